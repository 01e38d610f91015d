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
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

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

    def record(self, rounds: Sequence[Round]) -> None:
        """Learn what the round did to each row that was active in it. Called once, after its verification."""
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

    def record(self, rounds: Sequence[Round]) -> None:
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
        if not 0 <= threshold <= 1:
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

    def record(self, rounds: Sequence[Round]) -> None:
        """The round is over: its capacity moves up in the queue."""
        self._capacities.append(self._latest)


class AutoLength:
    """Chooses what to draft and verify from measured times, measured acceptance, and confidence.

    *Before* a round, from earlier rounds alone: with S_k the survival of draft k that they showed, drafting and verifying w
    tokens of n rows earns n (1 + S_1 + .. + S_w) tokens in the time of such a round. The best rate of all w, theta, is
    the price of time. w = 0 is plain decoding, so drafting that does not pay is not done; one draft more than planned is
    tried every `PROBE` rounds, or what changes would never be noticed.

    *After* drafting, where the confidences are on the host anyway (`cut`): column k is verified while its expected gain,
    sum_r a[r, k], is worth its time at that price. This is Algorithm 1's marginal test with a theta known beforehand and
    the convex hull of the times, so a dear first column does not end it, and it is lossless without an order over rows: it
    reads confidences of positions up to k only. Since a cut can still shorten the block, drafting goes on while a column is
    worth drafting.

    Args:
        draft_seconds: [K + 1], time to draft 0 .. K tokens of every row of this batch.
        verify_seconds: [K + 1], time to verify 0 .. K drafts of every row.
        acceptance: conditional acceptance to begin with, as many positions as known.
        rows: of the batch.
        cut: whether to read confidences.
    """

    PROBE = 16
    # Acceptance nobody measured counts as this many rounds of one row, and a measured one as more; rounds fade by FORGET a round.
    UNKNOWN, UNKNOWN_ROUNDS, KNOWN_ROUNDS, FORGET = 0.7, 4.0, 64.0, 0.98

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
        positions = len(self._draft) - 1
        known = np.array(acceptance[:positions], dtype=np.float64)
        prior = np.concatenate([known, np.full(positions - len(known), self.UNKNOWN)])
        weight = np.where(np.arange(positions) < len(known), self.KNOWN_ROUNDS, self.UNKNOWN_ROUNDS)
        self._reached, self._accepted = weight, weight * prior
        self._draft_slopes, self._verify_slopes = (np.diff(lower_convex_hull(times)) for times in (self._draft, self._verify))
        self._rows = rows
        self._rounds = 0
        self._price = 0.0  # theta of the round being drafted: tokens a second of the whole batch
        self.needs_confidence = cut

    @classmethod
    def from_step_times(cls, times: StepTimes, rows: int, limit: int, acceptance: Sequence[float] = (), *, cut: bool) -> AutoLength:
        """For a batch of `rows` rows and at most `limit` drafts."""
        drafts = np.arange(limit + 1)
        return cls(times.draft(rows, drafts), times.verify(rows, drafts), acceptance, rows=rows, cut=cut)

    @property
    def acceptance(self) -> npt.NDArray[np.float64]:
        """[K] the present estimate of each draft's conditional acceptance."""
        return np.asarray(self._accepted / self._reached, dtype=np.float64)

    def draft_tokens(self, limit: int) -> int:
        """See the class."""
        alive = np.concatenate([[1.0], np.cumprod(self.acceptance)])[: limit + 1]
        rates = self._rows * np.cumsum(alive) / (self._draft + self._verify)[: limit + 1]
        width = int(rates.argmax())
        self._price = float(rates[width])
        if width and self.needs_confidence:
            worth_drafting = self._rows * alive[1:] > self._price * self._draft_slopes[:limit]
            width = max(width, int(np.cumprod(worth_drafting).sum()))
        return min(limit, width + (self._rounds % self.PROBE == self.PROBE - 1))

    def lengths(self, confidence: Tensor | None, available: Tensor, active: Tensor) -> Tensor:
        """See the class."""
        if confidence is None:
            return available
        gains = survival(confidence, available).sum(0)
        prices = torch.as_tensor(self._price * self._verify_slopes[: len(gains)], device=gains.device)
        return torch.minimum(available, (gains > prices).long().cumprod(0).sum())

    def record(self, rounds: Sequence[Round]) -> None:
        """Count which drafts were reached and accepted."""
        self._rounds += 1
        self._rows = max(1, len(rounds))
        proposed, accepted = (np.array([getattr(a_round, name) for a_round in rounds], dtype=np.int64) for name in ("proposed", "accepted"))
        position = np.arange(len(self._reached))[:, None]
        reached = (proposed > position) & (accepted >= position)
        seen = reached.any(1)
        fade = np.where(seen, self.FORGET, 1.0)  # what was not tried is not forgotten
        self._reached = self._reached * fade + reached.sum(1)
        self._accepted = self._accepted * fade + (reached & (accepted > position)).sum(1)
