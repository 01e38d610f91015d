"""Goodness of fit, without a statistics package."""

from __future__ import annotations

import torch
from torch import Tensor


def chi_square_p_value(counts: Tensor, expected_probabilities: Tensor, minimum_expected: float = 5.0) -> float:
    """p-value of Pearson's chi-square test; cells with an expected count below the minimum are merged into one.

    Args:
        counts: [cells] observed counts.
        expected_probabilities: [cells], summing to 1. A count where it is 0 gives p-value 0.
    """
    statistic, freedom = chi_square(counts, expected_probabilities, minimum_expected)
    return chi_square_survival(statistic, freedom)


def chi_square(counts: Tensor, expected_probabilities: Tensor, minimum_expected: float = 5.0) -> tuple[float, int]:
    """Statistic and degrees of freedom; see `chi_square_p_value`."""
    counts, expected = counts.double(), expected_probabilities.double() * counts.sum()
    if (counts[expected == 0] > 0).any():
        return float("inf"), 1
    order = expected.argsort(descending=True)
    counts, expected = counts[order], expected[order]
    large = int((expected >= minimum_expected).sum())
    tail_counts, tail_expected = counts[large:].sum(), expected[large:].sum()
    if tail_expected < minimum_expected:  # too small to be a cell of its own
        tail_counts, tail_expected = tail_counts + counts[large - 1], tail_expected + expected[large - 1]
        large -= 1
    counts = torch.cat([counts[:large], tail_counts[None]])
    expected = torch.cat([expected[:large], tail_expected[None]])
    return float(((counts - expected) ** 2 / expected).sum()), len(expected) - 1


def chi_square_survival(statistic: float, freedom: int) -> float:
    """P(X >= statistic) for X chi-square distributed."""
    half = torch.tensor(freedom / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, torch.tensor(statistic / 2, dtype=torch.float64)))
