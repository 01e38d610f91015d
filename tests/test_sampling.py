"""Logits to tokens: the pipeline equals transformers', draws follow their distribution, random numbers depend only on their counter."""

import math

import pytest
import torch
from goodness_of_fit import chi_square_p_value
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from speculators.decoding import sampling
from speculators.decoding.proposal import Proposal
from speculators.decoding.randomness import Purpose, uniform
from speculators.decoding.sampling import RoundSampler, SamplingParams, draw, penalised, probabilities
from speculators.errors import ConfigError

ROUND = torch.tensor(3)


def logits_of(rows: int = 5, vocabulary: int = 101) -> Tensor:
    return 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.6},
        {"top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"repetition_penalty": 1.3},
        {"temperature": 1.7, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2},
        {"top_k": 1},
        {"top_p": 1e-6},
        {"top_k": 1000},
    ],
    ids=str,
)
def test_pipeline_equals_transformers_processors_in_their_order(options: dict[str, float]) -> None:
    params = SamplingParams(**{"temperature": 1.0, **options})  # type: ignore[arg-type]
    logits = logits_of()
    context = torch.randint(101, (5, 12), generator=torch.Generator().manual_seed(1))
    processors = LogitsProcessorList()
    processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    processors.append(TemperatureLogitsWarper(float(params.temperature)))
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    processors.append(TopPLogitsWarper(params.top_p))
    processors.append(MinPLogitsWarper(params.min_p))
    expected = processors(context, logits.clone()).softmax(-1)

    seen = torch.zeros(5, 101, dtype=torch.bool).scatter_(1, context, True)
    actual = probabilities(logits, params, seen)

    assert torch.equal(actual > 0, expected > 0)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7)


def test_penalty_divides_positive_logits_and_multiplies_negative_ones() -> None:
    params = SamplingParams(repetition_penalty=2.0)
    seen = torch.tensor([[True, True, False, False]])
    assert penalised(torch.tensor([[3.0, -3.0, 3.0, -3.0]]), params, seen).tolist() == [[1.5, -6.0, 3.0, -3.0]]


def test_nucleus_is_the_smallest_set_that_reaches_top_p() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    for top_p, expected in ((0.45, [1, 0, 0, 0]), (0.55, [0.625, 0.375, 0, 0]), (0.81, [10 / 19, 6 / 19, 3 / 19, 0])):
        actual = probabilities(logits, SamplingParams(temperature=1.0, top_p=top_p))
        torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float32), rtol=1e-5, atol=0)


def test_probabilities_are_float32_whatever_the_logits_are() -> None:
    assert probabilities(logits_of().bfloat16(), SamplingParams(temperature=0.5)).dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature = -0.1 must be at least 0"),
        ({"top_k": -1}, "top_k = -1 must be at least 0"),
        ({"top_p": 0.0}, "top_p = 0.0 must be above 0"),
        ({"top_p": 1.1}, "top_p = 1.1 must be above 0"),
        ({"min_p": 1.5}, "min_p = 1.5 must be between 0 and 1"),
        ({"temperature": 1e-40}, "temperature = 1e-40 must be 0 .greedy., or at least 1e-30"),
        ({"temperature": math.inf}, "temperature = inf must be .* finite"),
        ({"repetition_penalty": 0.0}, "repetition_penalty = 0.0 must be above 0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty = inf must be .* finite"),
        ({"max_new_tokens": 0}, "max_new_tokens = 0 must be at least 1"),
    ],
    ids=str,
)
def test_values_out_of_range_are_named_with_their_limit(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**options)  # type: ignore[arg-type]


def test_at_a_low_temperature_probabilities_of_large_logits_are_those_of_float64() -> None:
    logits = 9990 + 0.02 * logits_of()
    expected = (logits.double() / 0.01).softmax(-1)
    torch.testing.assert_close(probabilities(logits, SamplingParams(temperature=0.01)).double(), expected, rtol=1e-5, atol=0)


def test_the_coldest_temperature_takes_the_most_likely_token() -> None:
    assert torch.equal(probabilities(torch.tensor([3e4, 3.001e4, -7.0]), SamplingParams(temperature=1e-30)), torch.tensor([0.0, 1.0, 0.0]))


def test_stop_tokens_may_come_as_a_list_and_the_request_stays_a_key() -> None:
    listed = SamplingParams(stop_token_ids=[3, 5])  # type: ignore[arg-type]
    assert {listed: "kept"}[SamplingParams(stop_token_ids=(3, 5))] == "kept"


# -- drawing -------------------------------------------------------------------------------------------------


def test_draw_inverts_the_cumulative_distribution() -> None:
    distribution = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    uniforms = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2.0**-53], dtype=torch.float64)
    assert draw(distribution.expand(6, -1), uniforms).tolist() == [1, 1, 3, 3, 4, 4]


def test_draw_never_takes_a_token_of_probability_zero_even_when_rounding_leaves_less_than_one() -> None:
    distribution = torch.full((1, 1000), 1 / 3000, dtype=torch.float32)
    distribution[:, 900:] = 0
    assert draw(distribution, torch.tensor([1 - 2.0**-53], dtype=torch.float64)).tolist() == [899]


def test_draw_in_memory_sized_parts_equals_drawing_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    distribution, uniforms = logits_of(12).softmax(-1).view(4, 3, 101), torch.rand(4, 3, dtype=torch.float64)
    whole = draw(distribution, uniforms)
    monkeypatch.setattr(sampling, "MAX_ELEMENTS", 202)
    assert torch.equal(draw(distribution, uniforms), whole)


def test_draw_from_what_is_no_number_is_a_token() -> None:
    assert draw(torch.full((1, 5), float("nan")), torch.tensor([0.3], dtype=torch.float64)).tolist() == [4]


def test_draws_follow_the_distribution() -> None:
    distribution = torch.tensor([0.4, 0.3, 0.2, 0.05, 0.03, 0.02])
    rows = torch.arange(200_000)
    uniforms = uniform(7, Purpose.DRAFT, rows, ROUND, torch.tensor(0))
    counts = draw(distribution.expand(len(rows), -1), uniforms).bincount(minlength=6)
    assert chi_square_p_value(counts, distribution) > 1e-3


# -- random numbers ------------------------------------------------------------------------------------------


def splitmix64_finalizer(x: int) -> int:
    mask = (1 << 64) - 1
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
    return x ^ (x >> 31)


@pytest.mark.parametrize("seed", [0, 1, -5, 2**63 + 11])
def test_numbers_are_the_same_on_64_bit_tensors_as_on_unlimited_integers(seed: int) -> None:
    golden, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1
    actual = uniform(seed, Purpose.CORRECT, torch.tensor([[0], [9]]), ROUND, torch.arange(3))
    for i, row in enumerate((0, 9)):
        for slot in range(3):
            state = seed & mask
            for part in (Purpose.CORRECT, row, 3, slot):
                state = splitmix64_finalizer((state + (part + 1) * golden) & mask)
            assert actual[i, slot].item() == (state >> 11) / 2**53


def test_splitmix64_matches_its_published_first_outputs_for_seed_zero() -> None:
    golden, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1
    outputs = [splitmix64_finalizer(golden * n & mask) for n in (1, 2, 3)]
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_no_two_counters_share_a_number() -> None:
    numbers = [
        uniform(seed, purpose, torch.arange(50)[:, None], torch.tensor(round_index), torch.arange(8))
        for seed in range(3)
        for purpose in Purpose
        for round_index in range(5)
    ]
    assert torch.stack(numbers).unique().numel() == len(numbers) * 50 * 8


def test_every_part_of_the_counter_gives_other_uniform_and_uncorrelated_numbers() -> None:
    rows, slots = torch.arange(20_000), torch.arange(2)
    streams = []
    for seed in (0, 1):
        for purpose in Purpose:
            for round_index in (0, 1):
                streams += list(uniform(seed, purpose, rows[:, None], torch.tensor(round_index), slots).T)
    numbers = torch.stack(streams)
    assert 0 <= numbers.min() and numbers.max() < 1
    counts = torch.stack([(stream * 20).long().bincount(minlength=20) for stream in numbers])
    assert min(chi_square_p_value(count, torch.full((20,), 0.05)) for count in counts) > 1e-4
    correlation = numbers.corrcoef() - torch.eye(len(numbers))
    assert correlation.abs().max() < 5 / 20_000**0.5  # five standard deviations
    assert (numbers[:, 1:] * numbers[:, :-1]).mean().sub(0.25).abs() < 5e-3  # neighbouring rows


# -- the draft sampler ---------------------------------------------------------------------------------------


def round_sampler(seen: Tensor | None = None, rows: int = 5, **options: float) -> RoundSampler:
    return RoundSampler(SamplingParams(**options), torch.arange(rows), ROUND, seen)  # type: ignore[arg-type]


def test_stored_draft_probabilities_are_bitwise_those_drawn_from() -> None:
    logits = logits_of(20).view(5, 4, 101).bfloat16()
    options = {"temperature": 0.7, "top_p": 0.9}
    block = round_sampler(**options)
    block.draw_block(logits)
    sequential = round_sampler(**options)
    for k in range(4):
        sequential.draw(logits[:, k])
    expected = probabilities(logits, SamplingParams(**options))
    uniforms = uniform(0, Purpose.DRAFT, torch.arange(5)[:, None], ROUND, torch.arange(4))
    for proposal in (block.proposal(), sequential.proposal()):
        assert proposal.probabilities is not None
        assert torch.equal(proposal.probabilities, expected)
        assert torch.equal(draw(proposal.probabilities, uniforms), proposal.token_ids)
        assert proposal.probabilities.gather(-1, proposal.token_ids[..., None]).min() > 0


def test_greedy_drafts_are_argmaxes_without_probabilities() -> None:
    logits = logits_of(20).view(5, 4, 101)
    sampler = round_sampler()
    assert torch.equal(sampler.draw_block(logits), logits.argmax(-1))
    assert sampler.proposal().probabilities is None


def test_an_earlier_draft_is_penalised_in_later_slots() -> None:
    logits = torch.tensor([2.0, 1.9, 1.8, 0.1]).expand(2, 3, 4)
    seen = torch.zeros(2, 4, dtype=torch.bool)
    seen[1, 0] = True
    expected = [[0, 1, 2], [1, 2, 0]]
    assert round_sampler(seen, rows=2, repetition_penalty=1.5).draw_block(logits).tolist() == expected
    sampler = round_sampler(seen, rows=2, repetition_penalty=1.5)
    assert torch.stack([sampler.draw(logits[:, k]) for k in range(3)], dim=1).tolist() == expected
    assert seen.sum() == 1, "the request's own record changes only when tokens are committed"


def test_a_sampled_draft_without_its_probabilities_cannot_be_expressed() -> None:
    tokens, lengths = torch.zeros(1, 2, dtype=torch.int64), torch.tensor([2])
    with pytest.raises(TypeError, match="made by the sampler"):
        Proposal(tokens, lengths, None)
    with pytest.raises(TypeError, match="made by the sampler"):
        Proposal(tokens, lengths, torch.full((1, 2, 4), 0.25))
    sampler = round_sampler(rows=1, temperature=1.0)
    sampler.draw_block(torch.randn(1, 2, 4))
    assert sampler.proposal().probabilities is not None
    with pytest.raises(ConfigError, match="nothing to propose"):
        round_sampler().proposal()


def test_top_k_keeps_k_of_logits_that_are_equally_far_from_the_largest_in_float32() -> None:
    logits = torch.cat([torch.tensor([30.0]), torch.linspace(1e-7, 1e-6, 50)])[None]
    assert int((probabilities(logits, SamplingParams(temperature=1.0, top_k=5)) > 0).sum()) == 5
