"""The order in which a run visits its rows: a pure function of the seed and the position, so a resume needs no state."""

from __future__ import annotations

import torch
from torch import Tensor

from speculators.errors import DataError

# Neighbouring rows are visited close to each other in time, so that a store is read a region at a time.
GROUP_ROWS = 256


class EpochOrder:
    """An endless stream of row numbers: every epoch visits every row once, in an order of its own.

    The shuffle has two levels: groups of neighbouring rows in any order, and rows in any order inside a group. Packing has
    shuffled the rows before, so neighbours have nothing in common, and a run of at most one group is shuffled as a whole.

    Args:
        num_rows: packed rows.
        seed: of the shuffles.
        group_rows: rows of a group.

    Raises:
        DataError: there are no rows.
    """

    def __init__(self, num_rows: int, seed: int, group_rows: int = GROUP_ROWS) -> None:
        if num_rows < 1:
            raise DataError("there are no training rows; prepare conversations with at least one reply of the verifier")
        self.num_rows = num_rows
        self.seed = seed
        self._group_rows = group_rows
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
            starts = torch.arange(0, self.num_rows, self._group_rows)
            groups = starts[torch.randperm(len(starts), generator=generator)].tolist() if len(starts) > 1 else [0]
            sizes = [min(self._group_rows, self.num_rows - start) for start in groups]
            self._permutation = torch.cat(
                [start + torch.randperm(size, generator=generator) for start, size in zip(groups, sizes, strict=True)]
            )
            self._epoch = epoch
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
