"""Worker processes: a bounded amount of work in flight, results in order, and none outlives the process that began it."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from speculators.errors import DataError

T = TypeVar("T")
R = TypeVar("R")


def available_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def map_in_order(function: Callable[[T], R], items: Iterable[T], workers: int) -> Iterator[R]:
    """`map(function, items)` over worker processes.

    Every worker holds one item at a time and `items` is read no further than that, so memory does not grow with their
    number. Worker k gets items k, k + workers, ...: results come in the items' order whatever each takes.

    Args:
        function: picklable; sent to every worker once.
        items: picklable.
        workers: processes; 0 calls the function in this one.

    Raises:
        DataError: a worker ended before its work did.
    """
    if workers < 1:
        yield from map(function, items)
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy locks that other threads hold
    pipes: list[Connection] = []
    processes: list[Any] = []
    busy: list[bool] = [False] * workers
    try:
        for _ in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            ours.send(function)
            pipes.append(ours)
            processes.append(process)
        turn = 0
        for item in items:
            if busy[turn]:
                yield _receive(pipes[turn], processes[turn])
            _send(pipes[turn], item)
            busy[turn] = True
            turn = (turn + 1) % workers
        for number in (*range(turn, workers), *range(turn)):
            if busy[number]:
                yield _receive(pipes[number], processes[number])
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


def _send(pipe: Connection, item: Any) -> None:
    try:
        pipe.send(item)
    except (BrokenPipeError, ConnectionResetError):
        raise _died() from None


def _receive(pipe: Connection, process: Any) -> Any:
    try:
        result, error = pipe.recv()
    except (EOFError, ConnectionResetError):
        process.join(1)
        raise _died(process.exitcode) from None
    if error is not None:
        raise error
    return result


def _died(exit_code: int | None = None) -> DataError:
    return DataError(f"a worker process ended early (exit code {exit_code}); it may have run out of memory: lower the number of workers")


def _work(pipe: Connection) -> None:
    """A worker's life: receive the function, then items, until the pipe closes or the parent is gone."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        function = pipe.recv()
        while True:
            item = pipe.recv()
            result: Any = None
            failure: Exception | None = None
            try:
                result = function(item)
            except Exception as error:
                failure = error
            pipe.send((result, failure))
    except (EOFError, BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        return


def _end_with_parent() -> None:
    """A parent that is killed closes nothing in order; its sentinel tells of its end all the same."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
