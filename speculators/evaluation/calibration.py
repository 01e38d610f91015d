"""Sequential Temperature Scaling, and how well confidences predict acceptance: pure functions on arrays.

DSpark (arXiv 2607.05147, section 3.3) scales the logit of each position's confidence by a temperature T_k, so that the product

    a_k = sigmoid(z_1 / T_1) * .. * sigmoid(z_k / T_k)

equals the share of rounds that accept drafts 1 .. k. Positions are fitted from left to right: T_k is the grid value of least
expected calibration error of a_k, those before it frozen. The product is what the scheduler sorts by, so the product is
calibrated, not each factor.

What the paper leaves open is pinned here, since other choices give other temperatures: the grid, ten bins of equal width, and
among equal errors the temperature closest to 1. Scaling keeps the order of one position's confidences. It does not keep the
order of products, within a batch or between positions' temperatures.

A temperature leaves a confidence of 1/2 where it is, so it cannot correct a drafter that is too sure, or too unsure, at every
level. `fit_sequential_scaling` fits an offset b_k as well, sigmoid(z_k / T_k + b_k), by the same rule; offsets of 0 are the
paper's method.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from speculators.errors import DataError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

BINS = 10
# 33 values from 0.2 to 5, each 5^(1/16) times the one before; the middle one is 1.
GRID = tuple(5.0 ** ((index - 16) / 16) for index in range(33))
OFFSETS = tuple(index / 10 for index in range(-10, 11))


@dataclass(frozen=True)
class Bin:
    """Predictions of one interval of a reliability diagram: how many, their mean, and the share of them that came true."""

    count: int
    predicted: float
    observed: float


@dataclass(frozen=True)
class PositionQuality:
    """How well the probability that drafts 1 .. k are accepted was predicted.

    Attributes:
        rounds: in which position k counted.
        predicted, observed: means over them.
        ece: expected calibration error. auc: area under the ROC curve; None where every outcome is the same.
        brier: mean squared error.
        bins: the reliability diagram, empty intervals left out.
    """

    rounds: int
    predicted: float
    observed: float
    ece: float
    auc: float | None
    brier: float
    bins: tuple[Bin, ...]


def reliability(predicted: Floats, outcome: npt.ArrayLike, bins: int = BINS) -> list[Bin]:
    """Intervals of equal width that hold predictions, in order; p falls in number min(floor(bins * p), bins - 1).

    Args:
        predicted: [n] probabilities.
        outcome: [n] 0 or 1.
        bins: how many intervals.
    """
    came_true = np.asarray(outcome, dtype=np.float64)
    number = np.minimum((predicted * bins).astype(np.int64), bins - 1)
    counts = np.bincount(number, minlength=bins)
    sums = (np.bincount(number, weights=values, minlength=bins) for values in (predicted, came_true))
    return [Bin(int(n), float(p / n), float(o / n)) for n, p, o in zip(counts, *sums, strict=True) if n]


def expected_calibration_error(predicted: Floats, outcome: npt.ArrayLike, bins: int = BINS) -> float:
    """Mean over predictions of |mean prediction - mean outcome| of their interval; 0 without predictions."""
    number = np.minimum((predicted * bins).astype(np.int64), bins - 1)
    excess = np.bincount(number, weights=predicted - np.asarray(outcome, dtype=np.float64), minlength=bins)
    return float(np.abs(excess).sum()) / max(1, len(predicted))


def area_under_curve(predicted: Floats, outcome: npt.ArrayLike) -> float | None:
    """Probability that a true outcome was predicted higher than a false one, ties counting half; None without both."""
    came_true = np.asarray(outcome, dtype=bool)
    positives, negatives = int(came_true.sum()), int((~came_true).sum())
    if not positives or not negatives:
        return None
    _, tie, size = np.unique(predicted, return_inverse=True, return_counts=True)
    rank = (np.cumsum(size) - (size - 1) / 2)[tie]  # mean rank of equal predictions
    return float((rank[came_true].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def brier_score(predicted: Floats, outcome: npt.ArrayLike) -> float:
    """Mean squared error; 0 without predictions."""
    return float(np.mean((predicted - np.asarray(outcome, dtype=np.float64)) ** 2)) if len(predicted) else 0.0


def logits_of(confidence: npt.ArrayLike) -> Floats:
    """log(c / (1 - c)), finite: confidences are taken no closer to 0 or 1 than a millionth, as at decode time."""
    clipped = np.clip(np.asarray(confidence, dtype=np.float64), 1e-6, 1 - 1e-6)
    return np.asarray(np.log(clipped) - np.log1p(-clipped))


def prefix_probabilities(logits: Floats, temperatures: Sequence[float], offsets: Sequence[float] = (0.0,)) -> Floats:
    """a_k of the module's formula: [n, K] logits, K temperatures and K offsets (or one for all) -> [n, K]."""
    scaled = logits / np.asarray(temperatures, dtype=np.float64) + np.asarray(offsets, dtype=np.float64)
    return np.asarray(np.cumprod(_sigmoid(scaled), axis=1), dtype=np.float64)


def fit_sequential_temperatures(
    logits: Floats, accepted: Ints, observed: Ints | None = None, *, grid: Sequence[float] = GRID, bins: int = BINS
) -> list[float]:
    """Sequential Temperature Scaling as in the paper: T_1 .. T_K; see `fit_sequential_scaling`."""
    return fit_sequential_scaling(logits, accepted, observed, grid=grid, offsets=(0.0,), bins=bins)[0]


def fit_sequential_scaling(
    logits: Floats,
    accepted: Ints,
    observed: Ints | None = None,
    *,
    grid: Sequence[float] = GRID,
    offsets: Sequence[float] = OFFSETS,
    bins: int = BINS,
) -> tuple[list[float], list[float]]:
    """T_1 .. T_K and b_1 .. b_K of least calibration error, position by position.

    Args:
        logits: [n, K] raw confidence logits.
        accepted: [n] leading drafts accepted.
        observed: [n] leading positions that count in each round; all when None.
        grid: temperatures to choose from.
        offsets: offsets to choose from. Equal errors go to the smallest |log T| + |b|.
        bins: intervals of the calibration error.

    Raises:
        DataError: a position has no round that counts, or a logit there is not finite.
    """
    counts = np.full(len(logits), logits.shape[1]) if observed is None else observed
    candidates = sorted(itertools.product(grid, offsets), key=lambda pair: (abs(math.log(pair[0])) + abs(pair[1]), pair))
    survived = np.ones(len(logits))
    chosen: list[tuple[float, float]] = []
    for k in range(logits.shape[1]):
        here = counts > k
        if not here.any() or not np.isfinite(logits[here, k]).all():
            raise DataError(f"position {k + 1} cannot be calibrated: {int(here.sum())} rounds count there, and logits must be finite")
        before, z, outcome = survived[here], logits[here, k], accepted[here] > k

        def error(pair: tuple[float, float], before: Floats = before, z: Floats = z, outcome: npt.NDArray[np.bool_] = outcome) -> float:
            # Rounded, so that rounding does not break ties; among equals `min` keeps the first.
            return round(expected_calibration_error(before * _sigmoid(z / pair[0] + pair[1]), outcome, bins), 12)

        best = min(candidates, key=error)
        chosen.append((float(best[0]), float(best[1])))
        survived = survived * np.where(here, _sigmoid(logits[:, k] / best[0] + best[1]), 0.0)
    return [t for t, _ in chosen], [b for _, b in chosen]


def quality_by_position(probabilities: Floats, accepted: Ints, observed: Ints | None = None, *, bins: int = BINS) -> list[PositionQuality]:
    """How well [n, K] prefix probabilities predict acceptance; arguments as in `fit_sequential_scaling`."""
    counts = np.full(len(probabilities), probabilities.shape[1]) if observed is None else observed
    qualities = []
    for k in range(probabilities.shape[1]):
        here = counts > k
        predicted, outcome = probabilities[here, k], accepted[here] > k
        qualities.append(
            PositionQuality(
                rounds=int(here.sum()),
                predicted=float(predicted.mean()) if len(predicted) else 0.0,
                observed=float(outcome.mean()) if len(outcome) else 0.0,
                ece=expected_calibration_error(predicted, outcome, bins),
                auc=area_under_curve(predicted, outcome),
                brier=brier_score(predicted, outcome),
                bins=tuple(reliability(predicted, outcome, bins)),
            )
        )
    return qualities


def _sigmoid(logits: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-np.clip(logits, -700, 700))))
