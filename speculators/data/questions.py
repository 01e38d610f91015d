"""Self-synthesis jobs: the verifier continues an opened user turn into a question, then answers it in the same slot."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from speculators.data.generation import Job, Stage, StageResult
from speculators.data.rows import Conversation
from speculators.data.topics import NAMES, Topic
from speculators.errors import ConfigError, DataError
from speculators.evaluation.metrics import is_degenerate, repeated_ngram_fraction
from speculators.verifier import Verifier

_DOCSTRING_OPENINGS = (
    "",
    "",
    "",
    " Return",
    " Given a",
    " You are given",
    " Check if",
    " For a given",
    " Write a function that",
    "\n    Create a function that",
)
_SIGNATURE_TOKENS = 40
_EXAMPLE_TOKENS = 64
_EXAMPLE_SHARE = 0.5


@dataclass(frozen=True)
class SynthesisSettings:
    """How questions and replies are written.

    Attributes:
        max_question_tokens: a longer question is dropped.
        max_reply_tokens: a longer reply is cut there and marked as truncated.
        max_tokens: of a whole conversation, template included; a reply that would exceed it is cut there.
        min_reply_tokens: a shorter reply, stop token included, is dropped.
        question_temperature, question_min_p: of the question's draws.
        reply_temperatures: (share, temperature) pairs; a reply's temperature is drawn among them. Replies are drawn
            from the full distribution, since that is what a drafter will have to follow.
        seed: of everything drawn.
    """

    max_question_tokens: int = 96
    max_reply_tokens: int = 320
    max_tokens: int = 512
    min_reply_tokens: int = 16
    question_temperature: float = 1.0
    question_min_p: float = 0.05
    reply_temperatures: tuple[tuple[float, float], ...] = ((0.25, 0.0), (0.5, 0.7), (0.25, 1.0))
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_question_tokens < 8:
            raise ConfigError(f"max_question_tokens = {self.max_question_tokens} must be at least 8")
        if not 1 <= self.min_reply_tokens <= self.max_reply_tokens:
            raise ConfigError(
                f"max_reply_tokens = {self.max_reply_tokens} must be at least min_reply_tokens = {self.min_reply_tokens}, the shortest"
                " reply that is kept, and that at least 1"
            )
        if self.max_tokens < self.max_question_tokens + self.min_reply_tokens:
            raise ConfigError(
                f"max_tokens = {self.max_tokens} leaves no room for a question of {self.max_question_tokens} tokens and a reply of"
                f" {self.min_reply_tokens}"
            )
        if not self.reply_temperatures or any(share <= 0 or temperature < 0 for share, temperature in self.reply_temperatures):
            raise ConfigError(
                f"reply_temperatures = {self.reply_temperatures} needs pairs of a positive share and a temperature of at least 0"
            )


@dataclass(frozen=True)
class Exchange:
    """What a job returns: a conversation, or the reason why there is none.

    Attributes:
        topic: what was asked about.
        conversation: None where it was dropped.
        dropped: why.
        question: its text; "" where none was written, or was given.
    """

    topic: str
    conversation: Conversation | None
    dropped: str | None = None
    question: str = ""


class ChatFrame:
    """The chat template around one user turn, as text and tokens.

    Attributes:
        opening: everything up to the user's first word.
        closing: everything from behind the user's last word up to the assistant's first.
        question_stops: tokens that end a question: stop tokens and all other special ones.
    """

    _MARK = "\u2042user\u2042"

    def __init__(self, verifier: Verifier) -> None:
        """Read the verifier's template.

        Raises:
            DataError: it has none, or changes the user's text.
        """
        name, tokenizer = verifier.weights.name_or_path, verifier.tokenizer
        if tokenizer is None or not tokenizer.chat_template:
            raise DataError(f"{name!r} has no chat template: choose an instruction-tuned verifier to synthesise questions")
        rendered = tokenizer.apply_chat_template([{"role": "user", "content": self._MARK}], tokenize=False, add_generation_prompt=True)
        parts = str(rendered).split(self._MARK)
        if len(parts) != 2:
            raise DataError(
                f"the chat template of {name!r} does not show the user's text exactly once, so no question can be written into it"
            )
        self.opening, self.closing = parts
        self._tokenizer: Any = tokenizer
        self._encoded: dict[str, list[int]] = {}
        self.question_stops = frozenset(int(token) for token in {*tokenizer.all_special_ids, *verifier.stop_token_ids})
        texts: list[str] = tokenizer.batch_decode([[token] for token in range(verifier.vocab_size)])
        self.newline_stops = self.question_stops | {token for token, text in enumerate(texts) if "\n" in text}
        self.docstring_stops = self.question_stops | {token for token, text in enumerate(texts) if '"""' in text}

    def encode(self, text: str) -> list[int]:
        """Tokens of a piece of the rendered template; special tokens are recognised, none is added."""
        if text not in self._encoded:  # the same few thousand texts over and over, on the host while the device waits
            self._encoded[text] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return self._encoded[text]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, without special ones."""
        return plain_text(self._tokenizer, token_ids)

    def user_text(self, prompt_ids: Sequence[int]) -> str:
        """The user's turn in the tokens up to a reply."""
        text: str = self._tokenizer.decode(prompt_ids)
        return text.removeprefix(self.opening).removesuffix(self.closing)


def plain_text(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """Text of tokens, without special ones."""
    return str(tokenizer.decode(token_ids, skip_special_tokens=True))


# Looks at a question (its text, all tokens so far) and returns why to drop it, or None.
QuestionCheck = Callable[[str, Sequence[int]], str | None]


def question_and_reply(frame: ChatFrame, topic: Topic, settings: SynthesisSettings, number: int, check: QuestionCheck) -> Job[Exchange]:
    """The job of one synthesised conversation.

    Args:
        frame: the verifier's template.
        topic: what to ask about.
        settings: lengths and temperatures.
        number: of the conversation; its draws depend on it and the seed alone.
        check: looks at the question before it is answered.
    """
    draw = random.Random(f"{settings.seed}/{number}")
    write = _write_function if topic.wrappers else _write_question
    question = yield from write(frame, topic, settings, draw)
    if question.dropped is None:
        dropped = check(question.text, question.token_ids)
    else:
        dropped = question.dropped
    if dropped is not None:
        return Exchange(topic.name, None, dropped, question.text)
    room = settings.max_tokens - len(question.token_ids) - len(question.forced)
    if room < settings.min_reply_tokens:
        return Exchange(topic.name, None, "question too long", question.text)
    answered = yield from reply(question.forced, topic.name, settings, draw, frame.decode, room)
    return replace(answered, question=question.text)


def reply(
    forced: Sequence[int],
    topic: str,
    settings: SynthesisSettings,
    draw: random.Random,
    text: Callable[[Sequence[int]], str],
    room: int | None = None,
) -> Job[Exchange]:
    """The job, or the last stage of one, that answers what `forced` ends, in at most `room` tokens.

    `text` gives the text of tokens without special ones: a reply that has none, such as a stop token alone, is dropped.
    """
    budget = settings.max_reply_tokens if room is None else min(room, settings.max_reply_tokens)
    shares, temperatures = zip(*settings.reply_temperatures, strict=True)
    temperature = draw.choices(temperatures, shares)[0]
    result = yield Stage(forced, budget, temperature, abandon_if=loops)
    if result.finish_reason == "abandoned" or is_degenerate(result.token_ids):
        return Exchange(topic, None, "reply loops")
    if not text(result.token_ids).strip():
        return Exchange(topic, None, "empty reply")
    if len(result.token_ids) < settings.min_reply_tokens:
        return Exchange(topic, None, "reply too short")
    mask = [False] * len(result.context) + [True] * len(result.token_ids)
    return Exchange(topic, Conversation(result.context + result.token_ids, mask, topic, truncated=not result.stopped))


def loops(token_ids: Sequence[int]) -> bool:
    """Whether a reply is stuck. It would not end by itself: without this, the replies to drop would take the most time."""
    return repeated_ngram_fraction(token_ids[-128:]) > 0.5


@dataclass(frozen=True)
class _Question:
    """A written question: `forced` closes it and opens the reply."""

    text: str = ""
    token_ids: Sequence[int] = ()
    forced: Sequence[int] = ()
    dropped: str | None = None


def _write_question(
    frame: ChatFrame, topic: Topic, settings: SynthesisSettings, draw: random.Random
) -> Generator[Stage, StageResult, _Question]:
    seed = _fill_in(draw.choice(topic.seeds), draw)
    result = yield Stage(
        frame.encode(frame.opening + seed),
        settings.max_question_tokens,
        settings.question_temperature,
        settings.question_min_p,
        frame.question_stops,
    )
    if not result.stopped:
        return _Question(dropped="question too long")
    suffix = draw.choice(topic.suffixes) if draw.random() < topic.suffix_share else ""
    text = seed + frame.decode(result.token_ids)
    return _Question(text, result.context + result.token_ids, frame.encode(suffix + frame.closing))


def _write_function(
    frame: ChatFrame, topic: Topic, settings: SynthesisSettings, draw: random.Random
) -> Generator[Stage, StageResult, _Question]:
    """Signature, docstring and, every second time, usage examples of a function to complete."""
    temperature, min_p = settings.question_temperature, settings.question_min_p
    wrapper, seed = draw.choice(topic.wrappers), draw.choice(topic.seeds)
    signature = yield Stage(frame.encode(frame.opening + wrapper + seed), _SIGNATURE_TOKENS, temperature, min_p, frame.newline_stops)
    code = (seed + frame.decode(signature.token_ids)).split("\n\n\n")[-1].split("\n")[0]
    name = re.match(r"def (\w+)\(.*\).*:\s*$", code)
    if not signature.stopped or name is None:
        return _Question(dropped="malformed function")
    opening = '\n    """' + draw.choice(_DOCSTRING_OPENINGS)
    docstring = yield Stage(
        frame.encode(_before(frame, signature, "\n") + opening), settings.max_question_tokens, temperature, min_p, frame.docstring_stops
    )
    text = f"{code}{opening}{frame.decode(docstring.token_ids)}"
    if not docstring.stopped or len(text.split()) < 8:
        return _Question(dropped="malformed function")
    result = docstring
    if draw.random() < _EXAMPLE_SHARE and ">>>" not in text:
        examples = f"{_before(frame, docstring, QUOTES)}\n    >>> {name[1]}("
        result = yield Stage(frame.encode(examples), _EXAMPLE_TOKENS, temperature, min_p, frame.docstring_stops)
    end = _before(frame, result, QUOTES) + QUOTES if result.stopped else f"\n    {QUOTES}"
    fence = "\n```" if "```" in wrapper else ""
    return _Question(text, result.context + result.token_ids, frame.encode(end + fence + frame.closing))


QUOTES = '"""'


def _before(frame: ChatFrame, result: StageResult, mark: str) -> str:
    """What the stop token holds before the mark that made it one; the next stage takes the token's place."""
    return frame.decode(result.token_ids[-1:]).split(mark)[0]


def _fill_in(seed: str, draw: random.Random) -> str:
    while "{name}" in seed:
        seed = seed.replace("{name}", draw.choice(NAMES), 1)
    return seed.replace("{number}", str(draw.randint(2, 60)))
