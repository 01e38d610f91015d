"""CUDA graphs: the same function bodies, called on the CPU and replayed on CUDA.

A training step of a small drafter is thousands of kernels of a few microseconds each, while launching one costs more
than that. Captured once, the whole step costs one launch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from speculators.capture import without_collection

WARMUP_CALLS = 3
_LARGE = 2e13  # FLOPs of a micro-batch, about 25 milliseconds of an H100 or H200


def is_large(trainable: int, tokens: int) -> bool:
    """Whether a micro-batch computes for so long that its launches hide behind it.

    A graph cannot leave out rows of the loss nor share a teacher row between them: a large step is faster without. A rough measure:
    tables count as if they multiplied, and every token as if all layers saw it.

    Args:
        trainable: parameters.
        tokens: of a micro-batch.
    """
    return 6.0 * trainable * tokens > _LARGE


class Capture:
    """Turns functions of static tensors into CUDA graph replays.

    A captured function takes and returns nothing, never synchronises with the host, and reads and writes tensors
    that outlive it: inputs are copied into them before a replay, results stay in them. What it draws from torch's
    default generator changes from replay to replay. All captures share one memory pool, which is safe because
    nothing allocated inside a function is read after it and replays never overlap.

    Args:
        device: where the tensors are.
        enabled: False calls the functions eagerly on CUDA too.
    """

    def __init__(self, device: torch.device, *, enabled: bool = True) -> None:
        self.enabled = enabled and device.type == "cuda"
        self._device = device
        self._stream = torch.cuda.Stream(device) if self.enabled else None
        self._graphs: list[torch.cuda.CUDAGraph] = []  # kept: a pool whose graphs are all gone cannot be captured into

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        """Warm a function up and capture it. It really runs a few times; the caller resets what those runs changed."""
        if not self.enabled or self._stream is None:
            return function
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        # Warm-up on the capturing stream: kernels compile and tune, lazy state is made, autograd's nodes are not yet recorded.
        with torch.cuda.stream(self._stream):
            for _ in range(WARMUP_CALLS):
                function()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        pool = self._graphs[0].pool() if self._graphs else None
        with without_collection(), torch.cuda.graph(graph, pool=pool, stream=self._stream):
            function()
        self._graphs.append(graph)
        return graph.replay


class Pace:
    """Keeps the host at most one step ahead of a CUDA device.

    Enough to never let the device idle; little enough that clock, signals and progress bar mean the step that is running.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events = [torch.cuda.Event() for _ in range(2)] if device.type == "cuda" else []
        self._next = 0

    def step(self) -> None:
        """Call after launching a step: waits for the step before it."""
        if self._events:
            self._events[self._next].record(torch.cuda.current_stream(self._device))
            self._next = 1 - self._next
            self._events[self._next].synchronize()  # never recorded: returns at once
