"""Linear maps of a handful of tokens: the weights go past once, at the speed of memory, and little else costs anything.

    skinny_linear          y = x W^T, or y += x W^T
    skinny_gated_linear    y = silu(x G^T) * (x U^T), G and U lying together: SwiGLU's gate without a launch of its own

A program streams all columns of a few rows of W through a pipeline of tiles and multiplies them with all tokens at once. Sums run
over the columns in one order, in float32, whatever the number of tokens: a token comes out the same alone and in company.

Launched early (see `launch`), a program asks for the beginning of its rows while the kernel that computes x still runs.

Only where a benchmark (`benchmarks/products.py`) found it faster than cuBLAS does it run; see `FASTER`.
"""

# Triton's kernels are typed by what they are launched with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import sys
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from speculators.kernels.dot import dot
from speculators.kernels.gated_halves import gated_halves
from speculators.kernels.launch import dependent_launch
from speculators.kernels.packed_linear import packed_linear

try:
    import triton
    import triton.language as tl

    from speculators.kernels.launch import fetch_ahead, let_next_start, wait_for_inputs
except ImportError:  # no build for this platform: the reference serves it
    triton = None

__all__ = ["FASTER", "MAX_TOKENS", "Range", "Tiles", "skinny_gated_linear", "skinny_linear"]

Implementation = Literal["auto", "reference", "triton"]

MAX_TOKENS = 16  # of one reading of the weights: columns of a matrix product on tensor cores


@dataclass(frozen=True)
class Range:
    """Products that the kernel is faster for: x of so many tokens, inclusive, and a W of such a shape and so many bytes."""

    least_tokens: int
    most_tokens: int
    least_columns: int
    least_bytes: int
    most_rows: int = sys.maxsize
    most_bytes: int = sys.maxsize

    def holds(self, tokens: int, weight: Tensor) -> bool:
        """Whether it contains the product of so many tokens with [rows, columns]."""
        (rows, columns), size = weight.shape, weight.numel() * weight.element_size()
        shape = rows <= self.most_rows and columns >= self.least_columns and self.least_bytes <= size <= self.most_bytes
        return self.least_tokens <= tokens <= self.most_tokens and shape


# By compute capability, what was measured: benchmarks/results/products_h200.md. At 8 tokens 1.05 to 1.10 times cuBLAS on the smaller
# half of a Qwen3-8B drafter's products and 0.99 to 1.00 times on the others; at 1 token 1.06 to 1.10 times where the rows are few or
# long, and behind elsewhere. Below 8 MB the two are alike alone; in a chain of steps of SmolLM2 ours win where kernels launch early
# (benchmarks/results/round_profile_choices_h200.md).
FASTER = {
    (9, 0): (
        Range(least_tokens=5, most_tokens=MAX_TOKENS, least_columns=4096, least_bytes=1 << 23),
        Range(least_tokens=1, most_tokens=4, least_columns=4096, least_bytes=1 << 23, most_rows=4096),
        Range(least_tokens=1, most_tokens=4, least_columns=8192, least_bytes=1 << 23),
        Range(least_tokens=1, most_tokens=MAX_TOKENS, least_columns=1, least_bytes=0, most_bytes=(1 << 23) - 1),
    )
}


@dataclass(frozen=True)
class Tiles:
    """How a program reads: tiles of `rows` by `columns` of W, `stages` of them on their way, by so many warps.

    `ahead`, a power of two: bytes of each row that it asks for before x is there.
    """

    rows: int = 32
    columns: int = 256
    stages: int = 4
    warps: int = 4
    ahead: int = 2048

    @classmethod
    def of(cls, weight: Tensor) -> "Tiles":
        """512 bytes of a row, one after the other: what is on its way fills as much shared memory in any dtype.

        Few rows are split among twice as many programs, the fewest rows of a product on tensor cores each: what a
        multiprocessor can read in a microsecond is little.
        """
        return cls(rows=32 if len(weight) >= 4096 else 16, columns=512 // weight.element_size())


if triton is not None:

    @triton.jit
    def _skinny_linear_kernel(
        x,  # [tokens, columns]
        weight,  # [rows, columns]
        other_weight,  # [rows, columns], U where `weight` is G
        out,  # [tokens, rows]
        tokens,
        rows,
        columns,
        x_stride,
        TOKENS: tl.constexpr,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
        EVEN: tl.constexpr,
        GATED: tl.constexpr,
        ADD: tl.constexpr,
        AHEAD: tl.constexpr,
        PDL: tl.constexpr,
    ):
        """One program a block of rows of W, with GATED those of both halves, and block of tokens."""
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
        column = tl.arange(0, COLUMNS)
        here = row < rows
        first = tl.minimum(row, rows - 1).to(tl.int64) * columns
        if PDL:
            room = columns * (weight.dtype.element_ty.primitive_bitwidth // 8)
            fetch_ahead(weight + first, AHEAD, room)
            if GATED:
                fetch_ahead(other_weight + first, AHEAD, room)
        wait_for_inputs(PDL)
        place = first[:, None] + column[None, :]
        x_source = x + token[None, :] * x_stride + column[:, None]
        total = tl.zeros((ROWS, TOKENS), tl.float32)
        second = tl.zeros((ROWS, TOKENS), tl.float32)
        for at in range(0, columns, COLUMNS):
            if EVEN:
                tile = tl.load(weight + place + at, eviction_policy="evict_first")
                values = tl.load(x_source + at, mask=token[None, :] < tokens, other=0.0)
            else:
                inside = at + column < columns
                tile = tl.load(weight + place + at, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
                values = tl.load(x_source + at, mask=(token[None, :] < tokens) & inside[:, None], other=0.0)
            total += dot(tile, values)
            if GATED:
                if EVEN:
                    tile = tl.load(other_weight + place + at, eviction_policy="evict_first")
                else:
                    inside = at + column < columns
                    tile = tl.load(other_weight + place + at, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
                second += dot(tile, values)
        let_next_start(PDL)
        if GATED:
            # Rounded where two operations would round.
            kind = out.dtype.element_ty
            gate = total.to(kind).to(tl.float32)
            total = (gate * tl.sigmoid(gate)).to(kind).to(tl.float32) * second.to(kind).to(tl.float32)
        target = out + token[None, :].to(tl.int64) * rows + row[:, None]
        written = here[:, None] & (token[None, :] < tokens)
        if ADD:
            total += tl.load(target, mask=written, other=0.0).to(tl.float32)
        tl.store(target, total.to(out.dtype.element_ty), mask=written)


def _kernel(x: Tensor, weight: Tensor, gated: bool, tiles: Tiles | None, onto: Tensor | None = None) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    tokens, columns = flat.shape
    rows = len(weight) // 2 if gated else len(weight)
    out = torch.empty(*x.shape[:-1], rows, dtype=x.dtype, device=x.device) if onto is None else onto.view(-1, rows)
    tiles = Tiles.of(weight) if tiles is None else tiles
    with torch.cuda.device_of(x):
        _skinny_linear_kernel[(triton.cdiv(rows, tiles.rows), triton.cdiv(tokens, MAX_TOKENS))](
            flat, weight, weight[rows:] if gated else weight, out, tokens, rows, columns, flat.stride(0),
            TOKENS=MAX_TOKENS, ROWS=tiles.rows, COLUMNS=tiles.columns, EVEN=columns % tiles.columns == 0, GATED=gated,
            ADD=onto is not None, AHEAD=tiles.ahead, num_warps=tiles.warps, num_stages=tiles.stages, **dependent_launch(x),
        )  # fmt: skip
    return out if onto is None else onto


def _use_kernel(implementation: Implementation, x: Tensor, weight: Tensor) -> bool:
    if implementation != "auto":
        return implementation == "triton"
    if triton is None or not x.is_cuda or torch.is_grad_enabled() or not weight.is_contiguous():
        return False
    if x.dtype not in (torch.bfloat16, torch.float16) or weight.dtype != x.dtype:
        return False
    measured = FASTER.get(torch.cuda.get_device_capability(x.device), ())
    return any(range_.holds(x.numel() // x.shape[-1], weight) for range_ in measured)


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    onto: Tensor | None = None,
    implementation: Implementation = "auto",
    tiles: Tiles | None = None,
) -> Tensor:
    """x W^T + b, `torch.nn.functional.linear`.

    Args:
        x: [..., in].
        weight: [out, in], for the kernel contiguous.
        bias: [out] or None.
        onto: [..., out] contiguous, to which the product is added in place: the product's accumulator begins with it, which costs
            no launch and one rounding less than a sum. No gradient.
        implementation: "auto" takes the kernel for the 16-bit products of `FASTER` where no gradient is recorded.
        tiles: of the kernel, `Tiles.of` when None.

    Returns:
        [..., out]; `onto` where it is given.
    """
    if _use_kernel(implementation, x, weight):
        out = _kernel(x, weight, False, tiles, onto)
    elif onto is None:
        return packed_linear(x, weight, bias)
    else:
        onto.view(-1, len(weight)).addmm_(x.reshape(-1, x.shape[-1]), weight.t())
        out = onto
    if bias is None:
        return out
    return out + bias if onto is None else out.add_(bias)


def skinny_gated_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, implementation: Implementation = "auto", tiles: Tiles | None = None
) -> Tensor:
    """silu(x G^T + b) * (x U^T + c).

    Args:
        x: [..., in].
        weight: [2 * size, in], the rows of G, then those of U.
        bias: [2 * size] or None; with one, the gate has a launch of its own.
        implementation, tiles: as in `skinny_linear`.

    Returns:
        [..., size].
    """
    if bias is None and _use_kernel(implementation, x, weight):
        return _kernel(x, weight, True, tiles)
    return gated_halves(skinny_linear(x, weight, bias, implementation=implementation))
