"""Sequential Temperature Scaling and calibration metrics: worked values, and what scaling keeps and does not keep."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speculators.decoding.calibration import Calibration, calibration_for, choose, stored_calibrations
from speculators.decoding.prompt_lookup import PromptLookup
from speculators.errors import CheckpointError, DataError
from speculators.evaluation.calibration import (
    GRID,
    area_under_curve,
    brier_score,
    expected_calibration_error,
    fit_sequential_scaling,
    fit_sequential_temperatures,
    logits_of,
    prefix_probabilities,
    quality_by_position,
)

# Twelve rounds of three drafts: confidence logits, and how many leading drafts were accepted.
LOGITS = np.repeat([[2.2, 1.6, 1.2], [2.2, 0.4, 0.8], [0.6, 0.9, 0.2]], 4, axis=0)
ACCEPTED = np.array([3, 2, 3, 0, 1, 2, 1, 0, 2, 0, 1, 0])
COARSE = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0)


def errors(temperatures: list[float]) -> list[float]:
    return [quality.ece for quality in quality_by_position(prefix_probabilities(LOGITS, temperatures), ACCEPTED)]


def test_worked_example_of_sequential_temperature_scaling() -> None:
    assert [float((ACCEPTED > k).mean()) for k in range(3)] == pytest.approx([0.6667, 0.4167, 0.1667], abs=1e-4)
    assert errors([1, 1, 1]) == pytest.approx([0.14872, 0.1663, 0.2333], abs=5e-5)
    fitted = fit_sequential_temperatures(LOGITS, ACCEPTED, grid=COARSE)
    assert fitted == [2.0, 2.5, 4.0]
    assert errors(fitted) == pytest.approx([0.024988, 0.064019, 0.059442], abs=1e-6)
    expected = [[0.750260, 0.491235, 0.282186], [0.750260, 0.405077, 0.222725], [0.574443, 0.338370, 0.173414]]
    np.testing.assert_allclose(prefix_probabilities(LOGITS, fitted)[::4], expected, atol=1e-6)


def test_runner_ups_of_the_worked_example_are_worse() -> None:
    def second(chosen: list[float], k: int) -> float:
        others = [t for t in COARSE if t != chosen[k]]
        return min(errors([*chosen[:k], t, *chosen[k + 1 :]])[k] for t in others)

    assert [second([2.0, 2.5, 4.0], k) for k in range(3)] == pytest.approx([0.04869, 0.069008, 0.059637], abs=1e-5)


def test_twenty_bins_give_other_temperatures_so_their_number_is_pinned() -> None:
    assert fit_sequential_temperatures(LOGITS, ACCEPTED, grid=COARSE, bins=20) == [2.0, 1.0, 1.0]


def test_equal_errors_go_to_the_temperature_closest_to_one() -> None:
    # A logit of 0 stays 1/2 at every temperature.
    assert fit_sequential_temperatures(np.zeros((4, 1)), np.array([0, 1, 0, 1])) == [1.0]
    assert fit_sequential_temperatures(np.zeros((4, 1)), np.array([0, 1, 0, 1]), grid=(5.0, 0.5, 2.0)) == [0.5]


def test_the_grid_is_logarithmic_around_one() -> None:
    assert (GRID[0], GRID[16], GRID[-1]) == pytest.approx((0.2, 1.0, 5.0))
    np.testing.assert_allclose(np.diff(np.log(GRID)), np.log(5) / 16)


def test_scaling_may_change_the_order_of_products() -> None:
    logits = np.array([[1.0, 2.0], [2.0, 0.9]])
    assert prefix_probabilities(logits, [1, 1])[:, 1] == pytest.approx([0.6439, 0.6262], abs=1e-4)
    assert prefix_probabilities(logits, [1, 3])[:, 1] == pytest.approx([0.4831, 0.5060], abs=1e-4)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-8, 8), min_size=2, max_size=6), st.floats(0.2, 5))
def test_scaling_keeps_the_order_of_one_position(values: list[float], temperature: float) -> None:
    order = sorted(values)
    scaled = prefix_probabilities(np.array(order)[:, None], [temperature])[:, 0]
    assert (np.diff(scaled) >= 0).all()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_first_position_never_fits_worse_than_uncalibrated(seed: int, positions: int) -> None:
    generator = np.random.default_rng(seed)
    logits, accepted = generator.normal(0, 2, (60, positions)), generator.integers(0, positions + 1, 60)
    fitted = fit_sequential_temperatures(logits, accepted)
    raw, scaled = (quality_by_position(prefix_probabilities(logits, t), accepted)[0].ece for t in ([1.0] * positions, fitted))
    assert scaled <= raw + 1e-12


def test_true_temperatures_are_recovered_from_many_rounds() -> None:
    generator = np.random.default_rng(0)
    true = [GRID[20], GRID[12]]  # 1.50 and 0.67
    logits = generator.normal(1, 2, (200_000, 2))
    accepted = (generator.random(logits.shape) < 1 / (1 + np.exp(-logits / true))).cumprod(axis=1).sum(axis=1)
    assert fit_sequential_temperatures(logits, accepted) == pytest.approx(true)


def test_a_drafter_too_sure_at_every_level_needs_an_offset() -> None:
    generator = np.random.default_rng(1)
    logits = generator.normal(0.5, 0.7, (100_000, 1))
    accepted = (generator.random(logits.shape) < 1 / (1 + np.exp(0.4 - logits)))[:, 0].astype(int)

    def error(temperatures: list[float], offsets: list[float]) -> float:
        return quality_by_position(prefix_probabilities(logits, temperatures, offsets), accepted)[0].ece

    temperatures, offsets = fit_sequential_scaling(logits, accepted)
    assert (temperatures, offsets) == ([pytest.approx(1.0, abs=0.11)], [pytest.approx(-0.4, abs=0.11)])
    assert error(temperatures, offsets) < 0.006 < 0.03 < error(fit_sequential_temperatures(logits, accepted), [0.0])


def test_positions_that_do_not_count_change_nothing() -> None:
    cut = np.tile([[9.0, 9.0, -9.0]], (5, 1))
    logits, accepted = np.concatenate([LOGITS, cut]), np.concatenate([ACCEPTED, np.ones(5, int)])
    observed = np.concatenate([np.full(12, 3), np.ones(5, int)])
    only_first = fit_sequential_temperatures(logits[:, :1], accepted, grid=COARSE)
    with_cut = fit_sequential_temperatures(logits, accepted, observed, grid=COARSE)
    assert with_cut[0] == only_first[0]
    qualities = quality_by_position(prefix_probabilities(logits, [2.0, 2.5, 4.0]), accepted, observed)
    assert [quality.rounds for quality in qualities] == [17, 12, 12]
    assert [quality.ece for quality in qualities[1:]] == pytest.approx([0.064019, 0.059442], abs=1e-6)


def test_a_position_without_rounds_is_refused() -> None:
    with pytest.raises(DataError, match="position 2 cannot be calibrated: 0 rounds"):
        fit_sequential_temperatures(LOGITS[:, :2], ACCEPTED, np.ones(12, int))


def test_metrics_of_small_examples() -> None:
    predicted, outcome = np.array([0.1, 0.4, 0.4, 0.8]), np.array([0, 0, 1, 1])
    assert expected_calibration_error(predicted, outcome) == pytest.approx((0.1 + 2 * abs(0.4 - 0.5) + 0.2) / 4)
    assert area_under_curve(predicted, outcome) == 0.875  # of four pairs three right and one tied
    assert brier_score(predicted, outcome) == pytest.approx((0.01 + 0.16 + 0.36 + 0.04) / 4)
    assert area_under_curve(predicted, np.ones(4)) is None
    assert expected_calibration_error(np.array([1.0, 0.95]), np.array([1, 1])) == pytest.approx(0.025)  # 1.0 belongs to the last interval


# -- at decode time -------------------------------------------------------------------------------------------


def calibration(**changes: object) -> Calibration:
    values = {
        "temperature": 1.0,
        "domain": "all",
        "source": "head",
        "scaling": (2.0, 0.5),
        "offset": (-0.3, 0.0),
        "acceptance": (0.9, 0.8),
        "rounds": 100,
    }
    return Calibration(**{**values, **changes})  # type: ignore[arg-type]


def test_applied_confidences_are_those_that_were_fitted() -> None:
    confidence = torch.tensor([[0.9, 0.3], [0.6, 0.999]])
    applied = calibration().apply(confidence).cumprod(1)
    np.testing.assert_allclose(applied, prefix_probabilities(logits_of(confidence), [2.0, 0.5], [-0.3, 0.0]), rtol=1e-5)
    longer = torch.tensor([[0.5, 0.5, 0.7]])
    assert float(calibration().apply(longer)[0, 2]) == pytest.approx(0.7)  # no temperature: as it is
    assert calibration().apply(torch.tensor([[0.0, 1.0]])).isfinite().all()


def test_the_nearest_temperature_serves_a_request_and_greedy_stands_alone() -> None:
    greedy, warm, hot = calibration(temperature=0.0), calibration(temperature=0.7), calibration(temperature=1.0)
    stored = [greedy, warm, hot, calibration(temperature=0.8, domain="code"), calibration(temperature=0.8, source="probability")]
    assert [choose(stored, "head", t) for t in (0.0, 0.3, 0.84, 0.86, 2.0)] == [greedy, warm, warm, hot, hot]
    assert choose(stored, "head", 0.7, "code") == stored[3] and choose(stored, "none", 0.7) is None
    assert choose(stored[1:], "head", 0.0) is None and choose(stored[:1], "head", 0.7) is None


def test_stored_calibrations_survive_json_and_bad_ones_are_named() -> None:
    entry = calibration().to_json()
    assert stored_calibrations({"calibration": [entry], "form": "compact"}) == [calibration()]
    assert stored_calibrations(None) == [] and stored_calibrations({"form": "compact"}) == []
    for changes in ({"scaling": [0.0]}, {"rounds": None}, {"scaling": ["x"]}, {"offset": [0.0]}):
        with pytest.raises(CheckpointError, match=r"unified_speculators\.calibration holds an entry that cannot be read"):
            stored_calibrations({"calibration": [{**entry, **changes}]})
    assert calibration_for(PromptLookup(), 0.0) is None  # has no checkpoint
