"""The generator of training data: many slots, refilled, each at its own stage and temperature."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch
from tiny_models import tiny_verifier

from speculators.data.decode_step import draw_tokens
from speculators.data.generation import Job, Stage, StageResult, TokenGenerator
from speculators.errors import DataError
from speculators.verifier import Verifier

VOCABULARY = 64
STOP = VOCABULARY - 1


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    return tiny_verifier("llama", seed=1, vocab_size=VOCABULARY, initializer_range=0.8)  # its greedy output varies


def single(number: int, stage: Stage) -> Job[tuple[int, StageResult]]:
    result = yield stage
    return number, result


def run(verifier: Verifier, stages: Sequence[Stage], slots: int, **options: int) -> list[StageResult]:
    generator = TokenGenerator(verifier, slots=slots, **{"max_length": 96, **options})
    done = dict(generator.run(single(number, stage) for number, stage in enumerate(stages)))
    return [done[number] for number in range(len(stages))]


def greedy_reference(verifier: Verifier, prompt: Sequence[int], budget: int, stops: Sequence[int] = (STOP,)) -> list[int]:
    input_ids = torch.tensor([list(prompt)])
    output = verifier.model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        do_sample=False,
        max_new_tokens=budget,
        eos_token_id=list(stops),
        pad_token_id=0,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def random_prompts(count: int, longest: int = 20, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(STOP) for _ in range(draw.randint(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("slots", [1, 3, 16])
def test_greedy_jobs_of_mixed_length_equal_transformers_generate_through_slot_refills(verifier: Verifier, slots: int) -> None:
    prompts = random_prompts(11)
    budgets = [random.Random(i).randint(1, 24) for i in range(11)]
    results = run(verifier, [Stage(prompt, budget) for prompt, budget in zip(prompts, budgets, strict=True)], slots)
    for prompt, budget, result in zip(prompts, budgets, results, strict=True):
        assert result.context == prompt
        assert result.token_ids == greedy_reference(verifier, prompt, budget)


def test_a_shared_beginning_kept_in_the_slot_does_not_change_the_output(verifier: Verifier) -> None:
    beginning = random_prompts(1, longest=1, seed=3)[0] * 12
    prompts = [beginning + tail for tail in random_prompts(6, longest=4)] + [beginning]
    generator = TokenGenerator(verifier, slots=1, max_length=96)
    done = dict(generator.run(single(number, Stage(prompt, 6)) for number, prompt in enumerate(prompts)))
    for number, prompt in enumerate(prompts):
        assert done[number].token_ids == greedy_reference(verifier, prompt, 6)
    fed_without_reuse = sum(len(prompt) for prompt in prompts)
    assert generator.steps < fed_without_reuse  # the beginning was fed once, not seven times


def test_every_stop_token_ends_a_stage_and_is_part_of_the_result(verifier: Verifier) -> None:
    prompts = random_prompts(8)
    free = [greedy_reference(verifier, prompt, 12) for prompt in prompts]
    stops = {free[0][3], free[1][5], STOP}
    results = run(verifier, [Stage(prompt, 12, stop_token_ids=frozenset(stops)) for prompt in prompts], 4)
    assert any(result.stopped for result in results)
    for result, tokens in zip(results, free, strict=True):
        ends = [index for index, token in enumerate(tokens) if token in stops]
        assert result.token_ids == tokens[: ends[0] + 1 if ends else None]
        assert result.finish_reason == ("stop" if ends else "length")


def test_a_later_stage_follows_in_place_of_the_stop_token_or_behind_the_last_token(verifier: Verifier) -> None:
    prompts = random_prompts(7)
    stops = (greedy_reference(verifier, prompts[0], 9)[4], greedy_reference(verifier, prompts[1], 9)[2])

    def two_stages(number: int, keep_stop: bool) -> Job[tuple[int, StageResult, StageResult]]:
        first = yield Stage(prompts[number], 9, stop_token_ids=frozenset(stops))
        kept = first.token_ids[-1:] if first.stopped and keep_stop else []
        second = yield Stage([*kept, 5, 6, 7], 11)
        return number, first, second

    for keep_stop in (False, True):
        generator = TokenGenerator(verifier, slots=3, max_length=96)
        results = sorted(generator.run(two_stages(number, keep_stop) for number in range(7)), key=lambda result: result[0])
        assert {first.finish_reason for _, first, _ in results} == {"stop", "length"}
        for number, first, second in results:
            written = first.token_ids[:-1] if first.stopped and not keep_stop else first.token_ids
            context = [*prompts[number], *written, 5, 6, 7]
            assert first.token_ids == greedy_reference(verifier, prompts[number], 9, stops)
            assert second.context == context
            assert second.token_ids == greedy_reference(verifier, context, 11)


def test_a_greedy_slot_stays_greedy_among_sampling_ones(verifier: Verifier) -> None:
    prompts = random_prompts(9)
    results = run(verifier, [Stage(prompt, 15, temperature=(0.0, 0.7, 1.5)[i % 3]) for i, prompt in enumerate(prompts)], 4)
    greedy = [greedy_reference(verifier, prompt, 15) for prompt in prompts]
    assert [result.token_ids for result in results[::3]] == greedy[::3]
    assert all(result.token_ids != tokens for result, tokens in zip(results[2::3], greedy[2::3], strict=True))


def test_what_a_job_writes_depends_on_its_number_and_the_seed_but_not_on_the_slots(verifier: Verifier) -> None:
    stages = [Stage(prompt, 15, temperature=1.0) for prompt in [[4, 5, 6]] * 8]
    first = [result.token_ids for result in run(verifier, stages, 2, seed=1)]
    assert first == [result.token_ids for result in run(verifier, stages, 5, seed=1)]
    assert len({tuple(tokens) for tokens in first}) == len(stages)
    assert first != [result.token_ids for result in run(verifier, stages, 2, seed=2)]


def test_draws_over_all_uniform_numbers_have_the_softmax_probabilities() -> None:
    logits = torch.tensor([2.0, -1.0, 0.5, 0.0, 1.0])
    draws = 20_000
    uniform = (torch.arange(draws) + 0.5) / draws
    for temperature, min_p in ((1.0, 0.0), (0.7, 0.0), (2.0, 0.3)):
        expected = torch.softmax(logits.double() / temperature, -1)
        expected = torch.where(expected >= min_p * expected.max(), expected, 0.0)
        expected /= expected.sum()
        tokens = draw_tokens(
            logits.expand(draws, -1).clone(), torch.full((draws,), temperature), torch.full((draws,), min_p), uniform.float()
        )
        measured = torch.bincount(tokens, minlength=5).double() / draws
        assert (measured - expected).abs().max() <= 2 / draws  # evenly spread numbers leave no sampling error


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2.0**-24, 1.0])
def test_the_ends_of_the_uniform_range_draw_a_token_that_min_p_keeps(uniform: float) -> None:
    logits = torch.tensor([[-30.0, 1.0, 0.9, -30.0]])
    token = int(draw_tokens(logits, torch.ones(1), torch.tensor([0.1]), torch.tensor([uniform])))
    assert token == (1 if uniform == 0.0 else 2)


def test_abandon_if_ends_a_stage_after_64_tokens(verifier: Verifier) -> None:
    seen: list[int] = []

    def abandon(tokens: Sequence[int]) -> bool:
        seen.append(len(tokens))
        return True

    (result,) = run(verifier, [Stage([1], 90, temperature=1.0, stop_token_ids=frozenset(), abandon_if=abandon)], 2)
    assert (result.finish_reason, len(result.token_ids), seen) == ("abandoned", 64, [64])


def test_endless_jobs_end_when_the_time_is_over(verifier: Verifier) -> None:
    def endless():  # type: ignore[no-untyped-def]
        while True:
            yield single(0, Stage([1, 2], 3))

    clock = itertools.count()  # a second a look, so that the machine's speed decides nothing
    generator = TokenGenerator(verifier, slots=2, max_length=16)
    assert len(list(generator.run(endless(), seconds=30, clock=lambda: next(clock)))) >= 2
    assert generator.steps <= 31


def test_a_stage_that_does_not_fit_a_slot_is_refused_with_the_limit(verifier: Verifier) -> None:
    with pytest.raises(DataError, match=r"10 forced and 20 new tokens after 0 others does not fit into 24 positions"):
        run(verifier, [Stage([1] * 10, 20)], 2, max_length=24)
    with pytest.raises(DataError, match="at least one forced token"):
        run(verifier, [Stage([], 20)], 2)


def test_jobs_without_stages_are_handed_on(verifier: Verifier) -> None:
    def nothing() -> Job[str]:
        return "nothing to do"
        yield

    generator = TokenGenerator(verifier, slots=2, max_length=16)
    assert list(generator.run(nothing() for _ in range(3))) == ["nothing to do"] * 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_graphs_write_what_eager_steps_write() -> None:
    model = tiny_verifier("llama", seed=1, vocab_size=VOCABULARY, initializer_range=0.8).model.cuda()
    stages = [Stage(prompt, 150, temperature=(0.0, 1.0)[i % 2]) for i, prompt in enumerate(random_prompts(40, longest=90))]
    written = []
    for cuda_graphs in (True, False):
        generator = TokenGenerator(Verifier(model), slots=8, max_length=250, cuda_graphs=cuda_graphs)
        assert len(generator._step._graphs) == 2 * cuda_graphs  # for 128 and 250 positions
        written.append(dict(generator.run(single(number, stage) for number, stage in enumerate(stages))))
    assert written[0] == written[1]
