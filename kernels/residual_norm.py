"""RMS norms of decoding steps: alone, with the residual addition whose sum it reads, and a drafter's two input norms in one launch.

    rms_norm        n = x / sqrt(mean(x^2) + epsilon) * g
    add_rms_norm    y = x + u,    n = y / sqrt(mean(y^2) + epsilon) * g
    joined_norms    [norm_e(e) ; norm_h(h)], the input of EAGLE-3's first layer (arXiv 2503.01840)

The sum is rounded to its dtype before the norm reads it, as it is between two PyTorch operations; norms run in float32.
"""

# Triton's kernels are typed by what they are launched with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from speculators.kernels.launch import dependent_launch

try:
    import triton
    import triton.language as tl

    from speculators.kernels.launch import let_next_start, wait_for_inputs
except ImportError:  # no build for this platform: the reference serves it
    triton = None

__all__ = ["add_rms_norm", "joined_norms", "rms_norm"]

Implementation = Literal["auto", "reference", "triton"]

if triton is not None:

    @triton.jit
    def _normed(x, weight, size, epsilon):
        return x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / size + epsilon)) * weight.to(tl.float32)

    @triton.jit
    def _add_rms_norm_kernel(
        x, update, weight, total, normed, x_stride, update_stride, size, epsilon, BLOCK: tl.constexpr, PDL: tl.constexpr
    ):
        """One program a token."""
        wait_for_inputs(PDL)
        token = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, BLOCK)
        inside = column < size
        y = tl.load(x + token * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        y += tl.load(update + token * update_stride + column, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(weight + column, mask=inside, other=0.0)  # before the sum: it arrives with the rest
        let_next_start(PDL)
        rounded = y.to(total.dtype.element_ty)
        tl.store(total + token * size + column, rounded, mask=inside)
        out = _normed(rounded.to(tl.float32), g, size, epsilon)
        tl.store(normed + token * size + column, out.to(normed.dtype.element_ty), mask=inside)

    @triton.jit
    def _rms_norm_kernel(x, weight, normed, x_stride, size, epsilon, BLOCK: tl.constexpr, PDL: tl.constexpr):
        """One program a token."""
        wait_for_inputs(PDL)
        token = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, BLOCK)
        inside = column < size
        y = tl.load(x + token * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(weight + column, mask=inside, other=0.0)
        let_next_start(PDL)
        out = _normed(y, g, size, epsilon)
        tl.store(normed + token * size + column, out.to(normed.dtype.element_ty), mask=inside)

    @triton.jit
    def _joined_norms_kernel(
        first, second, first_weight, second_weight, out, first_stride, second_stride, size, first_epsilon, second_epsilon,
        BLOCK: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        """One program a token and half."""
        wait_for_inputs(PDL)
        token = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, BLOCK)
        inside = column < size
        if tl.program_id(1) == 0:
            x = tl.load(first + token * first_stride + column, mask=inside, other=0.0).to(tl.float32)
            g = tl.load(first_weight + column, mask=inside, other=0.0)
            let_next_start(PDL)
            y = _normed(x, g, size, first_epsilon)
            tl.store(out + token * 2 * size + column, y.to(out.dtype.element_ty), mask=inside)
        else:
            x = tl.load(second + token * second_stride + column, mask=inside, other=0.0).to(tl.float32)
            g = tl.load(second_weight + column, mask=inside, other=0.0)
            let_next_start(PDL)
            y = _normed(x, g, size, second_epsilon)
            tl.store(out + (token * 2 + 1) * size + column, y.to(out.dtype.element_ty), mask=inside)


def _use_kernel(implementation: Implementation, x: Tensor) -> bool:
    return implementation == "triton" or (
        implementation == "auto" and x.is_cuda and x.dtype != torch.float64 and not torch.is_grad_enabled() and triton is not None
    )


def _tokens(x: Tensor) -> Tensor:
    """[..., size] -> [tokens, size] with neighbouring columns next to one another."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()


def _launch_options(size: int) -> dict[str, int]:
    block = triton.next_power_of_2(size)
    return {"BLOCK": block, "num_warps": max(1, min(8, block // 256))}


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight.to(x.dtype), epsilon)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, *, implementation: Implementation = "auto") -> Tensor:
    """The norm alone: in a decoding step a kernel that is tuned for many tokens takes half as long again.

    Args:
        x: [..., size], any strides but that of the last axis.
        weight: [size].
        epsilon: of the norm.
        implementation: as in `add_rms_norm`.

    Returns:
        [..., size] in the dtype of x.
    """
    if not _use_kernel(implementation, x):
        return _norm(x, weight, epsilon)
    rows, size = _tokens(x), x.shape[-1]
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    with torch.cuda.device_of(x):
        _rms_norm_kernel[(len(rows),)](
            rows, weight, normed, rows.stride(0), size, epsilon, **_launch_options(size), **dependent_launch(x)
        )  # fmt: skip
    return normed


def add_rms_norm(
    x: Tensor, update: Tensor, weight: Tensor, epsilon: float, *, implementation: Implementation = "auto"
) -> tuple[Tensor, Tensor]:
    """Add a sublayer's output to the residual stream and norm the sum. The reference is differentiable, the kernel is not.

    Args:
        x, update: [..., size], any strides but that of the last axis; x may be one vector for all tokens.
        weight: [size] of the norm.
        epsilon: of the norm.
        implementation: "auto" takes the kernel on CUDA below float64 where no gradient is recorded.

    Returns:
        The sum and its norm, [..., size] in the promoted dtype of both inputs.
    """
    if not _use_kernel(implementation, x):
        total = x + update
        return total, _norm(total, weight, epsilon)
    rows, summands, size = _tokens(x.expand_as(update)), _tokens(update), x.shape[-1]
    total = torch.empty(update.shape, dtype=torch.promote_types(x.dtype, update.dtype), device=x.device)
    normed = torch.empty_like(total)
    with torch.cuda.device_of(x):
        _add_rms_norm_kernel[(len(rows),)](
            rows, summands, weight, total, normed, rows.stride(0), summands.stride(0), size, epsilon,
            **_launch_options(size), **dependent_launch(x),
        )  # fmt: skip
    return total, normed


def joined_norms(
    first: Tensor,
    second: Tensor,
    first_weight: Tensor,
    second_weight: Tensor,
    first_epsilon: float,
    second_epsilon: float,
    *,
    implementation: Implementation = "auto",
) -> Tensor:
    """Norm two tensors each by itself and lay them side by side. The reference is differentiable, the kernel is not.

    Args:
        first, second: [..., size] of one shape.
        first_weight, second_weight: [size] of their norms.
        first_epsilon, second_epsilon: of their norms.
        implementation: as in `add_rms_norm`.

    Returns:
        [..., 2 * size].
    """
    if not _use_kernel(implementation, first):
        return torch.cat([_norm(first, first_weight, first_epsilon), _norm(second, second_weight, second_epsilon)], dim=-1)
    left, right, size = _tokens(first), _tokens(second), first.shape[-1]
    kind = torch.promote_types(first.dtype, second.dtype)
    out = torch.empty(*first.shape[:-1], 2 * size, dtype=kind, device=first.device)
    with torch.cuda.device_of(first):
        _joined_norms_kernel[(len(left), 2)](
            left, right, first_weight, second_weight, out, left.stride(0), right.stride(0), size, first_epsilon, second_epsilon,
            **_launch_options(size), **dependent_launch(first),
        )  # fmt: skip
    return out
