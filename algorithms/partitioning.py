"""Sequence partitioning: a sum of losses whose parts run one after the other, with exact gradients (P-EAGLE, section 3.3).

The paper accumulates gradients over segments of one sequence, so that only one segment's activations exist at a time. Here the
parts share inputs that were computed once, outside of them (depth 0's keys and values): each part runs forward and
backward at once and leaves its gradients of these inputs and of the parameters in running sums, which the backward pass
hands on. So what lies before the shared inputs runs backward once, with the whole gradient. Detaching the inputs instead
would give the same loss and other gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# Shared inputs -> the part's loss, a scalar.
Part = Callable[[list[Tensor]], Tensor]


def sum_of_parts(parts: Sequence[Part], shared: Sequence[Tensor], parameters: Sequence[nn.Parameter]) -> Tensor:
    """The sum of the parts' losses, as if they were one expression; one part's activations are in memory at a time.

    Sums of gradients are kept in float32 at least: as much memory as one copy of `shared` and `parameters`. Parts must not
    change anything; without autograd they only run.

    Args:
        parts: each maps the shared inputs (in their order) to a scalar.
        shared: tensors computed before.
        parameters: what the parts use beside them.
    """
    if not torch.is_grad_enabled():
        return torch.stack([part(list(shared)) for part in parts]).sum()
    total: Tensor = _SumOfParts.apply(parts, len(shared), *shared, *parameters)  # type: ignore[no-untyped-call]
    return total


class _SumOfParts(torch.autograd.Function):
    """Runs every part forward and backward in its forward pass; its backward pass scales the sums, once."""

    @staticmethod
    def forward(ctx: Any, parts: Sequence[Part], num_shared: int, *inputs: Tensor) -> Tensor:
        shared, parameters = inputs[:num_shared], inputs[num_shared:]
        sums: list[Tensor | None] = [None] * len(inputs)
        losses = []
        for part in parts:
            leaves = [x.detach().requires_grad_(x.requires_grad) for x in shared]
            with torch.enable_grad():
                loss = part(leaves)
            losses.append(loss.detach())
            wanted = [(i, x) for i, x in enumerate([*leaves, *parameters]) if x.requires_grad]
            gradients: list[Tensor | None] = list(torch.autograd.grad(loss, [x for _, x in wanted], allow_unused=True))
            gradients.reverse()
            for index, x in wanted:
                gradient = gradients.pop()  # gone once it is added: there is never a second copy of all of them
                if gradient is None:
                    continue
                so_far = sums[index]
                if so_far is None:
                    sums[index] = gradient.to(torch.promote_types(x.dtype, torch.float32), copy=True)
                else:
                    so_far += gradient
        ctx.sums, ctx.dtypes = sums, [x.dtype for x in inputs]
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_gradient: Tensor) -> tuple[Tensor | None, ...]:
        sums, ctx.sums = ctx.sums, None  # scaled where they are, so they serve once
        if sums is None:
            raise RuntimeError("the backward pass of a sum of parts runs once")
        for index, dtype in enumerate(ctx.dtypes):
            if sums[index] is not None:
                sums[index] = sums[index].mul_(loss_gradient).to(dtype)
        return None, None, *sums
