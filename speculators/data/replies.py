"""From texts with their replies' places to token ids with a loss mask, exactly as a server would have tokenised them.

A server tokenises the prompt; the verifier then adds tokens. The two must not merge into one token here, and the prompt's
tokens must be what the prompt alone gives. Both hold where one tokenisation of the whole text has a border at the
boundary and agrees with the prompt's own last piece; where it does not, prompt and reply are tokenised apart.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from speculators.data.forms import RowError

Masked = tuple[list[int], list[bool]]


@dataclass(frozen=True)
class TurnText:
    """A turn of the assistant as text.

    Attributes:
        prompt: everything before the reply.
        through: everything up to the end of the turn; it continues `prompt`.
        unsupervised: characters at the reply's beginning that are no labels.
    """

    prompt: str
    through: str
    unsupervised: int = 0

    @property
    def reply(self) -> str:
        """What the verifier wrote, and what the template puts behind it."""
        return self.through[len(self.prompt) :]

    def without(self, reasoning: str) -> TurnText:
        """The same turn with its reasoning, and the tag that ends it, no longer supervised."""
        end = self.reply.index(reasoning) + len(reasoning)
        closing = self.reply.find("</think>", end)
        if closing >= 0:
            end = closing + len("</think>")
        rest = self.reply[end:]
        return replace(self, unsupervised=end + len(rest) - len(rest.lstrip()))


class ReplyTokens:
    """Tokenises documents and marks the replies in them, stop tokens included.

    Attributes:
        special_ids: ids of added tokens, which split a text before it is tokenised.
        stop_texts: the stop tokens as they stand in a rendered conversation.

    Args:
        tokenizer: the tokenizer.
        stop_token_ids: ids that end a turn.
        end_of_turn: finds the token that the template puts behind a reply; asked only where no stop token stands there.
    """

    def __init__(self, tokenizer: Any, stop_token_ids: Sequence[int], end_of_turn: Callable[[], int | None]) -> None:
        self._tokenizer = tokenizer
        self.special_ids = frozenset(tokenizer.get_added_vocab().values()) | frozenset(tokenizer.all_special_ids)
        self._stops = frozenset(int(token) for token in stop_token_ids)
        self.stop_texts = [text for token in sorted(self._stops) if (text := tokenizer.decode([token]).strip())]
        self._find_end_of_turn = end_of_turn
        self._known_end: list[int | None] = []
        self._short: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Ids of a piece of a rendered conversation: special tokens are recognised, none is added."""
        known = self._short.get(text)
        if known is None:
            known = self._tokenizer(text, add_special_tokens=False, return_attention_mask=False)["input_ids"]
            if len(text) <= 256 and len(self._short) < 4096:
                self._short[text] = known
        return list(known)

    def of(self, text: str, turns: Sequence[TurnText]) -> Iterator[Masked]:
        """Ids and loss mask of a document whose turns continue one another; several where tokens do not.

        Raises:
            RowError: a reply does not end with a stop token, or goes on behind one.
        """
        whole = self._at_once(text, turns) if self._tokenizer.is_fast else None
        if whole is not None:
            yield whole
        else:
            yield from self._apart(turns)

    # -- inside ------------------------------------------------------------------------------------------------

    def _at_once(self, text: str, turns: Sequence[TurnText]) -> Masked | None:
        """One tokenisation for all turns; None where a boundary does not lie between two tokens of it."""
        encoded = self._tokenizer(text, add_special_tokens=False, return_attention_mask=False).encodings[0]
        ids: list[int] = encoded.ids
        starts, ends = ([offset[side] for offset in encoded.offsets] for side in (0, 1))
        mask = [False] * len(ids)
        for turn in turns:
            boundary = len(turn.prompt)
            first, last = bisect_right(ends, boundary), bisect_left(starts, len(turn.through))
            if first >= last or starts[first] < boundary or not self._prompt_agrees(turn.prompt, ids[:first], ends):
                return None
            labels = first if not turn.unsupervised else bisect_left(starts, boundary + turn.unsupervised)
            end = self._end(ids, first, last)
            mask[labels:end] = [True] * (end - labels)
        return _until_last_label(ids, mask)

    def _prompt_agrees(self, prompt: str, ids: Sequence[int], ends: Sequence[int]) -> bool:
        """Whether the prompt's tokens are those of the prompt alone, as far back as its last special token."""
        special = next((place for place in range(len(ids) - 1, -1, -1) if ids[place] in self.special_ids), None)
        if special is None:
            return self.encode(prompt) == list(ids)
        return self.encode(prompt[ends[special] :]) == list(ids[special + 1 :])

    def _apart(self, turns: Sequence[TurnText]) -> Iterator[Masked]:
        """Prompt and reply of every turn tokenised on their own; a turn joins the one before where its prompt's tokens do."""
        ids: list[int] = []
        mask: list[bool] = []
        for turn in turns:
            prompt, through = self.encode(turn.prompt), self.encode(turn.through)
            reply = through[len(prompt) :] if through[: len(prompt)] == prompt else self.encode(turn.reply)
            if ids and prompt[: len(ids)] == ids:
                mask += [False] * (len(prompt) - len(ids))
            else:
                if ids:
                    yield _until_last_label(ids, mask)
                mask = [False] * len(prompt)
            whole = prompt + reply
            end = self._end(whole, len(prompt), len(whole))
            skipped = len(self.encode(turn.reply[: turn.unsupervised])) if turn.unsupervised else 0
            mask += [index >= len(prompt) + skipped for index in range(len(prompt), end)]
            ids = whole[:end]
        yield _until_last_label(ids, mask)

    def _end(self, ids: list[int], first: int, last: int) -> int:
        """Behind the last token of the reply that begins at `first` and whose turn ends at `last`: its stop token included."""
        stops = [place for place in range(first, last) if ids[place] in self._stops]
        if not stops and (end := self._end_of_turn()) is not None:
            # Either the verifier's stop ids lack the token that its template ends a turn with, or the turn is ended by
            # what opens the next one; at the end of a conversation nothing does, though the verifier wrote it.
            stops = [place for place in range(first, last) if ids[place] == end]
            if not stops and last == len(ids):
                ids.append(end)
            if not stops and ids[last] == end:
                return last + 1
        if not stops:
            raise RowError("no stop token ends the reply", "the template ends a reply with none of the verifier's stop tokens")
        if self._tokenizer.decode(ids[stops[0] + 1 : last]).strip():
            raise RowError("a stop token inside a reply", f"a reply goes on behind the stop token {ids[stops[0]]}")
        return stops[0] + 1

    def _end_of_turn(self) -> int | None:
        if not self._known_end:
            self._known_end.append(self._find_end_of_turn())
        return self._known_end[0]


def _until_last_label(ids: list[int], mask: list[bool]) -> Masked:
    mask += [False] * (len(ids) - len(mask))
    end = len(mask)
    while end and not mask[end - 1]:
        end -= 1
    return ids[:end], mask[:end]
