"""How far a run is, by steps and by the clock, and the learning rate that follows from it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


def learning_rate_factor(fraction: float, warmup: float, floor: float) -> float:
    """Linear rise to 1 over the first `warmup` of a run, then a cosine down to `floor`.

    Args:
        fraction: how much of the run is done, clamped to 0 .. 1.
        warmup: fraction of the run spent rising.
        floor: factor at the end.
    """
    fraction = min(max(fraction, 0.0), 1.0)
    if fraction < warmup:
        return fraction / warmup
    done = (fraction - warmup) / (1.0 - warmup)
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * done))


class Progress:
    """How much of a run is done: the larger of the fraction of its steps and the fraction of its time.

    A run that the clock limits therefore goes through its whole schedule, warm-up to floor, whatever a step costs.
    Time counts from `begin`, so setup does not eat the warm-up, yet setup and the reserve lie inside the budget. A
    resumed run spreads the rest of its schedule over the budget of the resuming process.

    Args:
        total_steps: steps of the run; None when only the clock limits it.
        budget_seconds: wall time of this process; None without a limit.
        done: fraction that earlier processes of a resumed run completed.
        created: when the budget began, on the clock; now when None.
        clock: seconds from any origin.
    """

    def __init__(
        self,
        total_steps: int | None,
        budget_seconds: float | None,
        *,
        done: float = 0.0,
        created: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_steps = total_steps
        self._budget = budget_seconds
        self._done = done
        self._clock = clock
        self._begun = clock()
        self._created = self._begun if created is None else created
        self._available = math.inf

    def begin(self, reserve_seconds: float = 0.0) -> None:
        """Start the schedule's clock; `reserve_seconds` of the budget are kept for what follows the last step."""
        self._begun = self._clock()
        if self._budget is not None:
            self._available = max(self._budget - (self._begun - self._created) - reserve_seconds, 1e-3)

    def fraction(self, step: float) -> float:
        """Fraction of the run that is done when `step` steps are, not above 1."""
        by_steps = step / self.total_steps if self.total_steps is not None else 0.0
        by_clock = self._done + (1.0 - self._done) * (self._clock() - self._begun) / self._available if self._budget is not None else 0.0
        return min(1.0, max(by_steps, by_clock))

    def finished(self, step: int) -> bool:
        """Whether the run ends after `step` steps."""
        return self.fraction(step) >= 1.0
