"""The engine's bookkeeping: stops, budgets, ragged rows, what drafters observe, statistics, seeds and errors."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from tiny_models import tiny_verifier
from torch import Tensor
from toy_drafters import BlockTable, Constant, Oracle, RandomTokens, SequentialTable, ToyDrafter, ToyState

from speculators.decoding import batch
from speculators.decoding.cache import KeyValueCache
from speculators.decoding.engine import Generation, generate
from speculators.decoding.length_schedules import ConfidenceThreshold, FixedLength, PrefixScheduler
from speculators.decoding.prompt_lookup import PromptLookup, PromptLookupState
from speculators.decoding.proposal import DraftSampler, Observation, Proposal
from speculators.decoding.sampling import SamplingParams
from speculators.decoding.statistics import (
    Round,
    acceptance_length,
    accepted_by_position,
    conditional_acceptance_by_position,
    mean_proposed,
    proposed_by_position,
    verification_rate,
)
from speculators.errors import ConfigError, DataError
from speculators.verifier import Verifier, VerifierOutput

VOCABULARY = 64
PROMPTS = [[11, 12, 13, 14, 15], [4, 5], [9, 8, 7, 6, 5, 4, 3, 2], [40]]


@cache
def verifier() -> Verifier:
    return tiny_verifier("llama", vocab_size=VOCABULARY, layers=2)


def plain(max_new_tokens: int = 24, prompts: list[list[int]] = PROMPTS, **options: object) -> Generation:
    return generate(verifier(), None, prompts, SamplingParams(max_new_tokens=max_new_tokens, **{"ignore_eos": True, **options}))  # type: ignore[arg-type]


def oracle(accept: list[int] | None = None, prompts: list[list[int]] = PROMPTS) -> Oracle:
    return Oracle(prompts, plain(48, prompts).token_ids, VOCABULARY, accept)


def first_repeats(tokens: list[int], length: int) -> bool:
    return len(set(tokens[:length])) < length


# -- where a reply ends --------------------------------------------------------------------------------------


def test_reply_ends_at_a_stop_token_accepted_inside_a_block() -> None:
    reference = plain(prompts=PROMPTS[:1]).token_ids[0]
    assert not first_repeats(reference, 3)
    for place in (0, 1, 2, 3, 6, 7):  # first token; inside a block; the bonus token; the next block
        stop = reference[place]
        expected = reference[: reference.index(stop) + 1]
        result = generate(verifier(), oracle(prompts=PROMPTS[:1]), PROMPTS[:1], SamplingParams(stop_token_ids=(stop,)), num_draft_tokens=5)
        assert result.token_ids == [expected]
        assert result.finish_reasons == ["stop"]
        assert 1 + sum(r.emitted for r in result.rounds[0]) == len(expected)


def test_round_that_accepts_a_stop_token_counts_no_bonus_and_no_draft_after_it() -> None:
    reference = plain(prompts=PROMPTS[:1]).token_ids[0]
    result = generate(
        verifier(), oracle(prompts=PROMPTS[:1]), PROMPTS[:1], SamplingParams(stop_token_ids=(reference[2],)), num_draft_tokens=5
    )
    assert result.rounds == [[Round(proposed=2, accepted=2, emitted=2)]]


@pytest.mark.parametrize("max_new_tokens", range(1, 9))
def test_budget_is_met_exactly_with_a_perfect_drafter(max_new_tokens: int) -> None:
    result = generate(verifier(), oracle(), PROMPTS, SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True), num_draft_tokens=6)
    assert result.token_ids == plain(max_new_tokens).token_ids
    assert [len(reply) for reply in result.token_ids] == [max_new_tokens] * 4
    assert result.finish_reasons == ["length"] * 4
    for rounds in result.rounds:
        remaining = max_new_tokens - 1
        for r in rounds:
            assert r.proposed == min(6, remaining - 1)
            remaining -= r.emitted
        assert remaining == 0


def test_stop_token_wins_when_it_falls_on_the_last_token_of_the_budget() -> None:
    reference = plain(prompts=PROMPTS[:1]).token_ids[0]
    sampling = SamplingParams(max_new_tokens=3, stop_token_ids=(reference[2],))
    result = generate(verifier(), oracle(prompts=PROMPTS[:1]), PROMPTS[:1], sampling, num_draft_tokens=6)
    assert (result.token_ids, result.finish_reasons) == ([reference[:3]], ["stop"])


def test_a_drafted_stop_token_that_the_verifier_rejects_ends_nothing() -> None:
    stop = next(token for token in range(VOCABULARY) if all(token not in reply for reply in plain().token_ids))
    sampling = SamplingParams(max_new_tokens=24, stop_token_ids=(stop,))
    result = generate(verifier(), Constant(stop), PROMPTS, sampling)
    assert result.token_ids == plain().token_ids
    assert result.finish_reasons == ["length"] * 4


def test_rows_end_independently_and_take_no_further_rounds() -> None:
    replies = plain().token_ids
    stop = replies[0][4]
    sampling = SamplingParams(max_new_tokens=24, stop_token_ids=(stop,))
    expected = [reply[: reply.index(stop) + 1] if stop in reply else reply for reply in replies]
    assert len({len(reply) for reply in expected}) > 1
    result = generate(verifier(), oracle([1]), PROMPTS, sampling, num_draft_tokens=3)
    assert result.token_ids == expected
    for reply, rounds in zip(result.token_ids, result.rounds, strict=True):
        assert 1 + sum(r.emitted for r in rounds) == len(reply)
        assert all(r.emitted > 0 for r in rounds)
    assert max(len(rounds) for rounds in result.rounds) == result.verify_forwards


def test_stop_tokens_default_to_the_verifiers_and_can_be_ignored() -> None:
    prompts = [[token] for token in range(VOCABULARY)]
    stop = verifier().stop_token_ids
    stopped = generate(verifier(), None, prompts, SamplingParams(max_new_tokens=24))
    ignored = generate(verifier(), None, prompts, SamplingParams(max_new_tokens=24, ignore_eos=True))
    assert stop == (VOCABULARY - 1,)
    assert {"stop", "length"} == set(stopped.finish_reasons)
    for short, long in zip(stopped.token_ids, ignored.token_ids, strict=True):
        assert short == (long[: long.index(stop[0]) + 1] if stop[0] in long else long)


# -- what drafters see ---------------------------------------------------------------------------------------


class Tapping(RandomTokens):
    aux_hidden_state_layer_ids = (0, 1, 2)


def test_cache_and_observations_advance_by_the_anchor_and_the_accepted_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    # Prompt of 5 tokens, 2 drafts accepted, then 0.
    cache_lengths: list[int] = []
    forward = Verifier.forward

    def spy(self: Verifier, input_ids: Tensor, cache: KeyValueCache, taps: tuple[int, ...] = (), **options: Any) -> VerifierOutput:
        cache_lengths.append(int(cache.lengths))
        return forward(self, input_ids, cache, taps, **options)

    monkeypatch.setattr(Verifier, "forward", spy)
    drafter = oracle([2, 0, 0], PROMPTS[:1])
    cache_lengths.clear()
    result = generate(verifier(), drafter, PROMPTS[:1], SamplingParams(max_new_tokens=12, ignore_eos=True), num_draft_tokens=4)
    assert [r.accepted for r in result.rounds[0][:3]] == [2, 0, 0]
    assert cache_lengths[:4] == [0, 5, 8, 9]
    observations = drafter.state.observations[:3]
    assert [int(o.start) for o in observations] == [0, 5, 8]
    assert [int(o.counts) for o in observations] == [5, 3, 1]


@pytest.mark.parametrize("prefill_width", [512, 3, 1])
def test_observations_join_to_the_sequence_and_its_hidden_states(prefill_width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "PREFILL_WIDTH", prefill_width)
    drafter = Tapping(VOCABULARY)
    result = generate(verifier(), drafter, PROMPTS, SamplingParams(max_new_tokens=20, ignore_eos=True), num_draft_tokens=4)
    assert result.token_ids == plain(20).token_ids
    for row, prompt in enumerate(PROMPTS):
        valid = [
            (o.token_ids[row, :count], o.next_token_ids[row, :count], o.hidden_states[row, :count])
            for o in drafter.state.observations
            if (count := int(o.counts[row]))
        ]
        tokens, following, hidden = (torch.cat(part) for part in zip(*valid, strict=True))
        sequence = torch.tensor(prompt + result.token_ids[row])
        assert len(tokens) >= len(sequence) - 1 - 5  # all but the last block, which ended the row
        assert torch.equal(tokens, sequence[: len(tokens)])
        assert torch.equal(following, sequence[1 : len(tokens) + 1])
        positions = torch.arange(len(tokens))[None]
        expected = verifier().encode(tokens[None], positions, torch.zeros_like(positions), (0, 1, 2)).hidden_states
        torch.testing.assert_close(hidden, expected[0], rtol=1e-4, atol=1e-5)


def test_draft_state_has_room_for_every_block() -> None:
    drafter = RandomTokens(VOCABULARY)
    generate(verifier(), drafter, PROMPTS, SamplingParams(max_new_tokens=20, ignore_eos=True), num_draft_tokens=7)
    ends = [int((o.start + o.token_ids.shape[1]).max()) for o in drafter.state.observations]
    assert max(ends) <= drafter.state.max_length
    assert drafter.state.max_length >= max(map(len, PROMPTS)) + 20 + 7


def test_drafter_is_asked_for_the_same_number_of_drafts_in_every_round() -> None:
    # Its predictions may depend on K, and another row's budget must not change this row's drafts.
    asked: list[int] = []

    class Asked(RandomTokens):
        def propose(self, state: ToyState, anchor: Tensor, sampler: DraftSampler, num_draft_tokens: int) -> Proposal:
            asked.append(num_draft_tokens)
            return super().propose(state, anchor, sampler, num_draft_tokens)

    generate(verifier(), Asked(VOCABULARY), PROMPTS, SamplingParams(max_new_tokens=9, ignore_eos=True), num_draft_tokens=5)
    assert set(asked) == {5}


@pytest.mark.parametrize("prefill_width", [512, 3])
def test_drafters_are_told_how_long_rows_can_be_without_asking_the_device(prefill_width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "PREFILL_WIDTH", prefill_width)
    for drafter in (oracle(), oracle([0, 2]), RandomTokens(VOCABULARY)):
        generate(verifier(), drafter, PROMPTS, SamplingParams(max_new_tokens=20, ignore_eos=True), num_draft_tokens=4)
        for o in drafter.state.observations:
            longest = int((o.start + o.counts).max())
            assert o.longest is not None and longest <= o.longest <= longest + o.token_ids.shape[1]


# -- lengths that change from round to round -----------------------------------------------------------------


class Rotating(FixedLength):
    """Drafts 0, 1, 2, 3, 0, 1, .. tokens."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def draft_tokens(self, limit: int) -> int:
        self.asked.append(len(self.asked) % (limit + 1))
        return self.asked[-1]


def test_rounds_draft_and_verify_no_more_than_the_schedule_says(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain(12, PROMPTS[:1]).token_ids
    widths: list[int] = []
    drafted: list[int] = []
    forward = Verifier.forward

    def spy(self: Verifier, input_ids: Tensor, cache: KeyValueCache, taps: tuple[int, ...] = (), **options: Any) -> VerifierOutput:
        widths.append(input_ids.shape[1])
        return forward(self, input_ids, cache, taps, **options)

    class Asked(SequentialTable):
        def propose(self, state: ToyState, anchor: Tensor, sampler: DraftSampler, num_draft_tokens: int) -> Proposal:
            drafted.append(num_draft_tokens)
            return super().propose(state, anchor, sampler, num_draft_tokens)

    monkeypatch.setattr(Verifier, "forward", spy)
    schedule = Rotating()
    sampling = SamplingParams(max_new_tokens=12, ignore_eos=True)
    result = generate(verifier(), Asked(VOCABULARY), PROMPTS[:1], sampling, num_draft_tokens=3, schedule=schedule)
    assert result.token_ids == expected
    assert drafted == [k for k in schedule.asked if k], "rounds without drafts do not ask the drafter"
    budget = [12 - 1 - sum(r.emitted for r in result.rounds[0][:i]) - 1 for i in range(len(result.rounds[0]))]
    assert widths[1:] == [1 + min(k, left) for k, left in zip(schedule.asked, budget, strict=True)]


def test_a_sequential_drafter_stops_where_every_block_will_be_cut() -> None:
    calls: list[int] = []

    class Counted(SequentialTable):
        def propose(self, state: ToyState, anchor: Tensor, sampler: DraftSampler, num_draft_tokens: int) -> Proposal:
            proposal = super().propose(state, anchor, sampler, num_draft_tokens)
            calls.append(proposal.token_ids.shape[1])
            return proposal

    sampling = SamplingParams(max_new_tokens=16, ignore_eos=True)
    never = generate(verifier(), Counted(VOCABULARY), PROMPTS, sampling, schedule=ConfidenceThreshold(1.0))
    assert set(calls) == {1}, "one draft shows a confidence below 1, and no further pass is made"
    assert never.token_ids == plain(16).token_ids and {r.proposed for row in never.rounds for r in row} == {0}
    calls.clear()
    always = generate(verifier(), Counted(VOCABULARY), PROMPTS, sampling, schedule=ConfidenceThreshold(0.0))
    assert always.token_ids == plain(16).token_ids and max(calls) == 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafters_without_a_confidence_head_are_cut_by_their_own_probabilities(temperature: float) -> None:
    seen: list[Tensor] = []

    class Seen(ConfidenceThreshold):
        def lengths(self, confidence: Tensor | None, available: Tensor, active: Tensor) -> Tensor:
            assert confidence is not None
            seen.append(confidence)
            return super().lengths(confidence, available, active)

    drafter = BlockTable(VOCABULARY)
    sampling = SamplingParams(max_new_tokens=2, temperature=temperature)
    result = generate(verifier(), drafter, PROMPTS, sampling, schedule=Seen(0.5))
    anchors = torch.tensor([reply[0] for reply in result.token_ids])
    expected = drafter.logits[anchors, :4].softmax(-1).amax(-1)  # no token enters: it may decide whether the token is verified
    torch.testing.assert_close(seen[0], expected)


def test_losing_the_draft_state_in_the_middle_leaves_the_output_unchanged() -> None:
    class Forgetful(PromptLookup):
        def observe(self, state: PromptLookupState, observation: Observation) -> None:
            super().observe(state, observation)
            if int(observation.start.max()) in range(14, 20):
                state.token_ids.zero_()
                state.lengths = torch.zeros_like(state.lengths)

    result = generate(verifier(), Forgetful(), PROMPTS, SamplingParams(max_new_tokens=24, ignore_eos=True))
    assert result.token_ids == plain().token_ids


# -- confidence ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("threshold", "proposed"), [(0.0, 4), (0.3, 4), (0.5, 1), (0.9, 1), (0.91, 0), (1.0, 0)])
def test_drafts_are_dropped_from_the_first_one_below_the_confidence_threshold(threshold: float, proposed: int) -> None:
    drafter = BlockTable(VOCABULARY, confidence=(0.9, 0.4, 0.95, 0.6))
    sampling = SamplingParams(max_new_tokens=24, ignore_eos=True)
    result = generate(verifier(), drafter, PROMPTS, sampling, num_draft_tokens=4, confidence_threshold=threshold)
    assert result.token_ids == plain().token_ids
    assert {r.proposed for rounds in result.rounds for r in rounds[:-4]} == {proposed}


# -- streaming, statistics, memory ---------------------------------------------------------------------------


def test_streamed_tokens_join_to_the_replies() -> None:
    streamed: list[list[int]] = [[] for _ in PROMPTS]
    sampling = SamplingParams(max_new_tokens=24)
    result = generate(verifier(), oracle([2, 0, 1]), PROMPTS, sampling, on_tokens=lambda row, tokens: streamed[row].extend(tokens))
    assert streamed == result.token_ids


def test_plain_decoding_emits_one_token_a_round() -> None:
    result = plain(24)
    assert result.verify_forwards == 23
    assert result.rounds == [[Round(0, 0, 1)] * 23] * 4


def test_acceptance_statistics_of_four_known_rounds() -> None:
    # The last round accepts a stop token as its second draft.
    rounds = [Round(3, 2, 3), Round(3, 0, 1), Round(3, 3, 4), Round(2, 2, 2)]
    assert acceptance_length(rounds) == 2.5
    assert mean_proposed(rounds) == 2.75
    assert verification_rate(rounds) == pytest.approx(2 / 3)
    assert proposed_by_position(rounds) == [4, 4, 3]
    assert accepted_by_position(rounds) == [3, 3, 1]
    assert conditional_acceptance_by_position(rounds) == [3 / 4, 1.0, 1 / 2]
    per_reply = [acceptance_length(rounds[:1]), acceptance_length(rounds[1:])]
    assert sum(per_reply) / 2 == pytest.approx(8 / 3)
    with_bonus_after_stop = [acceptance_length(rounds[:1]), acceptance_length([*rounds[1:3], Round(3, 2, 3)])]
    assert sum(with_bonus_after_stop) / 2 == pytest.approx(17 / 6)


def test_acceptance_statistics_of_no_rounds_are_zero() -> None:
    assert (acceptance_length([]), mean_proposed([]), verification_rate([]), accepted_by_position([])) == (0.0, 0.0, 0.0, [])


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_verifying_in_memory_sized_parts_changes_nothing(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = SamplingParams(temperature=temperature, repetition_penalty=1.2, max_new_tokens=20, ignore_eos=True)
    whole = generate(verifier(), SequentialTable(VOCABULARY), PROMPTS, sampling)
    monkeypatch.setattr(batch, "MAX_ELEMENTS", 1)
    assert generate(verifier(), SequentialTable(VOCABULARY), PROMPTS, sampling).token_ids == whole.token_ids


# -- seeds ---------------------------------------------------------------------------------------------------

SAMPLED = SamplingParams(temperature=1.0, top_p=0.95, max_new_tokens=20, ignore_eos=True, seed=5)


@pytest.mark.parametrize(
    "drafter", [None, BlockTable(VOCABULARY), SequentialTable(VOCABULARY), PromptLookup()], ids=lambda d: type(d).__name__
)
def test_equal_seeds_give_equal_replies(drafter: ToyDrafter | PromptLookup | None) -> None:
    first = generate(verifier(), drafter, PROMPTS, SAMPLED)
    second = generate(verifier(), drafter, PROMPTS, SAMPLED)
    assert (first.token_ids, first.rounds) == (second.token_ids, second.rounds)


def test_other_seeds_and_other_rows_give_other_replies() -> None:
    drafter = SequentialTable(VOCABULARY)
    replies = [
        reply
        for seed in range(4)
        for reply in generate(
            verifier(), drafter, [PROMPTS[0]] * 4, SamplingParams(temperature=1.0, max_new_tokens=20, seed=seed)
        ).token_ids
    ]
    assert len({tuple(reply) for reply in replies}) == 16


@pytest.mark.parametrize("drafter", [None, BlockTable(VOCABULARY), SequentialTable(VOCABULARY)], ids=lambda d: type(d).__name__)
def test_a_rows_reply_does_not_depend_on_the_other_rows(drafter: ToyDrafter | None) -> None:
    together = generate(verifier(), drafter, PROMPTS, SAMPLED)
    others = [[1], PROMPTS[1], [2] * 30, PROMPTS[3], [3, 4, 5]]
    mixed = generate(verifier(), drafter, others, SAMPLED)
    alone = generate(verifier(), drafter, PROMPTS[:1], SAMPLED)
    assert [mixed.token_ids[row] for row in (1, 3)] == [together.token_ids[row] for row in (1, 3)]
    assert alone.token_ids[0] == together.token_ids[0]
    assert alone.rounds[0] == together.rounds[0]


# -- errors --------------------------------------------------------------------------------------------------


def test_more_drafts_than_the_drafter_proposes_are_refused_naming_both() -> None:
    with pytest.raises(ConfigError, match="num_draft_tokens 17 must be between 1 and 16, the most that BlockTable proposes"):
        generate(verifier(), BlockTable(VOCABULARY), PROMPTS, num_draft_tokens=17)
    with pytest.raises(ConfigError, match="num_draft_tokens 0 must be between 1 and 16"):
        generate(verifier(), BlockTable(VOCABULARY), PROMPTS, num_draft_tokens=0)


def test_a_threshold_needs_a_drafter_with_confidence_and_is_refused_before_the_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Verifier, "forward", lambda *args: pytest.fail("nothing may run"))
    with pytest.raises(ConfigError, match=r"confidence_threshold 0\.5 needs a drafter with a confidence .* RandomTokens has none"):
        generate(verifier(), RandomTokens(VOCABULARY), PROMPTS, confidence_threshold=0.5)
    with pytest.raises(ConfigError, match="PrefixScheduler needs a drafter with a confidence"):
        generate(verifier(), RandomTokens(VOCABULARY), PROMPTS, schedule=PrefixScheduler(torch.ones(20)))
    with pytest.raises(ConfigError, match=r"confidence_threshold 1\.5 must be between 0"):
        generate(verifier(), RandomTokens(VOCABULARY), PROMPTS, confidence_threshold=1.5)


def test_two_ways_to_choose_lengths_are_refused() -> None:
    with pytest.raises(ConfigError, match="confidence_threshold and schedule each choose"):
        generate(verifier(), BlockTable(VOCABULARY), PROMPTS, confidence_threshold=0.5, schedule=FixedLength())
    with pytest.raises(ConfigError, match="num_draft_tokens='auto' and confidence_threshold each choose"):
        generate(verifier(), BlockTable(VOCABULARY), PROMPTS, confidence_threshold=0.5, num_draft_tokens="auto")
    with pytest.raises(ConfigError, match=r"num_draft_tokens 1\.5 must be a whole number or 'auto'"):
        generate(verifier(), BlockTable(VOCABULARY), PROMPTS, num_draft_tokens=1.5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'several' must be a whole number or 'auto'"):
        generate(verifier(), BlockTable(VOCABULARY), PROMPTS, num_draft_tokens="several")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="True must be a whole number or 'auto'"):
        generate(verifier(), BlockTable(VOCABULARY), PROMPTS, num_draft_tokens=True)  # type: ignore[arg-type]


def test_unusable_prompts_are_refused_naming_the_prompt() -> None:
    with pytest.raises(DataError, match="no prompts"):
        generate(verifier(), None, [])
    with pytest.raises(DataError, match="prompt 1 is empty"):
        generate(verifier(), None, [[1], []])
    for prompts, shown in (([1, 2], "1;"), (torch.tensor([[1, 2]]), r"tensor\(\[1, 2\]\)"), (["Why?"], "'Why"), ([[1.5]], r"\[1\.5\]")):
        with pytest.raises(DataError, match=f"prompt 0 must be a list of token ids, .* this one is {shown}"):
            generate(verifier(), None, prompts)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="prompt 1 holds token ids outside 0 to 63"):
        generate(verifier(), None, [[1], [64]])
    with pytest.raises(DataError, match="prompt 0 has 400 tokens, with max_new_tokens 128 that exceeds the context of 512 tokens"):
        generate(verifier(), None, [[1] * 400])


def test_a_drafter_that_proposes_more_than_asked_is_named() -> None:
    class Eager(ToyDrafter):
        def propose(self, state: ToyState, anchor: Tensor, sampler: DraftSampler, num_draft_tokens: int) -> Proposal:
            return sampler.point_mass(anchor[:, None].expand(-1, num_draft_tokens + 1))

    with pytest.raises(ConfigError, match=r"Eager\.propose returned 5 drafts for 4 rows, asked for at most 4"):
        generate(verifier(), Eager(), PROMPTS)
