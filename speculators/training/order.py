"""The order in which a run visits its rows: a pure function of the seed and the position, so a resume needs no state."""

from __future__ import annotations

import torch
from torch import Tensor

from speculators.errors import DataError


class EpochOrder:
    """An endless stream of row numbers: every epoch visits every row once, in an order of its own.

    Args:
        num_rows: packed rows.
        seed: of the shuffles.

    Raises:
        DataError: there are no rows.
    """

    def __init__(self, num_rows: int, seed: int) -> None:
        if num_rows < 1:
            raise DataError("there are no training rows; prepare conversations with at least one reply of the verifier")
        self.num_rows = num_rows
        self.seed = seed
        self._epoch = -1
        self._permutation = torch.empty(0, dtype=torch.int64)

    def rows(self, start: int, count: int) -> Tensor:
        """Row numbers `start` .. `start + count` of the stream, [count] int64 on the CPU."""
        parts = []
        while count > 0:
            epoch, offset = divmod(start, self.num_rows)
            part = self._shuffled(epoch)[offset : offset + count]
            parts.append(part)
            start, count = start + len(part), count - len(part)
        return torch.cat(parts)

    def _shuffled(self, epoch: int) -> Tensor:
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(mix(self.seed, epoch))
            self._permutation, self._epoch = torch.randperm(self.num_rows, generator=generator), epoch
        return self._permutation


def mix(*values: int) -> int:
    """A 63-bit seed from several numbers (splitmix64's finaliser over each), so that neighbouring numbers do not correlate."""
    state, mask = 0, (1 << 64) - 1
    for value in values:
        state = (state + value + 0x9E3779B97F4A7C15) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        state ^= state >> 31
    return state >> 1
