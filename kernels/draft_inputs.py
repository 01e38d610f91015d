"""Draft inputs: from a round's verified tokens to the whole batch of a parallel draft pass, in one launch.

Row r verified n_r tokens from position s_r on, and c_r of them were kept; the token b_r after them (the bonus token or the
correction) is the new anchor. A parallel drafter then runs n_r + M slots for the row (P-EAGLE, arXiv 2602.01469, section 2):

    slot i < c_r - 1              token i + 1 at position s_r + i     EAGLE's shift: the feature of a token meets the next token
    slot c_r - 1                  b_r                                 predicts the first draft token
    the next M slots              MASK                                predict the other draft tokens
    the last n_r - c_r slots      rejected: id 0 at position 0, no feature, nowhere to write

Rows lie one after another without gaps, so row r begins at slot `row_starts[r] + r * M`: nothing depends on what was accepted,
and a CUDA graph captures it. DFlash's and DSpark's block, an anchor and MASK slots, is the case n_r = c_r = 1.
"""

# Triton's kernels are typed by what they are launched with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # no build for this platform: the reference serves it
    triton = None

__all__ = ["DraftInputs", "draft_inputs"]

_BLOCK = 128


@dataclass(frozen=True)
class DraftInputs:
    """The slots of a draft pass. N slots, R rows, M MASK slots a row.

    Attributes:
        input_ids: [N] int64; the mask token in MASK slots, 0 in rejected and padding slots.
        positions: [N] int64; 0 in rejected and padding slots.
        masked: [N] bool, MASK slots. They are marked by their place: a prompt may hold the mask token's id as well.
        rejected: [N] bool, slots of tokens that were not kept; padding past the last row counts as rejected.
        hidden_rows: [N] int64, which verified token's hidden states belong in the slot; -1 where none do.
        slot_mapping: [N] int64, where in the cache the slot's key and value go; -1 for nowhere.
        sample_indices: [R, M + 1] int64, the slots whose outputs predict the row's draft tokens. A row that kept nothing
            points at its own first slots, whose outputs mean nothing.
    """

    input_ids: Tensor
    positions: Tensor
    masked: Tensor
    rejected: Tensor
    hidden_rows: Tensor
    slot_mapping: Tensor
    sample_indices: Tensor

    @classmethod
    def empty(cls, slots: int, rows: int, mask_slots: int, device: torch.device) -> "DraftInputs":
        """Room for the result."""
        numbers = torch.empty(4, slots, dtype=torch.int64, device=device)
        flags = torch.empty(2, slots, dtype=torch.bool, device=device)
        sample_indices = torch.empty(rows, mask_slots + 1, dtype=torch.int64, device=device)
        return cls(numbers[0], numbers[1], flags[0], flags[1], numbers[2], numbers[3], sample_indices)


# -- the definition ----------------------------------------------------------------------------------------------


def _reference(
    token_ids: Tensor,
    row_starts: Tensor,
    kept: Tensor,
    next_token: Tensor,
    position: Tensor,
    page_table: Tensor,
    mask_slots: int,
    mask_token_id: int,
    page_size: int,
    slots: int,
) -> DraftInputs:
    """Plain PyTorch on any device, without host synchronisation."""
    rows, device = len(kept), kept.device
    slot = torch.arange(slots, device=device)
    first_slot = row_starts + torch.arange(rows + 1, device=device) * mask_slots
    row = (torch.searchsorted(first_slot, slot, right=True) - 1).clamp(max=rows - 1)
    offset = slot - first_slot[row]
    count, last = kept[row], kept[row] - 1
    used = (slot < first_slot[-1]) & (count > 0) & (offset <= last + mask_slots)
    real = used & (offset <= last)
    masked = used & ~real

    source = row_starts[row] + offset
    shifted = token_ids[(source + 1).clamp(max=len(token_ids) - 1)]
    ids = torch.where(masked, mask_token_id, torch.where(offset == last, next_token[row], shifted))
    positions = torch.where(used, position[row] + offset, 0)
    page = page_table[row, torch.where(used, positions // page_size, 0)]
    sampled = (kept - 1).clamp(min=0)[:, None] + torch.arange(mask_slots + 1, device=device)
    return DraftInputs(
        input_ids=torch.where(used, ids, 0),
        positions=positions,
        masked=masked,
        rejected=~used,
        hidden_rows=torch.where(real, source, -1),
        slot_mapping=torch.where(used, page * page_size + positions % page_size, -1),
        sample_indices=first_slot[:-1, None] + sampled,
    )


# -- the kernel --------------------------------------------------------------------------------------------------

if triton is not None:

    @triton.jit
    def _draft_inputs_kernel(
        token_ids,  # [T]
        row_starts,  # [R + 1]
        kept,  # [R]
        next_token,  # [R]
        position,  # [R]
        page_table,  # [R, pages], rows `page_table_stride` apart
        input_ids,  # [N], and so on to slot_mapping
        positions,
        masked,
        rejected,
        hidden_rows,
        slot_mapping,
        sample_indices,  # [R, M + 1]
        page_table_stride,
        tokens,
        rows,
        slots,
        mask_slots,
        mask_token_id,
        page_size,
        SEARCH_STEPS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """One program a block of slots; each slot finds its row by bisection, so a ragged batch needs no other launch."""
        slot = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = slot < slots
        # The last row whose first slot is not beyond the slot: row 0's never is.
        low = tl.zeros((BLOCK,), tl.int64)
        high = low + rows
        for _ in range(SEARCH_STEPS):
            middle = (low + high) // 2
            reached = tl.load(row_starts + middle) + middle * mask_slots <= slot
            low = tl.where(reached, middle, low)
            high = tl.where(reached, high, middle)
        row = low
        first_slot = tl.load(row_starts + row) + row * mask_slots
        end = tl.load(row_starts + rows) + rows * mask_slots
        offset = slot - first_slot
        count = tl.load(kept + row)
        last = count - 1
        used = inside & (slot < end) & (count > 0) & (offset <= last + mask_slots)
        real = used & (offset <= last)
        is_mask = used & (offset > last)

        source = slot - row * mask_slots
        shifted = tl.load(token_ids + source + 1, mask=real & (offset < last) & (source + 1 < tokens), other=0)
        following = tl.load(next_token + row)
        ids = tl.where(is_mask, mask_token_id, tl.where(offset == last, following, shifted))
        at = tl.where(used, tl.load(position + row) + offset, 0)
        page = tl.load(page_table + row * page_table_stride + at // page_size, mask=used, other=0)
        tl.store(input_ids + slot, tl.where(used, ids, 0), mask=inside)
        tl.store(positions + slot, at, mask=inside)
        tl.store(masked + slot, is_mask, mask=inside)
        tl.store(rejected + slot, used == 0, mask=inside)
        tl.store(hidden_rows + slot, tl.where(real, source, -1), mask=inside)
        tl.store(slot_mapping + slot, tl.where(used, page * page_size + at % page_size, -1), mask=inside)
        # Sampled slots: the last real one and the MASK slots; the first ones of a row that kept nothing.
        drafted = offset - tl.maximum(last, 0)
        samples = inside & (slot < end) & (drafted >= 0) & (drafted <= mask_slots)
        tl.store(sample_indices + row * (mask_slots + 1) + drafted, slot, mask=samples)


def _kernel(
    token_ids: Tensor,
    row_starts: Tensor,
    kept: Tensor,
    next_token: Tensor,
    position: Tensor,
    page_table: Tensor,
    mask_slots: int,
    mask_token_id: int,
    page_size: int,
    slots: int,
) -> DraftInputs:
    rows = len(kept)
    out = DraftInputs.empty(slots, rows, mask_slots, kept.device)
    with torch.cuda.device_of(kept):
        _draft_inputs_kernel[(triton.cdiv(slots, _BLOCK),)](
            token_ids,
            row_starts,
            kept,
            next_token,
            position,
            page_table,
            out.input_ids,
            out.positions,
            out.masked,
            out.rejected,
            out.hidden_rows,
            out.slot_mapping,
            out.sample_indices,
            page_table.stride(0),
            len(token_ids),
            rows,
            slots,
            mask_slots,
            mask_token_id,
            page_size,
            SEARCH_STEPS=(rows - 1).bit_length(),
            BLOCK=_BLOCK,
            num_warps=4,
        )
    return out


# -- the public function -----------------------------------------------------------------------------------------


def draft_inputs(
    token_ids: Tensor,
    row_starts: Tensor,
    kept: Tensor,
    next_token: Tensor,
    position: Tensor,
    page_table: Tensor,
    *,
    mask_slots: int,
    mask_token_id: int,
    page_size: int,
    padded_slots: int | None = None,
    implementation: Literal["auto", "reference", "triton"] = "auto",
) -> DraftInputs:
    """Expand a ragged batch of verified tokens into the slots of one parallel draft pass. See the module's text.

    No host synchronisation, and no shape that depends on data. Integers throughout: kernel and reference agree exactly.

    Args:
        token_ids: [T] int64, the verified tokens of all rows, one row after another.
        row_starts: [R + 1] int64, ascending from 0 to T, where each row begins and the last one ends. Every row has at least
            one verified token or one MASK slot.
        kept: [R] int64, how many leading tokens of each row were kept; 0 for a row that takes no part.
        next_token: [R] int64, the token after them.
        position: [R] int64, the position of each row's first verified token.
        page_table: [R, pages] int64, the cache page of each run of `page_size` positions. A contiguous cache has one page a
            row: `torch.arange(R)[:, None]`, with the row's length as page size.
        mask_slots: M >= 0, draft tokens - 1.
        mask_token_id: id of MASK slots.
        page_size: positions a page.
        padded_slots: N, for graphs that run at a fixed size; T + R * M when None.
        implementation: "auto" takes the kernel on CUDA.

    Raises:
        ValueError: `padded_slots` is smaller than T + R * M.
    """
    needed = len(token_ids) + len(kept) * mask_slots
    slots = needed if padded_slots is None else padded_slots
    if slots < needed:
        raise ValueError(f"draft_inputs: padded_slots {slots} must be at least {needed} (verified tokens and MASK slots of all rows)")
    use_kernel = implementation == "triton" or (implementation == "auto" and kept.is_cuda and triton is not None)
    expand = _kernel if use_kernel else _reference
    return expand(token_ids, row_starts, kept, next_token, position, page_table, mask_slots, mask_token_id, page_size, slots)
