"""How the distillation loss goes through its rows: in chunks, without those that weigh nothing.

A chunk holds draft rows and the teacher rows they are compared with, each teacher row once: neighbouring blocks overlap, so
that one teacher row serves several draft rows. Leaving rows out needs their number on the host. While a CUDA graph is
captured that cannot be, and every row takes part with a teacher row of its own; the results are the same.

Where all rows take part in the order they have, a chunk is a range, and taking its rows copies nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class Chunk:
    """Rows that are computed together.

    Attributes:
        count: n, draft rows.
        rows: [n] int64, which they are; a slice where the host knows that they are a range.
        teacher_rows: [t] int64 or a slice, rows of the teacher.
        teacher_count: t <= n.
        positions: [n] int64, which of them each draft row is compared with.
        used: [n] bool, the draft rows that take part, where a chunk could not leave out the others; its teacher rows are
            then one a draft row. None where all do.
    """

    count: int
    rows: Tensor | slice
    teacher_rows: Tensor | slice
    teacher_count: int
    positions: Tensor
    used: Tensor | None = None

    def take(self, values: Tensor) -> Tensor:
        """Draft rows of [M, size]; zeros for those that take no part, since they may hold anything, and 0 * nan is nan."""
        return self._used_only(values[self.rows])

    def take_teacher(self, values: Tensor) -> Tensor:
        """Teacher rows of [T, size], likewise."""
        return self._used_only(values[self.teacher_rows])

    def row_numbers(self) -> Tensor:
        """`rows` [n] int64."""
        if isinstance(self.rows, slice):
            return torch.arange(self.rows.start, self.rows.stop, device=self.positions.device)
        return self.rows

    def _used_only(self, values: Tensor) -> Tensor:
        return values if self.used is None else torch.where(self.used[:, None], values, 0.0)


def row_chunks(used: Tensor, teacher_rows: Tensor | None, *, chunk_rows: int, block_rows: int = 1) -> list[Chunk]:
    """Cut rows into chunks.

    Args:
        used: [M] bool, rows that take part.
        teacher_rows: [M] int64, the teacher row of each; None for row i, also where there is no teacher at all.
        chunk_rows: the most rows of a chunk.
        block_rows: rows come in blocks of this many, and no block is cut; a larger block makes a larger chunk. Single rows
            are put in the order of their teacher rows, so that as many as can be share one.
    """
    if used.is_cuda and torch.cuda.is_current_stream_capturing():
        return _all_rows(used, teacher_rows, chunk_rows, block_rows)
    return _used_rows(used, teacher_rows, chunk_rows, block_rows)


def _all_rows(used: Tensor, teacher_rows: Tensor | None, chunk_rows: int, block_rows: int) -> list[Chunk]:
    step = max(1, chunk_rows // block_rows) * block_rows
    parts = [slice(start, min(start + step, len(used))) for start in range(0, len(used), step)]
    return _neighbours(parts, used.device, None, teacher_rows, used)


def _neighbours(
    parts: list[slice], device: torch.device, rows: Tensor | None, teacher_rows: Tensor | None, used: Tensor | None
) -> list[Chunk]:
    """Chunks of neighbours among some rows, all by default, each with a teacher row of its own, by default the same."""
    index = torch.arange(max((part.stop - part.start for part in parts), default=0), device=device)
    chunks = []
    for part in parts:
        own = part if rows is None else rows[part]
        positions = index[: part.stop - part.start]
        teachers = own if teacher_rows is None else teacher_rows[part]
        chunks.append(Chunk(len(positions), own, teachers, len(positions), positions, None if used is None else used[part]))
    return chunks


def _used_rows(used: Tensor, teacher_rows: Tensor | None, chunk_rows: int, block_rows: int) -> list[Chunk]:
    device = used.device
    ends = used.view(-1, block_rows).sum(dim=1).cumsum(dim=0).cpu()  # rows used up to the end of each block
    total = int(ends[-1]) if len(ends) else 0
    bounds = [0]  # in used rows
    while bounds[-1] < total:
        block = int(torch.searchsorted(ends, bounds[-1] + chunk_rows, right=True))  # the first block that does not fit
        last = int(ends[block - 1]) if block else 0
        if last <= bounds[-1]:  # a block larger than a chunk
            last = int(ends[ends > bounds[-1]][0])
        bounds.append(last)
    if total == 0:
        return []
    parts = [slice(start, stop) for start, stop in pairwise(bounds)]
    if teacher_rows is None:
        return _neighbours(parts, device, None if total == len(used) else used.nonzero()[:, 0], None, None)
    rows = used.nonzero()[:, 0]
    if block_rows == 1:
        rows = rows[teacher_rows[rows].argsort(stable=True)]
    starts = torch.tensor(bounds[:-1], device=device)
    chunk_of_row = torch.searchsorted(starts, torch.arange(total, device=device), right=True) - 1
    # One number for a teacher row in a chunk: unique ones then lie chunk by chunk.
    span = int(teacher_rows.max()) + 1
    keys, positions = torch.unique(chunk_of_row * span + teacher_rows[rows], return_inverse=True)
    firsts = torch.searchsorted(keys, torch.arange(len(bounds), device=device) * span).tolist()
    chunks = []
    for number, (start, stop) in enumerate(pairwise(bounds)):
        first, last = firsts[number], firsts[number + 1]
        chunks.append(Chunk(stop - start, rows[start:stop], keys[first:last] % span, last - first, positions[start:stop] - first))
    return chunks
