"""How a drafter is spread over the processes of a run: whole in each of them ("ddp"), or by rows ("fsdp", FSDP2).

A drafter is a few layers, so FSDP treats it as one group: its weights are gathered once for forward and backward, while master
weights, gradients and optimizer state stay spread. No algorithm needs to know, and a layer may be used in pieces (DFlash
projects its context with a layer's key and value matrices outside of that layer's own forward).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from speculators.errors import ConfigError
from speculators.speculator import Speculator
from speculators.training.batch import LossOutput, TrainingBatch
from speculators.training.gradients import FreshGradients, Gradients, ReplicatedGradients, ShardedGradients
from speculators.training.optimizer import DrafterOptimizer
from speculators.training.sharding import Sharding
from speculators.training.world import World
from speculators.verifier import Verifier


@dataclass(frozen=True)
class Parallel:
    """A drafter and the processes that train it.

    Attributes:
        world: the processes.
        sharding: how weights and optimizer state are spread; trivial under "ddp".
        loss: `Speculator.training_loss`, with weights gathered where they are spread.
        sharded: whether they are.
    """

    world: World
    sharding: Sharding
    loss: Callable[[TrainingBatch], LossOutput]
    sharded: bool

    def gradients(self, optimizer: DrafterOptimizer) -> Gradients:
        """Where the optimizer's gradients are summed."""
        if self.sharded:
            return ShardedGradients(optimizer.sources, optimizer.parameters, self.world)
        if self.world.size == 1:
            return FreshGradients(optimizer.parameters)
        return ReplicatedGradients(optimizer.parameters, self.world)


def parallelise(speculator: Speculator, world: World, strategy: Literal["ddp", "fsdp"], dtype: torch.dtype) -> Parallel:
    """Spread a drafter over the processes; all of them then hold the weights of rank 0.

    Args:
        speculator: float32, on this process's device, attached. Its parameters become DTensors under "fsdp".
        world: the processes; alone, nothing is spread.
        strategy: "ddp" or "fsdp".
        dtype: that matrices are multiplied in, and that weights are gathered in.
    """
    world.broadcast_(speculator.state_dict().values())
    if strategy == "ddp" or world.size == 1:
        return Parallel(world, Sharding(), speculator.training_loss, sharded=False)
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    root = _LossModule(speculator)
    gathered_in = None if dtype == torch.float32 else dtype
    policy = MixedPrecisionPolicy(param_dtype=gathered_in, reduce_dtype=torch.float32, cast_forward_inputs=False)
    sharded = fully_shard(root, mesh=_mesh(next(speculator.parameters()).device, world), mp_policy=policy, reshard_after_forward=False)
    # Sums, not means: the step divides once, by the weight of all processes.
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)

    def loss(batch: TrainingBatch) -> LossOutput:
        output = LossOutput(*root(batch))
        if not torch.is_grad_enabled():
            sharded.reshard()  # only a backward pass drops the gathered weights by itself, and they must not outlive a change
        return output

    return Parallel(world, Sharding(world), loss, sharded=True)


def shard_verifier(verifier: Verifier, world: World, device: torch.device) -> None:
    """Spread the verifier's decoder layers by rows over the processes; each is gathered while it runs, and then dropped.

    Embedding, final norm and head stay whole, since drafters read them. Afterwards the processes must encode in step. A
    verifier that fits no single device is loaded on the CPU first; this moves it to the device.

    Raises:
        ConfigError: there is one process only.
    """
    if world.size == 1:
        raise ConfigError("shard_verifier spreads the verifier over several processes, and there is one; start more with torchrun")
    from torch.distributed.fsdp import FSDPModule, fully_shard

    mesh = _mesh(device, world)
    for layer in verifier.layers:
        if not isinstance(layer, FSDPModule):
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    verifier.model.to(device)


def _mesh(device: torch.device, world: World) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device.type, (world.size,))


class _LossModule(nn.Module):
    """What FSDP wraps: the drafter's loss as a forward pass, with tensors as its outputs."""

    def __init__(self, speculator: Speculator) -> None:
        super().__init__()
        self.speculator = speculator

    def forward(self, batch: TrainingBatch) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """Loss and metrics."""
        output = self.speculator.training_loss(batch)
        trainable = [parameter for parameter in self.speculator.parameters() if parameter.requires_grad]
        return with_every_gradient(output.loss, trainable), output.metrics


def with_every_gradient(loss: Tensor, parameters: list[nn.Parameter]) -> Tensor:
    """The same loss, whose backward pass gives a gradient (zeros) to parameters that it does not depend on.

    The processes exchange what has a gradient. A head that one process's micro-batch happened not to use would leave the
    others waiting for it.
    """
    used = _leaves_of(loss)
    unused = [parameter for parameter in parameters if id(parameter) not in used]
    if not unused:
        return loss
    kept: Tensor = _ZeroGradients.apply(loss, *unused)  # type: ignore[no-untyped-call]
    return kept


def _leaves_of(loss: Tensor) -> set[int]:
    """Identities of the leaf tensors that a loss depends on."""
    leaves: set[int] = set()
    seen: set[Any] = set()
    stack: list[Any] = [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        stack.extend(following for following, _ in node.next_functions)
    return leaves


class _ZeroGradients(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, loss: Tensor, *parameters: Tensor) -> Tensor:
        context.save_for_backward(*parameters)
        return loss.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return (gradient, *(torch.zeros_like(parameter) for parameter in context.saved_tensors))
