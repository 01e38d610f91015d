"""The kernels of a drafter's decoding layer against their definitions, and weights that lie together."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from tiny_drafters import attend_few, decode_logits, drafter, moved, on_kernels, packed_batch

from speculators.algorithms import dflash, input_fusion, layers
from speculators.algorithms.layers import Attention, DecoderLayer, RotaryEmbedding
from speculators.config import LayerConfig
from speculators.kernels import launch
from speculators.kernels.attention_heads import CacheSlots, attention_heads
from speculators.kernels.gated_halves import gated_halves
from speculators.kernels.joined_projections import joined
from speculators.kernels.likeliest_tokens import likeliest_tokens
from speculators.kernels.residual_norm import add_rms_norm, joined_norms, rms_norm
from speculators.kernels.skinny_linear import Range, skinny_gated_linear, skinny_linear

pytestmark = pytest.mark.usefixtures("garbage_in_new_memory")  # no result may depend on what memory held

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FLOAT32, BFLOAT16 = {"rtol": 1e-5, "atol": 1e-5}, {"rtol": 2e-2, "atol": 2e-2}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize(
    ("size", "dtype", "close"), [(12, torch.float32, FLOAT32), (576, torch.bfloat16, BFLOAT16), (1, torch.float32, FLOAT32)]
)
def test_norms_equal_the_closed_form_also_of_strided_rows(size: int, dtype: torch.dtype, close: dict[str, float]) -> None:
    wide, update, weight, other = (
        random(3, 2, 2 * size, dtype=dtype),
        random(3, 2, size, dtype=dtype, seed=1),
        random(size),
        random(size, seed=2),
    )
    x = wide[..., size:]
    total, normed = add_rms_norm(x, update, weight, 1e-5, implementation="triton")
    torch.testing.assert_close(total, x + update, **close)

    def closed_form(y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = y.double()
        return (y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight).to(dtype)

    torch.testing.assert_close(normed, closed_form(total, weight), **close)
    for implementation in ("triton", "reference"):
        torch.testing.assert_close(rms_norm(x, weight, 1e-5, implementation=implementation), closed_form(x, weight), **close)
        both = joined_norms(update, x, weight, other, 1e-5, 1e-5, implementation=implementation)
        torch.testing.assert_close(both, torch.cat([closed_form(update, weight), closed_form(x, other)], dim=-1), **close)


@pytest.mark.parametrize(("size", "dtype", "close"), [(7, torch.float32, FLOAT32), (1536, torch.bfloat16, BFLOAT16)])
def test_the_gate_equals_its_definition(size: int, dtype: torch.dtype, close: dict[str, float]) -> None:
    states = random(2, 3, 2 * size, dtype=dtype)
    gate, up = states.double().chunk(2, dim=-1)
    torch.testing.assert_close(gated_halves(states, implementation="triton"), (gate * gate.sigmoid() * up).to(dtype), **close)
    torch.testing.assert_close(gated_halves(states, implementation="triton"), gated_halves(states, implementation="reference"), **close)


@pytest.mark.parametrize(
    ("tokens", "rows", "columns", "dtype", "close"),
    [
        (1, 40, 256, torch.float32, FLOAT32),
        (5, 33, 300, torch.float32, FLOAT32),
        (16, 48, 512, torch.bfloat16, BFLOAT16),
        (2, 1, 7, torch.float32, FLOAT32),
    ],
)
def test_products_of_few_tokens_equal_float64(tokens: int, rows: int, columns: int, dtype: torch.dtype, close: dict[str, float]) -> None:
    x, weight = random(2 * tokens, columns, dtype=dtype)[::2], random(2 * rows, columns, dtype=dtype, seed=1) / columns**0.5
    gate, up = (x.double() @ part.double().t() for part in weight.chunk(2))
    torch.testing.assert_close(skinny_linear(x, weight, implementation="triton"), torch.cat([gate, up], 1).to(dtype), **close)
    gated = (gate * gate.sigmoid() * up).to(dtype)
    for implementation in ("triton", "reference"):
        torch.testing.assert_close(skinny_gated_linear(x, weight, implementation=implementation), gated, **close)


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_a_product_is_added_to_what_is_there(implementation: Any) -> None:
    x, weight, bias, onto = random(2, 3, 300), random(40, 300, seed=1), random(40, seed=2), random(2, 3, 40, seed=3)
    expected = (onto.double() + x.double() @ weight.double().t() + bias.double()).float()
    out = skinny_linear(x, weight, bias, onto=onto, implementation=implementation)
    assert out is onto
    torch.testing.assert_close(onto, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter's products are those of a BLAS, which sums as it likes")
def test_a_token_comes_out_the_same_alone_and_in_company() -> None:
    x, weight = random(16, 520), random(40, 520, seed=1)
    together = skinny_linear(x, weight, implementation="triton")
    assert all(torch.equal(skinny_linear(x[i : i + 1], weight, implementation="triton")[0], together[i]) for i in (0, 7, 15))


HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


@pytest.mark.skipif(not HOPPER, reason="before compute capability 9.0 kernels run one after the other")
def test_kernels_launched_early_compute_what_they_compute_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    start, norm = random(8, 1024, dtype=torch.bfloat16), random(1024, dtype=torch.bfloat16, seed=1)
    wide, square = (random(rows, 1024, dtype=torch.bfloat16, seed=rows) / 32 for rows in (2048, 1024))

    def chain() -> torch.Tensor:
        x, update = start, start
        for _ in range(20):  # memory is used again, so that a kernel too early would read or overwrite what another needs
            x, normed = add_rms_norm(x, update, norm, 1e-5, implementation="triton")
            update = skinny_linear(skinny_gated_linear(normed, wide, implementation="triton"), square, implementation="triton")
        return x + update

    monkeypatch.setattr(launch, "enabled", False)
    expected = chain()
    monkeypatch.setattr(launch, "enabled", True)
    assert torch.equal(chain(), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for _ in range(20):
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, expected)


def test_where_kernels_cannot_launch_early_they_launch_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "enabled", True)
    assert launch.dependent_launch(torch.zeros(1)) == {"PDL": False}


def test_the_range_of_the_skinny_product_holds_its_ends_and_nothing_outside() -> None:
    measured, weight = Range(least_tokens=5, most_tokens=16, least_columns=64, least_bytes=64 * 64 * 2), torch.zeros(64, 64).bfloat16()
    assert [tokens for tokens in range(1, 40) if measured.holds(tokens, weight)] == list(range(5, 17))
    assert not measured.holds(8, weight[1:]) and not measured.holds(8, weight.view(128, 32))
    assert replace(measured, most_bytes=64 * 64 * 2).holds(8, weight) and not replace(measured, most_bytes=64 * 64).holds(8, weight)
    assert replace(measured, most_rows=64).holds(8, weight) and not replace(measured, most_rows=63).holds(8, weight)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize(
    ("query_heads", "key_heads", "size", "dtype", "close"), [(6, 3, 12, torch.float32, FLOAT32), (9, 1, 16, torch.bfloat16, BFLOAT16)]
)
def test_heads_and_cache_equal_the_definition(
    query_heads: int, key_heads: int, size: int, dtype: torch.dtype, close: dict[str, float], normalise: bool
) -> None:
    rows, width, slots = 2, 3, 8
    states = random(rows, width, query_heads + 2 * key_heads, size, dtype=dtype)
    rotation = random(2, rows, width, 1, size // 2).repeat(1, 1, 1, 1, 2)
    norms = (random(size, dtype=dtype, seed=1), random(size, dtype=dtype, seed=2)) if normalise else (None, None)
    start = torch.tensor([4, 6], device=DEVICE, dtype=torch.int32)  # the second row's last token has no slot
    results = []
    for implementation in ("reference", "triton"):
        memory = random(2, rows, slots, key_heads, size, dtype=dtype, seed=3)
        before = memory.clone()
        cache = CacheSlots(memory[0], memory[1], start)
        parts = attention_heads(states.clone(), key_heads, *rotation, *norms, 1e-5, cache, implementation=implementation)
        for kind in (0, 1):
            torch.testing.assert_close(memory[kind, 0, 4:7], parts[1 + kind][0])
            torch.testing.assert_close(memory[kind, 1, 6:8], parts[1 + kind][1, :2])
            assert torch.equal(memory[kind, 0, :4], before[kind, 0, :4]) and torch.equal(memory[kind, 0, 7:], before[kind, 0, 7:])
            assert torch.equal(memory[kind, 1, :6], before[kind, 1, :6])
        results.append(parts)
    for reference, kernel in zip(*results, strict=True):
        torch.testing.assert_close(kernel, reference, **close)


@pytest.mark.parametrize("vocabulary", [1, 37, 9000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_likeliest_token_is_the_first_of_equal_ones_over_the_whole_vocabulary(vocabulary: int, dtype: torch.dtype) -> None:
    logits = random(2, 3, vocabulary, dtype=dtype).mul_(2).round_()  # many are equal
    ids = torch.arange(vocabulary, device=DEVICE) * 3 + 1
    wide = torch.full((2, 3, 3 * vocabulary + 5), float("-inf"), device=DEVICE)
    wide[..., ids] = logits.float()
    for implementation in ("reference", "triton"):
        assert torch.equal(likeliest_tokens(logits, ids, implementation=implementation), wide.argmax(-1))
        assert torch.equal(likeliest_tokens(logits[:, 1:], implementation=implementation), logits[:, 1:].float().argmax(-1))


# -- weights that lie together -----------------------------------------------------------------------------------

CONFIG = LayerConfig(
    model_type="qwen3",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    attention_bias=True,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4},
)


def a_layer() -> DecoderLayer:
    torch.manual_seed(0)
    return DecoderLayer(CONFIG, normalise_heads=True).eval()


def output(layer: DecoderLayer) -> torch.Tensor:
    rotation = RotaryEmbedding(CONFIG)(torch.arange(3)[None])
    x = torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(1))
    return layer(x, rotation, lambda query, key, value: query + key.repeat_interleave(2, 2) + value.repeat_interleave(2, 2))


def of(attention: Attention) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    return joined((attention.q_proj, attention.k_proj, attention.v_proj))


def test_weights_lie_together_without_changing_what_a_layer_is() -> None:
    layer = a_layer()
    with torch.no_grad():
        expected, saved = output(layer), {name: value.clone() for name, value in layer.state_dict().items()}
        assert of(layer.self_attn) is None
        with torch.inference_mode():
            layer.lay_together()
        weights = of(layer.self_attn)
        assert weights is not None and weights[0].shape == (64, 32) and joined((layer.mlp.gate_proj, layer.mlp.up_proj)) is not None
        torch.testing.assert_close(output(layer), expected)
    restored = load(save(layer.state_dict()))
    assert restored.keys() == saved.keys() and all(torch.equal(restored[name], saved[name]) for name in saved)
    address = layer.self_attn.q_proj.weight.data_ptr()
    layer.lay_together()  # where they lie together, nothing moves: graphs hold addresses
    assert layer.self_attn.q_proj.weight.data_ptr() == address


def test_weights_that_lie_together_train_and_move() -> None:
    layer, plain = a_layer(), a_layer()
    layer.lay_together()
    for each in (layer, plain):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        output(each).square().sum().backward()
        optimizer.step()
    with torch.no_grad():
        assert of(layer.self_attn) is not None  # an update in place keeps them together
        torch.testing.assert_close(output(layer), output(plain))
        for moved in (copy.deepcopy(layer), copy.deepcopy(layer).to(torch.float64).to(torch.float32)):
            assert of(moved.self_attn) is None
            torch.testing.assert_close(output(moved), output(plain))


def test_weights_in_training_stay_where_they_are() -> None:
    layer = a_layer().train()  # a captured training step holds their addresses
    layer.lay_together()
    assert of(layer.self_attn) is None


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("eagle3", {"num_layers": 2, "norm_before_residual": True}),
        ("eagle3", {"norm_output": True, "draft_vocab_size": 40}),
        ("peagle", {"num_layers": 2}),
        ("dflash", {"num_layers": 2}),
        ("dspark", {"num_layers": 2}),
    ],
)
def test_decoding_on_the_kernels_offers_the_logits_of_plain_layers(
    method: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, speculator = packed_batch([24]), moved(drafter(method, **options), DEVICE)
    batch = replace(batch, **{name: getattr(batch, name).to(DEVICE) for name in ("input_ids", "hidden_states")})
    with torch.no_grad():
        speculator.train()  # its weights stay apart
        plain = decode_logits(speculator, batch, 12, 5, [9, 3])
        assert of(speculator.layers[0].self_attn) is None
        speculator.eval()
        together = decode_logits(speculator, batch, 12, 5, [9, 3])
        assert of(speculator.layers[0].self_attn) is not None
        torch.testing.assert_close(together, plain, rtol=1e-4, atol=1e-4)
        on_kernels(monkeypatch, layers, "attention_heads", "add_rms_norm", "joined_norms", "skinny_linear", "skinny_gated_linear")
        for module in (input_fusion, dflash):
            monkeypatch.setattr(module, "attention", attend_few)
        torch.testing.assert_close(decode_logits(speculator, batch, 12, 5, [9, 3]), plain, rtol=1e-4, atol=1e-4)
