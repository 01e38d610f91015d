"""Where the hidden states of training rows come from: the verifier in the same process, each time or once, or a store on disk.

The trainer knows `HiddenStateSource` only. Whichever it is, a run sees the same rows in the same order, so that the source
changes its speed and nothing else.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from speculators.data.hidden_states import STATE_DTYPES, StoreReader, rows_digest
from speculators.data.rows import PackedRows
from speculators.errors import ConfigError
from speculators.training.batch import TrainingBatch
from speculators.training.graph import Capture
from speculators.training.order import GROUP_ROWS
from speculators.verifier import Verifier

logger = logging.getLogger("speculators")

GIB = 1 << 30
_READERS = 4  # reads of a store in flight


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


class StoreBatches:
    """Reads batches of rows from a store, several rows at a time.

    Args:
        reader: of the store.
    """

    def __init__(self, reader: StoreReader) -> None:
        self._reader = reader
        self._buffers: list[Tensor] = []
        self._filled: list[list[int]] = []
        self._scales = torch.empty(0)
        self._pool = ThreadPoolExecutor(_READERS, thread_name_prefix="store")
        self._turn = 0
        self._expected: set[int] = set()

    def states(self, rows: Sequence[int]) -> Tensor:
        """[R, S, planes, hidden] of rows on the CPU, bfloat16 (float32 of a float8 store); zeros behind a row's last label.

        The tensor is valid until the second call after its own: two buffers take turns. Row -1 is 0.
        """
        layout = self._reader.layout
        shape = (len(rows), self._reader.row_length, layout.planes, layout.hidden_size)
        if not self._buffers or self._buffers[0].shape != shape:
            self._buffers = [torch.zeros(shape, dtype=STATE_DTYPES[layout.dtype]) for _ in range(2)]
            self._filled = [[0] * len(rows) for _ in range(2)]
            self._scales = torch.zeros(shape[:3])
        self._turn = 1 - self._turn
        buffer, filled, scaled = self._buffers[self._turn], self._filled[self._turn], layout.dtype == "float8"

        def read(place: int) -> None:
            row, tokens = rows[place], 0
            if row >= 0:
                tokens = self._reader.read_into(row, buffer[place], self._scales[place] if scaled else None)
            buffer[place, tokens : filled[place]].view(torch.uint8).zero_()  # what an earlier, longer row has left
            filled[place] = tokens

        groups = {row // GROUP_ROWS for row in rows if row >= 0}
        for group in groups - self._expected:
            self._reader.expect(group * GROUP_ROWS, (group + 1) * GROUP_ROWS)
        self._expected = groups
        list(self._pool.map(read, range(len(rows))))
        return buffer.float() * self._scales[..., None] if scaled else buffer


def open_store(store: str | Path, rows: PackedRows, taps: Sequence[int], verifier: Verifier) -> StoreReader:
    """A store that holds the wanted taps of these rows.

    Raises:
        DataError: there is no store, or it holds other rows.
        ConfigError: it lacks a tap, or belongs to a verifier of another width.
    """
    reader = StoreReader(store, rows_digest(rows))
    layout = reader.layout
    if layout.hidden_size != verifier.hidden_size:
        raise ConfigError(f"the store {store} holds states of width {layout.hidden_size}, the verifier's is {verifier.hidden_size}")
    missing = sorted(set(taps) - set(layout.taps))
    if missing:
        raise ConfigError(f"the store {store} holds the layers {list(layout.taps)}, not the tap {missing[0]}; store it with --taps")
    return reader


class StoredRows(ResidentRows):
    """Resident rows whose hidden states are read from a store at every visit. A batch is valid until the second one after it.

    What the store leaves out, tokens behind a row's last label, is 0.

    Args:
        source: whose taps are wanted, and on whose device.
        rows: packed rows.
        store: the folder, see `speculators.data.hidden_states`.

    Raises:
        DataError: there is no store, or it holds other rows.
        ConfigError: it lacks a tap, or belongs to a verifier of another width.
    """

    def __init__(self, source: VerifierSource, rows: PackedRows, store: str | Path) -> None:
        super().__init__(source, rows)
        reader = open_store(store, rows, source.taps, source.verifier)
        layout, name = reader.layout, source.verifier.weights.name_or_path
        if reader.verifier not in (None, name):
            logger.warning("the store %s was made with %r, not with %r", store, reader.verifier, name)
        self._batches = StoreBatches(reader)
        # None where the planes lie as they are wanted, which spares a copy.
        self._planes = None if layout.taps == source.taps else [layout.taps.index(tap) for tap in source.taps]

    def batch(self, index: Tensor) -> TrainingBatch:
        """See `HiddenStateSource.batch`. It waits for the disk, so it cannot be part of a CUDA graph."""
        states = self._batches.states(index.tolist())
        device, dtype = self.source.verifier.device, self.source.verifier.dtype
        taps = states[:, :, :-1] if self._planes is None else states[:, :, self._planes]
        input_ids, loss_mask, position_ids, document_ids = self.tokens(index)
        return TrainingBatch(
            input_ids,
            taps.flatten(2).to(device=device, dtype=dtype),
            states[:, :, -1].to(device=device, dtype=dtype),
            loss_mask,
            position_ids,
            document_ids,
        )


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
    store: str | Path | None = None,
) -> HiddenStateSource:
    """Rows with hidden states from the verifier: cached on its device where they fit, else computed, or read, at every visit.

    Args:
        verifier: the verifier.
        taps: layer ids, ascending.
        rows: packed rows.
        cache_states: compute the hidden states once.
        dtype: in which cached states are kept; the verifier's when None.
        memory_fraction: the most of the free memory that cached states may take.
        rows_per_forward: rows of one verifier forward while filling the cache.
        capture: for CUDA graphs; made here when None.
        store: a store to read from instead of running the verifier.

    Raises:
        DataError, ConfigError: the store is not of these rows, taps and verifier.
    """
    source = VerifierSource(verifier, taps)
    resident = ResidentRows(source, rows) if store is None else StoredRows(source, rows, store)
    if store is not None:
        capture = Capture(verifier.device, enabled=False)
    if not cache_states:
        return resident
    dtype = dtype or verifier.dtype
    needed, free = CachedRows.bytes_needed(resident, dtype), free_memory(verifier.device)
    if needed > memory_fraction * free:
        logger.warning(
            "hidden states of all rows take %.1f GiB, more than %.0f%% of the %.1f GiB free: they are %s at every visit",
            needed / GIB,
            100 * memory_fraction,
            free / GIB,
            "computed anew" if store is None else "read",
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
