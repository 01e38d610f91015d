"""Measures how long this machine takes for a round, once, and keeps it in the cache folder for every later run.

The curve belongs to everything it depends on: processor or accelerator, threads, library versions, both models with their
dtype, batch size, drafts, how long the rows are, and whether decoding is greedy. If one of them changes, it is measured anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, Self

import torch
from pydantic import BaseModel
from torch import Tensor

from speculators.capture import current_device
from speculators.data.default_verifier import cache_folder
from speculators.decoding.batch import Batch, prepare
from speculators.decoding.graph import LENGTH_MULTIPLE
from speculators.decoding.length_schedules import FixedLength
from speculators.decoding.proposal import Drafter
from speculators.decoding.sampling import SamplingParams
from speculators.decoding.step_times import StepTimes
from speculators.errors import DataError
from speculators.evaluation.evaluate import device_name
from speculators.kernels import launch
from speculators.verifier import Verifier

logger = logging.getLogger(__name__)

FOLDER = "step-times"
# The most tokens of a made-up prompt: elsewhere running it would take longer than what is measured.
LONGEST_PROMPT = {"cuda": 4096}
REPEATS = 3
# Rounds that are launched one behind the other and timed together, where they are graphs.
IN_A_ROW = 16
# Rounds before those that are timed: buffers and kernels of the shape, then on CUDA its graph.
WARM_UP = {"cuda": 4}
# On CUDA so many seconds of rounds in a row come before those that are timed, in which caches fill and the clock rises: a few
# after each prefill, and many after the graphs were captured, when the GPU idled and its clock fell.
WARM_UP_SECONDS = 0.05
CLOCK_SECONDS = 0.3
# Counts up when what is timed changes: times kept by an earlier version are then measured anew.
MEASUREMENT = 6
# The mean length of rows is rounded to multiples of 128 tokens, and of fewer with more rows: attention over many is a large part of
# a round, and at 64 rows rounding to 128 put it 5 to 10% off.
TYPICAL_MULTIPLES = (32, 128)
ROUNDED_TOKENS = 2048  # of all rows together
# The longest row decides only how many positions are read, in much larger steps.
LONGEST_MULTIPLE = 128
# A width whose first timed round takes this long is not timed again.
ENOUGH_SECONDS = 1.0


@dataclass(frozen=True)
class RowLengths:
    """How long the rows of a batch are, rounded so that similar batches share their measurement.

    Attributes:
        typical: tokens of the mean row in the middle of its reply, rounded.
        longest: of the longest row then, a multiple of `LONGEST_MULTIPLE`.
    """

    typical: int = 64
    longest: int = LENGTH_MULTIPLE

    @property
    def read(self) -> int:
        """Positions that attention over a padded cache spans then: a multiple of `LENGTH_MULTIPLE`."""
        return _up_to(self.longest, LENGTH_MULTIPLE)

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> Self:
        """Of the rows that decode these prompts."""
        lengths = [len(prompt) for prompt in prompts]
        half = sampling.max_new_tokens // 2
        mean, longest = sum(lengths) / len(lengths) + half, max(lengths) + half
        least, most = TYPICAL_MULTIPLES
        multiple = min(most, max(least, ROUNDED_TOKENS // len(prompts)))
        typical = max(multiple, multiple * round(mean / multiple))
        return cls(typical, _up_to(longest, LONGEST_MULTIPLE))


def step_times(
    verifier: Verifier, drafter: Drafter, max_drafts: int, prompts: Sequence[Sequence[int]], sampling: SamplingParams
) -> StepTimes:
    """Step times of a batch of such prompts up to `max_drafts` drafts: from the cache folder, else measured and kept there.

    A cache folder that cannot be read or written costs a measurement, never an error.
    """
    folder, rows, lengths = cache_folder() / FOLDER, len(prompts), RowLengths.of(prompts, sampling)
    file = folder / f"{_digest(identity(verifier, drafter, rows, lengths, max_drafts, sampling))}.json"
    try:
        return StepTimes.load(file)
    except DataError:
        logger.info("measuring the step times of %d rows and up to %d drafts", rows, max_drafts)
    times = measure(verifier, drafter, (rows,), widths(max_drafts, verifier.device), sampling, lengths)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        times.save(file)
    except (OSError, DataError) as error:
        logger.warning("step times are measured again next time, since they cannot be kept: %s", error)
    return times


def widths(max_drafts: int, device: torch.device) -> tuple[int, ...]:
    """The drafts to measure: 0, 1, 2, 4, 8 .. and the most.

    On CUDA all of the first 8: times there rise in steps, as tiles of kernels fill, and a width takes a fraction of a second.
    """
    powers = [2**power for power in range(max_drafts.bit_length())]
    first = range(9) if device.type == "cuda" else ()
    return tuple(sorted({0, max_drafts, *(count for count in (*first, *powers) if count < max_drafts)}))


def identity(
    verifier: Verifier, drafter: Drafter, rows: int, lengths: RowLengths, max_drafts: int, sampling: SamplingParams
) -> dict[str, Any]:
    """Everything that the step times of a batch depend on, as JSON values."""
    config = getattr(drafter, "config", None)
    shape = (
        config.model_dump(mode="json", include={"transformer_layer_config", "draft_vocab_size"}) if isinstance(config, BaseModel) else None
    )
    return {
        "measurement": MEASUREMENT,
        "machine": [device_name(verifier.device), _processor()],
        "versions": [torch.__version__, version("transformers"), version("unified-speculators")],
        "verifier": [verifier.weights.config.get(key) for key in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")],
        "name": verifier.weights.name_or_path,
        "dtype": str(verifier.dtype),
        "drafter": [type(drafter).__qualname__, shape],
        "rows": rows,
        "lengths": asdict(lengths),
        "drafts": list(widths(max_drafts, verifier.device)),
        "early": launch.enabled,
        "greedy": sampling.greedy,
        "pipeline": [sampling.only_temperature, sampling.verification],
        "penalty": sampling.repetition_penalty != 1.0,
    }


def measure(
    verifier: Verifier,
    drafter: Drafter | None,
    rows: Sequence[int],
    drafts: Sequence[int],
    sampling: SamplingParams,
    lengths: RowLengths = RowLengths(),
) -> StepTimes:
    """Time rounds of every batch size and length in the engine itself, on made-up prompts.

    Args:
        verifier, drafter: None measures plain decoding; then only 0 drafts make sense.
        rows: batch sizes, ascending.
        drafts: drafts a row, ascending from 0.
        sampling: greedy or not.
        lengths: of the rows; attention costs what they are.

    Returns:
        The median of a few repetitions for each point.
    """
    with current_device(verifier.device):
        table = [_measure_batch(verifier, drafter, count, drafts, sampling, lengths) for count in rows]
    return StepTimes(
        tuple(rows),
        tuple(drafts),
        tuple(tuple(draft for draft, _ in line) for line in table),
        tuple(tuple(verify for _, verify in line) for line in table),
        machine=device_name(verifier.device),
    )


class _Forced(FixedLength):
    """Drafts as many as it is told to."""

    def __init__(self) -> None:
        self.drafts = 0

    def draft_tokens(self, limit: int) -> int:
        return self.drafts


@dataclass(frozen=True)
class MadeUpRows:
    """Tokens of the longest prompt, of all others, and of every reply; `bound` is one of all rows before a round."""

    longest: int
    typical: int
    max_new_tokens: int
    bound: int


def made_up_rows(lengths: RowLengths, parts: Sequence[Sequence[int]], device: str, context: int | None) -> MadeUpRows:
    """Rows whose rounds cost what those of the described rows do.

    They read as far as the described rows do. No row, its last block included, ends beyond that: with one position more the next
    multiple would be read. Rows that reach their budget cost what they cost before.

    Args:
        lengths: of the rows.
        parts: numbers of drafts that are timed one after the other on the same rows.
        device: type.
        context: of the verifier, where it has a limit.
    """
    rounds = WARM_UP["cuda"] + (REPEATS + 1) * IN_A_ROW if device == "cuda" else 1 + REPEATS
    span = min(lengths.read, context or lengths.read) - max(max(part) for part in parts) - 1
    budget = min(2 + max(rounds * sum(count + 1 for count in part) for part in parts), max(128, span - lengths.longest))
    # Rows grow by about one token a round, since made-up text is hardly ever accepted: they begin half of that shorter.
    grown = rounds * len(parts[0]) // 2
    longest = max(1, min(LONGEST_PROMPT.get(device, 128), span - budget, lengths.longest - grown))
    return MadeUpRows(longest, min(longest, max(1, lengths.typical - grown)), budget, max(span, longest + budget))


@torch.inference_mode()
def _measure_batch(
    verifier: Verifier, drafter: Drafter | None, rows: int, drafts: Sequence[int], sampling: SamplingParams, lengths: RowLengths
) -> list[tuple[float, float]]:
    """(draft seconds, verify seconds) for each number of drafts.

    Where a round is a graph its halves cannot be told apart: all is called verifying, and no schedule there asks for more than
    the sum.
    """
    device, most_drafts = verifier.device.type, max(drafts)
    # A prefill is cheap on a GPU: rows begin anew for each number of drafts, and are never far from their typical length.
    parts = [[count] for count in drafts] if device == "cuda" else [list(drafts)]
    plan = made_up_rows(lengths, parts, device, verifier.context_length)
    generator = torch.Generator().manual_seed(0)
    sizes = (plan.longest, *[plan.typical] * (rows - 1))
    prompts = [torch.randint(verifier.vocab_size, (size,), generator=generator).tolist() for size in sizes]
    params = replace(sampling, max_new_tokens=plan.max_new_tokens, ignore_eos=True, stop_token_ids=None)
    schedule = _Forced()

    def begin() -> Batch:
        batch = prepare(verifier, drafter, prompts, params, most_drafts, schedule)
        batch.prefill(prompts)
        return batch

    measure_drafts = _measure_graphs if device == "cuda" else _measure_eagerly
    return measure_drafts(begin, schedule, drafts, plan.bound)


def _measure_eagerly(begin: Callable[[], Batch], schedule: _Forced, drafts: Sequence[int], longest: int) -> list[tuple[float, float]]:
    """`_measure_batch` where rounds run eagerly: all numbers of drafts on the same rows.

    Args:
        begin: a batch of the made-up rows after its prefill.
        schedule: of the batch.
        drafts: as in `measure`.
        longest: a bound of the rows' lengths.
    """
    batch, measured = begin(), []
    for count in drafts:
        schedule.drafts = count
        draft_seconds, verify_seconds = _time_rounds(batch, longest)
        # Without drafts there is nothing to draft but a few tensors to make.
        measured.append((draft_seconds if count else 0.0, verify_seconds))
    return measured


def _measure_graphs(begin: Callable[[], Batch], schedule: _Forced, drafts: Sequence[int], longest: int) -> list[tuple[float, float]]:
    """`_measure_batch` where rounds are graphs: the rows anew for each number of drafts; arguments as for `_measure_eagerly`.

    All graphs are captured before anything is timed: while the host captures, the GPU idles, and its clock stays low for longer
    than the rounds take that are timed. The first round after a prefill may have shapes of its own: it occurs once for each number of
    drafts, when that is timed, and so runs eagerly.
    """
    batch = begin()
    for count in drafts:
        schedule.drafts = count
        for _ in range(WARM_UP["cuda"]):
            batch.longest = longest
            batch.next_round()
    _run_graphs(batch, longest, CLOCK_SECONDS)
    measured = []
    for count in drafts:
        schedule.drafts = count
        measured.append((0.0, _time_graphs(begin(), longest)))
    return measured


def _time_rounds(batch: Batch, longest: int) -> tuple[float, float]:
    """The two halves of a round that runs eagerly: the median of a few, after one that is not counted.

    Args:
        batch: after its prefill.
        longest: a bound of its rows' lengths.
    """
    times: list[tuple[float, float]] = []
    for number in range(1 + REPEATS):
        batch.longest = longest
        started = _now(batch.anchor)
        proposed = batch.propose()
        drafted = _now(batch.anchor)
        batch.verify(proposed)
        if number:
            times.append((drafted - started, _now(batch.anchor) - drafted))
        if sum(map(sum, times)) > ENOUGH_SECONDS:
            break
    return median(draft for draft, _ in times), median(verify for _, verify in times)


def _time_graphs(batch: Batch, longest: int) -> float:
    """Seconds of a round that is a graph, halves not told apart; arguments as for `_time_rounds`."""
    _run_graphs(batch, longest, WARM_UP_SECONDS)
    times: list[float] = []
    while len(times) < REPEATS and sum(times) * IN_A_ROW < ENOUGH_SECONDS:
        times.append(_seconds_in_a_row(batch, longest))
    return median(times)


def _run_graphs(batch: Batch, longest: int, seconds: float) -> None:
    """Rounds in a row for so many seconds, with nothing in between."""
    until = _now(batch.anchor) + seconds
    while time.perf_counter() < until:
        _seconds_in_a_row(batch, longest)


def _seconds_in_a_row(batch: Batch, longest: int) -> float:
    """Seconds a round, of many that run as the engine runs them: each is launched before the host has looked at the last one.

    The clock starts when the first one's results arrive, so the time of a launch with nothing running is not in it.
    """
    batch.longest = longest
    running, started = batch.arriving(batch.next_round()), 0.0
    for _ in range(IN_A_ROW):
        batch.longest = longest
        ahead = batch.arriving(batch.next_round())
        running.rows()
        started = started or time.perf_counter()
        running = ahead
    running.rows()
    return (time.perf_counter() - started) / IN_A_ROW


def _up_to(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _now(tensor: Tensor) -> float:
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _digest(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:20]
