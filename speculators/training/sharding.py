"""Rows of a tensor spread over the processes, as FSDP2 spreads them: consecutive shares of dimension 0, the last ones shorter or empty."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from speculators.training.world import World


@dataclass(frozen=True)
class Sharding:
    """Who holds which rows.

    Attributes:
        world: the processes; alone, one holds everything and nothing is communicated.
    """

    world: World = field(default_factory=World)

    def share(self, rows: int) -> slice:
        """The rows of this process out of `rows`."""
        chunk = -(-rows // self.world.size)
        start = min(self.world.rank * chunk, rows)
        return slice(start, min(start + chunk, rows))

    def take(self, full: Tensor) -> Tensor:
        """This process's rows of a full tensor. Scalars are everybody's."""
        return full if full.ndim == 0 else full[self.share(full.shape[0])]

    def gather(self, local: Tensor, rows: int, dim: int = 0) -> Tensor:
        """The full tensor, in every process, from everybody's rows.

        Args:
            local: this process's rows.
            rows: of the full tensor.
            dim: dimension that is spread.
        """
        if self.world.size == 1 or local.ndim == 0:
            return local
        chunk = -(-rows // self.world.size)
        first = local.movedim(dim, 0)
        padded = first.new_zeros((chunk, *first.shape[1:]))
        padded[: first.shape[0]] = first
        full = first.new_empty((self.world.size * chunk, *first.shape[1:]))
        dist.all_gather(list(full.split(chunk)), padded)
        return full[:rows].movedim(0, dim)


def is_spread(tensor: Tensor) -> bool:
    """Whether FSDP spread a tensor over the processes, so that it is a DTensor."""
    module: Any = sys.modules.get("torch.distributed.tensor")  # importing it takes a second, which only FSDP needs
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, sharing its memory; all of it where it is not spread."""
    plain: Any = tensor.detach()
    local: Tensor = plain.to_local() if is_spread(plain) else plain
    return local


def gathered(tensor: Tensor, sharding: Sharding) -> Tensor:
    """A parameter or buffer in full, in every process."""
    return sharding.gather(local_part(tensor), tensor.shape[0]) if is_spread(tensor) else tensor.detach()


def full_copy(tensor: Tensor) -> Tensor:
    """A CPU copy that shares no memory with anything: tied or sliced tensors share theirs, which safetensors refuses."""
    return tensor.detach().to("cpu", copy=True).contiguous()
