"""What the simulator knows of a drafter, and how simulated requests draw their rounds from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from speculators.decoding.statistics import Round
from speculators.decoding.step_times import StepTimes
from speculators.errors import ConfigError
from speculators.serving.workload import Floats, Ints


@dataclass(frozen=True)
class DrafterProfile:
    """What the simulator knows of a drafter.

    Attributes:
        name: for tables.
        confidence: [n, K] calibrated conditional acceptances of measured rounds; one row for acceptance that is the same in
            every round.
        times: of rounds with this drafter.
        request: [n] which measured request each round is of. Each simulated request is then one of them: all are drawn before
            any is drawn again, and it goes through that request's rounds in their order, from a random one on and round again.
            Replies of some requests are hard to draft throughout, which is what batches wait for and p99 is made of. None:
            every round is drawn from all, with replacement.

    Raises:
        ConfigError: a confidence is no probability, or there are not as many `request` as rounds.
    """

    name: str
    confidence: Floats
    times: StepTimes
    request: Ints | None = None

    def __post_init__(self) -> None:
        if self.request is not None and self.request.shape != self.confidence.shape[:1]:
            raise ConfigError(
                f"drafter {self.name!r}: {len(self.confidence)} rounds need as many request numbers, not {self.request.shape}"
            )
        if self.confidence.ndim != 2 or not self.confidence.size or not ((self.confidence >= 0) & (self.confidence <= 1)).all():
            raise ConfigError(f"drafter {self.name!r}: confidences must be [rounds, drafts] probabilities, at least one")

    @classmethod
    def from_rounds(cls, name: str, rounds: Sequence[Sequence[Round]], drafts: int, times: StepTimes) -> DrafterProfile:
        """Of what happened to measured requests, without any confidence: a draft that was accepted is certain, the next one lost.

        Policies that read confidences would see the future in it; it is for fixed lengths and `auto`.

        Args:
            name: for tables.
            rounds: of each request, with blocks of `drafts` drafts.
            drafts: K; rounds that ended early, since nothing was left to decode, say nothing of the drafts after that and are left
                out.
            times: of rounds with this drafter.

        Raises:
            ConfigError: nothing is left.
        """
        whole = [
            (request, a_round.accepted)
            for request, of_request in enumerate(rounds)
            for a_round in of_request
            if a_round.proposed == drafts or a_round.accepted < a_round.proposed
        ]
        requests, accepted = np.array(whole, dtype=np.int64).reshape(-1, 2).T
        return cls(name, (np.arange(drafts) < accepted[:, None]).astype(np.float64), times, requests)

    @property
    def max_drafts(self) -> int:
        """K of the measured rounds."""
        return int(self.confidence.shape[1])

    @property
    def acceptance(self) -> list[float]:
        """[K] conditional acceptance over all rounds: survival of draft k / survival of the one before."""
        alive = np.concatenate([[1.0], np.cumprod(self.confidence, axis=1).mean(axis=0)])
        return [float(after / before) if before else 0.0 for before, after in pairwise(alive)]


class RoundDraws:
    """Draws the confidences of simulated requests from a profile, round after round.

    Args:
        profile: the drafter.
        requests: of the workload.
        generator: of all draws.
    """

    def __init__(self, profile: DrafterProfile, requests: int, generator: np.random.Generator) -> None:
        self._confidence, self._generator = profile.confidence, generator
        self._grouped = profile.request is not None
        if profile.request is not None:
            order = np.argsort(profile.request, kind="stable")
            self._confidence = self._confidence[order]
            _, first, count = np.unique(profile.request[order], return_index=True, return_counts=True)
            passes = [generator.permutation(len(first)) for _ in range(-(-requests // len(first)))]
            measured = np.concatenate(passes)[:requests]
            self._first, self._count = first[measured], count[measured]
            self._next = generator.integers(0, self._count)

    def confidence(self, requests: Ints) -> Floats:
        """[rows, K] of the next round of these requests."""
        if self._grouped:
            rounds = self._first[requests] + self._next[requests]
            self._next[requests] = (self._next[requests] + 1) % self._count[requests]
        elif len(self._confidence) > 1:
            rounds = self._generator.integers(0, len(self._confidence), len(requests))
        else:
            rounds = np.zeros(len(requests), dtype=np.int64)
        return np.asarray(self._confidence[rounds])
