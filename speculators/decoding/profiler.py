"""Measures how long this machine takes for a round, once, and keeps it in the cache folder for every later run.

The curve belongs to everything it depends on: processor or accelerator, threads, library versions, both models with their
dtype, batch size, drafts, how long the rows are, and whether decoding is greedy. If one of them changes, it is measured anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, Self

import torch
from pydantic import BaseModel
from torch import Tensor

from speculators.data.default_verifier import cache_folder
from speculators.decoding.batch import prepare
from speculators.decoding.graph import LENGTH_MULTIPLE
from speculators.decoding.length_schedules import FixedLength
from speculators.decoding.proposal import Drafter
from speculators.decoding.sampling import SamplingParams
from speculators.decoding.step_times import StepTimes
from speculators.errors import DataError
from speculators.evaluation.evaluate import device_name
from speculators.verifier import Verifier

logger = logging.getLogger(__name__)

FOLDER = "step-times"
# The most tokens of a made-up prompt: elsewhere running it would take longer than what is measured.
LONGEST_PROMPT = {"cuda": 4096}
REPEATS = 3
IN_A_ROW = 5  # graphs that are launched one behind the other and timed together
# Rounds before those that are timed: buffers and kernels of the shape, then on CUDA its graph.
WARM_UP = {"cuda": 3}
# A width whose first timed round takes this long is not timed again.
ENOUGH_SECONDS = 1.0


@dataclass(frozen=True)
class RowLengths:
    """How long the rows of a batch are, rounded so that similar batches share their measurement.

    Attributes:
        typical: tokens of the mean row in the middle of its reply: a power of two.
        longest: positions that attention over a padded cache has to span: a multiple of `LENGTH_MULTIPLE`.
    """

    typical: int = 64
    longest: int = LENGTH_MULTIPLE

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> Self:
        """Of the rows that decode these prompts."""
        lengths = [len(prompt) for prompt in prompts]
        mean = sum(lengths) / len(lengths) + sampling.max_new_tokens / 2
        longest = max(lengths) + sampling.max_new_tokens
        return cls(max(64, 2 ** round(math.log2(mean))), -(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE)


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
    times = measure(verifier, drafter, (rows,), widths(max_drafts), sampling, lengths)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        times.save(file)
    except (OSError, DataError) as error:
        logger.warning("step times are measured again next time, since they cannot be kept: %s", error)
    return times


def widths(max_drafts: int) -> tuple[int, ...]:
    """The drafts to measure: 0, 1, 2, 4, 8 .. and the most."""
    powers = [2**power for power in range(max_drafts.bit_length()) if 2**power < max_drafts]
    return (0, *powers, max_drafts)


def identity(
    verifier: Verifier, drafter: Drafter, rows: int, lengths: RowLengths, max_drafts: int, sampling: SamplingParams
) -> dict[str, Any]:
    """Everything that the step times of a batch depend on, as JSON values."""
    config = getattr(drafter, "config", None)
    shape = (
        config.model_dump(mode="json", include={"transformer_layer_config", "draft_vocab_size"}) if isinstance(config, BaseModel) else None
    )
    return {
        "machine": [device_name(verifier.device), _processor()],
        "versions": [torch.__version__, version("transformers"), version("unified-speculators")],
        "verifier": [verifier.weights.config.get(key) for key in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")],
        "name": verifier.weights.name_or_path,
        "dtype": str(verifier.dtype),
        "drafter": [type(drafter).__qualname__, shape],
        "rows": rows,
        "lengths": asdict(lengths),
        "drafts": list(widths(max_drafts)),
        "greedy": sampling.greedy,
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


@torch.inference_mode()
def _measure_batch(
    verifier: Verifier, drafter: Drafter | None, rows: int, drafts: Sequence[int], sampling: SamplingParams, lengths: RowLengths
) -> list[tuple[float, float]]:
    """(draft seconds, verify seconds) for each number of drafts.

    Where a round is a graph its halves cannot be told apart: all is called verifying, and no schedule there asks for more than
    the sum.
    """
    warm_up = WARM_UP.get(verifier.device.type, 1)
    budget = 2 + sum(count + 1 for count in drafts) * (warm_up + REPEATS * IN_A_ROW)
    params = replace(sampling, max_new_tokens=budget, ignore_eos=True, stop_token_ids=None)
    # The rows grow by about one token a round, since made-up text is hardly ever accepted: they begin half of that shorter.
    room = verifier.weights.config.get("max_position_embeddings", lengths.longest)
    most = max(1, min(LONGEST_PROMPT.get(verifier.device.type, 128), room - budget))
    typical = min(most, max(1, lengths.typical - budget // 2))
    sizes = [min(most, max(typical, lengths.longest - budget)), *[typical] * (rows - 1)]
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(verifier.vocab_size, (size,), generator=generator).tolist() for size in sizes]
    schedule = _Forced()
    batch = prepare(verifier, drafter, prompts, params, max(drafts), schedule)
    batch.prefill(prompts)
    longest = sizes[0] + budget
    measured = []
    for count in drafts:
        schedule.drafts = count
        times: list[tuple[float, float]] = []
        for number in range(warm_up + REPEATS):
            batch.longest = longest
            started = drafted = _now(batch.anchor)
            rounds = 1
            if batch.graphs is None:
                proposed = batch.propose()
                drafted = _now(batch.anchor)
                batch.verify(proposed)
            else:
                # The engine launches a round before it has looked at the last one: what counts is the time of many in a row.
                rounds = 1 if number < warm_up else IN_A_ROW
                for _ in range(rounds):
                    batch.longest = longest
                    batch.next_round()
            times.append(((drafted - started) / rounds, (_now(batch.anchor) - drafted) / rounds))
            if sum(map(sum, times[warm_up:])) > ENOUGH_SECONDS:
                break
        # Without drafts there is nothing to draft but a few tensors to make.
        draft_seconds = median(draft for draft, _ in times[warm_up:]) if count else 0.0
        measured.append((draft_seconds, median(verify for _, verify in times[warm_up:])))
    return measured


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
