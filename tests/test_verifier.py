"""The verifier: taps, logits, cached decoding with roll-back, packed features."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, SLIDING_WINDOW, tiny_model, tiny_verifier
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BloomConfig

from speculators.attention import grouped_attention
from speculators.config import LayerConfig, ProposalConfig, ProposalMethod, SpeculatorConfig
from speculators.errors import CheckpointError, ConfigError, PairingError
from speculators.speculator import Speculator
from speculators.verifier import Verifier

ALL_FAMILIES = (*FAMILIES, "gemma2", "cohere", "granite", "phi")
VOCABULARY = 64


def random_tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, VOCABULARY - 1, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def reference_logits(family: str, input_ids: Tensor, **overrides: Any) -> Tensor:
    """Logits of the untouched transformers model with its own eager attention."""
    model = tiny_model(family, **overrides)
    model.set_attn_implementation("eager")
    return model(input_ids, use_cache=False).logits


def encode_one(verifier: Verifier, input_ids: Tensor, taps: tuple[int, ...] = ()) -> Any:
    """Features of rows that hold one document each."""
    positions = torch.arange(input_ids.shape[1]).expand(input_ids.shape)
    return verifier.encode(input_ids, positions, torch.zeros_like(input_ids), taps)


# -- taps and logits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_tapped_stream_through_norm_and_head_reproduces_the_models_logits(family: str) -> None:
    input_ids = random_tokens(2, 20)
    verifier = tiny_verifier(family)
    cached = verifier.forward(input_ids, verifier.new_cache(2, 40), taps=(0, 2, 4))
    encoded = encode_one(verifier, input_ids, taps=(0, 2, 4))
    expected = reference_logits(family, input_ids)
    for output in (cached, encoded):
        assert torch.equal(output.hidden_states[..., -verifier.hidden_size :], output.last_hidden_state)
        torch.testing.assert_close(verifier.logits(output.last_hidden_state), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_borrowed_weights_alone_reproduce_the_models_logits(family: str) -> None:
    input_ids = random_tokens(1, 12)
    verifier = tiny_verifier(family)
    weights = verifier.weights
    logits = weights.final_norm(encode_one(verifier, input_ids).last_hidden_state) @ weights.head.T * weights.logit_scale
    assert (weights.head_bias is not None) == (family == "phi")
    if weights.head_bias is not None:
        logits = logits + weights.head_bias
    if weights.logit_softcap is not None:
        logits = weights.logit_softcap * torch.tanh(logits / weights.logit_softcap)
    torch.testing.assert_close(logits, reference_logits(family, input_ids), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_id_zero_is_the_scaled_embedding(family: str) -> None:
    input_ids = random_tokens(2, 5)
    verifier = tiny_verifier(family)
    tapped = verifier.forward(input_ids, verifier.new_cache(2, 8), taps=(0,)).hidden_states
    assert torch.equal(tapped, verifier.weights.embed(input_ids))
    scale = {"gemma2": 32**0.5, "gemma3": 32**0.5, "granite": 7.0}.get(family, 1.0)
    torch.testing.assert_close(tapped, verifier.model.get_input_embeddings().weight[input_ids] * scale, atol=1e-6, rtol=1e-6)


def test_gemma_embedding_scale_is_rounded_to_the_models_dtype() -> None:
    verifier = tiny_verifier("gemma3", dtype=torch.bfloat16)
    assert verifier.weights.embedding_scale == float(torch.tensor(32**0.5).to(torch.bfloat16))
    input_ids = random_tokens(1, 5)
    assert torch.equal(encode_one(verifier, input_ids, taps=(0,)).hidden_states, verifier.weights.embed(input_ids))


def test_softcap_and_logit_scale_change_the_logits() -> None:
    for family, override in (
        ("gemma2", {"final_logit_softcapping": None}),
        ("cohere", {"logit_scale": 1.0}),
        ("granite", {"logits_scaling": 1.0}),
    ):
        state = encode_one(tiny_verifier(family), random_tokens(1, 4)).last_hidden_state
        assert not torch.allclose(tiny_verifier(family).logits(state), tiny_verifier(family, **override).logits(state), atol=1e-2)


class AddPowerOfTen(nn.Module):
    """A decoder layer k that adds 10^k to its input."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return hidden_states + 10.0**self.layer


def test_layer_id_names_the_stream_after_that_many_layers() -> None:
    model = tiny_model("llama")
    model.model.layers = nn.ModuleList([AddPowerOfTen(layer) for layer in range(4)])
    model.model.embed_tokens.weight.data.fill_(0.5)
    verifier = Verifier(model)
    output = verifier.forward(random_tokens(1, 3), verifier.new_cache(1, 8), taps=(0, 1, 3, 4))
    values = output.hidden_states.view(1, 3, 4, verifier.hidden_size)
    # Ids 1 and 3 are the outputs of layers 0 and 2, which formats that count layer outputs call 0 and 2.
    for column, expected in enumerate((0.5, 1.5, 111.5, 1111.5)):
        assert torch.equal(values[:, :, column], torch.full((1, 3, verifier.hidden_size), expected))
    assert torch.equal(output.last_hidden_state, values[:, :, 3])


@pytest.mark.parametrize("family", FAMILIES)
def test_taps_equal_the_hidden_states_transformers_reports(family: str) -> None:
    input_ids = random_tokens(2, 9)
    verifier = tiny_verifier(family)
    with torch.no_grad():
        expected = verifier.model(input_ids, output_hidden_states=True, use_cache=False).hidden_states
    tapped = encode_one(verifier, input_ids, taps=(0, 1, 2, 3)).hidden_states
    torch.testing.assert_close(tapped, torch.cat(expected[:4], dim=-1), atol=1e-5, rtol=1e-5)


def test_taps_come_in_the_order_asked_for() -> None:
    verifier, input_ids = tiny_verifier(), random_tokens(1, 6)
    first, second = encode_one(verifier, input_ids, taps=(1, 4)).hidden_states.chunk(2, dim=-1)
    assert torch.equal(encode_one(verifier, input_ids, taps=(4, 1)).hidden_states, torch.cat([second, first], dim=-1))
    assert encode_one(verifier, input_ids).hidden_states.shape == (1, 6, 0)


@pytest.mark.parametrize("tap", [5, -1])
def test_tap_beyond_the_depth_names_it_and_the_depth(tap: int) -> None:
    verifier = tiny_verifier(layers=4)
    with pytest.raises(ConfigError, match=rf"layer id {tap} is not in 0 to 4: .* has 4 layers"):
        verifier.forward(random_tokens(1, 2), verifier.new_cache(1, 8), taps=(1, tap))
    with pytest.raises(ConfigError, match=rf"layer id {tap} "):
        encode_one(verifier, random_tokens(1, 2), taps=(tap,))


class TappedConfig(SpeculatorConfig):
    aux_hidden_state_layer_ids: list[int]


def test_drafter_of_a_deeper_verifier_is_refused_naming_both_depths() -> None:
    verifier = tiny_verifier(layers=2)
    config = TappedConfig(
        speculators_model_type="toy",
        transformer_layer_config=LayerConfig.model_validate(verifier.weights.config),
        speculators_config=ProposalConfig(algorithm="toy", proposal_methods=[ProposalMethod()]),
        draft_vocab_size=VOCABULARY,
        aux_hidden_state_layer_ids=[1, 4],
    )

    class Toy(Speculator):
        config_class, method = TappedConfig, "toy"

    Toy.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
    Toy(config).attach(replace(verifier.weights, num_layers=4))
    with pytest.raises(PairingError, match=r"reads layer 4, but 'tiny-llama' has 2 layers"):
        Toy(config).attach(verifier.weights)


def test_model_whose_logits_are_not_head_of_final_norm_is_refused() -> None:
    model = tiny_model("llama")
    model.lm_head.register_forward_hook(lambda module, args, output: output)  # harmless: part of the head itself
    Verifier(model)

    def doubled(module: nn.Module, args: Any, output: Any) -> Any:
        output.logits = 2 * output.logits
        return output

    model.register_forward_hook(doubled)
    with pytest.raises(CheckpointError, match="logits that are not those of its head"):
        Verifier(model, name_or_path="odd")


def test_model_that_cannot_take_our_masks_is_refused_at_load() -> None:
    config = BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4)  # derives positions from a 2-D mask
    with pytest.raises(CheckpointError, match="BloomForCausalLM"):
        Verifier(AutoModelForCausalLM.from_config(config), name_or_path="bloom")


# -- cached decoding -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*FAMILIES, "gemma2"])
def test_decoding_with_unequal_rows_and_rejected_tokens_equals_one_full_forward(family: str) -> None:
    length, width = 4 * SLIDING_WINDOW, 5
    truth = random_tokens(3, length)
    verifier = tiny_verifier(family)
    expected = encode_one(verifier, truth, taps=(1, 3))
    expected_logits = reference_logits(family, truth)
    cache = verifier.new_cache(3, length + width)
    generator = torch.Generator().manual_seed(2)
    done, calls = [0, 0, 0], 0
    while min(done) < length:
        # Row b's next `accepted` tokens are the true ones, the rest are drafts that get rejected.
        accepted = [min(int(torch.randint(0, width + 1, (), generator=generator)), length - count) for count in done]
        input_ids = random_tokens(3, width, seed=100 + calls)
        for row, count in enumerate(accepted):
            input_ids[row, :count] = truth[row, done[row] : done[row] + count]
        output = verifier.forward(input_ids, cache, taps=(1, 3))
        logits = verifier.logits(output.last_hidden_state)
        for row, count in enumerate(accepted):
            columns = slice(done[row], done[row] + count)
            torch.testing.assert_close(logits[row, :count], expected_logits[row, columns], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(output.hidden_states[row, :count], expected.hidden_states[row, columns], atol=1e-5, rtol=1e-5)
            done[row] += count
        cache.lengths = cache.lengths + torch.tensor(accepted)
        calls += 1
    assert calls > length / width  # some drafts were rejected


def test_rollback_copies_nothing_and_forward_does_not_advance_lengths() -> None:
    verifier = tiny_verifier()
    cache = verifier.new_cache(2, 32)
    verifier.forward(random_tokens(2, 8), cache)
    assert cache.lengths.tolist() == [0, 0]
    memory = [layer.keys.data_ptr() for layer in cache.layers]
    cache.lengths = torch.tensor([8, 5])
    verifier.forward(random_tokens(2, 4), cache)
    cache.lengths.copy_(torch.tensor([3, 3]))
    verifier.forward(random_tokens(2, 4), cache)
    assert memory == [layer.keys.data_ptr() for layer in cache.layers]
    assert cache.lengths.tolist() == [3, 3]


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_of_unequal_length_together_equal_each_alone(family: str) -> None:
    verifier = tiny_verifier(family)
    prompts = [random_tokens(length, seed=length) for length in (3, 17, 9, 1)]
    padded = torch.zeros(4, 17, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = prompt
    together = verifier.forward(padded, verifier.new_cache(4, 32), taps=(2,))
    again = verifier.forward(padded, verifier.new_cache(4, 32), taps=(2,))
    assert torch.equal(together.hidden_states, again.hidden_states)
    for row, prompt in enumerate(prompts):
        alone = verifier.forward(prompt[None], verifier.new_cache(1, 32), taps=(2,))
        torch.testing.assert_close(together.hidden_states[row, : len(prompt)], alone.hidden_states[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(together.last_hidden_state[row, : len(prompt)], alone.last_hidden_state[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_continuation_equals_transformers_generate(family: str) -> None:
    prompt = random_tokens(1, 5)
    stock = tiny_model(family)
    expected = stock.generate(prompt, do_sample=False, max_new_tokens=16, eos_token_id=None, attention_mask=torch.ones_like(prompt))
    verifier = tiny_verifier(family)
    cache, tokens = verifier.new_cache(1, 32), prompt
    for _ in range(16):
        new = tokens[:, int(cache.lengths) :]
        output = verifier.forward(new, cache)
        cache.lengths = cache.lengths + new.shape[1]
        tokens = torch.cat([tokens, verifier.logits(output.last_hidden_state[:, -1:]).argmax(-1)], dim=1)
    assert tokens.tolist() == expected.tolist()


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_static_length_changes_no_result(family: str) -> None:
    verifier = tiny_verifier(family)
    results = []
    for static_length in (None, 64, 100):
        cache = verifier.new_cache(2, 100)
        verifier.forward(random_tokens(2, 11), cache)
        cache.lengths = torch.tensor([11, 4])
        results.append(verifier.forward(random_tokens(2, 3, seed=7), cache, taps=(2,), static_length=static_length).hidden_states)
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(results[2], results[0], atol=1e-5, rtol=1e-5)


def test_cache_too_short_or_of_other_rows_is_a_clear_error() -> None:
    verifier = tiny_verifier()
    cache = verifier.new_cache(2, 10)
    with pytest.raises(ConfigError, match="has 2 rows, the input 3"):
        verifier.forward(random_tokens(3, 4), cache)
    cache.lengths = torch.tensor([2, 8])
    with pytest.raises(ConfigError, match="holds 10 positions a row, this forward needs 11"):
        verifier.forward(random_tokens(2, 3), cache)
    verifier.forward(random_tokens(2, 2), cache)


@pytest.mark.parametrize("width", [1, 8, 32, 40])
@pytest.mark.parametrize("additive", [False, True])
def test_grouped_attention_equals_attention_with_repeated_heads(width: int, additive: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 6, width, 16, generator=generator)
    key, value = (torch.randn(2, 2, 50, 16, generator=generator) for _ in range(2))
    mask = torch.rand(2, 1, width, 50, generator=generator) < 0.5
    mask[..., 0] = True
    module = nn.Module()
    module.num_key_value_groups = 3  # type: ignore[assignment]
    given = torch.zeros(mask.shape).masked_fill(~mask, -1e30) if additive else mask
    actual, _ = grouped_attention(module, query, key, value, given, scaling=0.3)
    scores = query.double() @ key.repeat_interleave(3, 1).double().transpose(2, 3) * 0.3
    expected = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ value.repeat_interleave(3, 1).double()
    torch.testing.assert_close(actual, expected.transpose(1, 2).float(), atol=1e-5, rtol=1e-5)


# -- packed features -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_equal_separate_documents(family: str) -> None:
    verifier = tiny_verifier(family)
    documents = [random_tokens(length, seed=length) for length in (9, 14, 1, 5)]
    input_ids = torch.zeros(2, 26, dtype=torch.int64)
    positions, owners = torch.zeros_like(input_ids), torch.full_like(input_ids, -1)
    places = [(0, 0), (0, 9), (0, 23), (1, 0)]
    for index, ((row, start), document) in enumerate(zip(places, documents, strict=True)):
        columns = slice(start, start + len(document))
        input_ids[row, columns], positions[row, columns], owners[row, columns] = document, torch.arange(len(document)), index
    packed = verifier.encode(input_ids, positions, owners, taps=(0, 2, 4))
    assert packed.hidden_states.isfinite().all() and packed.last_hidden_state.isfinite().all()
    for (row, start), document in zip(places, documents, strict=True):
        alone = encode_one(verifier, document[None], taps=(0, 2, 4))
        found = packed.hidden_states[row, start : start + len(document)]
        torch.testing.assert_close(found, alone.hidden_states[0], atol=1e-5, rtol=1e-5)
    padding = packed.last_hidden_state[owners < 0]  # a padding token is a document of its own
    alone = encode_one(verifier, torch.zeros(1, 1, dtype=torch.int64)).last_hidden_state[0]
    torch.testing.assert_close(padding, alone.expand_as(padding), atol=1e-5, rtol=1e-5)


def test_eight_prompts_of_mixed_length_have_the_states_they_have_alone_also_when_asked_again() -> None:
    verifier = tiny_verifier("gemma3")
    lengths = (3, 17, 9, 5, 12, 7, 20, 4)
    prompts = [random_tokens(1, length, seed=length) for length in lengths]
    alone = [encode_one(verifier, prompt, (1, 4)).hidden_states[0] for prompt in prompts]
    # Packed into three rows in another order, as training sees them, twice.
    for order in ((6, 0, 3, 1, 4), (2, 7, 5)):
        ids = torch.cat([prompts[number] for number in order], dim=1)
        positions = torch.cat([torch.arange(lengths[number]) for number in order])[None]
        documents = torch.cat([torch.full((lengths[number],), place) for place, number in enumerate(order)])[None]
        for _ in range(2):
            states = verifier.encode(ids, positions, documents, (1, 4)).hidden_states[0]
            for place, number in enumerate(order):
                torch.testing.assert_close(states[documents[0] == place], alone[number], atol=1e-5, rtol=1e-5)
