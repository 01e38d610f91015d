"""Rounds as CUDA graphs: one launch and one host synchronisation a round instead of thousands of launches.

A round reads the batch's tensors and assigns new ones to the same attributes. Replayed, it must find its inputs where they lay
when it was captured and leave its results there. `StaticState` does that for any round: it keeps a buffer for every tensor that
rounds reassign, in the batch, its cache and the drafter's state, and moves new values into the buffers at a round's end.

Graphs are captured when a shape first occurs: the number of drafts, the cached positions that attention reads (rounded up) and
whatever shapes the draft state has. Each shape runs once eagerly before that.
"""

from __future__ import annotations

import gc
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from speculators.capture import without_collection

__all__ = ["GraphedRounds", "StaticState", "reusable"]

Result = TypeVar("Result")
Placement = list[tuple[Any, str, Any]]  # object, attribute, value
Settled = tuple[Hashable, Placement]

# Cached positions that attention reads are rounded up to a multiple: one graph for each multiple that is reached.
LENGTH_MULTIPLE = 512
# Graphs of one batch. Each keeps the activations of a round, in a pool that all of them share.
MAX_GRAPHS = 40
# Batches whose buffers and graphs wait for the next call with the same shapes: so many, and while so much of the device is free.
MAX_BATCHES = 4
FREE_SHARE = 0.5


class StaticState:
    """The tensors that rounds reassign, each moved back to a buffer of its own.

    Args:
        holders: objects whose attributes are followed, with the names of these attributes; a dataclass among the values (a draft
            state, an observation) is followed into its own fields.
    """

    def __init__(self, holders: list[tuple[Any, tuple[str, ...]]]) -> None:
        self._slots: list[tuple[Any, str]] = []
        for holder, names in holders:
            for name in names:
                self._follow(holder, name)
        # Buffers by slot and shapes: an attribute may hold an observation of one shape now and of another one later.
        self._buffers: dict[Hashable, Any] = {}
        self._settled: Settled | None = None
        self._initial = [(holder, name, getattr(holder, name)) for holder, name in self._slots]
        self._initial_values = [
            [None if t.is_floating_point() else t.clone() for t in _tensors(getattr(holder, name))] for holder, name in self._slots
        ]

    def _follow(self, holder: Any, name: str) -> None:
        self._slots.append((holder, name))
        value = getattr(holder, name)
        if _followed(value):
            for part in fields(value):
                self._follow(value, part.name)

    def reset(self) -> None:
        """Give every attribute the value it had at first. Floating point buffers (keys and values) keep theirs: lengths hide them."""
        for (holder, name, value), initial in zip(self._initial, self._initial_values, strict=True):
            if _followed(value):
                continue
            for tensor, first in zip(_tensors(value), initial, strict=True):
                if first is not None:
                    tensor.copy_(first)
            setattr(holder, name, value)
        self._settled = None

    def settle(self) -> Settled:
        """Move all values into their buffers and put these in place.

        Returns:
            The shapes, by which graphs are told apart, and the placement, for `place`.
        """
        shapes: list[Hashable] = []
        moves: list[tuple[Tensor, Tensor]] = []
        placement: Placement = []
        for index, (holder, name) in enumerate(self._slots):
            value = getattr(holder, name)
            if _followed(value):
                continue  # its fields are slots of their own
            shape = tuple((t.shape, t.dtype) for t in _tensors(value))
            shapes.append(shape)
            if not shape:
                placement += [(holder, name, None)] if value is None else []
                continue
            buffer = self._buffers.get((index, shape))
            if buffer is None:
                # A value of before the first round is its own buffer: it is never assigned to anything else.
                buffer = value if value is self._initial[index][2] else _clone(value)
                self._buffers[index, shape] = buffer
            moves += [(target, source) for target, source in zip(_tensors(buffer), _tensors(value), strict=True) if target is not source]
            placement.append((holder, name, buffer))
        # A new value may itself be another slot's buffer (an observation keeps the lengths it started from): read all, then write.
        targets = {target.data_ptr() for target, _ in moves}
        values = [source.clone() if source.data_ptr() in targets else source for _, source in moves]
        for (target, _), source in zip(moves, values, strict=True):
            target.copy_(source)
        self.place(placement)
        self._settled = tuple(shapes), placement
        return self._settled

    def settled(self) -> Settled:
        """`settle`, which costs as much host time as a short round, unless all values still are where it last left them."""
        if self._settled is None or any(getattr(holder, name) is not value for holder, name, value in self._settled[1]):
            return self.settle()
        return self._settled

    def replayed(self, after: Settled) -> None:
        """Put buffers in place, as the Python code of a replayed round would have."""
        self._settled = after
        self.place(after[1])

    @staticmethod
    def place(placement: Placement) -> None:
        """Put buffers in place."""
        for holder, name, buffer in placement:
            setattr(holder, name, buffer)


class GraphedRounds:
    """Runs rounds over static buffers, on CUDA as graphs.

    Args:
        state: of the batch that `run` advances.
        run: one round, given the number of cached positions that attention reads; free of host synchronisation.
        max_length: positions of the cache.
        capture: whether to capture; without it every round runs eagerly over the same buffers, which any device can do.
    """

    def __init__(self, state: StaticState, run: Callable[[int], Result], max_length: int, *, capture: bool) -> None:
        self._state, self._run, self._max_length, self._capture = state, run, max_length, capture
        self._graphs: OrderedDict[Hashable, tuple[torch.cuda.CUDAGraph, Any, Settled]] = OrderedDict()
        self._seen: set[Hashable] = set()
        self._pool: Any = None

    def static_length(self, longest: int) -> int:
        """Cached positions that attention reads where the longest row, its new tokens included, has `longest`."""
        return min(self._max_length, -(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE)

    def round(self, key: Hashable, longest: int) -> Any:
        """One round. Its result is overwritten by the next one of the same shapes.

        Args:
            key: whatever else the round's shapes depend on: the number of drafts.
            longest: a bound, known to the host, of a row's positions at the end of the round.
        """
        length = self.static_length(longest)
        before, _ = self._state.settled()
        shapes = (key, length, before)
        if shapes not in self._graphs and self._capture and shapes in self._seen:
            self._try_to_capture(shapes, length)
        if shapes in self._graphs:
            graph, result, after = self._graphs[shapes]
            self._graphs.move_to_end(shapes)
            graph.replay()
            self._state.replayed(after)
            return result
        self._seen.add(shapes)  # running it once loads kernels and grows workspaces, which a capture must not do
        result = self._run(length)
        self._state.settle()
        return result

    def _try_to_capture(self, shapes: Hashable, length: int) -> None:
        """Capture a round; nothing is computed yet. A round that cannot be captured goes on running eagerly, with a warning."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        while len(self._graphs) >= MAX_GRAPHS:
            self._graphs.popitem(last=False)
        graph = torch.cuda.CUDAGraph()
        before = self._state.settled()
        try:
            with without_collection(), torch.cuda.graph(graph, pool=self._pool):
                result = self._run(length)
                after = self._state.settle()
            self._graphs[shapes] = graph, result, after
        except RuntimeError as error:
            reason = str(error).strip().split("\n")[0]
            warnings.warn(f"rounds run eagerly, many times slower, since no CUDA graph could be captured: {reason}", stacklevel=4)
            self._capture = False
        self._state.replayed(before)


def reusable(cache: OrderedDict[Hashable, Any], key: Hashable, make: Callable[[], Result], device: torch.device) -> Result:
    """What the cache holds under a key, made where it holds nothing.

    The least recently used entries leave beyond `MAX_BATCHES`, and earlier where the device has less than `FREE_SHARE` of its
    memory free for the new one.
    """
    if key not in cache:
        while cache and (len(cache) >= MAX_BATCHES or _free_share(device) < FREE_SHARE):
            cache.popitem(last=False)
            gc.collect()  # a batch and its graphs refer to one another, and hold the memory until they are found
        cache[key] = make()
    cache.move_to_end(key)
    made: Result = cache[key]
    return made


def _free_share(device: torch.device) -> float:
    """Of a device's memory, what this process could still take; 1 for the CPU."""
    if device.type != "cuda":
        return 1.0
    free, total = torch.cuda.mem_get_info(device)
    return (free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)) / total


def _followed(value: Any) -> bool:
    """Whether a value is an object whose own attributes are reassigned."""
    return is_dataclass(value) and not isinstance(value, type) and not type(value).__dataclass_params__.frozen  # type: ignore[attr-defined]


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of a value: itself, or those in a frozen dataclass, list or tuple."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        for part in fields(value):
            yield from _tensors(getattr(value, part.name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _clone(value: Any) -> Any:
    """A copy of a value with tensors of its own."""
    if isinstance(value, Tensor):
        return value.clone()
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{part.name: _clone(getattr(value, part.name)) for part in fields(value) if part.init})
    if isinstance(value, list | tuple):
        return type(value)(_clone(item) for item in value)
    return value
