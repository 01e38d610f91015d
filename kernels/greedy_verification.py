"""Greedy verification of ragged draft blocks: the longest prefix of drafts that are the verifier's most likely tokens.

Two launches: the largest logit of every tile of the vocabulary, then one program a row that walks its drafts. Each logit is read
once, and neither a float32 copy nor a row of argmaxes is written.
"""

# Triton's kernels are typed by what they are launched with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Literal

import torch
from torch import Tensor

from speculators.decoding.rejection import Acceptance, accept_greedy

try:
    import triton
    import triton.language as tl
except ImportError:  # no build for this platform: the reference serves it
    triton = None

__all__ = ["Implementation", "greedy_verification", "tiles_of", "use_kernel", "with_unit_stride"]

Implementation = Literal["auto", "reference", "triton"]

_TILE = 4096

if triton is not None:

    @triton.jit
    def _tile_argmax_kernel(values, largest, choice, slots, row_stride, slot_stride, vocabulary, TILES: tl.constexpr, TILE: tl.constexpr):
        """One program a slot and tile: the largest logit and the first column that has it."""
        slot = tl.program_id(0).to(tl.int64)
        tile = tl.program_id(1)
        columns = tile * TILE + tl.arange(0, TILE)
        source = values + slot // slots * row_stride + slot % slots * slot_stride
        x = tl.load(source + columns, mask=columns < vocabulary, other=float("-inf")).to(tl.float32)
        top = tl.max(x, 0)
        tl.store(largest + slot * TILES + tile, top)
        tl.store(choice + slot * TILES + tile, tl.min(tl.where(x == top, columns, vocabulary - 1), 0))

    @triton.jit
    def _compare_kernel(
        token_ids, lengths, largest, choice, accepted_out, next_token, drafts, token_stride, TILES: tl.constexpr, TILES_BLOCK: tl.constexpr
    ):
        """One program a row: the longest prefix of drafts that are the verifier's most likely tokens."""
        row = tl.program_id(0).to(tl.int64)
        length = tl.load(lengths + row)
        tile = tl.arange(0, TILES_BLOCK)
        accepted = tl.zeros((), tl.int64)
        following = tl.zeros((), tl.int64)
        walking = length >= 0
        for k in range(drafts + 1):
            slot = row * (drafts + 1) + k
            tops = tl.load(largest + slot * TILES + tile, mask=tile < TILES, other=float("-inf"))
            first = tl.min(tl.where(tops == tl.max(tops, 0), tile, TILES_BLOCK), 0)
            likely = tl.load(choice + slot * TILES + tl.minimum(first, TILES - 1)).to(tl.int64)
            following = tl.where(walking, likely, following)
            token = tl.load(token_ids + row * token_stride + k, mask=k < drafts, other=-1)
            walking = walking & (k < length) & (token == likely)
            accepted += tl.where(walking, 1, 0)
        tl.store(accepted_out + row, accepted)
        tl.store(next_token + row, following)


def with_unit_stride(values: Tensor) -> Tensor:
    """The values with neighbouring columns next to one another."""
    return values if values.stride(-1) == 1 else values.contiguous()


def tiles_of(vocabulary: int) -> tuple[int, int]:
    """Columns of a tile, and tiles."""
    tile = min(_TILE, triton.next_power_of_2(vocabulary))
    return tile, triton.cdiv(vocabulary, tile)


def use_kernel(implementation: Implementation, tensor: Tensor) -> bool:
    """Whether kernels run: asked for, or on CUDA below float64."""
    return implementation == "triton" or (
        implementation == "auto" and tensor.is_cuda and tensor.dtype != torch.float64 and triton is not None
    )


def _greedy_kernel(token_ids: Tensor, lengths: Tensor, logits: Tensor) -> Acceptance:
    device, (batch, drafts) = token_ids.device, token_ids.shape
    logits = with_unit_stride(logits)
    token_ids = token_ids if token_ids.stride(-1) == 1 else token_ids.contiguous()
    vocabulary = logits.shape[-1]
    tile, tiles = tiles_of(vocabulary)
    largest = torch.empty(batch * (drafts + 1), tiles, dtype=torch.float32, device=device)
    choice = torch.empty(batch * (drafts + 1), tiles, dtype=torch.int32, device=device)
    accepted, next_token = torch.empty_like(lengths), torch.empty_like(lengths)
    with torch.cuda.device_of(token_ids):
        _tile_argmax_kernel[(batch * (drafts + 1), tiles)](
            logits, largest, choice, drafts + 1, logits.stride(0), logits.stride(1), vocabulary, TILES=tiles, TILE=tile, num_warps=8
        )
        _compare_kernel[(batch,)](
            token_ids, lengths, largest, choice, accepted, next_token, drafts, token_ids.stride(0),
            TILES=tiles, TILES_BLOCK=triton.next_power_of_2(tiles), num_warps=1,
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
