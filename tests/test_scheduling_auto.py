"""num_draft_tokens="auto": lossless for every drafter, measured once, and as good as the table it is given."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import tiny_verifier
from toy_drafters import BlockTable, Oracle, RandomTokens, SequentialTable, ToyDrafter

from speculators.decoding import profiler
from speculators.decoding.calibration import Calibration
from speculators.decoding.engine import generate
from speculators.decoding.length_schedules import AutoLength
from speculators.decoding.prompt_lookup import PromptLookup
from speculators.decoding.sampling import SamplingParams
from speculators.decoding.statistics import Round
from speculators.decoding.step_times import StepTimes
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
    assert profiler.RowLengths.of(prompts, SamplingParams(max_new_tokens=200)) == profiler.RowLengths(typical=512, longest=1024)
    assert profiler.RowLengths.of(prompts[:1], SamplingParams(max_new_tokens=20)) == profiler.RowLengths(typical=128, longest=512)


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
