"""Products from packed copies on a CPU: the same values, and never those of weights that were."""

from __future__ import annotations

import copy as copies
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from speculators import Verifier
from speculators.kernels import packed_linear as module
from speculators.kernels.adamw import adamw_step
from speculators.kernels.packed_linear import MAX_TOKENS, announce, packed_linear

pytestmark = pytest.mark.skipif(not module._available(), reason="this build of torch has no oneDNN")


def weight_of(rows: int = 300, columns: int = 256) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


def is_packed(weight: Tensor) -> bool:
    found = module._copies.get(weight)
    return found is not None and found.packed is not None


@pytest.fixture(autouse=True)
def no_gradients() -> object:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(1,), (1, 1), (2, 3), (MAX_TOKENS,)])
def test_a_product_of_few_tokens_comes_from_the_copy_and_is_the_same(shape: tuple[int, ...], with_bias: bool) -> None:
    with torch.inference_mode(False):
        weight, bias = weight_of(), torch.randn(300) if with_bias else None
    x = torch.randn(*shape, 256)
    announce([weight])
    out = packed_linear(x, weight, bias)
    assert is_packed(weight)
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)
    assert out.shape == (*shape, 300)


def test_many_tokens_small_weights_other_dtypes_and_strangers_are_left_alone() -> None:
    with torch.inference_mode(False):
        weight, small, half, stranger = weight_of(), weight_of(8, 8), weight_of().bfloat16(), weight_of()
        turned = weight_of().T
    announce([weight, small, half, turned])
    packed_linear(torch.randn(MAX_TOKENS + 1, 256), weight)
    packed_linear(torch.randn(1, 8), small)
    packed_linear(torch.randn(1, 256).bfloat16(), half)
    packed_linear(torch.randn(1, 300), turned)
    packed_linear(torch.randn(1, 256), stranger)
    assert not any(map(is_packed, (weight, small, half, turned, stranger)))


def test_where_a_gradient_is_recorded_nothing_is_packed() -> None:
    with torch.inference_mode(False), torch.enable_grad():
        weight = weight_of().requires_grad_()
        announce([weight])
        packed_linear(torch.randn(2, 256), weight).sum().backward()
        assert not is_packed(weight)
        assert weight.grad is not None


def test_under_autocast_the_product_has_autocasts_dtype() -> None:
    with torch.inference_mode(False):
        weight = weight_of()
    announce([weight])
    packed_linear(torch.randn(1, 256), weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert packed_linear(torch.randn(1, 256), weight).dtype == torch.bfloat16


def replaced(weight: Tensor) -> None:
    weight.data = 2 * weight.data


def changed_in_place(weight: Tensor) -> None:
    with torch.no_grad():
        weight.mul_(2)


CHANGES: dict[str, Callable[[Tensor], None]] = {"in place": changed_in_place, "replaced": replaced}


@pytest.mark.parametrize("change", CHANGES)
def test_a_weight_that_changes_is_multiplied_as_it_is_now(change: str) -> None:
    with torch.inference_mode(False):
        weight = nn.Parameter(weight_of())
    x = torch.randn(3, 256)
    announce([weight])
    before = packed_linear(x, weight)
    with torch.inference_mode(False):
        CHANGES[change](weight)
    torch.testing.assert_close(packed_linear(x, weight), 2 * before, rtol=1e-5, atol=1e-4)
    announce([weight])
    torch.testing.assert_close(packed_linear(x, weight), 2 * before, rtol=1e-5, atol=1e-4)
    assert is_packed(weight)


def merged(weight: Tensor) -> None:
    """As adapters are."""
    weight.data += 1.0


def reordered(weight: Tensor) -> None:
    weight.data[[7, 107]] = weight.data[[107, 7]]


@pytest.mark.parametrize("change", [merged, reordered])
def test_a_change_that_torch_does_not_count_is_seen_when_decoding_begins(change: Callable[[Tensor], None]) -> None:
    with torch.inference_mode(False):
        weight = nn.Parameter(weight_of().round())  # its sum is exact in any order
    x = torch.randn(3, 256)
    announce([weight])
    packed_linear(x, weight)
    with torch.inference_mode(False):
        change(weight)
    announce([weight])
    torch.testing.assert_close(packed_linear(x, weight), F.linear(x, weight), rtol=1e-5, atol=1e-3)


def test_a_weight_that_is_written_over_with_itself_is_packed_again() -> None:
    with torch.inference_mode(False):
        weight = weight_of()
    x = torch.randn(3, 256)
    announce([weight])
    packed_linear(x, weight)
    with torch.inference_mode(False):
        weight.copy_(weight.clone())
    announce([weight])
    packed_linear(x, weight)
    assert module._copies[weight].state == module._state(weight)


def test_a_weight_that_becomes_part_of_itself_gives_the_products_of_that_part() -> None:
    with torch.inference_mode(False):
        weight = nn.Parameter(weight_of())
    x = torch.randn(3, 256)
    announce([weight])
    packed_linear(x, weight)
    weight.data = weight.data[:200]
    assert torch.equal(packed_linear(x, weight), F.linear(x, weight))


@pytest.mark.parametrize("bias", [torch.randn(600)[::2], torch.randn(1).expand(300)])
def test_a_bias_may_have_any_stride(bias: Tensor) -> None:
    with torch.inference_mode(False):
        weight = weight_of()
    x = torch.randn(3, 256)
    announce([weight])
    torch.testing.assert_close(packed_linear(x, weight, bias), F.linear(x, weight, bias), rtol=1e-5, atol=1e-4)
    assert is_packed(weight)


def test_a_trained_weight_is_seen_without_a_word() -> None:
    with torch.inference_mode(False), torch.no_grad():
        weight, (first, second) = nn.Parameter(weight_of()), torch.zeros(2, 300, 256)
        x, scalars = torch.randn(3, 256), [torch.tensor(value) for value in (0.0, 0.1, 1.0, 0.0)]
        announce([weight])
        packed_linear(x, weight)
        step, rate, scale, skip = scalars
        options = {"learning_rate": rate, "weight_decay": 0.0, "betas": (0.9, 0.99), "scale": scale, "skip": skip}
        adamw_step([weight], [torch.randn(300, 256)], [first], [second], [step], **options)
        assert torch.equal(packed_linear(x, weight), F.linear(x, weight))


def test_where_memory_is_short_there_is_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_memory", lambda: (1 << 30, 4 << 30))
    with torch.inference_mode(False):
        weight = weight_of()
    announce([weight])
    x = torch.randn(1, 256)
    assert torch.equal(packed_linear(x, weight), F.linear(x, weight))
    assert not is_packed(weight)


def test_copies_go_with_their_weights() -> None:
    with torch.inference_mode(False):
        weight = weight_of()
    announce([weight])
    packed_linear(torch.randn(1, 256), weight)
    before = len(module._copies)
    del weight
    assert len(module._copies) == before - 1


def model_of() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def test_a_forward_that_a_module_brings_along_stays() -> None:
    """As those of accelerate, which fetch weights that lie on a disk."""
    with torch.inference_mode(False), torch.no_grad():
        model, ids = model_of(), torch.randint(0, 512, (1, 5))
        linear = model.model.layers[0].mlp.down_proj
        own = linear.forward
        linear.forward = lambda x: own(x) + 1.0
        expected = model(ids).logits
        Verifier(model, None)  # type: ignore[arg-type]
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(model.lm_head(input=torch.ones(1, 256)), model.lm_head(torch.ones(1, 256)))


def test_a_verifiers_weights_go_with_it_at_once() -> None:
    with torch.inference_mode(False):
        verifier = Verifier(model_of(), None)  # type: ignore[arg-type]
        head = weakref.ref(verifier.weights.head)
        gc.disable()
        try:
            del verifier
            assert head() is None
        finally:
            gc.enable()


def test_a_verifier_multiplies_from_copies_and_its_logits_stay() -> None:
    """Also one wrapped a second time, or copied."""
    with torch.inference_mode(False):
        model = model_of()
        ids = torch.randint(0, 512, (1, 5))
        with torch.no_grad():
            expected = model(ids).logits
        for wrapped in (model, model, copies.deepcopy(model)):
            verifier = Verifier(wrapped, None)  # type: ignore[arg-type]
            cache = verifier.new_cache(1, 8)
            logits = verifier.logits(verifier.forward(ids, cache).last_hidden_state)
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
            assert all(is_packed(linear.weight) for linear in verifier._linears if linear.weight.numel() >= module._LEAST_NUMBERS)
            assert is_packed(verifier.weights.head)
