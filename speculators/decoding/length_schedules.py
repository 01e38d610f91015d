"""Length schedules: how many tokens a round drafts, and how many of them it verifies.

The engine asks a schedule twice a round: before drafting, when nothing of the round is known, and after it, with the
confidences. No schedule ever sees a token, and every one here decides on draft (r, k) from confidences that draft (r, k)'s
token did not influence (see `scheduling`); `tests/test_scheduling.py` holds any schedule to that.

The engine verifies a rectangle: all rows to the longest length. Shorter rows then cost what the longest one costs, so
`ConfidenceThreshold` and `PrefixScheduler` save work where the longest gets shorter, and `AutoLength`, which knows the price
of a column, is the one to use here. Servers that verify packed tokens gain from each row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from numbers import Real
from statistics import NormalDist
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from speculators.decoding.row_acceptance import RowAcceptance
from speculators.decoding.scheduling import admit_most_likely, best_capacity, prefix_schedule, survival, threshold_lengths
from speculators.decoding.statistics import Round
from speculators.decoding.step_times import StepTimes, lower_convex_hull
from speculators.errors import ConfigError


class LengthSchedule(Protocol):
    """Chooses lengths. One instance serves one `generate` call."""

    @property
    def needs_confidence(self) -> bool:
        """Whether `lengths` reads confidences; a drafter without any is then refused."""
        ...

    def draft_tokens(self, limit: int) -> int:
        """Tokens to draft this round, from 0 to `limit`. Known before drafting, so it may depend on all earlier rounds."""
        ...

    def lengths(self, confidence: Tensor | None, available: Tensor, active: Tensor) -> Tensor:
        """Leading drafts of every row to verify.

        Whether draft k of a row is among them must not depend on its token, hence not on the row's confidence k + 1 or a
        later one. Called several times in a round, with the confidences of the first drafts, where drafting can stop early.
        A schedule that needs no confidence makes the same of `available` in every round: on CUDA the round is a graph.

        Args:
            confidence: [rows, k] float32, calibrated where the checkpoint is; None where `needs_confidence` is False.
            available: [rows] int64, the drafts that the token budget leaves room for; 0 for finished rows.
            active: [rows] bool, rows that are not finished.

        Returns:
            [rows] int64, at most `available`.
        """
        ...

    def record(self, rounds: Sequence[Round | None], remaining: Sequence[int]) -> None:
        """Learn what a round did to each row. Called once, after its verification.

        Where the engine launches rounds ahead, the next one has by then been decided without it.

        Args:
            rounds: one entry a row of the batch; None for rows that were finished before it.
            remaining: tokens that each row may still emit, fewer where a stop token ends it; 0 for finished rows.
        """
        ...


class FixedLength:
    """All that is drafted is verified."""

    needs_confidence = False

    def draft_tokens(self, limit: int) -> int:
        """Always the limit."""
        return limit

    def lengths(self, confidence: Tensor | None, available: Tensor, active: Tensor) -> Tensor:
        """All that is available."""
        return available

    def record(self, rounds: Sequence[Round | None], remaining: Sequence[int]) -> None:
        """Learns nothing."""


class ConfidenceThreshold(FixedLength):
    """Each block ends before its first draft of a confidence below the threshold (DSpark, section 4.3).

    Args:
        threshold: in [0, 1].

    Raises:
        ConfigError: it is not.
    """

    needs_confidence = True

    def __init__(self, threshold: float) -> None:
        given: Any = threshold
        if not isinstance(given, Real) or not 0 <= threshold <= 1:
            raise ConfigError(f"confidence_threshold {threshold} must be between 0 (keep every draft) and 1")
        self._threshold = threshold

    def lengths(self, confidence: Tensor | None, available: Tensor, active: Tensor) -> Tensor:
        """See `threshold_lengths`."""
        assert confidence is not None
        return torch.minimum(threshold_lengths(confidence, self._threshold), available)


class PrefixScheduler(FixedLength):
    """The hardware-aware prefix scheduler with early stop over all rows of the batch (DSpark, Algorithm 1).

    Args:
        steps_per_second: [n], entry B the rate of a step that verifies B tokens (`StepTimes.steps_per_second`).
    """

    needs_confidence = True

    def __init__(self, steps_per_second: Tensor | npt.NDArray[np.float64]) -> None:
        self._rates = torch.as_tensor(steps_per_second, dtype=torch.float64)

    def lengths(self, confidence: Tensor | None, available: Tensor, active: Tensor) -> Tensor:
        """See `prefix_schedule`."""
        assert confidence is not None
        self._rates = self._rates.to(confidence.device)
        return prefix_schedule(survival(confidence, available), self._rates, active.sum())


class StaleCapacityScheduler(PrefixScheduler):
    """How many drafts to verify comes from the confidences of an earlier round; which ones, from those of this round.

    The capacity is the best over all lengths, so cliffs of the step time do not trap it, and it is known before this round
    ends: what engines with pre-built graphs need (DSpark, section 3.8). The first `delay` rounds verify everything.

    Args:
        steps_per_second: as in `PrefixScheduler`.
        delay: rounds between the confidences and their use; the paper's system has 2.

    Raises:
        ConfigError: the delay is below 1, which would not be lossless.
    """

    def __init__(self, steps_per_second: Tensor | npt.NDArray[np.float64], delay: int = 2) -> None:
        super().__init__(steps_per_second)
        if delay < 1:
            raise ConfigError(f"delay {delay} must be at least 1 round: a capacity chosen from this round's confidences biases the output")
        self._capacities: deque[Tensor | None] = deque([None] * delay, maxlen=delay)
        self._latest: Tensor | None = None

    def lengths(self, confidence: Tensor | None, available: Tensor, active: Tensor) -> Tensor:
        """See `admit_most_likely`."""
        assert confidence is not None
        self._rates = self._rates.to(confidence.device)
        a = survival(confidence, available)
        self._latest = best_capacity(a, self._rates, active.sum())
        capacity = self._capacities[0]
        return available if capacity is None else admit_most_likely(a, capacity)

    def record(self, rounds: Sequence[Round | None], remaining: Sequence[int]) -> None:
        """The round is over: its capacity moves up in the queue."""
        self._capacities.append(self._latest)


class AutoLength:
    """Chooses what to draft and verify from measured times, measured acceptance, and confidence.

    *Before* a round, from earlier rounds alone: a batch is done when its last row is, and finished rows cost as much as others.
    So what counts is not how many tokens all rows earn together but when the slowest will end. A row with `remaining` tokens
    to go that emits E(w) a round under blocks of w drafts needs remaining / E(w) rounds of T(w) seconds; the w is chosen for
    which the largest of all rows is smallest. Which row will be last is not known: each counts as if it were as much worse than
    expected as the worst of n rows is in the mean (n / (n + 1) of the rows' distribution, `RowAcceptance`). Of a single
    row nothing but the best rate is left. w = 0 is plain decoding, so drafting that does not pay is not done; one draft more
    than planned is tried every `PROBE` rounds, or what changes would never be noticed, more rarely where many rows show as much
    at once, and in the first round if no acceptance is known. Without confidences the choice holds for `HOLD` rounds: it takes
    the host as long as a launch does, and changes slowly. Once `SETTLED` rounds have told the rows apart, another length must
    promise an end sooner by `WORTH_CHANGING`, and every length that much sooner than plain decoding: expectations are no better
    than that, each length is a graph to capture, and the row that is last under one length is not the one that is last under
    another, so that going to and fro costs more than either. What was chosen before, when all rows looked alike, is not worth
    keeping.

    *After* drafting, where the confidences are on the host anyway (`cut`): with theta the tokens that all rows are expected to
    earn in a second of this round, column k is verified while its expected gain, sum_r a[r, k], is worth its time at that
    price. This is Algorithm 1's marginal test with a theta known beforehand and the convex hull of the times, so a dear first
    column does not end it, and it is lossless without an order over rows: it reads confidences of positions up to k only. Since
    a cut can still shorten the block, drafting goes on while a column is worth drafting.

    Args:
        draft_seconds: [K + 1], time to draft 0 .. K tokens of every row of this batch.
        verify_seconds: [K + 1], time to verify 0 .. K drafts of every row.
        acceptance: conditional acceptance to begin with, as many positions as known.
        rows: of the batch.
        cut: whether to read confidences.
    """

    PROBE, HOLD, SETTLED, WORTH_CHANGING = 64, 4, 32, 0.03
    # Before anything was recorded all rows have as much to do, and more than a block of it.
    UNKNOWN_REMAINING = 1000

    def __init__(
        self,
        draft_seconds: Sequence[float] | npt.NDArray[np.float64],
        verify_seconds: Sequence[float] | npt.NDArray[np.float64],
        acceptance: Sequence[float] = (),
        *,
        rows: int,
        cut: bool,
    ) -> None:
        self._draft, self._verify = np.asarray(draft_seconds, np.float64), np.asarray(verify_seconds, np.float64)
        self._draft_slopes, self._verify_slopes = (np.diff(lower_convex_hull(times)) for times in (self._draft, self._verify))
        self._acceptance = RowAcceptance(acceptance, len(self._draft) - 1, rows)
        self._remaining = np.full(rows, self.UNKNOWN_REMAINING, dtype=np.int64)
        self._rounds = 0
        self._known = len(acceptance) > 0
        self._width = 0  # of the blocks of this round
        self._kept = 0  # the same before confidences made it longer
        self._decided = (-1, 0)  # in which round, for how many rows
        self._price = 0.0  # theta of the round being drafted: tokens a second of the whole batch
        self.needs_confidence = cut

    @classmethod
    def from_step_times(cls, times: StepTimes, rows: int, limit: int, acceptance: Sequence[float] = (), *, cut: bool) -> AutoLength:
        """For a batch of `rows` rows and at most `limit` drafts."""
        drafts = np.arange(limit + 1)
        return cls(times.draft(rows, drafts), times.verify(rows, drafts), acceptance, rows=rows, cut=cut)

    @property
    def acceptance(self) -> npt.NDArray[np.float64]:
        """[K] the present estimate of each draft's conditional acceptance, for the mean row."""
        return self._acceptance.pooled

    def draft_tokens(self, limit: int) -> int:
        """See the class."""
        active = self._remaining > 0
        remaining = self._remaining[active, None]
        if not len(remaining):
            return 0
        every = max(self.PROBE, len(self._remaining))
        probe = self._rounds % every == every - 1 or not (self._rounds or self._known)
        decided = self._rounds // self.HOLD, len(remaining)
        if decided == self._decided and not self.needs_confidence:
            return min(limit, self._width + probe)
        self._decided = decided
        seconds = (self._draft + self._verify)[: limit + 1]
        worst_of_all = NormalDist().inv_cdf(len(remaining) / (len(remaining) + 1))
        # Tokens beyond the budget are not emitted: draft k of a row is worth nothing where k tokens or fewer remain.
        useful = np.arange(1, limit + 1) < remaining
        rounds = remaining / _emitted(self._acceptance.survival(active, worst_of_all)[:, :limit] * useful)
        end = rounds.max(axis=0) * seconds
        width = int(end.argmin())
        if self._rounds >= self.SETTLED:
            as_good = end <= end[width] * (1 + self.WORTH_CHANGING)
            width = 0 if as_good[0] else self._kept if self._kept <= limit and as_good[self._kept] else width
        self._kept = width
        if self.needs_confidence:
            survival = self._acceptance.survival(active)[:, :limit]
            self._price = float(_emitted(survival)[:, width].sum() / seconds[width])
            worth_drafting = survival.sum(axis=0) > self._price * self._draft_slopes[:limit]
            if width:
                width = max(width, int(np.cumprod(worth_drafting).sum()))
        self._width = width
        return min(limit, width + probe)

    def lengths(self, confidence: Tensor | None, available: Tensor, active: Tensor) -> Tensor:
        """See the class."""
        if confidence is None:
            return available
        gains = survival(confidence, available).sum(0)
        prices = torch.as_tensor(self._price * self._verify_slopes[: len(gains)], device=gains.device)
        return torch.minimum(available, (gains > prices).long().cumprod(0).sum())

    def record(self, rounds: Sequence[Round | None], remaining: Sequence[int]) -> None:
        """Learn the rows' acceptance, and what is left to do."""
        self._rounds += 1
        self._remaining = np.array(remaining, dtype=np.int64)
        self._acceptance.record(rounds)


def _emitted(survival: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """[rows, K] -> [rows, K + 1]: tokens that a round of 0 .. K drafts is expected to emit."""
    return np.cumsum(np.concatenate([np.ones((len(survival), 1)), survival], axis=1), axis=1)
