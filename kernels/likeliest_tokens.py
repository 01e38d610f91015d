"""The likeliest token of every slot, straight from a draft vocabulary's logits: two launches, each logit read once.

    token = ids[argmax_v logits[v]], of equal logits the first

With a reduced draft vocabulary, whose ids ascend, that is the argmax over the verifier's vocabulary, which is never written.
"""

# Triton's kernels are typed by what they are launched with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Literal

import torch
from torch import Tensor

from speculators.kernels.launch import dependent_launch

try:
    import triton
    import triton.language as tl

    from speculators.kernels.launch import let_next_start, wait_for_inputs
except ImportError:  # no build for this platform: the reference serves it
    triton = None

__all__ = ["Implementation", "likeliest_tokens", "tiles_of", "use_kernel", "with_unit_stride"]

Implementation = Literal["auto", "reference", "triton"]

_TILE = 4096

if triton is not None:

    @triton.jit
    def tile_argmax_kernel(
        values, largest, choice, slots, row_stride, slot_stride, vocabulary,
        TILES: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        """One program a slot and tile: the largest logit and the first column that has it."""
        wait_for_inputs(PDL)
        slot = tl.program_id(0).to(tl.int64)
        tile = tl.program_id(1)
        columns = tile * TILE + tl.arange(0, TILE)
        source = values + slot // slots * row_stride + slot % slots * slot_stride
        x = tl.load(source + columns, mask=columns < vocabulary, other=float("-inf")).to(tl.float32)
        top = tl.max(x, 0)
        let_next_start(PDL)
        tl.store(largest + slot * TILES + tile, top)
        tl.store(choice + slot * TILES + tile, tl.min(tl.where(x == top, columns, vocabulary - 1), 0))

    @triton.jit
    def _best_tile_kernel(
        largest, choice, ids, token_ids, REDUCED: tl.constexpr, TILES: tl.constexpr, TILES_BLOCK: tl.constexpr, PDL: tl.constexpr
    ):
        """One program a slot: the first of the best tiles."""
        wait_for_inputs(PDL)
        slot = tl.program_id(0).to(tl.int64)
        tile = tl.arange(0, TILES_BLOCK)
        tops = tl.load(largest + slot * TILES + tile, mask=tile < TILES, other=float("-inf"))
        first = tl.min(tl.where(tops == tl.max(tops, 0), tile, TILES_BLOCK), 0)
        token = tl.load(choice + slot * TILES + tl.minimum(first, TILES - 1)).to(tl.int64)
        if REDUCED:
            token = tl.load(ids + token)
        let_next_start(PDL)
        tl.store(token_ids + slot, token)


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


def likeliest_tokens(logits: Tensor, ids: Tensor | None = None, *, implementation: Implementation = "auto") -> Tensor:
    """The token of the largest logit; of equal logits the first counts.

    Args:
        logits: [R, K, V], any float dtype.
        ids: [V] int64, the verifier id of each column; None where they are the same.
        implementation: "auto" takes the kernels on CUDA below float64.

    Returns:
        [R, K] int64.
    """
    if not use_kernel(implementation, logits):
        columns = logits.float().argmax(-1)  # a CPU takes five times as long in bfloat16
        return columns if ids is None else ids[columns]
    logits = with_unit_stride(logits)
    rows, slots, vocabulary = logits.shape
    tile, tiles = tiles_of(vocabulary)
    largest = torch.empty(rows * slots, tiles, dtype=torch.float32, device=logits.device)
    choice = torch.empty(rows * slots, tiles, dtype=torch.int32, device=logits.device)
    token_ids = torch.empty(rows, slots, dtype=torch.int64, device=logits.device)
    with torch.cuda.device_of(logits):
        tile_argmax_kernel[(rows * slots, tiles)](
            logits, largest, choice, slots, logits.stride(0), logits.stride(1), vocabulary, TILES=tiles, TILE=tile, num_warps=8,
            **dependent_launch(logits),
        )  # fmt: skip
        _best_tile_kernel[(rows * slots,)](
            largest, choice, ids, token_ids, REDUCED=ids is not None, TILES=tiles, TILES_BLOCK=triton.next_power_of_2(tiles), num_warps=1,
            **dependent_launch(logits),
        )  # fmt: skip
    return token_ids
