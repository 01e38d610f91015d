"""A cluster that decodes speculatively, simulated step by step from measured inputs.

Each GPU batches continuously: requests join at the end of a step, first come first served, up to `max_batch`; a new request goes
to the GPU with the fewest requests. A step drafts, verifies and takes as long as `StepTimes` say; each row's drafts are accepted
as its confidences say, which calibration or measurement made true. Not simulated: prefill, memory, and the network.

All that comes out is of kind "simulated".
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from speculators.decoding.batch_schedule import num_speculative_tokens_per_batch_size
from speculators.decoding.scheduling import prefix_schedule
from speculators.errors import ConfigError
from speculators.serving.drafter_profile import DrafterProfile, RoundDraws
from speculators.serving.workload import Floats, Ints, Workload

KIND = "simulated"


class Policy(Protocol):
    """How long blocks are."""

    name: str

    def lengths(self, confidence: Floats) -> tuple[int, Ints]:
        """Tokens to draft of every row, and drafts of each row to verify, from [rows, K] confidences."""
        ...


class Fixed:
    """K drafts, always; 0 is plain decoding.

    Raises:
        ConfigError: the profile has fewer.
    """

    def __init__(self, profile: DrafterProfile, drafts: int) -> None:
        if not 0 <= drafts <= profile.max_drafts:
            raise ConfigError(f"policy fixed:{drafts} needs a profile of so many drafts, and {profile.name!r} has {profile.max_drafts}")
        self.name, self._drafts = f"fixed:{drafts}" if drafts else "none", drafts

    def lengths(self, confidence: Floats) -> tuple[int, Ints]:
        """The same for all."""
        return self._drafts, np.full(len(confidence), self._drafts)


class Threshold:
    """All K drafted, cut before the first below a confidence."""

    def __init__(self, profile: DrafterProfile, threshold: float) -> None:
        if not 0 <= threshold <= 1:
            raise ConfigError(f"policy threshold:{threshold} must lie between 0 and 1")
        self.name, self._threshold = f"threshold:{threshold:g}", threshold

    def lengths(self, confidence: Floats) -> tuple[int, Ints]:
        """See `threshold_lengths`."""
        return confidence.shape[1], np.cumprod(confidence >= self._threshold, axis=1).sum(axis=1)


class Scheduler:
    """All K drafted, verified as the hardware-aware prefix scheduler says (`prefix_schedule`)."""

    name = "scheduler"

    def __init__(self, profile: DrafterProfile) -> None:
        drafts = profile.max_drafts

        @lru_cache(maxsize=256)
        def rates(rows: int) -> torch.Tensor:
            return torch.from_numpy(profile.times.steps_per_second(rows, drafts))

        self._rates = rates

    def lengths(self, confidence: Floats) -> tuple[int, Ints]:
        """Of all rows together."""
        chosen = prefix_schedule(torch.from_numpy(np.cumprod(confidence, axis=1)), self._rates(len(confidence)))
        return confidence.shape[1], chosen.numpy()


class Auto:
    """The one K for all rows that is best for the present batch size, plain decoding included."""

    name = "auto"

    def __init__(self, profile: DrafterProfile, max_batch: int) -> None:
        spans = num_speculative_tokens_per_batch_size(profile.acceptance, profile.times, max_batch_size=max_batch)
        self._drafts = np.concatenate([[0], *(np.full(high - low + 1, k) for low, high, k in spans)])

    def lengths(self, confidence: Floats) -> tuple[int, Ints]:
        """By the number of rows."""
        drafts = int(self._drafts[len(confidence)])
        return drafts, np.full(len(confidence), drafts)


def make_policy(text: str, profile: DrafterProfile, max_batch: int) -> Policy:
    """`none`, `fixed:K`, `threshold:C`, `scheduler` or `auto`.

    Raises:
        ConfigError: it is something else, or out of range.
    """
    name, _, value = text.partition(":")
    try:
        if name == "none" and not value:
            return Fixed(profile, 0)
        if name == "fixed":
            return Fixed(profile, int(value))
        if name == "threshold":
            return Threshold(profile, float(value))
    except ValueError:
        pass
    else:
        if text == "scheduler":
            return Scheduler(profile)
        if text == "auto":
            return Auto(profile, max_batch)
    raise ConfigError(f"policy {text!r} must be none, fixed:K, threshold:C, scheduler or auto")


@dataclass(frozen=True)
class Simulation:
    """What happened, request by request, and over the time in which the cluster ran steadily.

    Attributes:
        arrival, start, first_token, finish: [n] seconds of each request; start is when it joined a batch.
        output_tokens: [n].
        tokens_per_second: of the whole cluster, in the steady part: from 20% to 80% of the time until the last arrival finished
            (closed loop), or of the whole run (arrivals).
        verified_a_step: mean drafts verified of a row and step.
        mean_batch: mean rows of a step.
    """

    arrival: Floats
    start: Floats
    first_token: Floats
    finish: Floats
    output_tokens: Ints
    tokens_per_second: float
    verified_a_step: float
    mean_batch: float

    @property
    def tokens_per_second_a_user(self) -> float:
        """Mean over requests of tokens / seconds in the batch: how fast a user sees text grow."""
        return float(np.mean(self.output_tokens / (self.finish - self.start)))

    def latency(self, percentiles: Sequence[float] = (50, 90, 99)) -> list[float]:
        """Percentiles of finish - arrival, in seconds."""
        return [float(value) for value in np.percentile(self.finish - self.arrival, percentiles)]

    def time_to_first_token(self, percentiles: Sequence[float] = (50, 90, 99)) -> list[float]:
        """Percentiles of first_token - arrival, in seconds, prefill not included."""
        return [float(value) for value in np.percentile(self.first_token - self.arrival, percentiles)]


@dataclass
class _Gpu:
    """The rows of one GPU's batch, and its queue of request numbers."""

    request: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    left: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    queue: deque[int] = field(default_factory=deque)
    running: bool = False  # a step is under way
    width: int = 0  # rows that a step computes

    @property
    def load(self) -> int:
        return len(self.request) + len(self.queue)


def simulate(
    workload: Workload, profile: DrafterProfile, policy: Policy, *, gpus: int = 1, max_batch: int = 256, packed: bool = True, seed: int = 0
) -> Simulation:
    """Run a workload through a cluster.

    Args:
        workload: requests.
        profile: the drafter.
        policy: how long blocks are.
        gpus: each with the whole model.
        max_batch: most rows of a GPU's batch.
        packed: the server verifies exactly the chosen drafts of each row, and rows come and go (vLLM). Otherwise, as in this
            library's engine, all rows to the longest length, and finished rows stay until the batch is done.
        seed: of the acceptances.

    Raises:
        ConfigError: a number is below 1.
    """
    if gpus < 1 or max_batch < 1:
        raise ConfigError(f"{gpus} GPUs with batches of {max_batch}: both must be at least 1")
    generator = np.random.default_rng(seed)
    count = len(workload)
    draws = RoundDraws(profile, count, generator)
    arrival = workload.arrival.copy()
    start, first_token, finish = np.zeros(count), np.full(count, np.nan), np.zeros(count)
    cluster = [_Gpu() for _ in range(gpus)]
    steps: list[tuple[float, int, int]] = []  # end, tokens and rows of each
    verified = 0
    # Ends of steps, and arrivals as GPU -1; the number breaks ties in order.
    events: list[tuple[float, int, int]] = []
    arrived = 0

    @lru_cache(maxsize=4096)
    def step_seconds(rows: int, drafted: int, verified_a_row: float) -> float:
        return float(profile.times.draft(rows, drafted) + profile.times.verify(rows, verified_a_row))

    def admit(request: int, now: float) -> None:
        arrival[request] = now
        target = min(range(gpus), key=lambda index: cluster[index].load)
        cluster[target].queue.append(request)
        if not cluster[target].running:
            begin(target, now)

    def begin(index: int, now: float) -> None:
        """Join the queue's head to the batch and start a step, if there are rows."""
        nonlocal verified
        gpu = cluster[index]
        room = max_batch - len(gpu.request) if packed or not len(gpu.request) else 0
        joining = [gpu.queue.popleft() for _ in range(min(len(gpu.queue), room))]
        if joining:
            start[joining] = now
            gpu.request = np.concatenate([gpu.request, joining])
            gpu.left = np.concatenate([gpu.left, workload.output_tokens[joining]])
        rows = len(gpu.request)
        gpu.width = rows if packed or joining else gpu.width
        gpu.running = rows > 0
        if not rows:
            return
        confidence = draws.confidence(gpu.request)
        drafted, lengths = policy.lengths(confidence)
        mean_length = float(lengths.mean()) if packed else float(lengths.max())
        seconds = step_seconds(gpu.width, drafted, mean_length)
        kept = generator.random(confidence.shape) < confidence
        inside = np.arange(confidence.shape[1]) < lengths[:, None]
        emitted = np.minimum(1 + np.cumprod(kept & inside, axis=1).sum(axis=1), gpu.left)
        end = now + seconds
        fresh = np.isnan(first_token[gpu.request])
        first_token[gpu.request[fresh]] = end
        gpu.left = gpu.left - emitted
        finish[gpu.request[gpu.left == 0]] = end
        steps.append((end, int(emitted.sum()), rows))
        verified += int(lengths.sum())
        heapq.heappush(events, (end, len(steps), index))

    if workload.users is None:
        heapq.heappush(events, (float(workload.arrival[0]), 0, -1))
    else:
        for request in range(min(workload.users, count)):
            cluster[request % gpus].queue.append(request)
        arrived = min(workload.users, count)
        for index in range(gpus):
            begin(index, 0.0)
    while events:
        now, _, index = heapq.heappop(events)
        if index < 0:
            admit(arrived, now)
            arrived += 1
            if arrived < count:
                heapq.heappush(events, (float(workload.arrival[arrived]), 0, -1))
            continue
        gpu = cluster[index]
        done = gpu.left == 0
        finished = int(done.sum())
        if finished:
            gpu.request, gpu.left = gpu.request[~done], gpu.left[~done]
            if workload.users is not None:  # the users' next requests go where the last ones were
                for request in range(arrived, min(arrived + finished, count)):
                    arrival[request] = now
                    gpu.queue.append(request)
                arrived = min(arrived + finished, count)
        begin(index, now)
    ends, tokens, rows = (np.array(values, dtype=np.float64) for values in zip(*steps, strict=True))
    return Simulation(
        arrival,
        start,
        first_token,
        finish,
        workload.output_tokens,
        _steady_rate(ends, tokens, closed=workload.users is not None),
        verified / float(rows.sum()),
        float(rows.mean()),
    )


def _steady_rate(ends: Floats, tokens: npt.NDArray[np.float64], *, closed: bool) -> float:
    """Tokens a second; in a closed loop without the first and last fifth, in which users begin and leave together."""
    order = np.argsort(ends, kind="stable")
    ends, total = ends[order], np.cumsum(tokens[order])
    if not closed or len(ends) < 20:
        return float(total[-1] / ends[-1])
    first, last = np.searchsorted(ends, [0.2 * ends[-1], 0.8 * ends[-1]])
    return float((total[last] - total[first]) / (ends[last] - ends[first]))
