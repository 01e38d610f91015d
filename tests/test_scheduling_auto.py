"""num_draft_tokens="auto": lossless for every drafter, measured once, and as good as the table it is given."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_verifier
from toy_drafters import BlockTable, Oracle, RandomTokens, SequentialTable, ToyDrafter

from speculators.decoding import profiler
from speculators.decoding.batch import Batch
from speculators.decoding.calibration import Calibration
from speculators.decoding.engine import generate
from speculators.decoding.length_schedules import AutoLength
from speculators.decoding.prompt_lookup import PromptLookup
from speculators.decoding.row_acceptance import RowAcceptance
from speculators.decoding.sampling import SamplingParams
from speculators.decoding.statistics import Round
from speculators.decoding.step_times import StepTimes
from speculators.registry import get_algorithm
from speculators.verifier import Verifier

VOCABULARY = 64
PROMPTS = [[11, 12, 13, 14, 15], [4, 5], [9, 8, 7, 6, 5, 4, 3, 2], [40]]
SAMPLING = SamplingParams(max_new_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    return tiny_verifier("llama", vocab_size=VOCABULARY, layers=2)


@pytest.fixture(scope="module")
def plain(verifier: Verifier) -> list[list[int]]:
    return generate(verifier, None, PROMPTS, SAMPLING).token_ids


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECULATORS_CACHE", str(tmp_path))
    return tmp_path / profiler.FOLDER


class Calibrated(SequentialTable):
    calibrations = [Calibration(0.0, "all", "probability", (1.5,) * 4, (0.0,) * 4, (0.5,) * 4, 100)]


@pytest.mark.parametrize("drafter", [BlockTable(VOCABULARY), SequentialTable(VOCABULARY), Calibrated(VOCABULARY), PromptLookup()])
def test_auto_is_lossless_with_a_confidence_and_without(drafter: ToyDrafter, verifier: Verifier, plain: list[list[int]]) -> None:
    for rows in (slice(0, 4), slice(1, 2)):
        assert generate(verifier, drafter, PROMPTS[rows], SAMPLING, num_draft_tokens="auto").token_ids == plain[rows]


def fixed_times(monkeypatch: pytest.MonkeyPatch, draft: float, verify: float) -> None:
    """A machine on which a forward takes 1 s, a draft `draft` s and a token to verify `verify` s."""
    drafts = (0, 1, 4)
    times = StepTimes((1,), drafts, (tuple(draft * k for k in drafts),), (tuple(1 + verify * k for k in drafts),))
    monkeypatch.setattr(profiler, "step_times", lambda *arguments: times)


def rounds_of(verifier: Verifier, drafter: ToyDrafter | PromptLookup, prompts: list[list[int]]) -> list[Round]:
    sampling = SamplingParams(max_new_tokens=100, ignore_eos=True)
    result = generate(verifier, drafter, prompts, sampling, num_draft_tokens="auto")
    return [a_round for row in result.rounds for a_round in row]


def test_auto_drafts_all_where_drafts_are_right_and_almost_none_where_they_are_wrong(
    verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed_times(monkeypatch, draft=0.05, verify=0.05)
    prompt = PROMPTS[:1]
    replies = generate(verifier, None, prompt, SamplingParams(max_new_tokens=110, ignore_eos=True)).token_ids
    right = rounds_of(verifier, Oracle(prompt, replies, VOCABULARY), prompt)
    assert [r.proposed for r in right[:-2]] == [4] * (len(right) - 2)
    wrong = rounds_of(verifier, Oracle(prompt, replies, VOCABULARY, accept=[0]), prompt)
    assert sum(r.proposed for r in wrong[50:]) <= 4, "from measured acceptance, without any confidence"


def test_auto_decodes_plainly_where_time_is_dear(verifier: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    fixed_times(monkeypatch, draft=2.0, verify=1.0)
    rounds = rounds_of(verifier, RandomTokens(VOCABULARY), PROMPTS[:1])
    assert sum(r.proposed for r in rounds) <= len(rounds) / AutoLength.PROBE + 1


def test_calibrated_confidence_shortens_blocks_within_a_round(verifier: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    fixed_times(monkeypatch, draft=0.0, verify=0.3)
    rounds = rounds_of(verifier, Calibrated(VOCABULARY, scale=3.0), PROMPTS[:1])
    assert len({r.proposed for r in rounds[:20]}) > 2, "lengths follow the confidence of each block"


# -- rows that are not alike ----------------------------------------------------------------------------------

# Seconds of a round of 0 .. 7 drafts of 256 rows on an H200 (SmolLM2-135M with DSpark, 2026).
SECONDS = np.array([1.85, 2.49, 2.86, 3.20, 3.54, 4.05, 4.55, 5.06]) * 1e-3
FREE = np.zeros_like(SECONDS)


def seconds_of_a_batch(acceptance: np.ndarray, tokens: int, seed: int, auto: AutoLength | None = None, drafts: int = 0) -> float:
    """Decode rows of such acceptance, the same in every round, until the last one is done; `auto` decides a round late, as on CUDA."""
    generator = np.random.default_rng(seed)
    remaining, seconds = np.full(len(acceptance), tokens), 0.0
    waiting: tuple[list[Round | None], list[int]] | None = None
    while remaining.any():
        width = drafts if auto is None else auto.draft_tokens(len(SECONDS) - 1)
        if auto is not None and waiting is not None:
            auto.record(*waiting)
        proposed = np.minimum(width, np.maximum(remaining - 1, 0))
        kept = np.cumprod(generator.random((len(acceptance), len(SECONDS) - 1)) < acceptance[:, None], axis=1).sum(axis=1)
        accepted = np.minimum(kept, proposed)
        active = remaining > 0
        remaining = np.where(active, remaining - 1 - accepted, 0)
        outcome = zip(proposed.tolist(), accepted.tolist(), active, strict=True)
        waiting = [Round(p, a, a + 1) if alive else None for p, a, alive in outcome], remaining.tolist()
        seconds += SECONDS[width]
    return seconds


@pytest.mark.parametrize(("frailty_variance", "within"), [(1 / 25, 1.02), (1 / 6, 1.05)])
def test_a_batch_of_unequal_rows_ends_about_as_soon_as_with_the_best_fixed_length(frailty_variance: float, within: float) -> None:
    acceptance = 0.79 ** np.random.default_rng(0).gamma(1 / frailty_variance, frailty_variance, 256)
    fixed = [np.mean([seconds_of_a_batch(acceptance, 127, seed, drafts=drafts) for seed in range(4)]) for drafts in range(8)]
    auto = np.mean([seconds_of_a_batch(acceptance, 127, seed, AutoLength(FREE, SECONDS, rows=256, cut=False)) for seed in range(4)])
    assert auto <= within * min(fixed)
    mean_row = np.cumsum(np.concatenate([[1.0], np.cumprod(np.full(7, acceptance.mean()))])) / SECONDS
    assert auto < fixed[int(mean_row.argmax())], "the length that earns most tokens a second on average is too long"


def told(auto: AutoLength, acceptance: list[float], remaining: list[int], rounds: int = 30) -> AutoLength:
    """Rounds of 7 drafts, of which each row accepts each with its probability."""
    generator = np.random.default_rng(0)
    for _ in range(rounds):
        accepted = np.cumprod(generator.random((len(acceptance), 7)) < np.array(acceptance)[:, None], axis=1).sum(axis=1)
        auto.record([Round(7, count, count + 1) for count in accepted.tolist()], remaining)
    return auto


def test_a_slow_row_shortens_the_block_until_it_is_done_or_has_little_left() -> None:
    def drafted(acceptance: list[float], remaining: list[int]) -> int:
        return told(AutoLength(FREE, SECONDS, rows=8, cut=False), acceptance, remaining).draft_tokens(7)

    good, with_a_slow_one = [0.95] * 8, [0.95] * 7 + [0.3]
    assert drafted(good, [100] * 8) >= 6
    assert drafted(with_a_slow_one, [100] * 8) <= 3
    assert drafted(with_a_slow_one, [100] * 7 + [0]) >= 6
    assert drafted(with_a_slow_one, [100] * 7 + [2]) >= 6


def test_no_more_is_drafted_than_what_is_left_to_decode() -> None:
    for left in range(1, 9):
        assert told(AutoLength(FREE, SECONDS, rows=2, cut=False), [0.99, 0.99], [left, 1]).draft_tokens(7) == left - 1
    assert told(AutoLength(FREE, SECONDS, rows=2, cut=False), [0.99, 0.99], [0, 0]).draft_tokens(7) == 0


def test_rows_of_one_kind_share_their_curve_and_others_stand_out_by_their_rejections() -> None:
    alike, unlike = RowAcceptance([0.8] * 4, 4, rows=4), RowAcceptance([0.8] * 4, 4, rows=4)
    every = np.ones(4, dtype=bool)
    for _ in range(20):
        alike.record([Round(4, 2, 3)] * 4)
        unlike.record([Round(4, 4, 5), Round(4, 0, 1), Round(4, 2, 3), None])
    np.testing.assert_allclose(alike.survival(every), np.tile(alike.survival(every)[0], (4, 1)))
    best, worst, middle, unseen = unlike.survival(every)
    assert (best > middle).all() and (middle > worst).all() and (best > unseen).all() and (unseen > worst).all()
    # A row of frailty h survives S ** h, and the frailty of a row that showed nothing is the mean one's.
    curve = np.cumprod(unlike.pooled)
    for row in (best, worst, middle, unseen):
        frailty = np.log(row) / np.log(curve)
        np.testing.assert_allclose(frailty, frailty[0])
    assert np.log(unseen[0]) / np.log(curve[0]) == pytest.approx(1, abs=0.2)  # the median of a skewed distribution
    assert (unlike.survival(every, 2.0) < unlike.survival(every)).all()
    assert unlike.survival(np.array([False, True, False, False])) == pytest.approx(worst[None])


def test_unequal_rows_are_each_expected_to_go_on_as_they_did() -> None:
    """Where h (1 - a) stands for the hazard, the worst rows are expected to keep a third more than they did."""
    own = np.repeat([0.3, 0.45, 0.6, 0.75, 0.9], 8)
    acceptance, generator = RowAcceptance([0.6], 1, rows=len(own)), np.random.default_rng(0)
    for _ in range(400):
        acceptance.record([Round(1, int(one), 1 + int(one)) for one in generator.random(len(own)) < own])
    expected = acceptance.survival(np.ones(len(own), dtype=bool))[:, 0].reshape(5, 8).mean(1)
    np.testing.assert_allclose(expected, own[::8], atol=0.04)


@pytest.mark.parametrize(("promised", "drafted"), [(1.02, 0), (1.05, 1)])
def test_plain_decoding_is_left_for_a_length_that_is_worth_it(promised: float, drafted: int) -> None:
    auto = AutoLength(np.zeros(2), [1.0, 1.8 / promised], [0.8], rows=1, cut=False)
    assert auto.draft_tokens(1) == 1
    for _ in range(AutoLength.SETTLED):
        auto.record([None], [1000])
    assert auto.draft_tokens(1) == drafted


@pytest.mark.parametrize(("rows", "every"), [(1, AutoLength.PROBE), (4 * AutoLength.PROBE, 4 * AutoLength.PROBE)])
def test_many_rows_are_asked_as_rarely_as_one_round_shows_more(rows: int, every: int) -> None:
    dear = AutoLength([0.0, 1.0], [1.0, 2.0], [0.5], rows=rows, cut=False)
    tried = []
    for index in range(8 * AutoLength.PROBE):
        if dear.draft_tokens(1):
            tried.append(index)
        dear.record([None] * rows, [1000] * rows)
    assert tried == list(range(every - 1, 8 * AutoLength.PROBE, every))


def test_a_single_row_is_the_mean_row() -> None:
    one, two = (RowAcceptance([0.8], 1, rows=rows) for rows in (1, 2))
    for _ in range(12):
        one.record([Round(1, 0, 1)])
        two.record([Round(1, 0, 1), Round(1, 1, 2)])
    alone = float(one.survival(np.ones(1, dtype=bool))[0, 0])
    worse, better = two.survival(np.ones(2, dtype=bool))[:, 0]
    assert alone == pytest.approx(one.pooled[0], abs=0.05)
    assert worse < two.pooled[0] - 0.1 and better > two.pooled[0] + 0.05


@pytest.mark.parametrize("acceptance", [0.02, 0.2, 0.5, 0.8, 0.98])
def test_a_row_that_does_as_expected_keeps_the_acceptance_it_is_expected_to_have(acceptance: float) -> None:
    rows = RowAcceptance([acceptance], 1, rows=1)
    for index in range(4000):
        accepted = int((index + 1) * acceptance) - int(index * acceptance)  # as often as expected, evenly
        rows.record([Round(1, accepted, 1 + accepted)])
    assert rows.survival(np.ones(1, dtype=bool))[0, 0] == pytest.approx(rows.pooled[0], abs=0.01)


@pytest.mark.parametrize(
    ("cheaper", "rounds", "drafted"), [(0.99, AutoLength.SETTLED, 2), (0.92, AutoLength.SETTLED, 3), (0.99, AutoLength.HOLD, 3)]
)
def test_once_rows_are_told_apart_a_length_is_kept_until_another_is_worth_the_change(cheaper: float, rounds: int, drafted: int) -> None:
    seconds = np.array([1.0, 1.2, 1.3, 5.0])
    auto = AutoLength(np.zeros(4), seconds, [0.8] * 3, rows=1, cut=False)
    assert auto.draft_tokens(3) == 2
    seconds[3] = cheaper * seconds[2] * (1 + 0.8 + 0.8**2 + 0.8**3) / (1 + 0.8 + 0.8**2)  # beside the seconds a token of two
    for _ in range(rounds):
        auto.record([None], [1000])
    assert auto.draft_tokens(3) == drafted


# -- the profiler ---------------------------------------------------------------------------------------------


def test_step_times_are_measured_once_and_again_when_what_they_depend_on_changes(
    verifier: Verifier, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = BlockTable(VOCABULARY)
    two, three = PROMPTS[:2], PROMPTS[:3]
    first = profiler.step_times(verifier, drafter, 5, two, SAMPLING)
    assert first.rows == (2,) and first.drafts == (0, 1, 2, 4, 5)
    assert first.draft_seconds[0][0] == 0 and all(
        seconds > 0 for line in (*first.verify_seconds, first.draft_seconds[0][1:]) for seconds in line
    )
    assert len(list(cache.iterdir())) == 1
    others = [
        (verifier, drafter, 5, three, SAMPLING),
        (verifier, drafter, 6, two, SAMPLING),
        (verifier, SequentialTable(VOCABULARY), 5, two, SAMPLING),
        (verifier, drafter, 5, two, SamplingParams(temperature=1.0)),
        (verifier, drafter, 5, [[1] * 120, [1] * 100], SAMPLING),
        (tiny_verifier("llama", vocab_size=VOCABULARY, layers=1), drafter, 5, two, SAMPLING),
    ]
    for arguments in others:
        profiler.step_times(*arguments)
    assert len(list(cache.iterdir())) == 1 + len(others)
    monkeypatch.setattr(profiler, "measure", lambda *arguments: pytest.fail("measured again"))
    assert profiler.step_times(verifier, drafter, 5, two, SAMPLING) == first
    # Seeds, budgets and thresholds do not change what a round costs.
    assert profiler.step_times(verifier, drafter, 5, two, SamplingParams(seed=3, max_new_tokens=7)) == first


def test_rows_are_measured_at_the_length_that_they_have_in_the_middle_of_their_replies() -> None:
    prompts = [[1] * 100, [1] * 300, [1] * 800]
    several = profiler.RowLengths.of(prompts, SamplingParams(max_new_tokens=200))
    assert several == profiler.RowLengths(typical=512, longest=1024) and several.read == 1024
    assert profiler.RowLengths.of(prompts[:1], SamplingParams(max_new_tokens=20)) == profiler.RowLengths(typical=128, longest=128)
    assert profiler.RowLengths.of([[1] * 3] * 64, SamplingParams(max_new_tokens=2)) == profiler.RowLengths(typical=32, longest=128)


@pytest.mark.parametrize(("rows", "close"), [(2, 64), (32, 32), (64, 16), (256, 16)])
@pytest.mark.parametrize("mean", range(65, 600, 41))
def test_the_measured_length_is_the_closer_to_the_mean_the_more_rows_there_are(mean: int, rows: int, close: int) -> None:
    prompts = [[1] * (mean - 64), [1] * (mean + 64)] * (rows // 2)
    assert abs(profiler.RowLengths.of(prompts, SamplingParams(max_new_tokens=128)).typical - (mean + 64)) <= close


@pytest.mark.parametrize("drafts", [0, 1, 7, 16])
@pytest.mark.parametrize(("typical", "longest"), [(64, 64), (64, 320), (256, 512), (192, 704), (1024, 2048)])
def test_made_up_rows_are_as_long_as_real_ones_and_read_as_far(drafts: int, typical: int, longest: int) -> None:
    lengths = profiler.RowLengths(typical, longest)
    rows = profiler.made_up_rows(lengths, [[count] for count in range(drafts + 1)], "cuda", None)
    assert rows.bound + drafts + 1 == lengths.read, "no position more, or the next multiple would be read"
    assert rows.longest + rows.max_new_tokens <= rows.bound
    assert 1 <= rows.typical <= rows.longest
    assert abs(rows.typical - typical) < 64 or rows.typical == rows.longest, "and grow past the typical length"
    if longest + 128 + 17 <= lengths.read:
        assert abs(rows.longest - longest) < 64


def test_every_width_is_measured_where_measuring_is_cheap() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert profiler.widths(7, cuda) == tuple(range(8))
    assert profiler.widths(20, cuda) == (*range(9), 16, 20)
    assert profiler.widths(16, cpu) == (0, 1, 2, 4, 8, 16)
    assert profiler.widths(1, cpu) == profiler.widths(1, cuda) == (0, 1)


def test_graphs_are_timed_as_the_engine_launches_them(verifier: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "WARM_UP_SECONDS", 0.0)
    drafts, sampling = profiler._Forced(), SamplingParams(max_new_tokens=400, ignore_eos=True)
    with torch.inference_mode():
        batch = Batch(verifier, BlockTable(VOCABULARY), PROMPTS, sampling, 4, drafts, max_length=1024)
        batch.use_static_buffers(capture=False)
        batch.prefill(PROMPTS)
        drafts.drafts = 4
        assert profiler._time_graphs(batch, 507) > 0
    assert batch.graphs is not None and {(key, length) for key, length, _ in batch.graphs._seen} == {(4, 512)}  # type: ignore[misc]


@pytest.mark.parametrize("method", ["dspark", "eagle3"])
def test_all_graphs_are_captured_before_any_is_timed(method: str, verifier: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "CLOCK_SECONDS", 0.0)
    monkeypatch.setattr(profiler, "WARM_UP_SECONDS", 0.0)
    events: list[str] = []
    captured: set[Hashable] = set()
    torch.manual_seed(0)
    options: dict[str, Any] = {"num_layers": 1, "num_draft_tokens": 3, "aux_hidden_state_layer_ids": [1, 2], "mask_token_id": 3}
    drafter = get_algorithm(method).speculator_class.from_verifier(verifier.weights, **options).eval()
    schedule, sampling = profiler._Forced(), SamplingParams(max_new_tokens=400, ignore_eos=True)
    with torch.inference_mode():
        batch = Batch(verifier, drafter, PROMPTS, sampling, 3, schedule, max_length=512)
    batch.use_static_buffers(capture=True)
    assert batch.graphs is not None

    def capture(shapes: Hashable, length: int) -> None:  # without a graph the round runs eagerly
        if shapes not in captured:
            captured.add(shapes)
            events.append("capture")

    def begin() -> Batch:
        batch.state.reset()
        batch.prefill(PROMPTS)
        return batch

    def timed(batch: Batch, longest: int) -> float:
        for _ in range(4):
            batch.longest = longest
            batch.next_round()
        events.append("timed")
        return float(schedule.drafts)

    monkeypatch.setattr(batch.graphs, "_try_to_capture", capture)
    monkeypatch.setattr(profiler, "_seconds_in_a_row", timed)
    with torch.inference_mode():
        assert profiler._measure_graphs(begin, schedule, (0, 1, 3), 500) == [(0.0, 0.0), (0.0, 1.0), (0.0, 3.0)]
    assert "capture" in events and "timed" not in events[: len(events) - events[::-1].index("capture")], "captures come first"
    steady = {drafts: sum(key == drafts for key, *_ in captured) for drafts in (0, 1, 3)}  # type: ignore[misc]
    assert min(steady.values()) > 0, "of every number of drafts"


def test_an_unusable_cache_costs_a_measurement_and_no_error(
    verifier: Verifier, cache: Path, monkeypatch: pytest.MonkeyPatch, plain: list[list[int]]
) -> None:
    cache.mkdir()
    drafter = BlockTable(VOCABULARY)
    file = (
        cache / f"{profiler._digest(profiler.identity(verifier, drafter, 4, profiler.RowLengths.of(PROMPTS, SAMPLING), 4, SAMPLING))}.json"
    )
    file.write_text("{}")
    assert generate(verifier, drafter, PROMPTS, SAMPLING, num_draft_tokens="auto").token_ids == plain
    assert StepTimes.load(file).rows == (4,), "damaged, measured again and replaced"
    blocked = cache / "file"
    blocked.write_text("")
    monkeypatch.setenv("SPECULATORS_CACHE", str(blocked))
    assert generate(verifier, drafter, PROMPTS, SAMPLING, num_draft_tokens="auto").token_ids == plain


def test_measuring_leaves_torchs_random_numbers_alone(verifier: Verifier) -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    profiler.step_times(verifier, BlockTable(VOCABULARY), 2, PROMPTS[:1], SAMPLING)
    assert torch.equal(torch.rand(1), expected)
