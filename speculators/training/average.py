"""Exponential moving average of the weights: smoother than the weights themselves, and usually the better drafter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


class WeightAverage:
    """a <- a + (1 - d) (w - a) after every update, with d = min(decay, (1 + n) / (10 + n)) at update n.

    The smaller d of the first updates keeps the random initial weights from lingering in the average.

    Args:
        weights: by name; this process's rows where they are spread. Read at every update, never copied but once.
        decay: d in the long run, in (0, 1).
    """

    def __init__(self, weights: Mapping[str, Tensor], decay: float) -> None:
        self.decay = decay
        self._weights = dict(weights)
        self._average = {name: weight.detach().clone() for name, weight in weights.items()}
        self._rate = torch.zeros((), device=next(iter(weights.values())).device)

    def prepare(self, update: int) -> None:
        """Set d for update number `update`, from 0; on the host, outside a captured step."""
        self._rate.fill_(1.0 - min(self.decay, (1 + update) / (10 + update)))

    @torch.no_grad()
    def update(self, skip: Tensor) -> None:
        """Move towards the weights; not at all where `skip`, a scalar float32 on the device, is 1."""
        rate = self._rate * (1.0 - skip)
        for name, average in self._average.items():  # the foreach version would read the rate on the host
            average.lerp_(self._weights[name], rate)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange weights and average; twice is nothing, bit for bit."""
        for name, weight in self._weights.items():
            kept = weight.clone()
            weight.copy_(self._average[name])
            self._average[name].copy_(kept)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """For as long as the block lasts the drafter has the averaged weights."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    def state(self) -> dict[str, Tensor]:
        """The average by name, not copied."""
        return dict(self._average)
