"""AdamW's update of one parameter in one pass over memory: 28 bytes an element, the gradient's clipping included.

With gradient g, factor c on it, learning rate r, weight decay w, step t and moments m, v (Loshchilov and Hutter, 2019):

    m <- b1 m + (1 - b1) c g,    v <- b2 v + (1 - b2) (c g)^2
    p <- p - r w p - r (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + epsilon)

torch's fused AdamW takes a factor too, but writes the scaled gradient back.
"""

# Triton's kernels are typed by what they are launched with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.optim.adamw import adamw

try:
    import triton
    import triton.language as tl
except ImportError:  # no build for this platform: torch serves it
    triton = None

__all__ = ["adamw_step"]

_BLOCK = 1024

if triton is not None:

    @triton.jit
    def _adamw_kernel(
        parameter, gradient, first_moment, second_moment, step, learning_rate, scale, skip, size,
        weight_decay, epsilon, keep_first, take_first, keep_second, take_second, log_first, log_second, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """One program a block of elements. `keep` is a beta, `take` is 1 - beta, `log` is log2(beta)."""
        offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = offsets < tl.where(tl.load(skip) == 0.0, size, 0)
        rate, count = tl.load(learning_rate), tl.load(step)
        p = tl.load(parameter + offsets, mask=inside, other=0.0)
        g = tl.load(gradient + offsets, mask=inside, other=0.0) * tl.load(scale)
        m = keep_first * tl.load(first_moment + offsets, mask=inside, other=0.0) + take_first * g
        v = keep_second * tl.load(second_moment + offsets, mask=inside, other=0.0) + take_second * g * g
        inverse_root = 1.0 / tl.sqrt(1.0 - tl.exp2(count * log_second))
        p -= rate * weight_decay * p
        p -= rate / (1.0 - tl.exp2(count * log_first)) * m / (tl.sqrt(v) * inverse_root + epsilon)
        tl.store(parameter + offsets, p, mask=inside)
        tl.store(first_moment + offsets, m, mask=inside)
        tl.store(second_moment + offsets, v, mask=inside)


def adamw_step(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    first_moments: Sequence[Tensor],
    second_moments: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    learning_rate: Tensor,
    weight_decay: float,
    betas: tuple[float, float],
    epsilon: float = 1e-8,
    scale: Tensor,
    skip: Tensor,
    implementation: Literal["auto", "reference", "triton"] = "auto",
) -> None:
    """Update parameters and moments in place, without host synchronisation. The gradients are not used afterwards: they may be scaled.

    Args:
        parameters, gradients, first_moments, second_moments: float32, of one shape each.
        steps: updates so far, scalars float32; counted up here.
        learning_rate: scalar float32 on the device.
        weight_decay: decoupled.
        betas: b1 and b2.
        epsilon: in the denominator.
        scale: scalar float32, the factor on the gradients.
        skip: scalar float32; 1.0 leaves everything as it is, whatever gradients and scale hold.
        implementation: "auto" takes the kernel on CUDA.
    """
    use_kernel = implementation == "triton" or (implementation == "auto" and triton is not None and skip.is_cuda)
    dense = all(tensor.is_contiguous() for group in (parameters, gradients, first_moments, second_moments) for tensor in group)
    if not (use_kernel and dense):
        torch._foreach_mul_(list(gradients), scale)
        adamw(
            *(list(parameters), list(gradients), list(first_moments), list(second_moments), [], list(steps)),
            fused=True,
            found_inf=skip,
            amsgrad=False,
            beta1=betas[0],
            beta2=betas[1],
            lr=learning_rate,
            weight_decay=weight_decay,
            eps=epsilon,
            maximize=False,
            capturable=skip.is_cuda,
        )
        torch.autograd.graph.increment_version(parameters)  # the fused update does not, and copies of weights would not be noticed as old
        return
    torch._foreach_add_(list(steps), [1.0 - skip] * len(steps))  # a lone tensor as summand would be read by the host
    factors = (weight_decay, epsilon, betas[0], 1.0 - betas[0], betas[1], 1.0 - betas[1], *(math.log2(max(b, 1e-30)) for b in betas))
    with torch.cuda.device_of(skip):
        for tensors in zip(parameters, gradients, first_moments, second_moments, steps, strict=True):
            size = tensors[0].numel()
            if size:
                _adamw_kernel[(triton.cdiv(size, _BLOCK),)](*tensors, learning_rate, scale, skip, size, *factors, BLOCK=_BLOCK)
