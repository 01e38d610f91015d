"""Sums of a log interval, kept on the device: no step waits for a number that only the log wants."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from speculators.training.world import World

# A ratio by draft position, a ratio, a count, or None where nothing was counted.
Reading = float | list[float | None] | None


class Meters:
    """Running numerators and denominators by name. Ratios are formed once, when they are read.

    Sums are float64 tensors that stay where they are, so that a CUDA graph may add to them.
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Tensor, Tensor | None]] = {}

    def add(self, name: str, numerator: Tensor, denominator: Tensor | None = None) -> None:
        """Add to a ratio, or to a plain count where there is no denominator. Scalars or [K] vectors."""
        if name not in self._sums:
            zero = torch.zeros(numerator.shape, dtype=torch.float64, device=numerator.device)
            self._sums[name] = (zero, None if denominator is None else torch.zeros_like(zero))
        total, weight = self._sums[name]
        total.add_(numerator.detach())
        if weight is not None and denominator is not None:
            weight.add_(denominator.detach())

    def reset(self) -> None:
        """Start a new interval."""
        for total, weight in self._sums.values():
            total.zero_()
            if weight is not None:
                weight.zero_()

    def state(self, world: World | None = None) -> dict[str, Tensor]:
        """Numerators and denominators of the interval so far by name, summed over all processes; copies."""
        parts = self._parts()
        if not parts:
            return {}
        flat = (world or World()).sum_(torch.cat([part.flatten() for part in parts.values()]))
        sums = flat.split([part.numel() for part in parts.values()])
        return {name: total.view_as(part).clone() for (name, part), total in zip(parts.items(), sums, strict=True)}

    def load_state(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Continue an interval. Sums that exist keep their place in memory, which a CUDA graph may have recorded."""
        for name in dict.fromkeys(key.rpartition(".")[0] for key in state):
            numerator, denominator = state[f"{name}.numerator"], state.get(f"{name}.denominator")
            if name not in self._sums:
                zero = torch.zeros(numerator.shape, dtype=torch.float64, device=device)
                self._sums[name] = (zero, None if denominator is None else torch.zeros_like(zero))
            total, weight = self._sums[name]
            total.copy_(numerator)
            if weight is not None and denominator is not None:
                weight.copy_(denominator)

    def _parts(self) -> dict[str, Tensor]:
        """Sums by name, in an order that does not depend on which came first: the processes must agree on it."""
        named = {}
        for name, (total, weight) in sorted(self._sums.items()):
            named[f"{name}.numerator"] = total
            if weight is not None:
                named[f"{name}.denominator"] = weight
        return named

    def read(self, world: World | None = None) -> dict[str, Reading]:
        """Every ratio and count of the interval over all processes, with one transfer from the device; then start a new one.

        What is summed over the processes is one copy of all sums, once: two names for one tensor cannot be summed twice.
        """
        parts = self._parts().values()
        if not parts:
            return {}
        values = (world or World()).sum_(torch.cat([part.flatten() for part in parts])).tolist()
        readings: dict[str, Reading] = {}
        at = 0
        for name, (total, weight) in sorted(self._sums.items()):
            size = total.numel()
            numerators = values[at : at + size]
            at += size
            if weight is None:
                ratios: list[float | None] = list(numerators)
            else:
                ratios = [n / d if d else None for n, d in zip(numerators, values[at : at + size], strict=True)]
                at += size
            readings[name] = ratios[0] if total.ndim == 0 else ratios
        self.reset()
        return readings


# A metric by draft position, and the length that it amounts to.
ACCEPTANCE_LENGTHS = {"acceptance": "acceptance_length", "greedy_acceptance": "greedy_acceptance_length"}


def estimated_acceptance_length(conditional: Reading) -> float | None:
    """1 + sum over k of the product of the first k conditional acceptances; the bonus token is the 1.

    Teacher forced: it estimates what decoding reaches, and is labelled so wherever it is shown. Positions that no data reached end
    the sum; None where one in the middle is unknown, for instance because its loss weighs nothing.
    """
    if not isinstance(conditional, list):
        return None
    known = list(itertools.takewhile(lambda rate: rate is not None, conditional))
    if not known or any(rate is not None for rate in conditional[len(known) :]):
        return None
    length = reached = 1.0
    for rate in known:
        reached *= rate or 0.0
        length += reached
    return length


def with_acceptance_lengths(readings: Mapping[str, Reading]) -> dict[str, Any]:
    """Readings plus the acceptance lengths that their conditional acceptances amount to, sampled and greedy."""
    record: dict[str, Any] = dict(readings)
    for metric, name in ACCEPTANCE_LENGTHS.items():
        length = estimated_acceptance_length(readings.get(metric))
        if length is not None:
            record[name] = length
    return record


def evaluated_numbers(metrics: Mapping[str, tuple[Tensor, Tensor | None]]) -> list[str]:
    """Names of the single numbers that an evaluation reports, given the metrics of a batch: what `best_by` may name."""
    single = [name for name, (numerator, _) in metrics.items() if numerator.ndim == 0 and name != "loss"]
    lengths = [length for metric, length in ACCEPTANCE_LENGTHS.items() if metric in metrics and metrics[metric][0].ndim]
    return ["loss", *single, *lengths]
