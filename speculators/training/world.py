"""The processes of a run, one a device. A run of one process is the same code without the communication.

`torchrun` starts the processes and tells each its rank through the environment. Numbers that decide what all of them do next
(a signal, the clock) are agreed on through the CPU, so that no process waits for its device to learn them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from speculators.errors import ConfigError


@dataclass(frozen=True)
class World:
    """The processes of this run.

    Attributes:
        rank: number of this process, 0 to size - 1. Rank 0 writes files and shows progress.
        size: how many there are.
    """

    rank: int = 0
    size: int = 1

    @classmethod
    def current(cls) -> World:
        """The processes that torch.distributed knows of, else this one alone."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls()

    @property
    def is_main(self) -> bool:
        """Whether this process writes the run's files."""
        return self.rank == 0

    def sum_(self, tensor: Tensor) -> Tensor:
        """Replace a tensor by its sum over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def largest(self, *values: float) -> tuple[float, ...]:
        """The largest of each value over all processes; the same everywhere."""
        if self.size == 1:
            return values
        shared = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return tuple(shared.tolist())

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """Give every process the tensors of rank 0, in place."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    def wait(self) -> None:
        """Return once every process has come here."""
        self.largest(0.0)


def local_device() -> torch.device | None:
    """The CUDA device of this process under torchrun; None for the default one."""
    rank = os.environ.get("LOCAL_RANK")
    if rank is None or not torch.cuda.is_available():
        return None
    if int(rank) >= torch.cuda.device_count():
        raise ConfigError(
            f"process {rank} of this machine has no GPU: there are {torch.cuda.device_count()}; start at most so many with --nproc-per-node"
        )
    return torch.device("cuda", int(rank))


@contextmanager
def process_group() -> Iterator[World]:
    """Join the processes that torchrun started, for as long as the block lasts. Without torchrun there is nothing to join."""
    started = not dist.is_initialized() and "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1
    if started:
        device = local_device()
        if device is not None:
            torch.cuda.set_device(device)
        dist.init_process_group("gloo" if device is None else "cpu:gloo,cuda:nccl")
    try:
        yield World.current()
    finally:
        if started:
            dist.destroy_process_group()
