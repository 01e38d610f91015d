"""Log-sum-exp and likeliest column of every row of a head's logits, and how kernels read such logits and leave gradients behind.

The logits of a product W h are softcap(scale * W h + b) + m, with a Markov bias m where one is kept apart
(`FrozenHead`). Rows are read once, in the head's dtype; everything else is float32.
"""

# Triton's kernels are typed by what they are launched with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import os
from typing import Any, Literal

import torch
from torch import Tensor

from speculators.kernels.frozen_head import FrozenHead

try:
    import triton
    import triton.language as tl
except ImportError:  # no build for this platform: the reference serves it
    triton = None

__all__ = ["log_sums"]

_WARPS = 32  # of 8, 16 and 32, with and without loads ahead of their step, the fastest on an H200
# What a peak is at least. Fused, `z * LOG2E - peak * LOG2E` leaves the rounding of the second product where z is the peak: at most
# 2^-4 from here, but 440 for a mask of -1e10, whose exponential would be infinite. Logits below it count as none.
LOWEST_PEAK = -1.0e6
_COLUMNS = 8  # neighbouring columns of a thread: 16 bytes of 16-bit logits


def _reference(product: Tensor, head: FrozenHead, bias: Tensor | None, chosen: Tensor | None) -> tuple[Tensor, Tensor]:
    logits = head.finish(product)
    if bias is not None:
        logits = logits + bias
    if chosen is not None:
        logits = logits[:, chosen]
    return logits.logsumexp(dim=1), logits.argmax(dim=1)


if triton is not None:
    LOG2E = tl.constexpr(1.4426950408889634)  # exp(x - r) = exp2(x * LOG2E - r * LOG2E): one multiply-add and one exponential
    LN2 = tl.constexpr(0.6931471805599453)
    FLOOR = tl.constexpr(LOWEST_PEAK)
    _PTX = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1" and torch.version.hip is None)

    @triton.jit
    def exp2(x):
        """2 to the x; below 2^-126, where `tl.exp2` spends three more instructions on subnormal numbers, 0."""
        if _PTX:
            return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
        return tl.exp2(x)

    @triton.jit
    def _capped(x, softcap):
        """softcap * tanh(x / softcap), from exp alone; saturates cleanly where exp overflows."""
        return softcap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * x / softcap)))

    @triton.jit
    def load_logits(
        row, bias_row, head_bias, columns, inside, scale, softcap,
        HAS_BIAS: tl.constexpr, HAS_HEAD_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    ):  # fmt: skip
        """Logits at some columns, -inf outside, and their part under the cap."""
        STAYS: tl.constexpr = not HAS_SOFTCAP and scale > 0  # -inf does, so that loading it is enough
        capped = tl.load(row + columns, mask=inside, other=float("-inf") if STAYS else 0.0).to(tl.float32) * scale
        if HAS_HEAD_BIAS:
            capped += tl.load(head_bias + columns, mask=inside, other=0.0).to(tl.float32)
        if HAS_SOFTCAP:
            capped = _capped(capped, softcap)
        logits = capped
        if HAS_BIAS:
            logits += tl.load(bias_row + columns, mask=inside, other=0.0).to(tl.float32)
        return logits if STAYS else tl.where(inside, logits, float("-inf")), capped

    @triton.jit
    def store_gradient(row, bias_row, columns, inside, gradient, capped, scale, softcap, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
        """The gradient of logits over these: m has it as it is, W h through cap and scale. `capped`: as `load_logits` gives it."""
        if HAS_BIAS:
            tl.store(bias_row + columns, gradient.to(bias_row.dtype.element_ty), mask=inside)
        gradient = gradient * scale
        if HAS_SOFTCAP:
            gradient = gradient * (1.0 - (capped / softcap) * (capped / softcap))
        tl.store(row + columns, gradient.to(row.dtype.element_ty), mask=inside)

    @triton.jit
    def _row_logits(
        row, bias_row, head_bias, chosen, index, size, scale, softcap,
        HAS_BIAS: tl.constexpr, HAS_HEAD_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, REDUCED: tl.constexpr,
    ):  # fmt: skip
        """Logits of some of `size` columns, which are places in `chosen` if REDUCED."""
        inside = index < size
        columns = index
        if REDUCED:
            columns = tl.load(chosen + index, mask=inside, other=0)
        return load_logits(row, bias_row, head_bias, columns, inside, scale, softcap, HAS_BIAS, HAS_HEAD_BIAS, HAS_SOFTCAP)[0]

    @triton.jit
    def row_log_sum(
        row, bias_row, head_bias, chosen, size, scale, softcap,
        HAS_BIAS: tl.constexpr, HAS_HEAD_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, REDUCED: tl.constexpr,
        LANES: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        """Log-sum-exp of a row's logits and where the largest stands, the first of equal ones; of the `chosen` columns if REDUCED.

        A lane keeps its own largest logit and sum, put together at the end: a sum over the program in every step would make it
        wait. It takes COLUMNS neighbours at a time, so that one exponential rescales for all of them, and remembers the step of
        its largest logit; which of the neighbours that is, it looks up once.
        """
        largest = tl.full((LANES,), FLOOR, tl.float32)  # finite, so that exp(-inf - largest) is 0 and never NaN
        total = tl.zeros((LANES,), tl.float32)
        found = tl.zeros((LANES,), tl.int32)
        neighbours = tl.arange(0, LANES)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        for start in range(0, size, LANES * COLUMNS):
            z = _row_logits(
                row, bias_row, head_bias, chosen, start + neighbours, size, scale, softcap, HAS_BIAS, HAS_HEAD_BIAS, HAS_SOFTCAP, REDUCED
            )
            peak = tl.max(z, 1)
            found = tl.where(peak > largest, start, found)
            peak = tl.maximum(peak, largest)
            reference = peak * LOG2E
            total = total * exp2((largest - peak) * LOG2E) + tl.sum(exp2(z * LOG2E - reference[:, None]), 1)
            largest = peak
        index = found[:, None] + neighbours
        z = _row_logits(row, bias_row, head_bias, chosen, index, size, scale, softcap, HAS_BIAS, HAS_HEAD_BIAS, HAS_SOFTCAP, REDUCED)
        top = tl.max(largest, 0)
        choice = tl.min(tl.min(tl.where(z == top, index, size - 1), 1), 0)
        return top + tl.log(tl.sum(total * exp2((largest - top) * LOG2E), 0)), choice

    @triton.jit
    def _log_sums_kernel(
        logits,  # [n, stride] W h
        bias,  # [n, stride] m
        head_bias,  # [stride]
        chosen,  # [size]
        log_sums,  # [n] float32
        choices,  # [n] int64
        stride,
        size,
        scale: tl.constexpr,  # 1 costs no product
        softcap,
        HAS_BIAS: tl.constexpr,
        HAS_HEAD_BIAS: tl.constexpr,
        HAS_SOFTCAP: tl.constexpr,
        REDUCED: tl.constexpr,
        LANES: tl.constexpr,
        COLUMNS: tl.constexpr,
    ):
        """One program a row."""
        row = tl.program_id(0).to(tl.int64)
        log_sum, choice = row_log_sum(
            logits + row * stride, bias + row * stride, head_bias, chosen, size, scale, softcap,
            HAS_BIAS, HAS_HEAD_BIAS, HAS_SOFTCAP, REDUCED, LANES, COLUMNS,
        )  # fmt: skip
        tl.store(log_sums + row, log_sum)
        tl.store(choices + row, choice)


def row_tiles(size: int) -> dict[str, int]:
    """LANES, COLUMNS and num_warps of a kernel that goes through rows of some length by `row_log_sum`."""
    return {
        "LANES": min(32 * _WARPS, max(1, triton.next_power_of_2(size) // _COLUMNS)),
        "COLUMNS": _COLUMNS,
        "num_warps": _WARPS,
    }


def head_flags(head: FrozenHead) -> dict[str, Any]:
    """What `load_logits` compiles a head's logits from."""
    return {"HAS_HEAD_BIAS": head.bias is not None, "HAS_SOFTCAP": head.softcap is not None}


def log_sums(
    product: Tensor,
    head: FrozenHead,
    bias: Tensor | None = None,
    chosen: Tensor | None = None,
    *,
    implementation: Literal["auto", "reference", "triton"] = "auto",
) -> tuple[Tensor, Tensor]:
    """Log-sum-exp and argmax of every row of a head's logits.

    Args:
        product: [n, V] W h.
        head: gives scale, bias and cap.
        bias: [n, V] added after the cap, or None.
        chosen: [size] int64, the columns that take part; None for all.
        implementation: "auto" takes the kernel on CUDA.

    Returns:
        [n] float32 (the reference keeps float64), and [n] int64 places among the columns that take part, the first of equal ones.
    """
    if implementation == "reference" or (implementation == "auto" and (triton is None or not product.is_cuda)):
        return _reference(product, head, bias, chosen)
    sums = torch.empty(len(product), dtype=torch.float32, device=product.device)
    choices = torch.empty(len(product), dtype=torch.int64, device=product.device)
    size = product.shape[1] if chosen is None else len(chosen)
    _log_sums_kernel[(len(product),)](
        product,
        product if bias is None else bias,
        head.bias,
        chosen,
        sums,
        choices,
        product.shape[1],
        size,
        head.scale,
        head.softcap or 1.0,
        HAS_BIAS=bias is not None,
        REDUCED=chosen is not None,
        **head_flags(head),
        **row_tiles(size),
    )
    return sums, choices
