"""Linear maps that keep little for the backward pass: the plain expressions' values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from speculators.kernels import projection as module
from speculators.kernels.projection import feed_forward, gated_projection, linear

pytestmark = pytest.mark.usefixtures("garbage_in_new_memory")  # no result may depend on what memory held

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def normal(*size: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(size))
    return torch.randn(*size, generator=generator, dtype=torch.float64).to(DEVICE, dtype).requires_grad_()


@pytest.mark.parametrize("size", [13, 60])
def test_a_gated_projection_has_the_gradients_of_the_plain_expression(size: int) -> None:
    gate, up, weight = normal(2, 3, size), normal(2, 3, size, seed=1), normal(5, size)
    found, expected = gated_projection(gate, up, weight), (F.silu(gate) * up) @ weight.T
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    upstream = normal(2, 3, 5).detach()
    for ours, theirs in zip(*(torch.autograd.grad(y, [gate, up, weight], upstream) for y in (found, expected)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


def test_a_feed_forward_has_the_gradients_of_the_plain_expression_and_keeps_its_input_only() -> None:
    x, gate, up, down = normal(2, 3, 7), normal(13, 7), normal(13, 7, seed=1), normal(5, 13)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (kept.append(tensor), tensor)[1], lambda tensor: tensor):
        found = feed_forward(x, gate, up, down)
    assert [tensor.shape for tensor in kept] == [x.shape, gate.shape, up.shape, down.shape]
    expected = (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    upstream = normal(2, 3, 5).detach()
    for ours, theirs in zip(*(torch.autograd.grad(y, [x, gate, up, down], upstream) for y in (found, expected)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_the_gate_kernels_equal_float64(dtype: torch.dtype, tolerance: float) -> None:
    gate, up, gradient = (normal(3, 701, dtype=dtype, seed=seed).detach() for seed in range(3))
    exact = [x.double().requires_grad_() for x in (gate, up)]
    product = F.silu(exact[0]) * exact[1]
    expected = (product.detach(), *torch.autograd.grad(product, exact, gradient.double()))
    found = module._launch_gated_gradients(gate, up, gradient.clone())
    for ours, theirs in zip((module._launch_gated(gate, up), *found), (expected[0], *expected), strict=True):
        assert ours.dtype == dtype
        assert float((ours.double() - theirs).norm() / theirs.norm()) < tolerance


def test_under_autocast_nothing_of_sixteen_bits_is_kept_but_activations() -> None:
    x, weight = normal(7, 12, dtype=torch.bfloat16), normal(20, 12, dtype=torch.float32)
    kept: list[Tensor] = []
    with torch.autocast(DEVICE, torch.bfloat16, cache_enabled=False), torch.autograd.graph.saved_tensors_hooks(kept.append, lambda x: x):
        plain = F.linear(x, weight)
        assert any(tensor.dtype == torch.bfloat16 and tensor.numel() == weight.numel() for tensor in kept if tensor is not None)
    kept.clear()
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x), x)[1], lambda x: x)
    with torch.autocast(DEVICE, torch.bfloat16, cache_enabled=False), hooks:
        output = linear(x, weight)
    assert [(tensor.dtype, tensor.shape) for tensor in kept] == [(torch.bfloat16, x.shape), (torch.float32, weight.shape)]
    assert torch.equal(output, plain) and output.dtype == torch.bfloat16
    exact = [x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()]
    expected = torch.autograd.grad(F.linear(*exact).sum(), exact)
    for ours, theirs in zip(torch.autograd.grad(output.sum(), [x, weight]), expected, strict=True):
        assert float((ours.double() - theirs).norm() / theirs.norm()) < 1e-2


def test_a_rotation_sends_its_gradient_back_by_the_opposite_angle() -> None:
    from speculators.algorithms.layers import Rotation

    x, angle = normal(2, 5, 3, 8), normal(5, 4).detach()
    angle = torch.cat([angle, angle], dim=-1)[:, None]
    rotation = Rotation(angle.cos(), angle.sin())
    assert torch.autograd.gradcheck(rotation.apply, (x,))
    torch.testing.assert_close(rotation.apply(x).norm(dim=-1), x.norm(dim=-1), rtol=1e-12, atol=1e-12)
