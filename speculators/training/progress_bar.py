"""The line a user watches: how far the run is, how long it will take, and how well the drafter does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

_FORMAT = "{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}, {postfix}"


class ProgressBar:
    """A bar over the run's schedule, whatever limits it, with the time that is left.

    Args:
        method: what is trained.
        total_steps: of the run; None when only the clock limits it.
        fraction: how much is done when it begins.
        shown: False shows nothing.
    """

    def __init__(self, method: str, total_steps: int | None, fraction: float, *, shown: bool) -> None:
        self._method, self._total = method, "" if total_steps is None else f"/{total_steps}"
        self._bar = tqdm(total=1.0, initial=fraction, disable=not shown, desc=method, bar_format=_FORMAT)

    def show(self, step: int, fraction: float, record: Mapping[str, Any]) -> None:
        """Show a training record."""
        numbers = [
            f"loss {_number(record.get('loss'))}",
            f"acceptance length {_number(record.get('acceptance_length'))} (train)",
            f"lr {record['learning_rate']:.1e}",
            f"{record['tokens_per_second']:,.0f} tokens/s",
            *([f"MFU {record['mfu']:.1%}"] if "mfu" in record else []),
        ]
        self._bar.set_description_str(f"{self._method} step {step}{self._total}")
        self._bar.set_postfix_str(", ".join(numbers))
        self._bar.update(fraction - self._bar.n)

    def close(self) -> None:
        """Leave the line as it is."""
        self._bar.close()


def _number(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else "-"
