"""What ends a run early: a signal, or evaluations that no longer improve."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from speculators.errors import ConfigError
from speculators.training.meters import ACCEPTANCE_LENGTHS


@dataclass(frozen=True)
class Best:
    """The best evaluation so far.

    Attributes:
        value: of the metric; None before the first evaluation.
        step: at which it was reached.
        since: evaluations after it that were no better.
    """

    value: float | None = None
    step: int = 0
    since: int = 0

    def after(self, record: Mapping[str, Any], metric: str | None, min_improvement: float) -> Best:
        """The best once an evaluation is known.

        Args:
            record: the evaluation, with its step.
            metric: an acceptance length is better when larger, anything else (the loss and its terms) when smaller; see
                `TrainingConfig.best_by`.
            min_improvement: less than this is no improvement.

        Raises:
            ConfigError: the evaluation has no such number.
        """
        if metric is None:
            metric = "acceptance_length" if "acceptance_length" in record else "loss"
        check_best_by(metric, [name for name, number in record.items() if isinstance(number, float)])
        value = record[metric]
        gain = 0.0 if self.value is None else (value - self.value if metric in ACCEPTANCE_LENGTHS.values() else self.value - value)
        if self.value is None or gain > min_improvement:
            return Best(value, record["step"], 0)
        return replace(self, since=self.since + 1)


def check_best_by(metric: str, known: Sequence[str]) -> None:
    """Refuse a number that evaluations do not report.

    Raises:
        ConfigError: naming those that they do.
    """
    if metric not in known:
        raise ConfigError(f"best_by = {metric!r}, but evaluations of this drafter have {', '.join(known)}; choose one of them")


@dataclass
class Stop:
    """Number of the signal that asked the run to stop, if one did."""

    signal: int | None = None


@contextmanager
def stop_signals() -> Iterator[Stop]:
    """Turn the first SIGINT or SIGTERM into a request to stop, for the block to grant; a second one acts at once."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # Python delivers signals to the main thread only
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def request(number: int, frame: FrameType | None) -> None:
        stop.signal = number
        restore()

    for number in previous:
        signal.signal(number, request)
    try:
        yield stop
    finally:
        restore()
