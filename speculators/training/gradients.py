"""The gradient of a step: where micro-batches add it up, and how the processes sum it.

Everything is a sum, never a mean: micro-batches and processes weigh by their supervised tokens, and the step divides once by
the total weight. So the gradient does not depend on how a step's rows are cut into micro-batches and spread over processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from speculators.training.world import World

BUCKET_BYTES = 64 << 20
_ALIGNMENT = 128  # float32 values: 512 bytes, what vectorised kernels like


class Gradients(Protocol):
    """Where the backward passes of a step leave their sum: in the `.grad` of the optimizer's parameters."""

    def begin(self) -> None:
        """Begin a new step: what a backward pass left before is gone."""
        ...

    def complete(self) -> None:
        """After the step's first backward pass: parameters that it did not reach have a gradient of zeros, and each a memory of its own."""
        ...

    def begin_last(self) -> None:
        """The next backward pass is the step's last one in this process: what it finishes may be sent at once."""
        ...

    def reduce(self) -> None:
        """After this every process holds the sum over all of them (of its own rows, where they are spread)."""
        ...

    def norm(self) -> Tensor:
        """Norm of the whole gradient, after `reduce`. Scalar float32, the same in every process."""
        ...

    def release(self) -> None:
        """After the update: nobody needs the gradient any more."""
        ...


class FreshGradients:
    """The gradients of a process that is alone: those that the first backward pass makes, taken as they are.

    Autograd hands over what it computed, so nothing is filled with zeros and added to, and between the update and the backward
    pass there are no gradients at all. Captured in a CUDA graph they lie in the graph's memory, at the same place in every replay.

    Args:
        parameters: trainable ones.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters

    def begin(self) -> None:
        """See `Gradients.begin`."""
        self.release()

    def complete(self) -> None:
        """See `Gradients.complete`."""
        seen: set[int] = set()
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, requires_grad=False)
            elif parameter.grad.untyped_storage().data_ptr() in seen:  # of a sum of two parameters: both were handed the same memory
                parameter.grad = parameter.grad.clone()
            seen.add(parameter.grad.untyped_storage().data_ptr())

    def begin_last(self) -> None:
        """See `Gradients.begin_last`."""

    def reduce(self) -> None:
        """See `Gradients.reduce`."""

    def norm(self) -> Tensor:
        """See `Gradients.norm`."""
        return torch.nn.utils.get_total_norm([parameter.grad for parameter in self._parameters if parameter.grad is not None])

    def release(self) -> None:
        """See `Gradients.release`."""
        for parameter in self._parameters:
            parameter.grad = None


class ReplicatedGradients:
    """Whole gradients in every process ("ddp"): a few flat buckets, summed while the last backward pass still runs.

    DistributedDataParallel averages over processes instead of summing, cannot be captured in a CUDA graph with gradients that
    stay in place, and stops when a parameter took no part in one process's backward pass. Here buckets are sent in one fixed
    order and all of them are sent, used or not, so the processes always agree on what comes next.

    Args:
        parameters: trainable ones, in the order of their use: the last is the first to have its gradient.
        world: the processes.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], world: World) -> None:
        self._world = world
        self._buckets: list[Tensor] = []
        self._missing: list[int] = []  # parameters of each bucket whose gradient the current backward pass still owes
        self._sizes: list[int] = []
        self._sent: list[Any] = []
        self._sending = False
        members: list[list[nn.Parameter]] = []
        room = 0
        for parameter in reversed(parameters):
            length = -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
            if not members or length > room:
                members.append([])
                room = BUCKET_BYTES // 4
            members[-1].append(parameter)
            room -= length
        for number, bucket in enumerate(members):
            lengths = [-(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT for parameter in bucket]
            flat = torch.zeros(sum(lengths), device=bucket[0].device)
            for parameter, part in zip(bucket, flat.split(lengths), strict=True):
                parameter.grad = part[: parameter.numel()].view_as(parameter)
                parameter.register_post_accumulate_grad_hook(lambda _, number=number: self._finished(number))
            self._buckets.append(flat)
            self._sizes.append(len(bucket))

    def begin(self) -> None:
        """See `Gradients.begin`."""
        torch._foreach_zero_(self._buckets)

    def complete(self) -> None:
        """See `Gradients.complete`."""

    def begin_last(self) -> None:
        """See `Gradients.begin_last`."""
        self._missing, self._sending = list(self._sizes), True

    def _finished(self, number: int) -> None:
        if not self._sending:
            return
        self._missing[number] -= 1
        # In order: two processes that finish buckets in different orders must still send them in the same one.
        while len(self._sent) < len(self._buckets) and self._missing[len(self._sent)] <= 0:
            self._send()

    def _send(self) -> None:
        self._sent.append(dist.all_reduce(self._buckets[len(self._sent)], async_op=True))

    def reduce(self) -> None:
        """See `Gradients.reduce`."""
        self._sending = False
        while len(self._sent) < len(self._buckets):
            self._send()
        for work in self._sent:
            work.wait()
        self._sent = []

    def norm(self) -> Tensor:
        """See `Gradients.norm`."""
        return torch.nn.utils.get_total_norm(self._buckets)

    def release(self) -> None:
        """See `Gradients.release`."""


class ShardedGradients:
    """Every process's own rows of the gradient ("fsdp"): FSDP sums and spreads them after each backward pass.

    Args:
        parameters: as FSDP left them in the speculator.
        local: the optimizer's view of this process's rows of each.
        world: the processes.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], local: Sequence[nn.Parameter], world: World) -> None:
        from torch.distributed.tensor import DTensor

        self._world = world
        self._tensors: list[Tensor] = []
        for parameter, own in zip(parameters, local, strict=True):
            assert isinstance(parameter, DTensor)
            own.grad = torch.zeros_like(own, requires_grad=False)
            parameter.grad = DTensor.from_local(
                own.grad, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
            )
            self._tensors.append(own.grad)

    def begin(self) -> None:
        """See `Gradients.begin`."""
        torch._foreach_zero_(self._tensors)

    def complete(self) -> None:
        """See `Gradients.complete`."""

    def begin_last(self) -> None:
        """See `Gradients.begin_last`."""

    def reduce(self) -> None:
        """See `Gradients.reduce`."""

    def norm(self) -> Tensor:
        """See `Gradients.norm`."""
        own = torch.nn.utils.get_total_norm([tensor for tensor in self._tensors if tensor.numel()] or [self._tensors[0].new_zeros(1)])
        return self._world.sum_(own.square()).sqrt()

    def release(self) -> None:
        """See `Gradients.release`."""
