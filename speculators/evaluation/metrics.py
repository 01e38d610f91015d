"""What a decode run says about a drafter: pure functions on the rounds of every row.

`rounds` is one sequence of `Round` a row (a prompt). One definition of each number, used by the commands, the
notebook and the committed tables:

- acceptance length: tokens emitted after the first, divided by rounds; the bonus token is included, and nothing
  after a stop token or beyond the budget counts. Micro average: every round weighs the same.
- acceptance by position k: rounds that accepted more than k drafts / rounds that proposed more than k (survival).
- conditional acceptance by position k: the same among rounds whose first k drafts were all accepted.

`speculators.decoding.statistics` counts; here rows are weighed, and what cannot be measured is None, never 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from speculators.decoding import statistics
from speculators.decoding.statistics import Round

Rounds = Sequence[Sequence[Round]]

NGRAM_LENGTH = 8
DEGENERATE_FRACTION = 0.2
NEAR_TIE_GAP = 2e-4


def acceptance_length(rounds: Rounds) -> float | None:
    """Tokens emitted after the first / rounds, over all rows; None where no row needed a round."""
    flat = list(chain.from_iterable(rounds))
    return statistics.acceptance_length(flat) if flat else None


def macro_acceptance_length(rounds: Rounds) -> float | None:
    """Mean over rows of each row's own acceptance length; rows without a round are left out."""
    of_rows = [statistics.acceptance_length(row) for row in rounds if row]
    return sum(of_rows) / len(of_rows) if of_rows else None


def verification_rate(rounds: Rounds) -> float | None:
    """Emitted tokens / positions the verifier computed (the drafts and the anchor of every round)."""
    flat = list(chain.from_iterable(rounds))
    return statistics.verification_rate(flat) if flat else None


def acceptance_by_position(rounds: Rounds, positions: int) -> list[float | None]:
    """[positions]: the share of rounds proposing draft k that accept it and all before it; None where none proposed it."""
    flat = list(chain.from_iterable(rounds))
    counts = zip(statistics.accepted_by_position(flat), statistics.proposed_by_position(flat), strict=True)
    return _padded([accepted / proposed for accepted, proposed in counts], positions)


def conditional_acceptance_by_position(rounds: Rounds, positions: int) -> list[float | None]:
    """[positions]: acceptance of draft k among rounds that accepted the k drafts before it; None where none did."""
    flat = list(chain.from_iterable(rounds))
    reached = [any(r.proposed > k and r.accepted >= k for r in flat) for k in range(positions)]
    values = _padded(statistics.conditional_acceptance_by_position(flat), positions)
    return [value if was_reached else None for value, was_reached in zip(values, reached, strict=True)]


def _padded(values: Sequence[float], positions: int) -> list[float | None]:
    return [values[k] if k < len(values) else None for k in range(positions)]


def acceptance_length_from_conditional(conditional: Sequence[float]) -> float:
    """1 + sum over k of the product of the first k conditional acceptances: what uncut rounds emit on average."""
    length = survival = 1.0
    for alpha in conditional:
        survival *= alpha
        length += survival
    return length


def repeated_ngram_fraction(token_ids: Sequence[int], ngram_length: int = NGRAM_LENGTH) -> float:
    """Share of the n-grams of a sequence that occurred in it before; 0 for a sequence shorter than one n-gram."""
    ngrams = [tuple(token_ids[i : i + ngram_length]) for i in range(len(token_ids) - ngram_length + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def is_degenerate(token_ids: Sequence[int]) -> bool:
    """Whether an output loops: more than 20% of its 8-grams repeat. Loops flatter every drafter."""
    return repeated_ngram_fraction(token_ids) > DEGENERATE_FRACTION


def first_divergence(token_ids: Sequence[int], reference: Sequence[int]) -> int | None:
    """Index of the first token that differs, or where the shorter sequence ends; None for equal sequences."""
    for index, (ours, theirs) in enumerate(zip(token_ids, reference, strict=False)):
        if ours != theirs:
            return index
    return None if len(token_ids) == len(reference) else min(len(token_ids), len(reference))
