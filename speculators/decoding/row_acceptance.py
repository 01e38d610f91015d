"""How likely drafts are accepted, by position and by row, learned from few rounds of each row.

Rows of a batch are not alike: one continues a list, another makes up a story, and each stays as it is over its whole reply. A
row alone shows too few rounds for an acceptance of every position, so the rows share one curve and differ by one number each,
the *frailty* of survival analysis: where the mean row's first k drafts survive with probability S_k, those of a row of frailty h
survive with S_k ** h. Frailties are drawn from a gamma distribution of mean 1. After f drafts of a row were rejected while it was
exposed to a cumulative hazard e, its posterior has shape m + f and rate m + e, m being one over the variance of the frailties; that
variance is learned from all rows. A draft that the mean row accepts with probability a is a hazard of h = -log(a); where it was
rejected, the exposure ended within it, in the mean after 1 - h a / (1 - a) (the mean of an exponential variable below h), about half.
The mean row's exposure is then what it is expected to lose.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from speculators.decoding.statistics import Round

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class RowAcceptance:
    """The estimate for one batch. Old rounds fade, so it follows the text.

    Args:
        acceptance: conditional acceptance of the mean row to begin with, as many positions as known.
        positions: K.
        rows: of the batch.
    """

    # Acceptance nobody measured counts as this many rounds of one row, and a measured one as more; rounds fade by FORGET a round.
    UNKNOWN, UNKNOWN_ROUNDS, KNOWN_ROUNDS, FORGET = 0.7, 4.0, 64.0, 0.995
    # Variance of the frailties to begin with, which counts as what one row with 10 expected rejections shows (e ** 2); its bounds.
    # Most rows differ less, but the worst of hundreds do worse than a gamma distribution of the variance measured lets expect.
    VARIANCE, VARIANCE_WEIGHT, VARIANCES = 1 / 2, 100.0, (1 / 50, 1 / 2)
    # Between which a draft's acceptance has a hazard that is finite and not zero.
    ACCEPTANCES = (1e-3, 1 - 1e-6)

    def __init__(self, acceptance: Sequence[float], positions: int, rows: int) -> None:
        known = np.array(acceptance[:positions], dtype=np.float64)
        prior = np.concatenate([known, np.full(positions - len(known), self.UNKNOWN)])
        self._reached = np.where(np.arange(positions) < len(known), self.KNOWN_ROUNDS, self.UNKNOWN_ROUNDS)
        self._accepted = self._reached * prior
        self._row_reached = np.zeros((rows, positions))
        self._row_rejected = np.zeros((rows, positions))

    @property
    def pooled(self) -> Floats:
        """[K] conditional acceptance of the mean row."""
        return np.asarray(self._accepted / self._reached, dtype=np.float64)

    def survival(self, rows: Bools, deviations: float = 0.0) -> Floats:
        """Probability that the first k drafts of a row are all accepted.

        Args:
            rows: [batch] which rows are asked for.
            deviations: each row's frailty is the quantile of its posterior that lies so many standard deviations of a normal
                distribution above the median.

        Returns:
            [rows asked for, K].
        """
        acceptance = self.pooled
        expected = self._row_reached @ (1 - acceptance)
        binomial = self._row_reached @ (acceptance * (1 - acceptance))  # variance of the rejections of a row that is like the mean
        rejected = self._row_rejected.sum(1)
        excess = ((rejected - expected) ** 2 - binomial).sum()
        variance = (self.VARIANCE_WEIGHT * self.VARIANCE + excess) / (self.VARIANCE_WEIGHT + (expected**2).sum())
        variance *= 1 - 1 / len(self._row_reached)  # of few rows each is a good part of the mean row, a single one is it
        m = 1 / np.clip(variance, *self.VARIANCES)
        likely = np.clip(acceptance, *self.ACCEPTANCES)
        hazard = -np.log(likely)
        until_rejected = 1 - hazard * likely / (1 - likely)
        exposure = (self._row_reached - self._row_rejected)[rows] @ hazard + self._row_rejected[rows] @ until_rejected
        shape = m + rejected[rows]
        # Quantiles of a gamma distribution by the approximation of Wilson and Hilferty.
        frailty = shape / (m + exposure) * (1 - 1 / (9 * shape) + deviations / (3 * np.sqrt(shape))) ** 3
        return np.asarray(np.cumprod(acceptance) ** frailty[:, None], dtype=np.float64)

    def record(self, rounds: Sequence[Round | None]) -> None:
        """Count which drafts of each row were reached and accepted; None is a row that has finished."""
        proposed = np.array([-1 if a_round is None else a_round.proposed for a_round in rounds], dtype=np.int64)[:, None]
        accepted = np.array([-1 if a_round is None else a_round.accepted for a_round in rounds], dtype=np.int64)[:, None]
        position = np.arange(len(self._reached))
        reached = (proposed > position) & (accepted >= position)
        kept = reached & (accepted > position)
        fade = np.where(reached.any(0), self.FORGET, 1.0)  # what was not tried is not forgotten
        self._reached = self._reached * fade + reached.sum(0)
        self._accepted = self._accepted * fade + kept.sum(0)
        self._row_reached = self._row_reached * self.FORGET + reached
        self._row_rejected = self._row_rejected * self.FORGET + (reached & ~kept)
