"""Cross-entropy in one sweep over the vocabulary: against a float64 definition, closed forms, and where exponentials run out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from speculators.kernels import linear_cross_entropy as module
from speculators.kernels.frozen_head import FrozenHead
from speculators.kernels.linear_cross_entropy import linear_cross_entropy, sweep_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLEMENTATIONS = ["reference", "triton"]

pytestmark = pytest.mark.usefixtures("garbage_in_new_memory")
HEADS = {"plain": {}, "scaled, capped, with a bias": {"scale": 0.5, "softcap": 3.0, "bias": True}}


@pytest.fixture(params=[8, 64], ids=["narrow tiles", "wide tiles"])
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Columns of a tile: several tiles at a test's size, the last one cut."""
    monkeypatch.setattr(module, "TILE", request.param)
    return int(request.param)


def random_head(
    vocabulary: int, hidden_size: int, dtype: torch.dtype, scale: float = 1.0, softcap: float | None = None, bias: bool = False
) -> FrozenHead:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(vocabulary, hidden_size, generator=generator).to(DEVICE, dtype)
    return FrozenHead(weight, torch.randn(vocabulary, generator=generator).to(DEVICE, dtype) if bias else None, scale, softcap)


def random_rows(count: int, hidden_size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, hidden_size, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)


def constant(weights: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda _: weights


def exact(hidden: Tensor, head: FrozenHead, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy, matches and gradient in float64, from probabilities and by hand."""
    h, weight = hidden.double(), head.weight.double()
    capped = head.scale * h @ weight.T + (0.0 if head.bias is None else head.bias.double())
    slope = torch.full_like(capped, head.scale)
    if head.softcap is not None:
        capped = head.softcap * torch.tanh(capped / head.softcap)
        slope = slope * (1 - (capped / head.softcap) ** 2)
    p = torch.softmax(capped, dim=1)
    known = (labels >= 0) & (labels < len(weight))
    columns = torch.where(known, labels, 0)
    one_hot = torch.zeros_like(p).scatter(1, columns[:, None], 1.0)
    cross_entropy = torch.where(known, -torch.log_softmax(capped, dim=1).gather(1, columns[:, None])[:, 0], 0.0)
    gradient = torch.where(known, weights.double(), 0.0)[:, None] * (((p - one_hot) * slope) @ weight)
    return cross_entropy, (p.argmax(1) == labels) & known, gradient


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("listed", [False, True], ids=["a range", "listed"])
@pytest.mark.parametrize("vocabulary", [1, 37, 129])
def test_it_equals_the_definition(vocabulary: int, listed: bool, kind: str, implementation: Any, tile: int) -> None:
    """Labels in every tile, none, and beyond the columns; weights of zero; other places of the gradient stay as they are."""
    head, hidden = random_head(vocabulary, 10, torch.float32, **HEADS[kind]), random_rows(9, 10, torch.float32)
    labels = torch.tensor([0, vocabulary - 1, -1, vocabulary, *(vocabulary * i // 5 for i in range(5))], device=DEVICE)
    weights = torch.linspace(0.0, 2.0, 9, device=DEVICE)
    labels[5] = head.logits(hidden).argmax(1)[5]
    rows: Tensor | slice = torch.randperm(12, generator=torch.Generator().manual_seed(0))[:9].to(DEVICE) if listed else slice(2, 11)
    target = torch.full((12, 10), 7.0, device=DEVICE)
    cross_entropy, matches = linear_cross_entropy(
        hidden, head, labels, rows, weigh=constant(weights), gradient=target, implementation=implementation
    )
    expected, expected_matches, gradient = exact(hidden, head, labels, weights)
    torch.testing.assert_close(cross_entropy.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(matches, expected_matches) and bool(matches[5])
    torch.testing.assert_close(target[rows].double(), gradient, rtol=1e-4, atol=1e-5)
    untouched = torch.ones(12, dtype=torch.bool, device=DEVICE)
    untouched[rows] = False
    assert bool((target[untouched] == 7.0).all())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_without_weights_there_is_no_gradient_and_the_same_value(implementation: Any, tile: int) -> None:
    head, hidden = random_head(37, 10, torch.float32), random_rows(4, 10, torch.float32)
    labels = torch.tensor([0, 8, 36, 20], device=DEVICE)
    cross_entropy, matches = linear_cross_entropy(hidden, head, labels, slice(0, 4), implementation=implementation)
    expected, expected_matches, _ = exact(hidden, head, labels, torch.ones(4, device=DEVICE))
    torch.testing.assert_close(cross_entropy.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(matches, expected_matches)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_weights_may_follow_from_the_cross_entropy(implementation: Any) -> None:
    """As D-PACE's do, which are those of the label's own probability."""
    head, hidden = random_head(37, 10, torch.float32), random_rows(4, 10, torch.float32)
    labels, target = torch.tensor([0, 8, 36, 20], device=DEVICE), torch.empty(4, 10, device=DEVICE)
    linear_cross_entropy(
        hidden, head, labels, slice(0, 4), weigh=lambda values: (-values).exp(), gradient=target, implementation=implementation
    )
    values = exact(hidden, head, labels, torch.ones(4, device=DEVICE))[0]
    torch.testing.assert_close(target.double(), exact(hidden, head, labels, (-values).exp())[2], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("order", ["rising", "falling", "one peak"])
@pytest.mark.parametrize("spread", [1.0, 30.0, 300.0, 3000.0])
def test_logits_far_apart_neither_overflow_nor_vanish(spread: float, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits from 0 to `spread`: the largest in the last tile, in the first, or alone in the middle, with exp(spread) between."""
    monkeypatch.setattr(module, "TILE", 8)
    logits = {
        "rising": torch.linspace(0, spread, 37),
        "falling": torch.linspace(spread, 0, 37),
        "one peak": torch.where(torch.arange(37) == 18, spread, 0.0),
    }[order].repeat(37, 1)
    hidden, head = logits.to(DEVICE), FrozenHead(torch.eye(37, device=DEVICE), None, 1.0, None)
    labels, weights = torch.arange(37, device=DEVICE), torch.ones(37, device=DEVICE)
    target = torch.empty(37, 37, device=DEVICE)
    cross_entropy, matches = linear_cross_entropy(
        hidden, head, labels, slice(0, 37), weigh=constant(weights), gradient=target, implementation="triton"
    )
    expected, expected_matches, gradient = exact(hidden, head, labels, weights)
    torch.testing.assert_close(cross_entropy.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(matches, expected_matches)
    torch.testing.assert_close(target.double(), gradient, rtol=1e-4, atol=1e-6)


def test_a_nearly_certain_label_keeps_the_digits_of_its_gradient(tile: int) -> None:
    """p_y = 1 - 4e-8: subtracted from 1 in float32 nothing sensible would be left; the other columns' sum says it to six digits."""
    hidden = torch.zeros(1, 37, device=DEVICE)
    hidden[0, 18] = 20.6
    head, target = FrozenHead(torch.eye(37, device=DEVICE), None, 1.0, None), torch.empty(1, 37, device=DEVICE)
    labels, weights = torch.tensor([18], device=DEVICE), torch.ones(1, device=DEVICE)
    cross_entropy, _ = linear_cross_entropy(
        hidden, head, labels, slice(0, 1), weigh=constant(weights), gradient=target, implementation="triton"
    )
    expected, _, gradient = exact(hidden, head, labels, weights)
    torch.testing.assert_close(cross_entropy.double(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(target.double(), gradient, rtol=1e-5, atol=0)


def test_half_precision_holds_what_exceeds_the_first_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits that rise by 30: their exponentials over the first tile's would be infinite in float16, whose largest number is exp(11)."""
    monkeypatch.setattr(module, "TILE", 8)
    hidden, head = torch.linspace(0, 30, 37)[None].to(DEVICE, torch.float16), torch.eye(37, device=DEVICE, dtype=torch.float16)
    labels, target = torch.tensor([36], device=DEVICE), torch.empty(1, 37, device=DEVICE, dtype=torch.float16)
    ones = torch.ones(1, device=DEVICE)
    linear_cross_entropy(
        hidden, FrozenHead(head, None, 1.0, None), labels, slice(0, 1), weigh=constant(ones), gradient=target, implementation="triton"
    )
    gradient = exact(hidden, FrozenHead(head, None, 1.0, None), labels, ones)[2]
    torch.testing.assert_close(target.double(), gradient, rtol=4e-3, atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_states_wider_than_a_step_of_the_kernel(implementation: Any, tile: int) -> None:
    head, hidden = random_head(37, 2100, torch.float32), random_rows(2, 2100, torch.float32) / 8
    labels, weights, target = torch.tensor([3, 30], device=DEVICE), torch.ones(2, device=DEVICE), torch.empty(2, 2100, device=DEVICE)
    linear_cross_entropy(hidden, head, labels, slice(0, 2), weigh=constant(weights), gradient=target, implementation=implementation)
    torch.testing.assert_close(target.double(), exact(hidden, head, labels, weights)[2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_cost_the_gradient_what_rounding_costs(dtype: torch.dtype, tile: int) -> None:
    """Beside the exact values of the same rounded inputs: half a unit in the last place of every logit and exponential."""
    head, hidden = random_head(129, 24, dtype), random_rows(6, 24, dtype)
    labels, weights = torch.arange(6, device=DEVICE) * 21, torch.linspace(0.5, 2.0, 6, device=DEVICE)
    target = torch.empty(6, 24, device=DEVICE, dtype=dtype)
    cross_entropy, _ = linear_cross_entropy(
        hidden, head, labels, slice(0, 6), weigh=constant(weights), gradient=target, implementation="triton"
    )
    expected, _, gradient = exact(hidden, head, labels, weights)
    unit = torch.finfo(dtype).eps
    largest = float((hidden.double() @ head.weight.double().T).abs().max())
    torch.testing.assert_close(cross_entropy.double(), expected, rtol=0, atol=unit * largest)
    assert float((target.double() - gradient).abs().max()) <= 2 * unit * largest * float(gradient.abs().max())


def test_what_is_not_finite_shows_in_its_own_row_alone(tile: int) -> None:
    head, hidden = random_head(37, 10, torch.float32), random_rows(3, 10, torch.float32)
    hidden[1, 4] = float("nan")
    labels, target = torch.tensor([3, 30, 5], device=DEVICE), torch.empty(3, 10, device=DEVICE)
    values, _ = linear_cross_entropy(
        hidden, head, labels, slice(0, 3), weigh=constant(torch.ones(3, device=DEVICE)), gradient=target, implementation="triton"
    )
    assert values.isfinite().tolist() == [True, False, True]
    assert target.isfinite().all(dim=1).tolist() == [True, False, True]


@pytest.mark.parametrize("mask", [float("-inf"), -1e10, -1e20, -1e30])
def test_masked_columns_are_never_proposed(mask: float, tile: int) -> None:
    """A head's bias masks ids: a whole first tile of them, and single ones."""
    bias = torch.zeros(37, device=DEVICE)
    bias[:9] = bias[20] = mask
    weight = random_head(37, 10, torch.float32).weight
    head, hidden = FrozenHead(weight, bias, 1.0, None), random_rows(3, 10, torch.float32)
    kept = (bias == 0).nonzero()[:, 0]
    labels, weights = torch.tensor([9, 21, 36], device=DEVICE), torch.ones(3, device=DEVICE)
    target = torch.empty(3, 10, device=DEVICE)
    values, _ = linear_cross_entropy(hidden, head, labels, slice(0, 3), weigh=constant(weights), gradient=target, implementation="triton")
    places = torch.searchsorted(kept, labels)
    expected, _, gradient = exact(hidden, FrozenHead(weight[kept], None, 1.0, None), places, weights)
    torch.testing.assert_close(values.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(target.double(), gradient, rtol=1e-4, atol=1e-5)


def test_the_rows_of_a_sweep_fit_their_room() -> None:
    def rows(vocabulary: int, hidden_size: int) -> int:
        weight = torch.empty(1, 1, dtype=torch.bfloat16).expand(vocabulary, hidden_size)
        return sweep_rows(FrozenHead(weight, None, 1.0, None))

    assert rows(151_936, 4096) == 2048
    assert rows(2_000_000, 40_000_000) == 1
    for vocabulary, hidden_size in ((151_936, 4096), (49_152, 576), (300, 16), (128_256, 16_384)):
        assert 1 <= rows(vocabulary, hidden_size) <= (72 << 20) // (4 * hidden_size + 2 * min(8192, vocabulary))
