"""Head rotation: the norm of query or key heads and their rotary position embedding, in one launch instead of seven.

For each token t and head vector x of size D, with half-split rotation (Llama, Qwen) and optional weights g (Qwen3):

    y = x / sqrt(mean(x^2) + epsilon) * g     (y = x without weights),     (y1, y2) the halves of y
    out = (y1 cos_t - y2 sin_t, y2 cos_t + y1 sin_t)

Norm and rotation run in float32; between them y has the input's dtype, as it has between two PyTorch operations.
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

__all__ = ["rotate_heads"]


def _reference(x: Tensor, cosine: Tensor, sine: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    if weight is not None:
        x = F.rms_norm(x, x.shape[-1:], weight.to(x.dtype), epsilon)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    first, second = wide.chunk(2, dim=-1)
    return (wide * cosine + torch.cat([-second, first], dim=-1) * sine).to(x.dtype)


if triton is not None:

    @triton.jit
    def _rotate_heads_kernel(
        x,  # [N, H, D]
        cosine,  # [N, D] float32; its halves are equal
        sine,
        weight,  # [D]
        out,  # [N, H, D]
        token_stride,
        head_stride,
        epsilon,
        HEADS: tl.constexpr,
        HALF: tl.constexpr,
        HEADS_BLOCK: tl.constexpr,
        HALF_BLOCK: tl.constexpr,
        NORMALISE: tl.constexpr,
        PDL: tl.constexpr,
    ):
        """One program a token and block of heads, in two halves."""
        wait_for_inputs(PDL)
        token = tl.program_id(0).to(tl.int64)
        head = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)[:, None]
        half = tl.arange(0, HALF_BLOCK)[None, :]
        inside = (head < HEADS) & (half < HALF)
        source = x + token * token_stride + head * head_stride + half
        first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
        if NORMALISE:
            square = tl.sum(first * first + second * second, 1)[:, None]
            scale = 1.0 / tl.sqrt(square / (2 * HALF) + epsilon)
            first = first * scale * tl.load(weight + half, mask=half < HALF, other=0.0).to(tl.float32)
            second = second * scale * tl.load(weight + HALF + half, mask=half < HALF, other=0.0).to(tl.float32)
            first = first.to(x.dtype.element_ty).to(tl.float32)
            second = second.to(x.dtype.element_ty).to(tl.float32)
        cos = tl.load(cosine + token * (2 * HALF) + half, mask=half < HALF, other=0.0)
        sin = tl.load(sine + token * (2 * HALF) + half, mask=half < HALF, other=0.0)
        let_next_start(PDL)
        target = out + (token * HEADS + head) * (2 * HALF) + half
        tl.store(target, (first * cos - second * sin).to(out.dtype.element_ty), mask=inside)
        tl.store(target + HALF, (second * cos + first * sin).to(out.dtype.element_ty), mask=inside)


def _kernel(x: Tensor, cosine: Tensor, sine: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    heads, size = x.shape[-2:]
    shape = (*x.shape[:-2], 1, size)
    cosine, sine = (table.expand(shape).reshape(-1, size).contiguous() for table in (cosine, sine))
    flat = x.reshape(-1, heads, size)
    flat = flat if flat.stride(-1) == 1 else flat.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = min(8, triton.next_power_of_2(heads))
    with torch.cuda.device_of(x):
        _rotate_heads_kernel[(len(flat), triton.cdiv(heads, block))](
            flat, cosine, sine, weight, out, flat.stride(0), flat.stride(1), epsilon,
            HEADS=heads, HALF=size // 2, HEADS_BLOCK=block, HALF_BLOCK=triton.next_power_of_2(size // 2), NORMALISE=weight is not None,
            num_warps=4, **dependent_launch(x),
        )  # fmt: skip
    return out


def rotate_heads(
    x: Tensor,
    cosine: Tensor,
    sine: Tensor,
    weight: Tensor | None = None,
    epsilon: float = 1e-6,
    *,
    implementation: Literal["auto", "reference", "triton"] = "auto",
) -> Tensor:
    """Normalise heads, where weights are given, and rotate them. The reference is differentiable, the kernel is not.

    Args:
        x: [..., H, D], queries or keys as they were projected.
        cosine, sine: [..., 1, D] float32 of the tokens' positions, in both halves the same; broadcast against x.
        weight: [D] of the norm, or None.
        epsilon: of the norm.
        implementation: "auto" takes the kernel on CUDA below float64 where no gradient is recorded.

    Returns:
        [..., H, D] in the dtype of x.
    """
    use_kernel = implementation == "triton" or (
        implementation == "auto" and x.is_cuda and x.dtype != torch.float64 and not torch.is_grad_enabled() and triton is not None
    )
    return (_kernel if use_kernel else _reference)(x, cosine, sine, weight, epsilon)
