"""Losslessness of the whole engine under every length schedule, sampled and greedy; and that these tests notice a biased one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import test_lossless
import torch
from test_lossless import PROMPTS, SMALL_VOCABULARY, TEMPERATURE, VOCABULARY, p_value_of_tokens_2_to_4, transformers_replies, verifier
from torch import Tensor
from toy_drafters import SequentialTable

from speculators.decoding import engine
from speculators.decoding.calibration import Calibration
from speculators.decoding.engine import generate
from speculators.decoding.length_schedules import (
    AutoLength,
    ConfidenceThreshold,
    FixedLength,
    LengthSchedule,
    PrefixScheduler,
    StaleCapacityScheduler,
)
from speculators.decoding.sampling import SamplingParams
from speculators.decoding.scheduling import survival
from speculators.decoding.statistics import Round
from speculators.registry import get_algorithm

# Steps a second for one request at 1 to 4 tokens: unsure first drafts do not pay for themselves, with sure ones after them they do.
ALONE = np.array([1.0, 1.0, 0.7, 0.6, 0.5])


def rates(rows: int) -> np.ndarray[Any, Any]:
    """Of a batch in which about every second draft of even probability is worth its token."""
    return 1 / (rows + 0.8 * np.arange(4 * rows + 1))


class BestInHindsight(FixedLength):
    """The biased rule of the paper's appendix A, each row for itself: the best of all lengths, judged with all confidences."""

    needs_confidence = True

    def lengths(self, confidence: Tensor | None, available: Tensor, active: Tensor) -> Tensor:
        assert confidence is not None
        return torch.minimum(self.worth(confidence, available).argmax(1), available)

    @staticmethod
    def worth(confidence: Tensor, available: Tensor) -> Tensor:
        tokens = 1 + torch.nn.functional.pad(survival(confidence, available).cumsum(1), (1, 0))
        return tokens * torch.from_numpy(ALONE[1 : 2 + confidence.shape[1]])


class FirstImprovements(BestInHindsight):
    """The early stop on the same rates."""

    def lengths(self, confidence: Tensor | None, available: Tensor, active: Tensor) -> Tensor:
        assert confidence is not None
        worth = self.worth(confidence, available)
        return torch.minimum((worth[:, 1:] > worth[:, :-1]).long().cumprod(1).sum(1), available)


class Confident(SequentialTable):
    """A drafter whose confidence changes much with the token before a slot, and a checkpoint that scales it."""

    calibrations = [Calibration(1.0, "all", "probability", (0.7, 0.7, 0.7), (0.0, 0.2, 0.0), (0.5, 0.5, 0.5), 100)]


SCHEDULES: dict[str, Callable[[int], LengthSchedule]] = {
    "threshold": lambda rows: ConfidenceThreshold(0.4),
    "prefix": lambda rows: PrefixScheduler(rates(rows)),
    "early stop, rows alone": lambda rows: FirstImprovements(),
    "stale capacity": lambda rows: StaleCapacityScheduler(rates(rows), delay=1),
    "auto": lambda rows: AutoLength([0, 0.1, 0.12, 0.15], [1.0, 1.05, 1.2, 1.3], (0.8, 0.8, 0.8), rows=rows, cut=True),
}


def p_value(monkeypatch: pytest.MonkeyPatch, schedule: Callable[[int], LengthSchedule], draws: int) -> tuple[float, set[int]]:
    """The chi-square test of `test_lossless` with a schedule; also the lengths that blocks had."""
    lengths: set[int] = set()

    def scheduled(*args: Any, **kwargs: Any) -> engine.Generation:
        result = generate(*args, **kwargs, schedule=schedule(len(args[2])))
        lengths.update(r.proposed for row in result.rounds for r in row)
        return result

    monkeypatch.setattr(test_lossless, "generate", scheduled)
    return p_value_of_tokens_2_to_4(TEMPERATURE, Confident(SMALL_VOCABULARY, scale=2.0), draws), lengths


@pytest.mark.parametrize("name", SCHEDULES)
def test_sampled_replies_follow_the_verifier_under_every_schedule(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p, lengths = p_value(monkeypatch, SCHEDULES[name], draws=20_000)
    assert p > 1e-3
    assert len(lengths) > 1, "the schedule never chose"


def test_choosing_the_length_in_hindsight_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert p_value(monkeypatch, lambda rows: BestInHindsight(), draws=20_000)[0] < 1e-3


@pytest.mark.parametrize("name", SCHEDULES)
def test_greedy_output_equals_transformers_generate_under_every_schedule(name: str) -> None:
    sampling = SamplingParams(max_new_tokens=24)
    for rows in (slice(0, 4), slice(1, 2)):
        prompts = PROMPTS[rows]
        drafter = Confident(VOCABULARY, scale=2.0)
        result = generate(verifier("llama"), drafter, prompts, sampling, num_draft_tokens=3, schedule=SCHEDULES[name](len(prompts)))
        assert result.token_ids == transformers_replies("llama")[rows]


def test_every_schedule_is_told_each_round_of_the_active_rows() -> None:
    told: list[Sequence[Round | None]] = []
    left: list[Sequence[int]] = []

    class Told(FixedLength):
        def record(self, rounds: Sequence[Round | None], remaining: Sequence[int]) -> None:
            told.append(rounds)
            left.append(remaining)

    result = generate(verifier("llama"), SequentialTable(VOCABULARY), PROMPTS, SamplingParams(max_new_tokens=12), schedule=Told())
    assert len(told) == result.verify_forwards
    for row, rounds in enumerate(result.rounds):
        finished = len(told) - len(rounds)
        assert [told_of[row] for told_of in told] == [*rounds, *[None] * finished], "its own rounds, and then nothing"
        emitted = np.cumsum([r.emitted for r in rounds])
        after = (11 - emitted).tolist()  # the prefill's token is of no round
        if result.finish_reasons[row] == "stop":
            after[-1] = 0
        assert [remaining[row] for remaining in left] == [*after, *[0] * finished]


class Rotating(FixedLength):
    """0, 1, 2, .. K drafts, and again: rounds that do not ask the drafter included."""

    def __init__(self) -> None:
        self.rounds = -1

    def draft_tokens(self, limit: int) -> int:
        return (self.rounds + 1) % (limit + 1)

    def record(self, rounds: Sequence[Round | None], remaining: Sequence[int]) -> None:
        self.rounds += 1


@pytest.mark.parametrize("method", ["eagle3", "peagle", "dflash", "dspark"])
def test_every_method_drafts_on_after_rounds_without_drafts_and_of_other_lengths(method: str) -> None:
    expected = transformers_replies("llama")
    torch.manual_seed(0)
    options = {"num_layers": 1, "num_draft_tokens": 4, "aux_hidden_state_layer_ids": [0, 1], "mask_token_id": 6}
    drafter = get_algorithm(method).speculator_class.from_verifier(verifier("llama").weights, **options).eval()
    sampling = SamplingParams(max_new_tokens=24)
    for schedule in (Rotating(), ConfidenceThreshold(0.03)):
        result = generate(verifier("llama"), drafter, PROMPTS, sampling, schedule=schedule)
        assert result.token_ids == expected
        assert len({r.proposed for row in result.rounds for r in row}) > 1
