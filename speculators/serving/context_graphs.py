"""Context injection of block drafters as one CUDA graph a batch size, for vLLM before it captured that itself.

vLLM 0.26 captures a DFlash or DSpark drafter's block and launches the injection of its context (norms, projection, rotation, a cache
write a layer) kernel by kernel in every round; 0.32 has both in one graph. Where launching is what a round costs, that is about a
sixth of it: 2.5 instead of 3.0 ms for DFlash over SmolLM2 on an H200. `SPECULATORS_CONTEXT_GRAPHS=0` leaves vLLM as it is.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

VARIABLE = "SPECULATORS_CONTEXT_GRAPHS"
MOST_REQUESTS = 16  # larger batches keep the GPU busy while kernels are launched
DONE = "_speculators_context_graphs"

Slots = Tensor | Sequence[Tensor | None] | None
Inject = Callable[[Tensor, Tensor, Slots], None]
Record = Callable[[Callable[[], None]], Callable[[], None]]


class ContextGraphs:
    """Stands where a drafter's injection stood: replays it for the buffers it was recorded with, else runs it."""

    def __init__(self, inject: Inject, record: Record) -> None:
        """See `add`.

        Args:
            inject: called as inject(states [rows, hidden], positions [rows], slots [rows] or one a layer); writes to the cache.
            record: makes a call without arguments into one that repeats it on the same memory.
        """
        self._inject, self._record = inject, record
        self._recorded: dict[tuple[int, ...], Callable[[], None]] = {}

    def add(self, states: Tensor, positions: Tensor, slots: Slots) -> None:
        """Record the injection for these buffers. It runs, so their slots must say that nothing is written."""
        self._inject(states, positions, slots)  # first-time work of libraries must not be recorded
        self._recorded[_memory(states, positions, slots)] = self._record(lambda: self._inject(states, positions, slots))

    def __call__(self, states: Tensor, positions: Tensor, slots: Slots = None) -> None:
        """Inject."""
        replay = self._recorded.get(_memory(states, positions, slots))
        if replay is None:
            self._inject(states, positions, slots)
        else:
            replay()


def _memory(states: Tensor, positions: Tensor, slots: Slots) -> tuple[int, ...]:
    """Where the arguments lie and how many rows they have: what a graph is bound to."""
    every = [slots] if isinstance(slots, Tensor) else [one for one in slots or () if one is not None]
    return len(states), states.data_ptr(), positions.data_ptr(), *(one.data_ptr() for one in every)


def replay_context() -> None:
    """Let vLLM's block drafters record their injection when they capture their graphs, where vLLM does not itself."""
    if os.environ.get(VARIABLE) == "0":
        return
    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

    capture = DFlashSpeculator.capture
    if hasattr(DFlashSpeculator, "_precompute_context_kv") or hasattr(capture, DONE):
        return

    @functools.wraps(capture)
    def capture_both(self: Any) -> None:
        capture(self)
        injects = hasattr(self.model, "precompute_and_store_context_kv")  # a subclass may have another way
        if injects and self.query_cudagraph_manager.needs_capture():
            record_context(self, _graph_recorder())

    setattr(capture_both, DONE, True)
    DFlashSpeculator.capture = capture_both


@torch.inference_mode()
def record_context(speculator: Any, record: Record) -> None:
    """Record the injection of uniform decode rounds: K + 1 rows of each request.

    Args:
        speculator: vLLM's, whose buffers keep their places.
        record: see `ContextGraphs`.
    """
    from vllm.v1.attention.backends.utils import PAD_SLOT_ID

    graphs = ContextGraphs(speculator.model.precompute_and_store_context_kv, record)
    mappings, groups = speculator._context_slot_mappings, speculator._layer_group_idx
    mappings.fill_(PAD_SLOT_ID)
    width = speculator.num_speculative_steps + 1
    for requests in range(min(MOST_REQUESTS, speculator.max_num_reqs, speculator.max_num_tokens // width), 0, -1):
        rows = requests * width
        slots = mappings[0][:rows] if groups is None else [mappings[group][:rows] for group in groups]
        graphs.add(speculator.hidden_states[:rows], speculator.context_positions[:rows], slots)
    speculator.model.precompute_and_store_context_kv = graphs


def _graph_recorder() -> Record:
    """Records on the current GPU; all graphs share one pool of memory, since one is replayed at a time."""
    pool = torch.cuda.graph_pool_handle()

    def record(call: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            call()
        return graph.replay

    return record
