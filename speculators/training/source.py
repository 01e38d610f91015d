"""Where the hidden states of training rows come from: the verifier in the same process, each time or once.

The trainer knows `HiddenStateSource` only, so a disk store or a serving engine can take the verifier's place.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from speculators.data.rows import PackedRows
from speculators.training.batch import TrainingBatch
from speculators.training.graph import Capture
from speculators.verifier import Verifier

logger = logging.getLogger("speculators")

GIB = 1 << 30


class HiddenStateSource(Protocol):
    """Packed rows together with the verifier's hidden states, addressed by row number."""

    @property
    def num_rows(self) -> int:
        """Packed rows."""
        ...

    def batch(self, index: Tensor) -> TrainingBatch:
        """The rows `index`, [R] int64 on the device; -1 stands for a row without supervised tokens.

        Under CUDA graphs this runs inside the captured step, so it neither synchronises nor depends on the values.
        """
        ...


class VerifierSource:
    """Hidden states from the verifier in this process.

    Args:
        verifier: the verifier.
        taps: layer ids, ascending.
    """

    def __init__(self, verifier: Verifier, taps: Sequence[int]) -> None:
        self.verifier = verifier
        self.taps = tuple(taps)

    def batch(self, input_ids: Tensor, loss_mask: Tensor, position_ids: Tensor, document_ids: Tensor) -> TrainingBatch:
        """Run the verifier over packed rows, [R, S] each; see `TrainingBatch` for what they hold."""
        output = self.verifier.encode(input_ids, position_ids, document_ids, self.taps)
        return TrainingBatch(input_ids, output.hidden_states, output.last_hidden_state, loss_mask, position_ids, document_ids)


class ResidentRows:
    """Packed rows on the verifier's device, 13 bytes a token, run through the verifier at every visit."""

    def __init__(self, source: VerifierSource, rows: PackedRows) -> None:
        device = source.verifier.device
        self.source = source
        # int32: 65,536 tokens and more fit, and CUDA gathers it (uint16 it does not).
        self._input_ids, self._position_ids, self._document_ids = (
            values.to(torch.int32).to(device) for values in (rows.input_ids, rows.position_ids, rows.document_ids)
        )
        self._loss_mask = rows.loss_mask.to(device=device, dtype=torch.bool)

    @property
    def num_rows(self) -> int:
        """Packed rows."""
        return self._input_ids.shape[0]

    @property
    def row_length(self) -> int:
        """Tokens of a row."""
        return self._input_ids.shape[1]

    def tokens(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`input_ids`, `loss_mask`, `position_ids`, `document_ids` of rows [R] int64, where -1 supervises nothing."""
        at = index.clamp_min(0)
        mask = self._loss_mask[at] & (index >= 0)[:, None]
        return self._input_ids[at].long(), mask, self._position_ids[at].long(), self._document_ids[at].long()

    def batch(self, index: Tensor) -> TrainingBatch:
        """See `HiddenStateSource.batch`."""
        return self.source.batch(*self.tokens(index))


class CachedRows:
    """Resident rows whose hidden states were computed once and stay on the device.

    Args:
        rows: the resident rows.
        dtype: in which the hidden states are kept.
        rows_per_forward: rows of one verifier forward while filling.
        capture: replays that forward as a CUDA graph.
    """

    def __init__(self, rows: ResidentRows, dtype: torch.dtype, rows_per_forward: int, capture: Capture) -> None:
        self.rows = rows
        device, hidden, taps = rows.source.verifier.device, rows.source.verifier.hidden_size, len(rows.source.taps)
        shape = (rows.num_rows, rows.row_length)
        self._hidden_states = torch.empty((*shape, taps * hidden), dtype=dtype, device=device)
        self._last_hidden_state = torch.empty((*shape, hidden), dtype=dtype, device=device)
        index = torch.zeros(min(rows_per_forward, rows.num_rows), dtype=torch.int64, device=device)
        count = len(index)

        def encode() -> None:
            batch = rows.batch(index)
            self._hidden_states.index_copy_(0, index, batch.hidden_states.to(dtype))
            self._last_hidden_state.index_copy_(0, index, batch.last_hidden_state.to(dtype))

        index.copy_(torch.arange(count))
        replay = capture(encode)
        for start in range(0, rows.num_rows, count):
            # The last forward steps back to stay full: a graph has one shape.
            index.copy_(torch.arange(count) + min(start, rows.num_rows - count))
            replay()

    @staticmethod
    def bytes_needed(rows: ResidentRows, dtype: torch.dtype) -> int:
        """Memory of the hidden states, in bytes."""
        width = (len(rows.source.taps) + 1) * rows.source.verifier.hidden_size
        return rows.num_rows * rows.row_length * width * dtype.itemsize

    @property
    def num_rows(self) -> int:
        """Packed rows."""
        return self.rows.num_rows

    def batch(self, index: Tensor) -> TrainingBatch:
        """See `HiddenStateSource.batch`."""
        input_ids, loss_mask, position_ids, document_ids = self.rows.tokens(index)
        at = index.clamp_min(0)
        return TrainingBatch(input_ids, self._hidden_states[at], self._last_hidden_state[at], loss_mask, position_ids, document_ids)


def hidden_state_source(
    verifier: Verifier,
    taps: Sequence[int],
    rows: PackedRows,
    *,
    cache_states: bool = True,
    dtype: torch.dtype | None = None,
    memory_fraction: float = 0.6,
    rows_per_forward: int = 16,
    capture: Capture | None = None,
) -> HiddenStateSource:
    """Rows with hidden states from the verifier: cached on its device where they fit, else computed at every visit.

    Args:
        verifier: the verifier.
        taps: layer ids, ascending.
        rows: packed rows.
        cache_states: compute the hidden states once.
        dtype: in which cached states are kept; the verifier's when None.
        memory_fraction: the most of the free memory that cached states may take.
        rows_per_forward: rows of one verifier forward while filling the cache.
        capture: for CUDA graphs; made here when None.
    """
    resident = ResidentRows(VerifierSource(verifier, taps), rows)
    if not cache_states:
        return resident
    dtype = dtype or verifier.dtype
    needed, free = CachedRows.bytes_needed(resident, dtype), free_memory(verifier.device)
    if needed > memory_fraction * free:
        logger.warning(
            "hidden states of all rows take %.1f GiB, more than %.0f%% of the %.1f GiB free: they are computed anew at every visit",
            needed / GIB,
            100 * memory_fraction,
            free / GIB,
        )
        return resident
    return CachedRows(resident, dtype, rows_per_forward, capture or Capture(verifier.device))


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on a device; on the CPU, half of the machine's memory."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def without_damaged_rows(batch: TrainingBatch) -> tuple[TrainingBatch, Tensor]:
    """Clear rows whose hidden states are not finite: states become 0 and nothing in them is supervised.

    States of padding are meaningless and always become 0.

    Returns:
        The batch and [R] bool, the damaged rows.
    """
    valid = batch.document_ids >= 0
    # A sum is finite only where every term is; it reads the states once and keeps nothing of their size.
    total = batch.hidden_states.sum(-1, dtype=torch.float32) + batch.last_hidden_state.sum(-1, dtype=torch.float32)
    damaged = (~total.isfinite() & valid).any(dim=1)
    kept = (valid & ~damaged[:, None])[..., None]
    return (
        TrainingBatch(
            input_ids=batch.input_ids,
            hidden_states=torch.where(kept, batch.hidden_states, 0),
            last_hidden_state=torch.where(kept, batch.last_hidden_state, 0),
            loss_mask=batch.loss_mask & kept[..., 0],
            position_ids=batch.position_ids,
            document_ids=batch.document_ids,
        ),
        damaged,
    )
