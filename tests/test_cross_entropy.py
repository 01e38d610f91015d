"""Log-sums and cross-entropy of rows of logits: the kernels against their definitions, and these against closed forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from speculators.kernels.cross_entropy import cross_entropy_
from speculators.kernels.frozen_head import FrozenHead
from speculators.kernels.log_sums import log_sums

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLEMENTATIONS = ["reference", "triton"]

pytestmark = pytest.mark.usefixtures("garbage_in_new_memory")
HEADS = {
    "plain": {},
    "scaled, capped, with a bias": {"scale": 0.5, "softcap": 3.0, "bias": True},
}


def head_of(size: int, scale: float = 1.0, softcap: float | None = None, bias: bool = False) -> FrozenHead:
    """Its weight is not looked at: rows of W h are given."""
    generator = torch.Generator().manual_seed(3)
    added = torch.randn(size, generator=generator).to(DEVICE) if bias else None
    return FrozenHead(torch.empty(size, 1, device=DEVICE), added, scale, softcap)


def rows_of(count: int, size: int, seed: int = 0) -> Tensor:
    return 4.0 * torch.randn(count, size, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_of_equal_logits_the_sum_is_the_log_of_their_number_and_the_first_is_chosen(implementation: Any) -> None:
    product = torch.full((2, 777), 1.5, device=DEVICE)
    product[1, 600:] = 2.0
    sums, choices = log_sums(product, head_of(777), implementation=implementation)
    expected = torch.tensor([1.5 + torch.tensor(777.0).log(), (600 * torch.tensor(1.5).exp() + 177 * torch.tensor(2.0).exp()).log()])
    torch.testing.assert_close(sums.cpu(), expected, rtol=1e-6, atol=1e-6)
    assert choices.tolist() == [0, 600]


@pytest.mark.parametrize("mask", [float("-inf"), -1e10, -1e20, -1e30])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_masked_columns_add_nothing_to_a_sum(implementation: Any, mask: float) -> None:
    """Whole lanes of them, from the first on."""
    product = rows_of(2, 9000)
    product[:, :8300] = mask
    sums, choices = log_sums(product, head_of(9000), implementation=implementation)
    torch.testing.assert_close(sums, product[:, 8300:].logsumexp(dim=1), rtol=1e-6, atol=1e-5)
    assert torch.equal(choices, product.argmax(dim=1))


@pytest.mark.parametrize("size", [1, 5, 63, 4097])
@pytest.mark.parametrize("kind", HEADS)
def test_the_sums_of_the_kernel_equal_the_definition(size: int, kind: str) -> None:
    """All columns and some, with a Markov bias and without."""
    head, product, bias = head_of(size, **HEADS[kind]), rows_of(5, size), rows_of(5, size, seed=1)
    for added in (None, bias):
        for chosen in (None, torch.randperm(size, generator=torch.Generator().manual_seed(2))[: size // 2 + 1].to(DEVICE)):
            reference = log_sums(product, head, added, chosen, implementation="reference")
            sums, choices = log_sums(product, head, added, chosen, implementation="triton")
            torch.testing.assert_close(sums, reference[0], rtol=1e-6, atol=1e-5)
            assert torch.equal(choices, reference[1])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_row_without_label_or_weight_has_neither_loss_nor_gradient(implementation: Any) -> None:
    """Labels at both ends, none, and beyond the columns; the gradient of the rest sums to zero over each row."""
    labels, weights = torch.tensor([0, 36, -1, 37, 5], device=DEVICE), torch.tensor([1.0, 2.0, 1.0, 1.0, 0.0], device=DEVICE)
    product, losses = rows_of(5, 37), torch.full((5,), 9.0, device=DEVICE)
    log_p, matches = product.double().log_softmax(dim=1), torch.ones(5, dtype=torch.bool, device=DEVICE)
    cross_entropy_(
        product, None, head_of(37), slice(0, 5), labels, weights, losses, matches, gradient_scale=0.5, implementation=implementation
    )
    expected = torch.stack([-log_p[0, 0], -log_p[1, 36], *torch.zeros(3, device=DEVICE)]).float()
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    gradient = torch.zeros_like(log_p)
    gradient[0], gradient[1] = 0.5 * log_p[0].exp(), log_p[1].exp()
    gradient[0, 0] -= 0.5
    gradient[1, 36] -= 1.0
    torch.testing.assert_close(product, gradient.float(), rtol=1e-5, atol=1e-6)
    assert matches.tolist() == [bool(log_p[0].argmax() == 0), bool(log_p[1].argmax() == 36), False, False, False]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("size", [3, 4097, 9000])
@pytest.mark.parametrize("kind", HEADS)
def test_the_kernel_equals_the_definition(kind: str, size: int, listed: bool, with_bias: bool) -> None:
    """A chunk in the middle of more rows, whose other places stay as they are; labels that are the likeliest column too."""
    head, product, bias = head_of(size, **HEADS[kind]), rows_of(3, size), rows_of(3, size, seed=1) if with_bias else None
    rows = torch.tensor([6, 1, 4], device=DEVICE) if listed else slice(2, 5)
    labels = torch.arange(8, device=DEVICE) * (size // 8)
    labels[rows] = torch.where(torch.tensor([True, False, True], device=DEVICE), log_sums(product, head, bias)[1], labels[rows])
    results = []
    for implementation in ("reference", "triton"):
        made = [torch.full((8,), 9.0, device=DEVICE), torch.ones(8, dtype=torch.bool, device=DEVICE)]
        logits = [x.clone() for x in (product, bias) if x is not None]
        cross_entropy_(
            logits[0],
            logits[1] if with_bias else None,
            head,
            rows,
            labels,
            torch.linspace(0.5, 2.0, 8, device=DEVICE),
            *made,
            gradient_scale=0.7,
            implementation=implementation,  # type: ignore[arg-type]
        )
        results.append([*made, *logits])
    assert int(results[0][1][rows].sum()) >= 2
    assert not torch.equal(results[0][2], product)
    for reference, kernel in zip(*results, strict=True):
        torch.testing.assert_close(kernel, reference, rtol=1e-5, atol=1e-5)


def test_without_gradient_the_logits_stay() -> None:
    product, kept = rows_of(2, 50), rows_of(2, 50)
    zeros = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    cross_entropy_(
        product,
        None,
        head_of(50),
        slice(0, 2),
        zeros,
        torch.ones(2, device=DEVICE),
        torch.empty(2, device=DEVICE),
        torch.empty(2, dtype=torch.bool, device=DEVICE),
        gradient_scale=None,
        implementation="triton",
    )
    assert torch.equal(product, kept)
