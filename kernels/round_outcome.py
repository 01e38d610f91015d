"""The outcome of a round: what verification decided, turned into tokens of the replies and the state of the next round.

A row keeps its accepted drafts and the token drawn after them, up to its first stop token, and ends with that or when its reply is
as long as it may be. What is kept, the anchor and the cached length of the next round are a dozen comparisons of a few
numbers a row: one launch instead of thirty.
"""

# Triton's kernels are typed by what they are launched with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass

import torch
from torch import Tensor

from speculators.kernels.launch import dependent_launch
from speculators.kernels.likeliest_tokens import Implementation

try:
    import triton
    import triton.language as tl

    from speculators.kernels.launch import let_next_start, wait_for_inputs
except ImportError:  # no build for this platform: the reference serves it
    triton = None

__all__ = ["RoundOutcome", "RowState", "round_outcome"]

_COUNTS = 5  # columns of `packed` before the tokens


@dataclass(frozen=True)
class RowState:
    """Where rows stand before a round.

    Attributes:
        anchor: [R] int64, the newest token, not yet cached.
        emitted: [R] int64, tokens of the reply so far.
        finished: [R] bool.
        lengths: [R] int64, cached positions.
    """

    anchor: Tensor
    emitted: Tensor
    finished: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class RoundOutcome:
    """One round of every row, on the device; rows that were finished before emit 0 tokens.

    Attributes:
        packed: [R, K + 6] int64, proposed, accepted, emitted, stopped, finished and the tokens side by side, for one transfer.
        committed: [R] int64, columns of the block (anchor and accepted drafts) that stay in the cache; 0 for finished rows.
        after: where the rows stand now.
    """

    packed: Tensor
    committed: Tensor
    after: RowState

    @property
    def emitted(self) -> Tensor:
        """[R], tokens that the round adds to the reply."""
        return self.packed[:, 2]

    @property
    def tokens(self) -> Tensor:
        """[R, K + 1], the accepted drafts, then the next token, then padding."""
        return self.packed[:, _COUNTS:]


def _reference(
    state: RowState, drafts: Tensor, proposed: Tensor, accepted: Tensor, next_token: Tensor, stop_ids: Tensor, limit: int
) -> RoundOutcome:
    tokens = torch.cat([drafts, next_token[:, None]], dim=1).scatter(1, accepted[:, None], next_token[:, None])
    column = torch.arange(tokens.shape[1], device=tokens.device)
    stops = (tokens[..., None] == stop_ids).any(-1) & (column <= accepted[:, None])
    stopped = stops.any(1) & ~state.finished
    emitted = torch.where(stopped, stops.long().argmax(1), accepted) + 1
    emitted = torch.where(state.finished, 0, emitted)
    total = state.emitted + emitted
    finished = state.finished | stopped | (total >= limit)
    cut = emitted <= accepted  # an accepted draft was a stop token: the round ends there
    proposed, accepted = torch.where(cut, emitted, proposed), torch.where(cut, emitted, accepted)
    counts = torch.stack([proposed, accepted, emitted, stopped.long(), finished.long()], dim=1)
    committed = torch.where(finished, 0, emitted)
    after = RowState(torch.where(finished, state.anchor, next_token), total, finished, state.lengths + committed)
    return RoundOutcome(torch.cat([counts, tokens], dim=1), committed, after)


if triton is not None:

    @triton.jit
    def _round_outcome_kernel(
        drafts, proposed_in, accepted_in, next_token_in, stop_ids,
        anchor_in, emitted_in, finished_in, lengths_in,
        packed, committed_out, anchor_out, emitted_out, finished_out, lengths_out,
        width, draft_stride, stops, limit, COUNTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        """One program a row."""
        wait_for_inputs(PDL)
        row = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, BLOCK)
        accepted = tl.load(accepted_in + row)
        following = tl.load(next_token_in + row)
        over = tl.load(finished_in + row) != 0
        token = tl.load(drafts + row * draft_stride + column, mask=column < width, other=0)
        token = tl.where((column == accepted) | (column == width), following, token)
        is_stop = column < 0
        for index in range(stops):
            is_stop = is_stop | (token == tl.load(stop_ids + index))
        first_stop = tl.min(tl.where(is_stop & (column <= accepted), column, BLOCK), 0)
        stopped = (first_stop < BLOCK) & (over == 0)
        emitted = tl.where(over, 0, tl.where(stopped, first_stop.to(tl.int64), accepted) + 1)
        total = tl.load(emitted_in + row) + emitted
        finished = over | stopped | (total >= limit)
        cut = emitted <= accepted
        committed = tl.where(finished, 0, emitted)
        let_next_start(PDL)
        out = packed + row * (width + 1 + COUNTS)
        tl.store(out, tl.where(cut, emitted, tl.load(proposed_in + row)))
        tl.store(out + 1, tl.where(cut, emitted, accepted))
        tl.store(out + 2, emitted)
        tl.store(out + 3, stopped.to(tl.int64))
        tl.store(out + 4, finished.to(tl.int64))
        tl.store(out + COUNTS + column, token, mask=column <= width)
        tl.store(committed_out + row, committed)
        tl.store(anchor_out + row, tl.where(finished, tl.load(anchor_in + row), following))
        tl.store(emitted_out + row, total)
        tl.store(finished_out + row, finished)
        tl.store(lengths_out + row, tl.load(lengths_in + row) + committed)


def _kernel(
    state: RowState, drafts: Tensor, proposed: Tensor, accepted: Tensor, next_token: Tensor, stop_ids: Tensor, limit: int
) -> RoundOutcome:
    rows, width = drafts.shape
    drafts = drafts if drafts.stride(-1) == 1 else drafts.contiguous()
    packed = torch.empty(rows, width + 1 + _COUNTS, dtype=torch.int64, device=drafts.device)
    committed = torch.empty_like(accepted)
    after = RowState(*(torch.empty_like(x) for x in (state.anchor, state.emitted, state.finished, state.lengths)))
    with torch.cuda.device_of(drafts):
        _round_outcome_kernel[(rows,)](
            drafts, proposed, accepted, next_token, stop_ids, state.anchor, state.emitted, state.finished, state.lengths,
            packed, committed, after.anchor, after.emitted, after.finished, after.lengths,
            width, drafts.stride(0), len(stop_ids), limit, COUNTS=_COUNTS, BLOCK=triton.next_power_of_2(width + 1), num_warps=1,
            **dependent_launch(drafts),
        )  # fmt: skip
    return RoundOutcome(packed, committed, after)


def round_outcome(
    state: RowState,
    drafts: Tensor,
    proposed: Tensor,
    accepted: Tensor,
    next_token: Tensor,
    stop_ids: Tensor,
    limit: int,
    *,
    implementation: Implementation = "auto",
) -> RoundOutcome:
    """What a round adds to the replies, and where the rows stand after it. No host synchronisation.

    Args:
        state: of the rows before the round; all tensors contiguous.
        drafts: [R, K] int64, K >= 0.
        proposed: [R] int64, drafts of each row that counted.
        accepted: [R] int64, how many of these were accepted.
        next_token: [R] int64, the token drawn after them.
        stop_ids: [S] int64, tokens that end a reply; may be empty.
        limit: tokens of a reply at most.
        implementation: "auto" takes the kernel on CUDA.
    """
    use_kernel = implementation == "triton" or (implementation == "auto" and drafts.is_cuda and triton is not None)
    run = _kernel if use_kernel else _reference
    return run(state, drafts, proposed, accepted, next_token, stop_ids, limit)
