"""Softmax sums of rows that come tile by tile: the kernel and its definition against all logits at once, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from speculators.kernels.frozen_head import FrozenHead
from speculators.kernels.running_sums import RunningSums

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLEMENTATIONS = ["reference", "triton"]
VOCABULARY, COUNT = 37, 6

pytestmark = pytest.mark.usefixtures("garbage_in_new_memory")
HEADS = {"plain": {}, "scaled, capped, with a bias": {"scale": 0.5, "softcap": 150.0, "bias": True}}


def head_of(scale: float = 1.0, softcap: float | None = None, bias: bool = False) -> FrozenHead:
    """Its weight is not looked at: W h is given."""
    added = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(3)).to(DEVICE) if bias else None
    return FrozenHead(torch.empty(VOCABULARY, 1, device=DEVICE), added, scale, softcap)


def rows(spread: float) -> Tensor:
    """Some rows whose largest logit comes late, some whose largest comes first; `spread` between the tiles."""
    logits = torch.randn(COUNT, VOCABULARY, generator=torch.Generator().manual_seed(0))
    logits += torch.linspace(0, spread, VOCABULARY) * torch.tensor([1.0, -1.0] * (COUNT // 2))[:, None]
    return logits.to(DEVICE)


def exact(logits: Tensor, head: FrozenHead) -> tuple[Tensor, Tensor]:
    """z and dz/d(W h) in float64."""
    z = head.scale * logits.double() + (0.0 if head.bias is None else head.bias.double())
    slope = torch.full_like(z, head.scale)
    if head.softcap is not None:
        z = head.softcap * torch.tanh(z / head.softcap)
        slope = slope * (1 - (z / head.softcap) ** 2)
    return z, slope


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("with_labels", [False, True])
@pytest.mark.parametrize("width", [5, 16, 64])
@pytest.mark.parametrize("spread", [0.0, 60.0, 400.0])
@pytest.mark.parametrize("kind", HEADS)
def test_tiles_leave_the_sums_of_all_columns(kind: str, spread: float, width: int, with_labels: bool, implementation: Any) -> None:
    """And what is summed up beside them, as a gradient is, has shrunk along: sum_v exp(z_v - r) dz_v/d(W h) without the label."""
    head, logits = head_of(**HEADS[kind]), rows(spread)
    z, slope = exact(logits, head)
    labels = torch.tensor([0, 36, -1, 37, 20, 5], device=DEVICE) if with_labels else None
    running = RunningSums.of(COUNT, labels, logits.device)
    summed = torch.zeros(COUNT, 1, device=DEVICE)
    for start in range(0, VOCABULARY, width):
        tile = logits[:, start : start + width].clone()
        running.add(tile, start, head, summed, implementation=implementation)
        summed += tile.sum(dim=1, keepdim=True)
    kept = torch.ones_like(z, dtype=torch.bool)
    if labels is not None:
        known = (labels >= 0) & (labels < VOCABULARY)
        kept[known, labels[known]] = False
        torch.testing.assert_close(running.label_logits[known].double(), z[known, labels[known]], rtol=1e-5, atol=1e-5)
        assert not running.label_logits[~known].any()
    exponentials = torch.where(kept, (z - running.references.double()[:, None]).exp(), 0.0)
    torch.testing.assert_close(running.sums.double(), exponentials.sum(dim=1), rtol=1e-4, atol=0)
    torch.testing.assert_close(summed[:, 0].double(), (exponentials * slope).sum(dim=1), rtol=1e-4, atol=1e-30)
    assert torch.equal(running.choices, z.argmax(dim=1))
    torch.testing.assert_close(running.peaks.double(), z.max(dim=1).values, rtol=1e-5, atol=1e-5)
    above = running.peaks - running.references
    assert bool(((above >= 0) & (above <= 40.0)).all()) and bool(running.sums.isfinite().all())


def test_the_reference_of_a_row_moves_only_where_an_exponential_might_overflow() -> None:
    """Each move costs a pass over what is summed up."""
    running, logits = RunningSums.of(1, None, torch.device(DEVICE)), torch.linspace(0, 60, VOCABULARY)[None].to(DEVICE)
    references = []
    for start in range(0, VOCABULARY, 5):
        running.add(logits[:, start : start + 5].contiguous(), start, head_of())
        references.append(float(running.references))
    first = float(logits[0, 4])
    assert references[:5] == [first] * 5 and first + 40 < references[-1] <= 60.0
