"""Linear maps of the training step, with float32 weights and 16-bit products, that keep little for the backward pass.

    linear             y = x W^T + b            keeps x; the 16-bit copy of W is made again where autocast would keep it
    gated_projection   y = (silu(g) * u) W^T    keeps g and u (SwiGLU); silu(g) * u is computed again, one pass over memory
    feed_forward       the same with g = x G^T, u = x U^T: keeps x; two of the three products are computed again

At a hidden size of 4096 and a feed-forward size of 12,288 a token and layer keeps 48 KB less in the feed-forward (96 KB less with
the last), and a layer 2 bytes a weight less. Values and gradients are those of the plain expressions.
"""

# Triton's kernels are typed by what they are launched with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

try:
    import triton
    import triton.language as tl
except ImportError:  # no build for this platform: the reference serves it
    triton = None

__all__ = ["feed_forward", "gated_projection", "linear"]

_BLOCK = 1024


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, [..., in] -> [..., out], in autocast's dtype where that is on and in x's elsewhere."""
    if not torch.is_grad_enabled() or _compute_dtype(x) == weight.dtype:
        return F.linear(x, weight, bias)
    output: Tensor = _Linear.apply(x.to(_compute_dtype(x)), weight)  # type: ignore[no-untyped-call]
    return output if bias is None else output + bias.to(output.dtype)


def gated_projection(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """(silu(gate) * up) W^T: [..., size] twice -> [..., out].

    Args:
        gate, up: of one dtype, in which the product is computed.
        weight: [out, size], in the same dtype or in float32.
    """
    if not torch.is_grad_enabled():
        return F.linear(F.silu(gate) * up, weight.to(gate.dtype))
    output: Tensor = _GatedProjection.apply(gate, up, weight)  # type: ignore[no-untyped-call]
    return output


def feed_forward(x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor) -> Tensor:
    """(silu(x G^T) * x U^T) W^T, [..., in] -> [..., out], computed again in the backward pass; dtypes as in `linear`."""
    output: Tensor = _FeedForward.apply(x.to(_compute_dtype(x)), gate_weight, up_weight, down_weight)  # type: ignore[no-untyped-call]
    return output


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight = ctx.needs_input_grad
        return (
            gradient @ weight.to(gradient.dtype) if wants_x else None,
            _weight_gradient(gradient, x, weight) if wants_weight else None,
        )


class _GatedProjection(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        return F.linear(_gated(gate, up), weight.to(gate.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        product, gate_gradient, up_gradient = _gated_gradients(gate, up, gradient @ weight.to(gradient.dtype))
        return gate_gradient, up_gradient, _weight_gradient(gradient, product, weight) if ctx.needs_input_grad[2] else None


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, gate_weight, up_weight, down_weight)
        gate, up = (F.linear(x, weight.to(x.dtype)) for weight in (gate_weight, up_weight))
        return F.linear(_gated(gate, up), down_weight.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        gate_weight, up_weight, down_weight = (weight.to(x.dtype) for weight in weights)
        product, *gradients = _gated_gradients(F.linear(x, gate_weight), F.linear(x, up_weight), gradient @ down_weight)
        pairs = zip((gradients[0], gradients[1], gradient), (x, x, product), weights, ctx.needs_input_grad[1:], strict=True)
        weight_gradients = [_weight_gradient(d, inputs, weight) if wanted else None for d, inputs, weight, wanted in pairs]
        return gradients[0] @ gate_weight + gradients[1] @ up_weight if ctx.needs_input_grad[0] else None, *weight_gradients


def _weight_gradient(gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    # reshape and not flatten: a single vector, such as P-EAGLE's shared state, is one token
    rows, columns = gradient.reshape(-1, gradient.shape[-1]).T, x.reshape(-1, x.shape[-1])
    if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and weight.dtype == torch.float32:
        return torch.mm(rows, columns, out_dtype=torch.float32)  # as the product sums it: not rounded first, and not copied
    return (rows @ columns).to(weight.dtype)


# -- silu(gate) * up ---------------------------------------------------------------------------------------------


def _use_kernel(x: Tensor) -> bool:
    return triton is not None and x.is_cuda and x.dtype != torch.float64


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    if not _use_kernel(gate):
        return F.silu(gate) * up
    return _launch_gated(gate, up)


def _gated_gradients(gate: Tensor, up: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The product, and the gradients of gate and up from the product's: with s = sigmoid(g), silu' = s (1 + g (1 - s))."""
    if _use_kernel(gate):
        return _launch_gated_gradients(gate, up, gradient)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    return silu * up, gradient * up * (sigmoid * (1 + gate - silu)), gradient * silu


if triton is not None:

    @triton.jit
    def _gated_kernel(gate, up, product, size, BLOCK: tl.constexpr):
        offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = offsets < size
        g = tl.load(gate + offsets, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(up + offsets, mask=inside, other=0.0).to(tl.float32)
        tl.store(product + offsets, (g * tl.sigmoid(g) * u).to(product.dtype.element_ty), mask=inside)

    @triton.jit
    def _gated_gradients_kernel(gate, up, gradient, product, gate_gradient, up_gradient, size, BLOCK: tl.constexpr):
        offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = offsets < size
        g = tl.load(gate + offsets, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(up + offsets, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(gradient + offsets, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(g)
        silu = g * sigmoid
        tl.store(product + offsets, (silu * u).to(product.dtype.element_ty), mask=inside)
        tl.store(gate_gradient + offsets, (d * u * sigmoid * (1.0 + g - silu)).to(product.dtype.element_ty), mask=inside)
        tl.store(up_gradient + offsets, (d * silu).to(product.dtype.element_ty), mask=inside)


def _launch_gated(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    product = torch.empty_like(gate)
    with torch.cuda.device_of(gate):
        _gated_kernel[(triton.cdiv(gate.numel(), _BLOCK),)](gate, up, product, gate.numel(), BLOCK=_BLOCK)
    return product


def _launch_gated_gradients(gate: Tensor, up: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    gate, up, gradient = gate.contiguous(), up.contiguous(), gradient.contiguous()
    product, gate_gradient = torch.empty_like(gate), torch.empty_like(gate)
    with torch.cuda.device_of(gate):
        _gated_gradients_kernel[(triton.cdiv(gate.numel(), _BLOCK),)](
            gate, up, gradient, product, gate_gradient, gradient, gate.numel(), BLOCK=_BLOCK
        )  # the gradient of up takes the place of the product's, element by element
    return product, gate_gradient, gradient
