"""Replies written anew by the verifier, turn by turn, as it would have answered the conversation's questions itself.

The user's turns and the system prompt stay; earlier replies are those just written. Who writes is a *writer*: our engine
(`EngineWriter`) or a server with an OpenAI-compatible interface (`endpoint.EndpointWriter`).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tqdm.auto import tqdm

from speculators.data.chat import ChatEncoder
from speculators.data.forms import Chat, Message, RowError, main_reasons, split_reasoning
from speculators.data.generation import Job, Stage, StageResult, TokenGenerator
from speculators.data.journal import JournalledFile
from speculators.data.prepare import parse_row
from speculators.data.questions import loops, plain_text
from speculators.data.sources import Source, mix
from speculators.errors import ConfigError, DataError
from speculators.evaluation.metrics import is_degenerate
from speculators.verifier import Verifier


@dataclass(frozen=True)
class AnswerSettings:
    """How replies are written.

    Attributes:
        temperature: 0 is greedy.
        top_p, top_k: of servers; our engine draws from the full distribution, which is what a drafter has to follow.
        min_p: keep tokens of at least this share of the largest probability; 0 keeps all.
        max_new_tokens: a longer reply is cut there and flagged.
        max_tokens: of a whole conversation, template included; never more than the verifier's context, where our engine writes.
        thinking: whether the verifier reasons first, for templates that ask; None leaves it to the template.
        keep_truncated: keep cut replies, flagged; a conversation ends with one either way.
        seed: of everything drawn.
    """

    temperature: float = 0.7
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_new_tokens: int = 1024
    max_tokens: int = 4096
    thinking: bool | None = None
    keep_truncated: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf") or not 0 < self.top_p <= 1 or not 0 <= self.min_p < 1 or self.top_k < 0:
            raise ConfigError("sampling needs temperature >= 0, 0 < top_p <= 1, 0 <= min_p < 1 and top_k >= 0")
        if not 1 <= self.max_new_tokens < self.max_tokens:
            raise ConfigError(f"max_new_tokens = {self.max_new_tokens} must be at least 1 and below max_tokens = {self.max_tokens}")

    @property
    def sampling(self) -> dict[str, Any]:
        """What goes into every row's metadata."""
        return {key: getattr(self, key) for key in ("temperature", "top_p", "top_k", "min_p", "max_new_tokens", "seed")}


@dataclass(frozen=True)
class Reply:
    """A reply as its writer hands it back.

    Attributes:
        content: its text, without reasoning.
        reasoning: the reasoning text before it, or None.
        finish_reason: "stop", "length" (cut by its budget) or "abandoned" (it looped).
        prompt_ids, token_ids: the tokens before it and its own, stop token included; None where the writer does not tell.
        repeatable: whether the conversation can go on: the template shows the reply as it was written.
    """

    content: str
    reasoning: str | None
    finish_reason: str
    prompt_ids: list[int] | None = None
    token_ids: list[int] | None = None
    repeatable: bool = True

    @property
    def degenerate(self) -> bool:
        """Whether it loops."""
        words = self.content.split() if self.token_ids is None else self.token_ids
        return self.finish_reason == "abandoned" or is_degenerate([hash(word) for word in words])


@dataclass
class Answered:
    """What became of a conversation.

    Attributes:
        rows: JSON rows, one a document: several where the template rewrites earlier turns.
        dropped: why there are none, or None.
        ended: why later turns were not answered, or None.
        reply_tokens: tokens written, as far as the writer tells them.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    dropped: str | None = None
    ended: str | None = None
    reply_tokens: int = 0


# Yields the messages before each reply; is sent replies, or None where there is no room for one.
Dialogue = Generator[list[Message], Reply | None, Answered]


class Writer(Protocol):
    """Answers conversations."""

    @property
    def name(self) -> str:
        """The model that writes."""
        ...

    def answer(self, chats: Iterable[tuple[int, Chat]], settings: AnswerSettings) -> Iterator[tuple[int, Answered]]:
        """Answer numbered conversations, in any order, taking no more of them than it works on.

        Raises:
            DataError: it cannot go on at all.
        """
        ...


def dialogue(chat: Chat, settings: AnswerSettings, model: str) -> Dialogue:
    """A conversation with its replies left to the caller."""
    messages: list[Message] = []
    answered = Answered()
    facts = {"model": model, "thinking": settings.thinking, "sampling": settings.sampling, **_topic(chat)}
    for message, following in zip(chat.messages, [*chat.messages[1:], None], strict=True):
        if message["role"] == "assistant":
            continue
        if message["role"] == "tool":
            answered.ended = "tool results are given, not computed"
            break
        messages.append(message)
        if message["role"] != "user" or (following is not None and following["role"] == "user"):
            continue  # several messages of the user in a row are answered together
        reply = yield list(messages)
        answered.ended = _reason_to_end(reply)
        if reply is None or (answered.ended is not None and not _keeps(reply, settings)):
            break
        messages.append(
            {"role": "assistant", "content": reply.content} | ({"reasoning_content": reply.reasoning} if reply.reasoning else {})
        )
        _append(answered.rows, chat, messages, reply, facts)
        answered.reply_tokens += len(reply.token_ids or ())
        if answered.ended is not None:
            break
    if not answered.rows:
        answered.dropped = answered.ended or "no user turn"
    return answered


def seed_of(settings: AnswerSettings, number: int, turn: int) -> int:
    """A 31-bit seed for one reply."""
    digest = hashlib.blake2b(f"{settings.seed}/{number}/{turn}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


class EngineWriter:
    """Our own engine: continuous batching on the verifier in this process; rows carry the exact tokens.

    Args:
        verifier: with a chat template.
        slots: conversations at once, see `TokenGenerator`.

    Raises:
        DataError: the verifier has no chat template.
    """

    def __init__(self, verifier: Verifier, slots: int | None = None) -> None:
        self.name = verifier.weights.name_or_path
        self._verifier, self._slots = verifier, slots
        ChatEncoder.for_verifier(verifier)

    def answer(self, chats: Iterable[tuple[int, Chat]], settings: AnswerSettings) -> Iterator[tuple[int, Answered]]:
        """See `Writer`.

        Raises:
            ConfigError: top-p or top-k are asked for.
        """
        if settings.top_p < 1 or settings.top_k:
            raise ConfigError("our engine draws replies from the full distribution or by min_p; leave top_p and top_k to a server")
        encoder = ChatEncoder.for_verifier(self._verifier, thinking=settings.thinking)
        limit = min(settings.max_tokens, self._verifier.context_length or settings.max_tokens)
        generator = TokenGenerator(self._verifier, slots=self._slots, max_length=limit, seed=settings.seed)
        return generator.run_numbered((number, self._job(encoder, number, chat, settings, limit)) for number, chat in chats)

    def _job(self, encoder: ChatEncoder, number: int, chat: Chat, settings: AnswerSettings, limit: int) -> Job[tuple[int, Answered]]:
        conversation = dialogue(chat, settings, self.name)
        try:
            messages = next(conversation)
            while True:
                prompt = encoder.prompt_ids(messages, chat.tools)
                room = min(settings.max_new_tokens, limit - len(prompt))
                if room < 1:
                    messages = conversation.send(None)
                    continue
                result = yield Stage(prompt, room, settings.temperature, settings.min_p, abandon_if=loops, restart=True)
                messages = conversation.send(self._reply(encoder, chat, messages, prompt, result))
        except StopIteration as end:
            return number, end.value
        except RowError as error:
            return number, Answered(dropped=error.reason)

    def _reply(self, encoder: ChatEncoder, chat: Chat, messages: list[Message], prompt: list[int], result: StageResult) -> Reply:
        tokenizer: Any = self._verifier.tokenizer
        written = result.token_ids[:-1] if result.stopped else result.token_ids
        opened = "<think>" if tokenizer.decode(prompt[-8:]).rstrip().endswith("<think>") else ""
        # Nothing but special tokens, such as another end token before the stop token, is no reply.
        said = tokenizer.decode(written) if plain_text(tokenizer, written).strip() else ""
        reasoning, content = split_reasoning(opened + said)
        message = _assistant(content, reasoning)
        return Reply(
            content,
            reasoning,
            result.finish_reason,
            prompt,
            result.token_ids,
            repeatable=not result.stopped or _shows(encoder, Chat([*messages, message], chat.tools), result.token_ids, tokenizer),
        )


def answer_file(
    sources: Sequence[Source],
    writer: Writer,
    output: Path,
    settings: AnswerSettings,
    *,
    limit: int | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Let a writer answer conversations and write them to a JSONL file, in their order, with a card beside it.

    Finished conversations survive a kill; a rerun answers the others.

    Args:
        sources: conversations, or prompts alone.
        writer: who answers.
        output: a `.jsonl` file; must not exist, or be this very run's, finished or not.
        settings: how replies are written.
        limit: at most so many rows of the sources.
        progress: show a progress bar.

    Returns:
        The card: writer, settings and counts.

    Raises:
        DataError: the output holds something else, a source or the writer fails, or nothing was answered.
    """
    run = {
        "command": "data generate",
        "model": writer.name,
        "sources": [source.identity() for source in sources],
        "limit": limit,
        "settings": asdict(settings),
    }
    file = JournalledFile(output, run)
    if file.complete:
        return file.read_card()
    journal, total = file.journal, sum(1 for _ in mix(sources, limit))

    def waiting() -> Iterator[tuple[int, Chat]]:
        for number, row in enumerate(mix(sources, limit)):
            if number in journal:
                continue
            try:
                parsed = parse_row(row)
                if not isinstance(parsed, Chat):
                    raise RowError("tokens without messages")
                yield number, parsed
            except RowError as error:
                journal.add(number, {"rows": [], "dropped": error.reason, "ended": None, "reply_tokens": 0})
                bar.update()

    tokens = 0
    with (
        journal.discarded_if_empty(),
        tqdm(total=total, initial=len(journal), unit=" conversations", disable=not progress, desc="answering") as bar,
    ):
        try:
            for number, answered in writer.answer(waiting(), settings):
                journal.add(number, asdict(answered))
                tokens += answered.reply_tokens
                bar.update()
                bar.set_postfix(reply_tokens=tokens, refresh=False)
        except KeyboardInterrupt:
            raise DataError(f"interrupted after {len(journal)} of {total} conversations; the same command goes on from there") from None
    if not any(result["rows"] for _, result in journal.in_order()):
        main = main_reasons(Counter(result["dropped"] for _, result in journal.in_order())) or "there are none"
        journal.close()
        journal.partial.discard()
        raise DataError(f"none of {len(journal)} conversations was answered: {main}")
    counts: Counter[str] = Counter()

    def rows() -> Iterator[Mapping[str, Any]]:
        for _, result in journal.in_order():
            counts["conversations"] += 1
            counts["answered"] += not result["dropped"]
            counts["reply_tokens"] += result["reply_tokens"]
            if result["dropped"]:
                counts[f"dropped: {result['dropped']}"] += 1
            elif result["ended"]:
                counts[f"ended early: {result['ended']}"] += 1
            counts["truncated replies"] += sum(row["metadata"]["finish_reason"] == "length" for row in result["rows"])
            yield from result["rows"]

    return file.finish(rows(), lambda: {"model": writer.name, "thinking": settings.thinking, "counts": dict(counts)})


def _append(rows: list[dict[str, Any]], chat: Chat, messages: list[Message], reply: Reply, facts: Mapping[str, Any]) -> None:
    """Add a reply to the last row where its prompt continues it, else as a new row."""
    row: dict[str, Any] = {"id": chat.identifier, "messages": list(messages)}
    if chat.tools:
        row["tools"] = chat.tools
    row["metadata"] = {**facts, "finish_reason": reply.finish_reason}
    if reply.prompt_ids is not None and reply.token_ids is not None:
        before = rows[-1]["input_ids"] if rows else None
        joins = before is not None and reply.prompt_ids[: len(before)] == before
        mask = rows[-1]["loss_mask"] if joins else []
        row["input_ids"] = reply.prompt_ids + reply.token_ids
        row["loss_mask"] = [*mask, *[0] * (len(reply.prompt_ids) - len(mask)), *[1] * len(reply.token_ids)]
        row["truncated"] = reply.finish_reason == "length"
    else:
        joins = bool(rows)
    if joins:
        rows[-1] = row
    else:
        rows.append(row)


def _assistant(content: str, reasoning: str | None) -> Message:
    return {"role": "assistant", "content": content} | ({"reasoning_content": reasoning} if reasoning else {})


def _reason_to_end(reply: Reply | None) -> str | None:
    if reply is None:
        return "no room for a reply"
    if reply.degenerate:
        return "reply loops"
    if not reply.content.strip() and not reply.reasoning:
        return "empty reply"
    if reply.finish_reason == "length":
        return "reply cut"
    if reply.finish_reason != "stop":
        return f"reply finished by {reply.finish_reason}"
    return None if reply.repeatable else "the template does not show the reply as written"


def _keeps(reply: Reply, settings: AnswerSettings) -> bool:
    """Whether a reply that ends its conversation is worth keeping."""
    usable = not reply.degenerate and bool(reply.content.strip() or reply.reasoning)
    return usable and (settings.keep_truncated or reply.finish_reason != "length")


def _shows(encoder: ChatEncoder, chat: Chat, token_ids: list[int], tokenizer: Any) -> bool:
    try:
        labels = encoder.documents(chat)[-1].labels
    except RowError:
        return False
    text: Callable[[list[int]], str] = tokenizer.decode
    return text(labels[-len(token_ids) :]) == text(token_ids) or text(labels).endswith(text(token_ids))


def _topic(chat: Chat) -> dict[str, Any]:
    return {"topic": chat.facts["topic"]} if "topic" in chat.facts else {}
