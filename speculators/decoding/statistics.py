"""What a round was, and the acceptance numbers papers report, from rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Round:
    """One verify forward of one row.

    Where an accepted draft is a stop token, the round ends with it: drafts after it count as not proposed, and there is no
    bonus token. So `emitted` is `accepted` there, and `accepted + 1` elsewhere.

    Attributes:
        proposed: drafts verified, after the confidence threshold and the token budget.
        accepted: drafts accepted.
        emitted: tokens added to the reply.
    """

    proposed: int
    accepted: int
    emitted: int


def acceptance_length(rounds: Sequence[Round]) -> float:
    """Tokens a verify forward, the bonus token included (tau of the papers): emitted / rounds; 0 without rounds."""
    return sum(r.emitted for r in rounds) / len(rounds) if rounds else 0.0


def mean_proposed(rounds: Sequence[Round]) -> float:
    """Drafts verified a round; 0 without rounds."""
    return sum(r.proposed for r in rounds) / len(rounds) if rounds else 0.0


def verification_rate(rounds: Sequence[Round]) -> float:
    """Share of the verified positions (each round's drafts and one more) that became tokens; 0 without rounds."""
    return sum(r.emitted for r in rounds) / (sum(r.proposed for r in rounds) + len(rounds)) if rounds else 0.0


def proposed_by_position(rounds: Sequence[Round]) -> list[int]:
    """Entry k: rounds that proposed a draft at position k + 1."""
    deepest = max((r.proposed for r in rounds), default=0)
    return [sum(r.proposed > k for r in rounds) for k in range(deepest)]


def accepted_by_position(rounds: Sequence[Round]) -> list[int]:
    """Entry k: rounds whose draft at position k + 1 was accepted, and so were all before it."""
    return [sum(r.accepted > k for r in rounds) for k in range(len(proposed_by_position(rounds)))]


def conditional_acceptance_by_position(rounds: Sequence[Round]) -> list[float]:
    """Entry k: share of drafts at position k + 1 accepted, among rounds that accepted all before it; 0 where there are none."""
    reached = [sum(r.proposed > k and r.accepted >= k for r in rounds) for k in range(len(proposed_by_position(rounds)))]
    return [accepted / count if count else 0.0 for accepted, count in zip(accepted_by_position(rounds), reached, strict=True)]
