"""Length scheduling as pure functions and schedules: the paper's worked values, order and monotonicity, and what makes it lossless."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from speculators.decoding.batch_schedule import num_speculative_tokens_per_batch_size
from speculators.decoding.length_schedules import (
    AutoLength,
    ConfidenceThreshold,
    FixedLength,
    LengthSchedule,
    PrefixScheduler,
    StaleCapacityScheduler,
)
from speculators.decoding.scheduling import (
    admit_most_likely,
    best_capacity,
    prefix_schedule,
    survival,
    threshold_lengths,
    throughput_path,
)
from speculators.decoding.statistics import Round
from speculators.decoding.step_times import StepTimes, lower_convex_hull
from speculators.errors import ConfigError

# Two requests of three drafts each: survival (.9, .72, .36) and (.6, .3, .12).
CONFIDENCE = torch.tensor([[0.9, 0.8, 0.5], [0.6, 0.5, 0.4]], dtype=torch.float64)
EVERYTHING = torch.tensor([3, 3])
JAGGED = torch.tensor([0.0, 0.0, 1.0, 0.60, 0.59, 0.58, 0.57, 0.56, 0.55])


def affine(fixed: float, a_token: float, tokens: int = 8) -> Tensor:
    return 1 / (fixed + a_token * torch.arange(tokens + 1, dtype=torch.float64))


def a() -> Tensor:
    return survival(CONFIDENCE, EVERYTHING)


# -- worked values -------------------------------------------------------------------------------------------


def test_survival_is_the_product_of_confidences_and_zero_beyond_what_is_available() -> None:
    torch.testing.assert_close(a(), torch.tensor([[0.9, 0.72, 0.36], [0.6, 0.3, 0.12]], dtype=torch.float64))
    assert survival(CONFIDENCE, torch.tensor([1, 0])).tolist() == [[0.9, 0, 0], [0, 0, 0]]


def test_throughput_along_the_way_and_the_lengths_of_the_worked_example() -> None:
    path = throughput_path(a(), affine(10, 1), 2)
    expected = [0.16667, 0.22308, 0.25857, 0.28133, 0.28625, 0.28706, 0.27778]
    assert path.tolist() == pytest.approx(expected, abs=5e-6)
    assert prefix_schedule(a(), affine(10, 1)).tolist() == [3, 2]


@pytest.mark.parametrize(
    ("rates", "lengths", "theta", "following"),
    [
        (affine(4, 1), [2, 1], 0.46889, None),
        (affine(1, 1), [1, 0], 0.725, 0.724),
        (affine(100, 1), [3, 3], 0.046296, None),
    ],
)
def test_lengths_follow_the_price_of_a_token(rates: Tensor, lengths: list[int], theta: float, following: float | None) -> None:
    assert prefix_schedule(a(), rates).tolist() == lengths
    path = throughput_path(a(), rates, 2)
    admitted = sum(lengths)
    assert float(path[admitted]) == pytest.approx(theta, abs=5e-6)
    if following is not None:
        assert float(path[admitted + 1]) == pytest.approx(following, abs=5e-6)


def test_a_cliff_traps_the_early_stop_and_not_the_global_search() -> None:
    path = throughput_path(a(), JAGGED, 2)
    assert path.tolist() == pytest.approx([2.0, 1.74, 2.1358, 2.4476, 2.6106, 2.7328, 2.75], abs=5e-5)
    assert prefix_schedule(a(), JAGGED).tolist() == [0, 0]
    assert admit_most_likely(a(), best_capacity(a(), JAGGED)).tolist() == [3, 3]


def test_ties_go_to_the_smaller_position_then_to_the_smaller_request() -> None:
    tied = torch.full((3, 2), 0.5, dtype=torch.float64)  # drafts 1 and 2 equally likely, of three requests
    lengths = [admit_most_likely(tied, capacity).tolist() for capacity in range(7)]
    assert lengths == [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 1, 1], [2, 2, 1], [2, 2, 2]]


def test_improbable_drafts_are_never_admitted_and_equality_stops() -> None:
    assert admit_most_likely(torch.tensor([[0.5, 0.0], [0.0, 0.0]]), 4).tolist() == [1, 0]
    flat = torch.tensor([0.0, 1.5, 1.0])  # one draft of probability 1/2 earns exactly what it costs
    assert prefix_schedule(torch.tensor([[0.5]], dtype=torch.float64), flat).tolist() == [0]


def test_threshold_ends_a_block_before_its_first_unsure_draft() -> None:
    confidence = torch.tensor([[0.9, 0.4, 0.9], [0.5, 0.5, 0.5], [0.1, 0.9, 0.9]])
    assert threshold_lengths(confidence, 0.5).tolist() == [1, 3, 0]
    assert threshold_lengths(confidence, 0.0).tolist() == [3, 3, 3]


# GSM8K at thresholds 0.0 to 0.9 (DSpark, figure 5): acceptance length and tokens verified a step.
ACCEPTANCE_LENGTHS = [6.11, 6.11, 6.11, 6.12, 6.14, 6.13, 6.01, 5.74, 5.48, 4.56]
TOKENS_A_STEP = [7.95, 7.95, 7.95, 7.92, 7.87, 7.77, 7.51, 6.99, 6.34, 4.93]
VERIFICATION_RATES = [76.9, 76.9, 76.9, 77.2, 78.0, 78.9, 80.1, 82.1, 86.4, 92.5]


def test_threshold_sweep_has_the_published_shape() -> None:
    """Calibrated confidences of the published spread: flat acceptance up to 0.5, fewer tokens, and a rate that only rises."""
    rates = [100 * length / tokens for length, tokens in zip(ACCEPTANCE_LENGTHS, TOKENS_A_STEP, strict=True)]
    assert rates == pytest.approx(VERIFICATION_RATES, abs=0.35)  # our verification rate is theirs
    generator = torch.Generator().manual_seed(0)
    # Most blocks sure, some not: beta-like confidences around the published mean acceptance.
    logits = 2.6 + 1.6 * torch.randn(40_000, 1, generator=generator) + 0.6 * torch.randn(40_000, 7, generator=generator)
    confidence = logits.sigmoid()
    accepted = (torch.rand(confidence.shape, generator=generator) < confidence).long().cumprod(1).sum(1)
    lengths = [threshold_lengths(confidence, 0.1 * step) for step in range(10)]
    taus = [float(torch.minimum(accepted, kept).double().mean()) + 1 for kept in lengths]
    verified = [float(kept.double().mean()) + 1 for kept in lengths]
    assert all(x >= y for x, y in pairwise(verified))
    rate = [tau / tokens for tau, tokens in zip(taus, verified, strict=True)]
    assert all(x <= y for x, y in pairwise(rate))
    assert taus[5] > 0.97 * taus[0] and taus[9] < 0.85 * taus[0]
    assert rate[9] > 0.9


# -- losslessness --------------------------------------------------------------------------------------------


def retrospective(confidence: Tensor, rates: Tensor) -> Tensor:
    """The biased rule: the best of all lengths, judged with every confidence of the block."""
    a = survival(confidence, torch.full((len(confidence),), confidence.shape[1]))
    return admit_most_likely(a, best_capacity(a, rates))


def causal(confidence: Tensor, rates: Tensor) -> Tensor:
    return prefix_schedule(survival(confidence, torch.full((len(confidence),), confidence.shape[1])), rates)


PAPER_RATES = torch.tensor([0.0, 1.0, 0.5, 0.45], dtype=torch.float64)  # steps a second at 1, 2 and 3 tokens
SURE, HOPELESS = torch.tensor([[0.8, 0.9]], dtype=torch.float64), torch.tensor([[0.8, 0.0]], dtype=torch.float64)


def test_the_papers_counter_example_in_numbers() -> None:
    assert throughput_path(SURE.cumprod(1), PAPER_RATES, 1).tolist() == pytest.approx([1.0, 0.9, 1.134])
    assert throughput_path(HOPELESS.cumprod(1), PAPER_RATES, 1).tolist() == pytest.approx([1.0, 0.9, 0.81])
    assert [retrospective(c, PAPER_RATES).tolist() for c in (SURE, HOPELESS)] == [[2], [0]]
    assert [causal(c, PAPER_RATES).tolist() for c in (SURE, HOPELESS)] == [[0], [0]]


def first_token_distribution(rule: Callable[[Tensor, Tensor], Tensor]) -> list[float]:
    """Exact distribution of the first token: the verifier wants (.7, .3), drafts come from (.5, .5), and draft A makes the second sure."""
    p, q = [0.7, 0.3], [0.5, 0.5]
    result = [0.0, 0.0]
    for token, confidence in enumerate((SURE, HOPELESS)):
        if int(rule(confidence, PAPER_RATES)[0]) == 0:  # not verified: the verifier draws the token itself
            result = [value + q[token] * share for value, share in zip(result, p, strict=True)]
            continue
        kept = min(1.0, p[token] / q[token])
        result[token] += q[token] * kept
        result[0] += q[token] * (1 - kept)  # the residual max(p - q, 0) is all on A
    return result


def test_a_retrospective_rule_biases_the_output_and_ours_does_not() -> None:
    assert first_token_distribution(retrospective) == pytest.approx([0.85, 0.15])
    assert first_token_distribution(causal) == pytest.approx([0.7, 0.3])


SCHEDULES: dict[str, Callable[[Tensor], LengthSchedule]] = {
    "fixed": lambda rates: FixedLength(),
    "threshold": lambda rates: ConfidenceThreshold(0.5),
    "prefix": lambda rates: PrefixScheduler(rates),
    "stale capacity": lambda rates: with_a_past(StaleCapacityScheduler(rates, delay=1)),
    "auto": lambda rates: with_a_past(AutoLength([0, 0.1, 0.1, 0.1, 0.1], [1, 1.5, 1.6, 1.9, 2.5], rows=3, cut=True)),
}


def with_a_past(schedule: LengthSchedule) -> LengthSchedule:
    schedule.draft_tokens(4)
    schedule.lengths(torch.full((3, 4), 0.7), torch.full((3,), 4), torch.ones(3, dtype=torch.bool))
    schedule.record([Round(4, 2, 3)] * 3, [50] * 3)
    schedule.draft_tokens(4)
    return schedule


def leaks(lengths: Callable[[Tensor], Tensor], confidence: Tensor, generator: torch.Generator) -> bool:
    """Whether any draft's admission changes with what its token may change: the row's confidences after it."""
    before = lengths(confidence)
    for row in range(confidence.shape[0]):
        for k in range(1, confidence.shape[1] + 1):
            changed = confidence.clone()
            changed[row, k:] = torch.rand(confidence.shape[1] - k, generator=generator, dtype=confidence.dtype)
            if bool((lengths(changed)[row] >= k) != (before[row] >= k)):
                return True
    return False


RATES = st.lists(st.floats(0.05, 1.0), min_size=16, max_size=16).map(lambda v: torch.tensor(sorted(v, reverse=True), dtype=torch.float64))


@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), rates=RATES)
def test_admission_of_a_draft_never_depends_on_its_token(name: str, seed: int, rates: Tensor) -> None:
    generator = torch.Generator().manual_seed(seed)
    confidence = torch.rand(3, 4, generator=generator, dtype=torch.float64)
    schedule, active = SCHEDULES[name](rates), torch.ones(3, dtype=torch.bool)
    available = torch.full((3,), 4)
    assert not leaks(lambda c: schedule.lengths(c if schedule.needs_confidence else None, available, active), confidence, generator)


def test_the_same_search_finds_that_a_retrospective_rule_leaks() -> None:
    generator = torch.Generator().manual_seed(0)
    rates = torch.tensor([1.0, 1.0, 1.0, 1.0, *[0.45] * 12], dtype=torch.float64)
    assert any(
        leaks(lambda c: retrospective(c, rates), torch.rand(3, 4, generator=generator, dtype=torch.float64), generator) for _ in range(20)
    )


# -- order and monotonicity ----------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), fixed=st.floats(0.5, 50), a_token=st.floats(0.01, 5))
def test_for_affine_times_the_early_stop_is_the_best_of_all_lengths(seed: int, fixed: float, a_token: float) -> None:
    a = torch.rand(3, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).cumprod(1)
    rates = affine(fixed, a_token, 12)
    chosen = prefix_schedule(a, rates)

    def value(lengths: tuple[int, ...]) -> float:
        tokens = sum(1 + float(a[r, :length].sum()) for r, length in enumerate(lengths))
        return tokens * float(rates[sum(lengths) + 3])

    every = np.ndindex(4, 4, 4)
    assert value(tuple(chosen.tolist())) == pytest.approx(max(value(lengths) for lengths in every), rel=1e-12)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), capacity=st.integers(0, 12))
def test_admitted_drafts_are_the_most_likely_and_more_capacity_takes_none_away(seed: int, capacity: int) -> None:
    a = torch.rand(4, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).cumprod(1)
    fewer, more = admit_most_likely(a, capacity), admit_most_likely(a, capacity + 1)
    assert int(fewer.sum()) == capacity and bool((more >= fewer).all())
    inside = torch.arange(3) < fewer[:, None]
    if 0 < capacity < 12:
        assert float(a[inside].min()) >= float(a[~inside].max())


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), dearer=st.floats(1.0, 5.0))
def test_dearer_tokens_and_higher_thresholds_never_lengthen_a_block(seed: int, dearer: float) -> None:
    confidence = torch.rand(4, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    a = confidence.cumprod(1)
    assert bool((prefix_schedule(a, affine(5, dearer, 16)) <= prefix_schedule(a, affine(5, 1, 16))).all())
    assert bool((threshold_lengths(confidence, 0.3 * dearer / 5 + 0.1) <= threshold_lengths(confidence, 0.1)).all())


# -- schedules that remember ---------------------------------------------------------------------------------


def test_stale_capacity_uses_the_confidences_of_two_rounds_earlier() -> None:
    schedule = StaleCapacityScheduler(JAGGED, delay=2)
    available, active = EVERYTHING, torch.tensor([True, True])
    unlikely = torch.full((2, 3), 0.01)
    seen = []
    for confidence in (CONFIDENCE, unlikely, CONFIDENCE, CONFIDENCE, CONFIDENCE):
        seen.append(schedule.lengths(confidence, available, active).tolist())
        schedule.record([], [])
    # Two rounds without a past; then what the global search made of round 1 (all six), of round 2 (none), of round 3.
    assert seen == [[3, 3], [3, 3], [3, 3], [0, 0], [3, 3]]
    with pytest.raises(ConfigError, match="at least 1 round"):
        StaleCapacityScheduler(JAGGED, delay=0)


def learned(schedule: AutoLength, accepted: list[int], proposed: int, rounds: int = 300) -> AutoLength:
    for index in range(rounds):
        schedule.draft_tokens(len(schedule.acceptance))
        schedule.record([Round(proposed, accepted[index % len(accepted)], accepted[index % len(accepted)] + 1)], [1000])
    return schedule


def test_auto_drafts_nothing_where_drafting_does_not_pay_but_tries_now_and_then() -> None:
    dear = AutoLength([0, 1, 1, 1], [1, 2, 3, 4], rows=1, cut=False)
    asked = []
    for _ in range(4 * AutoLength.PROBE):
        asked.append(dear.draft_tokens(3))
        dear.record([Round(asked[-1], 0, 1)], [1000])
    assert asked[0] == 1, "of drafts nothing is known yet"
    assert asked[1:].count(1) == 4 and asked[1:].count(0) == len(asked) - 5


def test_auto_finds_the_length_that_maximises_tokens_a_second() -> None:
    verify = [1.0, 1.05, 1.1, 1.5, 1.9, 2.3]
    schedule = learned(AutoLength([0, 0.1, 0.1, 0.1, 0.1, 0.1], verify, rows=1, cut=False), [5, 5, 2, 0], proposed=5)
    survive = [1, 0.75, 0.75, 0.5, 0.5, 0.5]
    rates = [sum(survive[: w + 1]) / (verify[w] + (0.1 if w else 0)) for w in range(6)]
    assert schedule.draft_tokens(5) == int(np.argmax(rates)) == 2
    assert schedule.draft_tokens(1) == 1  # never above the limit


def test_auto_starts_from_the_acceptance_that_the_checkpoint_brings_along() -> None:
    times = StepTimes((1, 2), (0, 4), ((0, 0.1),) * 2, ((1.0, 2.0),) * 2)
    assert AutoLength.from_step_times(times, 2, 4, [0.95] * 4, cut=False).draft_tokens(4) == 4
    assert AutoLength.from_step_times(times, 2, 4, [0.1] * 4, cut=False).draft_tokens(4) == 0


def test_auto_cuts_columns_that_are_not_worth_their_time() -> None:
    schedule = AutoLength([0, 0.0, 0.0, 0.0], [1, 1.2, 1.4, 1.6], [0.8] * 3, rows=2, cut=True)
    assert schedule.draft_tokens(3) == 3
    # Theta is 2 * 2.952 / 1.6 = 3.69 tokens a second, a column costs 0.2 s: it must earn 0.738 tokens from the two rows.
    confidence = torch.tensor([[0.9, 0.9, 0.1], [0.2, 0.1, 0.9]])  # columns earn 1.1, 0.83 and 0.099
    both = torch.tensor([True, True])
    assert schedule.lengths(confidence, torch.tensor([3, 3]), both).tolist() == [2, 2]
    assert schedule.lengths(confidence, torch.tensor([3, 0]), both).tolist() == [2, 0]
    assert schedule.lengths(torch.full((2, 3), 0.3), torch.tensor([3, 3]), both).tolist() == [0, 0]


# -- step times ----------------------------------------------------------------------------------------------


def test_step_times_are_linear_between_measurements_beyond_them_and_never_fall() -> None:
    times = StepTimes((1, 4), (0, 2, 4), ((0, 1, 1), (0, 1, 3)), ((1, 2, 1.5), (4, 6, 10)))
    assert times.verify(1, [0, 1, 2, 4]).tolist() == [1, 1.5, 2, 2]  # 1.5 is raised to that of less work
    assert float(times.verify(2.5, 2)) == 4.0
    assert float(times.verify(7, 4)) == 18.0
    assert float(times.draft(4, 6)) == 5.0
    assert float(times.round(4, 4)) == 13.0


def test_steps_per_second_of_a_batch_are_those_of_the_affine_time() -> None:
    rates = StepTimes.affine(10.0, 1.0, max_rows=8, max_drafts=3).steps_per_second(2, 3)
    assert rates[2:].tolist() == pytest.approx(affine(10, 1)[2:].tolist())


def test_convex_hull_lies_below_the_times_with_rising_slopes() -> None:
    assert lower_convex_hull([1, 3, 3.2, 3.4, 6]).tolist() == pytest.approx([1, 1.8, 2.6, 3.4, 6])
    assert lower_convex_hull([2.0]).tolist() == [2.0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rows": (2, 1)}, "rows"),
        ({"drafts": (1, 2)}, "must begin at 0"),
        ({"verify_seconds": ((1.0, 2.0),)}, "2 x 2"),
        ({"verify_seconds": ((0.0, 1.0), (1.0, 2.0))}, "not positive"),
    ],
)
def test_impossible_step_times_are_refused(changes: dict[str, tuple[object, ...]], words: str) -> None:
    given = {"rows": (1, 2), "drafts": (0, 1), "draft_seconds": ((0.0, 1.0),) * 2, "verify_seconds": ((1.0, 2.0),) * 2}
    with pytest.raises(ConfigError, match=words):
        StepTimes(**{**given, **changes})  # type: ignore[arg-type]


def test_draft_tokens_by_batch_size_are_the_best_of_each_size_without_gaps() -> None:
    times = StepTimes.affine(10.0, 0.1, draft_fixed=0.5, max_rows=512, max_drafts=4)
    acceptance = [0.8, 0.7, 0.6, 0.5]
    spans = num_speculative_tokens_per_batch_size(acceptance, times, max_batch_size=2000)
    assert [span[0] for span in spans] == [1, *(span[1] + 1 for span in spans[:-1])] and spans[-1][1] == 2000
    expected = [sum(np.cumprod(acceptance)[:k]) + 1 for k in range(5)]
    for low, high, k in spans:
        for size in (low, high):
            seconds = [10 + 0.1 * size * (1 + drafts) + (0.5 if drafts else 0) for drafts in range(5)]
            assert k == int(np.argmax(np.array(expected) / seconds))
    assert [span[2] for span in spans] == [4, 3, 2, 1, 0], "the larger the batch, the shorter"
    assert num_speculative_tokens_per_batch_size([0.1], times, max_batch_size=4, min_draft_tokens=1) == [(1, 4, 1)]
    with pytest.raises(ConfigError, match="between 0 and 4"):
        num_speculative_tokens_per_batch_size(acceptance, times, max_batch_size=4, min_draft_tokens=5)
