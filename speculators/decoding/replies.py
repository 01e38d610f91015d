"""The replies of a batch, on the host."""

from __future__ import annotations

from collections.abc import Callable

from speculators.decoding.batch import Arriving
from speculators.decoding.statistics import Round

OnTokens = Callable[[int, list[int]], None]


class Replies:
    """One transfer a round brings the tokens and counts of all rows.

    Attributes:
        token_ids: new tokens of each row.
        rounds: what each round did to it.
        finish_reasons: "stop", "length", or empty while the row is active.
    """

    def __init__(self, rows: int, on_tokens: OnTokens | None) -> None:
        self.token_ids: list[list[int]] = [[] for _ in range(rows)]
        self.rounds: list[list[Round]] = [[] for _ in range(rows)]
        self.finish_reasons = [""] * rows
        self._on_tokens = on_tokens

    @property
    def active(self) -> bool:
        """Whether any row is unfinished."""
        return "" in self.finish_reasons

    @property
    def shortest(self) -> int:
        """Tokens of the shortest reply that is not finished."""
        return min(len(reply) for reply, reason in zip(self.token_ids, self.finish_reasons, strict=True) if not reason)

    def remaining(self, max_new_tokens: int) -> list[int]:
        """Tokens that each row may still get; 0 for finished rows."""
        return [0 if reason else max_new_tokens - len(reply) for reply, reason in zip(self.token_ids, self.finish_reasons, strict=True)]

    def add(self, arriving: Arriving, *, prefill: bool = False) -> list[Round | None]:
        """Append what a round emitted; the prefill's token belongs to no round.

        Returns:
            What the round did to each row; None for rows that were finished before.
        """
        added: list[Round | None] = [None] * len(self.token_ids)
        for row, (proposed, accepted, emitted, stopped, finished, *tokens) in enumerate(arriving.rows()):
            if self.finish_reasons[row]:
                continue
            self.token_ids[row] += tokens[:emitted]
            if not prefill:
                this_round = added[row] = Round(proposed, accepted, emitted)
                self.rounds[row].append(this_round)
            if finished:
                self.finish_reasons[row] = "stop" if stopped else "length"
            if self._on_tokens is not None:
                self._on_tokens(row, tokens[:emitted])
        return added
