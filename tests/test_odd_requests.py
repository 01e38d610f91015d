"""Requests that strangers make: values of other types, drafters of other verifiers, dtypes that do not meet. One sentence each."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from tiny_models import tiny_model, tiny_verifier
from transformers import AutoModelForCausalLM, OPTConfig

from speculators.decoding.engine import generate
from speculators.decoding.sampling import SamplingParams
from speculators.errors import CheckpointError, ConfigError, DataError, PairingError
from speculators.registry import get_algorithm
from speculators.speculator import Speculator
from speculators.verifier import Verifier

METHODS = ("eagle3", "peagle", "dflash", "dspark")
PROMPTS = [[1, 2, 3], [4]]


def drafter_for(verifier: Verifier, method: str = "dflash", **options: Any) -> Speculator:
    chosen = {"num_layers": 1, "num_draft_tokens": 3, "aux_hidden_state_layer_ids": [1, 2], "mask_token_id": 3, **options}
    return get_algorithm(method).speculator_class.from_verifier(verifier.weights, **chosen).eval()


@pytest.mark.parametrize("value", [None, "1", [1], True, math.nan, torch.ones(2)], ids=str)
@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens", "seed"])
def test_a_value_that_is_no_number_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^sampling: {name} = "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["top_k", "max_new_tokens", "seed"])
@pytest.mark.parametrize("value", [1.5, 2.0, math.inf])
def test_fractions_of_tokens_are_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} = {value} must be a whole number"):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [5, "end", ("end",), (1.5,), (None,), (True,), (-1,), (2**70,)], ids=str)
def test_stop_tokens_that_are_no_token_ids_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"stop_token_ids = .* must be a list of token ids"):
        SamplingParams(stop_token_ids=value)


@pytest.mark.parametrize("seed", [-1, 2**64 - 1, 2**200])
def test_any_whole_number_is_a_seed(seed: int) -> None:
    verifier = tiny_verifier()
    drafter = drafter_for(verifier)
    replies = [
        generate(verifier, drafter, PROMPTS, SamplingParams(temperature=1.0, seed=given, max_new_tokens=6)).token_ids
        for given in (seed, seed % 2**64)
    ]
    assert replies[0] == replies[1]


@pytest.mark.parametrize("prompts", [None, 5, iter([[1]]), [[True]]], ids=["none", "number", "iterator", "truth"])
def test_prompts_that_are_no_lists_of_token_ids_are_refused(prompts: Any) -> None:
    with pytest.raises(DataError, match="token ids"):
        generate(tiny_verifier(), None, prompts)


@pytest.mark.parametrize("threshold", [None, "0.5", math.nan])
def test_a_threshold_that_is_no_number_is_refused(threshold: Any) -> None:
    verifier = tiny_verifier()
    with pytest.raises(ConfigError, match=r"confidence_threshold .* must be between"):
        generate(verifier, drafter_for(verifier), PROMPTS, confidence_threshold=threshold)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("other", [{"vocab_size": 70}, {"vocab_size": 60}, {"hidden_size": 48}], ids=str)
def test_a_drafter_of_another_verifier_is_refused_before_anything_runs(method: str, other: dict[str, Any]) -> None:
    drafter = drafter_for(tiny_verifier(), method)
    with pytest.raises(PairingError, match=r"drafter belongs to 'tiny-llama', of 64 tokens and hidden size 32, but 'tiny-llama' has"):
        generate(tiny_verifier(**other), drafter, PROMPTS)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16, torch.float16])
def test_a_drafter_takes_hidden_states_of_its_dtype_or_a_narrower_one(method: str, weights: torch.dtype, states: torch.dtype) -> None:
    verifier = tiny_verifier(dtype=states)
    drafter = drafter_for(verifier, method).to(weights)
    if weights in (states, torch.float32):
        state = drafter.new_state(len(PROMPTS), 16, verifier.device, states)
        assert state.cache.memory.dtype == weights, "on a GPU attention reads queries and keys of one dtype"
        reply = generate(verifier, drafter, PROMPTS, SamplingParams(max_new_tokens=6)).token_ids
        assert states != torch.float32 or reply == generate(verifier, None, PROMPTS, SamplingParams(max_new_tokens=6)).token_ids
    else:
        with pytest.raises(ConfigError, match=rf"the drafter's weights are {weights}, the verifier's {states}; convert the drafter"):
            generate(verifier, drafter, PROMPTS)


@pytest.mark.parametrize("option", [{"num_layers": 10**5}, {"intermediate_size": 10**9}], ids=str)
@pytest.mark.parametrize("method", ["peagle", "dflash", "dspark"])
def test_a_drafter_of_absurd_size_is_refused_in_one_sentence(method: str, option: dict[str, int]) -> None:
    ((name, value),) = option.items()
    with pytest.raises(ConfigError, match=f"^{method} option {name} = {value}: Input should be less than or equal to"):
        drafter_for(tiny_verifier(), method, **option)


def test_a_dtype_too_narrow_for_the_model_is_named() -> None:
    model = tiny_model("llama")
    model.get_output_embeddings().weight.data.mul_(1e5).clamp_(-6e4, 6e4)
    Verifier(copy.deepcopy(model), name_or_path="loud")
    with pytest.raises(CheckpointError, match=r"'loud' computes logits that are not finite in torch\.float16; load it in another dtype"):
        Verifier(model.to(torch.float16), name_or_path="loud")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_verifier_whose_arithmetic_overflows_is_refused_by_prompt_and_dtype(broken: float, temperature: float) -> None:
    verifier = tiny_verifier(dtype=torch.float16)
    with torch.no_grad():
        verifier.model.get_input_embeddings().weight[50, 0] = broken
    sampling = SamplingParams(temperature=temperature, max_new_tokens=4)
    for drafter in (None, drafter_for(verifier)):
        with pytest.raises(ConfigError, match=r"after prompt 1 the verifier's hidden state is not finite in torch\.float16: .* bfloat16"):
            generate(verifier, drafter, [[1, 2, 3], [4, 50], [50, 3]], sampling)
        assert len(generate(verifier, drafter, [[1, 2, 3], [4]], sampling).token_ids) == 2


def test_a_model_that_masks_its_own_logits_is_refused() -> None:
    """Some mask tokens with the lowest number there is, whose square in float32 would hide every other difference."""
    model = tiny_model("llama")

    def mask(module: Any, arguments: Any, output: Any) -> Any:
        output.logits[..., 5] = torch.finfo(torch.float32).min
        return output

    model.register_forward_hook(mask)
    with pytest.raises(CheckpointError, match="has logits that are not those of its head"):
        Verifier(model, name_or_path="masking")


def test_an_embedding_narrower_than_the_layers_is_refused() -> None:
    config = OPTConfig(vocab_size=64, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=16)
    with pytest.raises(CheckpointError, match="has an embedding 16 wide and layers 32 wide"):
        Verifier(AutoModelForCausalLM.from_config(config), name_or_path="opt")


def test_arguments_that_are_something_else_are_refused_by_name() -> None:
    verifier, request = tiny_verifier(), SamplingParams(max_new_tokens=2)
    odd: list[tuple[str, Any, Any, Any]] = [
        ("verifier", verifier.model, None, request),
        ("verifier", "a/model", None, request),
        ("drafter", verifier, "a/drafter", request),
        ("sampling", verifier, None, {"max_new_tokens": 2}),
        ("sampling", verifier, None, None),
    ]
    for name, model, drafter, sampling in odd:
        with pytest.raises(ConfigError, match=f"^generate: {name} must be "):
            generate(model, drafter, PROMPTS, sampling)
