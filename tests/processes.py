"""Real processes for tests: forked from one server that has imported the library already, so that each costs milliseconds."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

TIMEOUT_SECONDS = 600  # for what would otherwise hang forever


def server() -> ForkServerContext:
    """The server; it starts with the first process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["speculators.training.trainer", "torch.distributed.fsdp", "tiny_models", "tiny_training"])
    return context


def start(target: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    """Start a process."""
    process = server().Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def together(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run a function in `size` processes that know each other as torchrun's do; their results by rank.

    Results are pickled, so they hold no tensors.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pipes = [server().Pipe(duplex=False) for _ in range(size)]
    processes = [start(_as_rank, rank, size, port, pipes[rank][1], function, arguments) for rank in range(size)]
    results = []
    try:
        for receiver, sender in pipes:
            sender.close()  # ours: now the pipe ends when the process does
            assert receiver.poll(TIMEOUT_SECONDS), "the processes wait for each other"
            results.append(receiver.recv())
    finally:
        for process in processes:
            process.kill()
            process.join()
    return results


def _as_rank(rank: int, size: int, port: int, result: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch

    torch.set_num_threads(1)
    result.send(function(*arguments))
