"""Greedy verification of ragged draft blocks: the longest prefix of drafts that are the verifier's most likely tokens.

Two launches: the largest logit of every tile of the vocabulary, then one program a row that walks its drafts. Each logit is read
once, and neither a float32 copy nor a row of argmaxes is written.
"""

# Triton's kernels are typed by what they are launched with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
from torch import Tensor

from speculators.decoding.rejection import Acceptance, accept_greedy
from speculators.kernels.launch import dependent_launch
from speculators.kernels.likeliest_tokens import Implementation, tiles_of, use_kernel, with_unit_stride

try:
    import triton
    import triton.language as tl

    from speculators.kernels.launch import let_next_start, wait_for_inputs
    from speculators.kernels.likeliest_tokens import tile_argmax_kernel
except ImportError:  # no build for this platform: the reference serves it
    triton = None

__all__ = ["greedy_verification"]

if triton is not None:

    @triton.jit
    def _compare_kernel(
        token_ids, lengths, largest, choice, accepted_out, next_token, drafts, token_stride,
        SLOTS_BLOCK: tl.constexpr, TILES: tl.constexpr, TILES_BLOCK: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        """One program a row: the longest prefix of drafts that are the verifier's most likely tokens.

        All slots at once: one after the other each would wait for memory.
        """
        wait_for_inputs(PDL)
        row = tl.program_id(0).to(tl.int64)
        k = tl.arange(0, SLOTS_BLOCK)
        tile = tl.arange(0, TILES_BLOCK)[None, :]
        length = tl.load(lengths + row)
        token = tl.load(token_ids + row * token_stride + k, mask=k < drafts, other=-1)
        found = (row * (drafts + 1) + k[:, None]) * TILES + tile
        there = (k <= drafts)[:, None] & (tile < TILES)
        tops = tl.load(largest + found, mask=there, other=float("-inf"))
        first = tl.min(tl.where(tops == tl.max(tops, 1)[:, None], tile, TILES - 1), 1)
        likely = tl.load(choice + (row * (drafts + 1) + k) * TILES + first, mask=k <= drafts, other=0).to(tl.int64)
        accepted = tl.min(tl.where((k < drafts) & (k < length) & (token == likely), drafts, k), 0)
        let_next_start(PDL)
        tl.store(accepted_out + row, accepted.to(tl.int64))
        tl.store(next_token + row, tl.sum(tl.where(k == accepted, likely, 0), 0))


def _greedy_kernel(token_ids: Tensor, lengths: Tensor, logits: Tensor) -> Acceptance:
    device, (batch, drafts) = token_ids.device, token_ids.shape
    logits = with_unit_stride(logits)
    token_ids = token_ids if token_ids.stride(-1) == 1 else token_ids.contiguous()
    lengths = lengths.contiguous()
    vocabulary = logits.shape[-1]
    tile, tiles = tiles_of(vocabulary)
    largest = torch.empty(batch * (drafts + 1), tiles, dtype=torch.float32, device=device)
    choice = torch.empty(batch * (drafts + 1), tiles, dtype=torch.int32, device=device)
    accepted, next_token = torch.empty_like(lengths), torch.empty_like(lengths)
    with torch.cuda.device_of(token_ids):
        tile_argmax_kernel[(batch * (drafts + 1), tiles)](
            logits, largest, choice, drafts + 1, logits.stride(0), logits.stride(1), vocabulary, TILES=tiles, TILE=tile, num_warps=8,
            **dependent_launch(logits),
        )  # fmt: skip
        _compare_kernel[(batch,)](
            token_ids, lengths, largest, choice, accepted, next_token, drafts, token_ids.stride(0),
            SLOTS_BLOCK=triton.next_power_of_2(drafts + 1), TILES=tiles, TILES_BLOCK=triton.next_power_of_2(tiles), num_warps=4,
            **dependent_launch(logits),
        )  # fmt: skip
    return Acceptance(accepted, next_token)


def greedy_verification(token_ids: Tensor, lengths: Tensor, logits: Tensor, *, implementation: Implementation = "auto") -> Acceptance:
    """Accept the drafts that are the verifier's most likely tokens; of equal logits the first counts.

    Args:
        token_ids: [R, K] int64 drafts, K >= 0.
        lengths: [R] int64, drafts of each row that count.
        logits: [R, K + 1, V], any float dtype.
        implementation: "auto" takes the kernels on CUDA below float64.
    """
    if use_kernel(implementation, logits):
        return _greedy_kernel(token_ids, lengths, logits)
    return accept_greedy(token_ids, lengths, logits.float().argmax(-1))  # a CPU takes five times as long in bfloat16
