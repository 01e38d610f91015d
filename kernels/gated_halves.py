"""SwiGLU's gate, silu(g) * u, on the one product [g ; u] of both projections: one launch, and no copy of either half."""

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

__all__ = ["gated_halves"]

_BLOCK = 1024

if triton is not None:

    @triton.jit
    def _gated_halves_kernel(states, out, size, blocks, EVEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
        """One program a token and block of columns."""
        wait_for_inputs(PDL)
        token = (tl.program_id(0) // blocks).to(tl.int64)
        column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
        inside = (column < size) | EVEN
        # Read once: what is in the cache for others may stay there.
        gate = tl.load(states + token * 2 * size + column, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        up = tl.load(states + (token * 2 + 1) * size + column, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        let_next_start(PDL)
        silu = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32)
        tl.store(out + token * size + column, (silu * up).to(out.dtype.element_ty), mask=inside)


def gated_halves(states: Tensor, *, implementation: Literal["auto", "reference", "triton"] = "auto") -> Tensor:
    """silu(g) * u of [..., 2 * size], g before u; [..., size] in the same dtype.

    silu runs in float32 and is rounded before it multiplies, as between two PyTorch operations.

    Args:
        states: g and u side by side.
        implementation: "auto" takes the kernel, which is not differentiable, on CUDA below float64 where no gradient is recorded.
    """
    use_kernel = implementation == "triton" or (
        implementation == "auto" and states.is_cuda and states.dtype != torch.float64 and not torch.is_grad_enabled() and triton is not None
    )
    if not use_kernel:
        gate, up = states.chunk(2, dim=-1)
        return F.silu(gate) * up
    states, size = states.contiguous(), states.shape[-1] // 2
    out = torch.empty(*states.shape[:-1], size, dtype=states.dtype, device=states.device)
    with torch.cuda.device_of(states):
        blocks = triton.cdiv(size, _BLOCK)
        _gated_halves_kernel[(out.numel() // size * blocks,)](
            states, out, size, blocks, EVEN=size % _BLOCK == 0, BLOCK=_BLOCK, num_warps=4, **dependent_launch(states)
        )
    return out
