"""Losslessness of the whole engine: greedy output is plain decoding's and transformers', sampled output is the verifier's."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from goodness_of_fit import chi_square, chi_square_survival
from tiny_models import tiny_model, tiny_verifier
from torch import Tensor
from toy_drafters import BlockTable, Oracle, RandomTokens, SequentialTable

from speculators.decoding import batch, rejection, sampling
from speculators.decoding.engine import generate
from speculators.decoding.prompt_lookup import PromptLookup
from speculators.decoding.proposal import Drafter
from speculators.decoding.sampling import SamplingParams
from speculators.verifier import Verifier

# -- greedy --------------------------------------------------------------------------------------------------

VOCABULARY = 64
NEW_TOKENS = 24
PROMPTS = [[11, 12, 13, 14, 15], [4, 5], [9, 8, 7, 6, 5, 4, 3, 2, 1, 9, 8], [40]]
DRAFTERS: dict[str, Callable[[list[list[int]], list[list[int]]], Drafter]] = {
    "perfect": lambda prompts, replies: Oracle(prompts, replies, VOCABULARY),
    "wrong after two": lambda prompts, replies: Oracle(prompts, replies, VOCABULARY, accept=[2]),
    "always wrong": lambda prompts, replies: Oracle(prompts, replies, VOCABULARY, accept=[0]),
    "random": lambda prompts, replies: RandomTokens(VOCABULARY),
    "parallel table": lambda prompts, replies: BlockTable(VOCABULARY),
    "sequential table": lambda prompts, replies: SequentialTable(VOCABULARY),
    "prompt lookup": lambda prompts, replies: PromptLookup(),
}


@cache
def verifier(family: str) -> Verifier:
    return tiny_verifier(family, vocab_size=VOCABULARY, layers=2)


@cache
def transformers_replies(family: str, new_tokens: int = NEW_TOKENS, repetition_penalty: float = 1.0) -> list[list[int]]:
    """Greedy replies of transformers' own loop, one prompt at a time, stop token included."""
    model = tiny_model(family, vocab_size=VOCABULARY, layers=2)
    replies = []
    for prompt in PROMPTS:
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=new_tokens,
            pad_token_id=0,
            repetition_penalty=repetition_penalty,
        )
        replies.append(output[0, len(prompt) :].tolist())
    return replies


@pytest.mark.parametrize("family", ["llama", "gemma3"])  # gemma3 alternates sliding windows of 6 tokens with full attention
def test_plain_decoding_equals_transformers_generate(family: str) -> None:
    result = generate(verifier(family), None, PROMPTS, SamplingParams(max_new_tokens=NEW_TOKENS))
    assert result.token_ids == transformers_replies(family)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_greedy_output_equals_transformers_generate_for_every_k_and_batch(family: str, drafter: str) -> None:
    expected = transformers_replies(family)
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS)
    for draft_tokens in range(1, 8):
        result = generate(verifier(family), DRAFTERS[drafter](PROMPTS, expected), PROMPTS, sampling, num_draft_tokens=draft_tokens)
        assert result.token_ids == expected, f"K = {draft_tokens}, batch of 4"
        row = draft_tokens % 4
        prompt, reply = PROMPTS[row : row + 1], expected[row : row + 1]
        alone = generate(verifier(family), DRAFTERS[drafter](prompt, reply), prompt, sampling, num_draft_tokens=draft_tokens)
        assert alone.token_ids == reply, f"K = {draft_tokens}, prompt {row} alone"


def test_perfect_drafter_is_accepted_whole_and_a_wrong_one_never() -> None:
    expected = transformers_replies("llama")
    for accept, accepted in ((None, 5), ([2], 2), ([0], 0)):
        drafter = Oracle(PROMPTS, expected, VOCABULARY, accept=accept)
        result = generate(verifier("llama"), drafter, PROMPTS, SamplingParams(max_new_tokens=NEW_TOKENS), num_draft_tokens=5)
        assert {r.accepted for rounds in result.rounds for r in rounds[:-2]} == {accepted}


@pytest.mark.parametrize("drafter", [RandomTokens(VOCABULARY), SequentialTable(VOCABULARY)], ids=lambda d: type(d).__name__)
def test_200_greedy_tokens_are_identical_in_float32(drafter: Drafter) -> None:
    sampling = SamplingParams(max_new_tokens=200, ignore_eos=True)
    plain = generate(verifier("llama"), None, PROMPTS, sampling).token_ids
    assert [len(reply) for reply in plain] == [200] * 4
    assert generate(verifier("llama"), drafter, PROMPTS, sampling, num_draft_tokens=7).token_ids == plain


@pytest.mark.parametrize("drafter", ["perfect", "sequential table", "parallel table", "prompt lookup"])
def test_greedy_output_with_a_repetition_penalty_equals_transformers_generate(drafter: str) -> None:
    expected = transformers_replies("llama", NEW_TOKENS, 1.5)
    assert expected != transformers_replies("llama")
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS, repetition_penalty=1.5)
    for draft_tokens in (1, 4, 7):
        result = generate(verifier("llama"), DRAFTERS[drafter](PROMPTS, expected), PROMPTS, sampling, num_draft_tokens=draft_tokens)
        assert result.token_ids == expected


# -- sampled -------------------------------------------------------------------------------------------------

SMALL_VOCABULARY = 8
SMALL_PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 0, 2], [6], [1, 2, 1, 2]]
DRAWS, ROWS = 100_000, 5_000  # rows decoded in all, and at once
TEMPERATURE, TOP_P = "temperature 1", "temperature 0.7 and top-p 0.8"
SAMPLERS = {TEMPERATURE: {"temperature": 1.0}, TOP_P: {"temperature": 0.7, "top_p": 0.8}}


@cache
def small_verifier() -> Verifier:
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1}
    small = tiny_verifier("llama", seed=1, vocab_size=SMALL_VOCABULARY, layers=1, **shape)
    logits = small.logits(torch.randn(1000, small.hidden_size, generator=torch.Generator().manual_seed(0)))
    with torch.no_grad():
        small.weights.head.mul_(1.5 / logits.std())  # neither uniform nor certain
    return small


def reference_distribution(logits: Tensor, temperature: float, top_p: float = 1.0) -> Tensor:
    """The textbook definition, in float64 and by a loop: [vocabulary] -> [vocabulary]."""
    distribution = (logits.double() / temperature).softmax(-1)
    kept, mass = torch.zeros_like(distribution), 0.0
    for token in distribution.argsort(descending=True).tolist():
        if mass >= top_p:
            break
        kept[token] = distribution[token]
        mass += distribution[token].item()
    return kept / kept.sum()


@cache
def exact_joint(sampler: str) -> Tensor:
    """[prompts, V^3] float64: probability of tokens 2, 3 and 4 of the reply, by enumerating all prefixes of three tokens."""
    size, joints = SMALL_VOCABULARY, []
    for prompt in SMALL_PROMPTS:
        prefixes = torch.tensor([[*prompt, *prefix] for prefix in itertools.product(range(size), repeat=3)])
        positions = torch.arange(prefixes.shape[1]).expand_as(prefixes)
        output = small_verifier().encode(prefixes, positions, torch.zeros_like(prefixes), ())
        logits = small_verifier().logits(output.last_hidden_state[:, len(prompt) - 1 :]).view(size, size, size, 4, size)

        def after(rows: Tensor) -> Tensor:
            return torch.stack([reference_distribution(row, **SAMPLERS[sampler]) for row in rows.reshape(-1, size)]).view(rows.shape)

        first, second, third = after(logits[0, 0, 0, 0]), after(logits[:, 0, 0, 1]), after(logits[:, :, 0, 2])
        fourth = after(logits[:, :, :, 3])
        joints.append(torch.einsum("a,ab,abc,abcd->bcd", first, second, third, fourth).flatten())
    return torch.stack(joints)


def p_value_of_tokens_2_to_4(sampler: str, drafter: Drafter | None, draws: int = DRAWS, **options: Any) -> float:
    """Chi-square test of the joint of reply tokens 2 to 4, summed over the prompts, from `draws` rows of the full engine.

    `options`: of `SamplingParams`, which must not change the distribution.
    """
    counts = torch.zeros(len(SMALL_PROMPTS), SMALL_VOCABULARY**3, dtype=torch.int64)
    for seed in range(draws // ROWS):
        params = SamplingParams(**SAMPLERS[sampler], max_new_tokens=5, ignore_eos=True, seed=seed, **options)
        prompts = SMALL_PROMPTS * (ROWS // len(SMALL_PROMPTS))
        replies = torch.tensor(generate(small_verifier(), drafter, prompts, params, num_draft_tokens=3).token_ids)
        cells = (replies[:, 1] * SMALL_VOCABULARY + replies[:, 2]) * SMALL_VOCABULARY + replies[:, 3]
        for prompt in range(len(SMALL_PROMPTS)):
            counts[prompt] += cells[prompt :: len(SMALL_PROMPTS)].bincount(minlength=SMALL_VOCABULARY**3)
    tests = [chi_square(observed, expected) for observed, expected in zip(counts, exact_joint(sampler), strict=True)]
    return chi_square_survival(sum(statistic for statistic, _ in tests), sum(freedom for _, freedom in tests))


@pytest.mark.parametrize("drafter", [BlockTable(SMALL_VOCABULARY), SequentialTable(SMALL_VOCABULARY)], ids=["parallel", "sequential"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_sampled_replies_follow_the_verifier(sampler: str, drafter: Drafter) -> None:
    assert p_value_of_tokens_2_to_4(sampler, drafter) > 1e-3


def test_sampled_replies_follow_the_verifier_with_deterministic_drafts_of_ragged_lengths() -> None:
    assert p_value_of_tokens_2_to_4(TOP_P, RandomTokens(SMALL_VOCABULARY)) > 1e-3


@pytest.mark.parametrize(
    "drafter", [SequentialTable(SMALL_VOCABULARY), RandomTokens(SMALL_VOCABULARY)], ids=["sampled", "point-mass, ragged"]
)
def test_block_verification_keeps_replies_distributed_as_the_verifier(drafter: Drafter) -> None:
    assert p_value_of_tokens_2_to_4(TEMPERATURE, drafter, 50_000, verification="block") > 1e-3


def test_block_verification_accepts_more_drafts_than_standard_verification() -> None:
    accepted = {}
    for verification in ("standard", "block"):
        sampling = SamplingParams(temperature=1.0, max_new_tokens=5, ignore_eos=True, verification=verification)  # type: ignore[arg-type]
        rounds = generate(small_verifier(), SequentialTable(SMALL_VOCABULARY), SMALL_PROMPTS * 1000, sampling, num_draft_tokens=3).rounds
        accepted[verification] = sum(row[0].accepted for row in rounds)
    assert accepted["block"] > 1.01 * accepted["standard"]


# The same test must notice a wrong engine. Each fault replaces one pure function.


def assert_fault_is_noticed(sampler: str, draws: int = 35_000) -> None:
    # A third of the draws that a right engine has to pass shows most faults.
    assert p_value_of_tokens_2_to_4(sampler, SequentialTable(SMALL_VOCABULARY), draws) < 1e-3


def draw_drafts_from(monkeypatch: pytest.MonkeyPatch, other: Callable[[Tensor], Tensor]) -> None:
    """Drafts are drawn from `other(probabilities)` but verified against the probabilities."""
    original = sampling.draw
    monkeypatch.setattr(sampling, "draw", lambda distribution, uniforms: original(other(distribution), uniforms))


def test_residual_that_is_not_subtracted_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "residual", lambda p, q, token: p.double())
    assert_fault_is_noticed(TEMPERATURE)


def test_top_p_on_the_draft_side_only_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    without_top_p = SamplingParams(temperature=0.7)
    monkeypatch.setattr(batch, "probabilities", lambda logits, params, seen: sampling.probabilities(logits, without_top_p))
    assert_fault_is_noticed(TOP_P)


def test_drafts_drawn_without_the_top_p_they_are_verified_with_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = sampling.probabilities
    without_top_p: list[Tensor] = []

    def probabilities(logits: Tensor, params: SamplingParams, seen: Tensor | None = None) -> Tensor:
        without_top_p[:] = [original(logits, SamplingParams(temperature=params.temperature))]
        return original(logits, params, seen)

    monkeypatch.setattr(sampling, "probabilities", probabilities)
    draw_drafts_from(monkeypatch, lambda distribution: without_top_p[0])
    assert_fault_is_noticed(TOP_P)


def test_draft_probabilities_of_another_temperature_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    draw_drafts_from(monkeypatch, lambda distribution: distribution.pow(0.7))
    assert_fault_is_noticed(TEMPERATURE)


def test_draft_probabilities_of_another_dtype_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    # Logits near 60, where bfloat16 numbers are 0.25 apart.
    draw_drafts_from(monkeypatch, lambda distribution: (distribution.log() + 60).bfloat16().float().softmax(-1))
    assert_fault_is_noticed(TEMPERATURE, DRAWS)
