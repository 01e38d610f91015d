"""The injection of a block drafter's context is recorded for the buffers of a decode round, and only there replayed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from speculators.serving.context_graphs import ContextGraphs


class Recorder:
    """A CUDA graph's behaviour: what is recorded runs at once, and again, on the same memory, when it is replayed."""

    def __init__(self) -> None:
        self.replays = 0

    def __call__(self, call: Callable[[], None]) -> Callable[[], None]:
        call()

        def replay() -> None:
            self.replays += 1
            call()

        return replay


def stored(cache: Tensor) -> Callable[[Tensor, Tensor, Any], None]:
    """An injection: each row's state and position, into every slot that is not padding."""

    def inject(states: Tensor, positions: Tensor, slots: Any) -> None:
        if slots is None:
            return
        for layer, mapping in enumerate(slots):
            kept = mapping >= 0
            cache[layer, mapping[kept]] = states[kept] * positions[kept, None]

    return inject


def buffers() -> SimpleNamespace:
    return SimpleNamespace(
        states=torch.ones(12, 2), positions=torch.zeros(12), slots=torch.full((2, 12), -1), cache=torch.zeros(2, 20, 2), record=Recorder()
    )


def rows(at: SimpleNamespace, count: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    return at.states[:count], at.positions[:count], [at.slots[layer][:count] for layer in range(2)]


def test_a_decode_round_replays_what_its_buffers_hold_by_then() -> None:
    at = buffers()
    graphs = ContextGraphs(stored(at.cache), at.record)
    graphs.add(*rows(at, 8))
    assert not at.cache.any(), "recording must write nothing"
    at.positions[:] = torch.arange(12) + 1.0
    at.slots[0, :8], at.slots[1, :8] = torch.arange(8), torch.arange(8) + 10
    at.slots[:, 5] = -1
    graphs(*rows(at, 8))
    expected = torch.arange(8) + 1.0
    expected[5] = 0
    assert at.record.replays == 1
    assert torch.equal(at.cache[0, :8, 0], expected) and torch.equal(at.cache[1, 10:18, 1], expected)


def test_other_numbers_of_rows_other_memory_and_dummy_runs_are_not_replayed() -> None:
    at = buffers()
    graphs = ContextGraphs(stored(at.cache), at.record)
    graphs.add(*rows(at, 8))
    at.positions.fill_(3.0)
    at.slots[:] = torch.arange(12)
    graphs(*rows(at, 11))  # a prompt
    assert at.cache[:, :11].eq(3.0).all() and not at.cache[:, 11:].any()
    elsewhere = buffers()
    elsewhere.positions.fill_(2.0)
    elsewhere.slots[:] = torch.arange(12)
    graphs(*rows(elsewhere, 8))
    assert at.cache[:, :8].eq(2.0).all()
    graphs(at.states[:8], at.positions[:8])  # without slots
    assert at.cache[:, :8].eq(2.0).all() and at.record.replays == 0
