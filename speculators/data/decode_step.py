"""One decode step of many slots for data generation: embedding, model, head and sampling, on CUDA as one graph.

The host never waits for a step before it launches the next: the drawn tokens stay on the device, where they are the
next step's inputs unless the host forces others. `Plan` is everything the host sends, a few integers a slot.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from speculators.verifier import Verifier

# Cached positions that attention reads are rounded up to a multiple: one CUDA graph for each multiple.
_GRAPH_LENGTH_MULTIPLE = 128
_EAGER_LENGTH_MULTIPLE = 32


def draw_tokens(logits: Tensor, temperature: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    """Draw one token a row by inverting the cumulative distribution, or take the most likely one.

    Min-p keeps the tokens whose probability is at least `min_p` times the largest one. It needs no sort, unlike top-p.

    Args:
        logits: [rows, vocabulary], any float dtype; computed with in float32.
        temperature: [rows] float32; 0 takes the argmax.
        min_p: [rows] float32 in [0, 1]; 0 keeps every token.
        uniform: [rows] float32 in [0, 1), one number a row.

    Returns:
        [rows] int64.
    """
    scores = logits.float()
    largest, greedy = scores.max(dim=-1)
    # Relative to the largest probability, so that min-p is a plain comparison.
    weights = scores.sub_(largest[:, None]).div_((temperature + (temperature == 0))[:, None]).exp_()
    weights.mul_(weights >= min_p[:, None])
    cumulative = weights.cumsum(dim=-1)
    # With u <= 1 - 2^-23, u * total stays below total after rounding: the draw lands on a token of positive weight.
    target = uniform.clamp_max(1 - 2.0**-23) * cumulative[:, -1]
    drawn = torch.searchsorted(cumulative, target[:, None], right=True).squeeze(1)
    return torch.where(temperature > 0, drawn, greedy)


class Plan:
    """What the host decides for one step. Arrays of [slots], all views of `packed` [5, slots] int32.

    Attributes:
        forced: the token to feed, or -1 for the one drawn in the step before.
        position: where the token goes in the slot's sequence.
        temperature, min_p, uniform: float32, see `draw_tokens`.
    """

    def __init__(self, packed: NDArray[np.int32]) -> None:
        self.forced: NDArray[np.int32] = packed[0]
        self.position: NDArray[np.int32] = packed[1]
        self.temperature: NDArray[np.float32] = packed[2].view(np.float32)
        self.min_p: NDArray[np.float32] = packed[3].view(np.float32)
        self.uniform: NDArray[np.float32] = packed[4].view(np.float32)


@dataclass(frozen=True)
class RunningStep:
    """A launched step.

    Attributes:
        position: [slots] int64, where each slot's fed token went; -1 where the result is no longer wanted.
    """

    position: NDArray[np.int64]
    _tokens: Tensor
    _done: Any

    def tokens(self) -> NDArray[np.int64]:
        """[slots]: the drawn tokens; waits for the step to end."""
        if self._done is not None:
            self._done.synchronize()
        return self._tokens.numpy()


class DecodeStep:
    """The device side of generation: a cache for all slots and one step over it."""

    def __init__(self, verifier: Verifier, slots: int, max_length: int, cuda_graphs: bool = True) -> None:
        """Allocate the cache and, on CUDA, capture the step once for each multiple of the attention length.

        Args:
            verifier: the model; its dtype is the computation's.
            slots: sequences decoded at once.
            max_length: positions a slot.
            cuda_graphs: capture on CUDA. A model that cannot be captured runs without, with a warning.
        """
        device = verifier.device
        on_cuda = device.type == "cuda"
        self._verifier = verifier
        self._cache = verifier.new_cache(slots, max_length)
        self._max_length = max_length
        self._plan = torch.zeros(5, slots, dtype=torch.int32, device=device)
        self._tokens = torch.zeros(slots, dtype=torch.int64, device=device)
        # Two of each on the host, since the next step is planned while this one is still running.
        self._host_plans = [torch.zeros(5, slots, dtype=torch.int32, pin_memory=on_cuda) for _ in range(2)]
        self._host_tokens = [torch.zeros(slots, dtype=torch.int64, pin_memory=on_cuda) for _ in range(2)]
        self._launched = 0
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._length_multiple = _GRAPH_LENGTH_MULTIPLE if on_cuda and cuda_graphs else _EAGER_LENGTH_MULTIPLE
        self._on_device = torch.cuda.device(device) if on_cuda else nullcontext()
        if on_cuda and cuda_graphs:
            with self._on_device:
                self._capture_all()

    def next_plan(self) -> Plan:
        """The plan to fill in before `launch`."""
        return Plan(self._host_plans[self._launched % 2].numpy())

    @torch.inference_mode()
    def launch(self) -> RunningStep:
        """Start the step that the latest `next_plan` describes. At most one earlier step may still be running."""
        host_plan, host_tokens = self._host_plans[self._launched % 2], self._host_tokens[self._launched % 2]
        position = host_plan[1].to(torch.int64).numpy()
        length = self._attention_length(int(position.max()) + 1)
        done = None
        with self._on_device:
            self._plan.copy_(host_plan, non_blocking=True)
            if length in self._graphs:
                self._graphs[length].replay()
            else:
                self._decode(length)
            host_tokens.copy_(self._tokens, non_blocking=True)
            if self._tokens.is_cuda:
                done = torch.cuda.Event()
                done.record()
        self._launched += 1
        return RunningStep(position, host_tokens, done)

    def _attention_length(self, needed: int) -> int:
        return min(self._max_length, -(-needed // self._length_multiple) * self._length_multiple)

    def _decode(self, length: int) -> None:
        forced, position = self._plan[0], self._plan[1]
        temperature, min_p, uniform = self._plan[2:].view(torch.float32)
        self._cache.lengths.copy_(position)
        input_ids = torch.where(forced >= 0, forced.to(torch.int64), self._tokens)
        output = self._verifier.forward(input_ids[:, None], self._cache, static_length=length)
        logits = self._verifier.logits(output.last_hidden_state[:, -1])
        self._tokens.copy_(draw_tokens(logits, temperature, min_p, uniform))

    @torch.inference_mode()
    def _capture_all(self) -> None:
        """Longest first: it needs the most memory, and the shorter ones then fit into the same pool.

        Sharing a pool is safe: graphs never run at the same time, and all that outlives a replay (the plan, the
        tokens, the cache) was allocated outside of it.
        """
        pool = torch.cuda.graph_pool_handle()
        graphs: dict[int, torch.cuda.CUDAGraph] = {}
        stream = torch.cuda.Stream()
        for length in sorted({self._attention_length(needed) for needed in range(1, self._max_length + 1)}, reverse=True):
            # The first runs allocate the cache and choose kernels, which a capture must not do.
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    self._decode(length)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=pool):
                    self._decode(length)
            except RuntimeError as error:
                reason = str(error).strip().split("\n")[0]
                warnings.warn(
                    f"the decode step runs eagerly, many times slower, since no CUDA graph could be captured: {reason}", stacklevel=4
                )
                return
            graphs[length] = graph
        self._graphs = graphs
        self._tokens.zero_()
