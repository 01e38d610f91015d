"""A tensor times a number that lies on the device: what backward does with gradients that are already there.

`x * factor` would not do for 16-bit tensors: on a GPU torch rounds the factor to x's dtype first, and is four times slower than a copy.
"""

# Triton's kernels are typed by what they are launched with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Literal

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # no build for this platform: the reference serves it
    triton = None

__all__ = ["scaled"]

_BLOCK = 4096

if triton is not None:

    @triton.jit
    def _scale_kernel(x, factor, result, size, BLOCK: tl.constexpr):
        index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = index < size
        value = tl.load(x + index, mask=inside).to(tl.float32) * tl.load(factor).to(tl.float32)
        tl.store(result + index, value.to(result.dtype.element_ty), mask=inside)


def scaled(x: Tensor, factor: Tensor, *, implementation: Literal["auto", "reference", "triton"] = "auto") -> Tensor:
    """x * factor in x's dtype, multiplied in float32 or float64.

    Args:
        x: any shape.
        factor: a scalar on the same device.
        implementation: "auto" takes the kernel on CUDA below float64.
    """
    by_kernel = triton is not None and x.is_cuda and x.dtype != torch.float64 and x.is_contiguous()
    if implementation == "reference" or (implementation == "auto" and not by_kernel):
        accurate = torch.promote_types(x.dtype, torch.float32)
        return (x.to(accurate) * factor.to(accurate)).to(x.dtype)
    result = torch.empty_like(x)
    if x.numel():
        with torch.cuda.device_of(x):
            _scale_kernel[(triton.cdiv(x.numel(), _BLOCK),)](x, factor, result, x.numel(), BLOCK=_BLOCK, num_warps=8)
    return result
