"""Losslessness of the four methods themselves: every one through the whole engine, greedy and sampled."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from test_lossless import (
    PROMPTS,
    SAMPLERS,
    SMALL_PROMPTS,
    TEMPERATURE,
    TOP_P,
    p_value_of_tokens_2_to_4,
    small_verifier,
    transformers_replies,
    verifier,
)

from speculators.data.rows import Conversation
from speculators.decoding import engine
from speculators.decoding.engine import generate
from speculators.decoding.proposal import Drafter
from speculators.decoding.sampling import SamplingParams
from speculators.registry import get_algorithm
from speculators.speculator import Speculator
from speculators.training.overfit import overfit

K = 7
METHODS: dict[str, dict[str, Any]] = {
    "eagle3": {"training": {"anchors": 24}},
    "peagle": {"num_layers": 1, "training": {"anchors": 24}},
    "dflash": {"num_layers": 1, "training": {"anchors": 24}},
    "dspark": {"num_layers": 1, "markov_rank": 8, "training": {"anchors": 24}},
}


@cache
def trained(method: str) -> Speculator:
    """A drafter that half knows the reply to the first prompt: some drafts are accepted, others are not."""
    reply = transformers_replies("llama")[0]
    conversation = Conversation([*PROMPTS[0], *reply], [False] * len(PROMPTS[0]) + [True] * len(reply))
    options = {"num_draft_tokens": K, "aux_hidden_state_layer_ids": [1, 2], **METHODS[method]}
    return overfit(method, verifier("llama"), conversation, 60, learning_rate=4e-3, **options)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("draft_tokens", range(1, K + 1))
def test_greedy_output_of_every_method_equals_transformers_generate(method: str, draft_tokens: int) -> None:
    expected = transformers_replies("llama")
    sampling = SamplingParams(max_new_tokens=max(map(len, expected)))
    batch = generate(verifier("llama"), trained(method), PROMPTS, sampling, num_draft_tokens=draft_tokens)
    assert batch.token_ids == expected
    for prompt, reply in zip(PROMPTS, expected, strict=True):
        assert generate(verifier("llama"), trained(method), [prompt], sampling, num_draft_tokens=draft_tokens).token_ids == [reply]


@pytest.mark.parametrize("method", METHODS)
def test_the_drafters_of_these_tests_have_drafts_accepted_and_rejected(method: str) -> None:
    rounds = generate(verifier("llama"), trained(method), PROMPTS, SamplingParams(max_new_tokens=24), num_draft_tokens=K).rounds
    accepted = sum(r.accepted for row in rounds for r in row)
    assert 0 < accepted < sum(r.proposed for row in rounds for r in row)


def untrained(method: str, **options: Any) -> Drafter:
    """A random drafter for the verifier of eight tokens, with logits that are neither uniform nor certain."""
    torch.manual_seed(3)
    settings = {"num_layers": 1, "num_draft_tokens": 3, "aux_hidden_state_layer_ids": [0, 1], "mask_token_id": 6, **options}
    speculator = get_algorithm(method).speculator_class.from_verifier(small_verifier().weights, **settings)
    with torch.no_grad():
        for parameter in speculator.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    return speculator.eval()


@pytest.mark.parametrize("method", METHODS)
def test_sampled_replies_of_every_method_follow_the_verifier(method: str) -> None:
    options = {"markov_rank": 4} if method == "dspark" else {}
    assert p_value_of_tokens_2_to_4(TEMPERATURE, untrained(method, **options)) > 1e-3


def overflowing(method: str) -> Drafter:
    """Weights that fit bfloat16 may give infinite activations in float16, and logits that are no numbers."""
    drafter = untrained(method, **({"markov_rank": 4} if method == "dspark" else {}))
    assert isinstance(drafter, Speculator)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.mul_(1e30)
    return drafter


@pytest.mark.parametrize("method", METHODS)
def test_greedy_output_does_not_depend_on_a_drafter_whose_arithmetic_overflows(method: str) -> None:
    sampling = SamplingParams(max_new_tokens=24, ignore_eos=True)
    plain = generate(small_verifier(), None, SMALL_PROMPTS, sampling).token_ids
    assert generate(small_verifier(), overflowing(method), SMALL_PROMPTS, sampling).token_ids == plain


@pytest.mark.parametrize(("sampler", "verification"), [(TEMPERATURE, "standard"), (TEMPERATURE, "block"), (TOP_P, "standard")])
@pytest.mark.parametrize("method", METHODS)
def test_sampled_replies_follow_the_verifier_whatever_overflows_in_the_drafter(method: str, sampler: str, verification: str) -> None:
    assert p_value_of_tokens_2_to_4(sampler, overflowing(method), 35_000, verification=verification) > 1e-3


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_truncating_blocks_by_confidence_keeps_replies_distributed_as_the_verifier(sampler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """c_k reads the token before slot k and never slot k's own, so a threshold selects nothing (DSpark, section 3.2)."""
    drafter = untrained("dspark", markov_rank=4)
    lengths: set[int] = set()
    original = engine.generate

    def with_threshold(*args: Any, **kwargs: Any) -> engine.Generation:
        result = original(*args, **kwargs, confidence_threshold=0.5)
        lengths.update(r.proposed for row in result.rounds for r in row)
        return result

    monkeypatch.setattr("test_lossless.generate", with_threshold)
    assert p_value_of_tokens_2_to_4(sampler, drafter) > 1e-3
    assert lengths == {0, 1, 2, 3}
