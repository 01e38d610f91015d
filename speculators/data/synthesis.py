"""Training data from the verifier alone: its own questions, or given prompts, and its own answers to them."""

from __future__ import annotations

import dataclasses
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from speculators.data.decontamination import PromptIndex
from speculators.data.deduplication import SeenQuestions
from speculators.data.forms import main_reasons
from speculators.data.generation import Job, TokenGenerator
from speculators.data.journal import Journal, JournalledFile
from speculators.data.partial import PartialFolder
from speculators.data.prompts import Prompt
from speculators.data.questions import ChatFrame, Exchange, SynthesisSettings, plain_text, question_and_reply, reply
from speculators.data.rows import Conversation
from speculators.data.statistics import statistics
from speculators.data.storage import save_conversations
from speculators.data.topics import TOPICS, Topic
from speculators.errors import ConfigError, DataError
from speculators.verifier import Verifier

_BENCHMARK_OVERLAP = "shares 13 tokens or words with a benchmark prompt"
_TOO_SHORT = "question too short"
# Why a question is not asked at all; it is then not one that later ones could repeat.
_BEFORE_ASKING = (_BENCHMARK_OVERLAP, _TOO_SHORT, "question too long", "malformed function")


@dataclass(frozen=True)
class Synthesis:
    """Generated conversations and how they came about.

    Attributes:
        conversations: in the order of their jobs.
        counts: "kept" and, by reason, the number of jobs dropped.
        header: JSON values for `save_conversations`: verifier, settings, counts, topics, speed.
        vocab_size: of the verifier.
    """

    conversations: list[Conversation]
    counts: dict[str, int]
    header: dict[str, Any]
    vocab_size: int

    def save(self, path: str | Path, settings: Mapping[str, Any] | None = None) -> list[Path]:
        """Write a folder of conversations; see `save_conversations`."""
        return save_conversations(path, self.conversations, self.header, vocab_size=self.vocab_size, settings=settings)

    def rows(self, verifier: Verifier) -> Iterator[dict[str, Any]]:
        """The conversations as rows of a JSONL file, with their text beside the exact tokens."""
        frame, settings = ChatFrame(verifier), self.header["settings"]
        sampling = {key: settings[key] for key in ("reply_temperatures", "max_reply_tokens", "seed")}
        for conversation in self.conversations:
            prompt = conversation.input_ids[: conversation.loss_mask.index(True)]
            finish_reason = "length" if conversation.truncated else "stop"
            yield {
                "messages": [
                    {"role": "user", "content": frame.user_text(prompt)},
                    {"role": "assistant", "content": frame.decode(conversation.labels)},
                ],
                "input_ids": conversation.input_ids,
                "loss_mask": [int(label) for label in conversation.loss_mask],
                "topic": conversation.topic,
                "truncated": conversation.truncated,
                "metadata": {"model": self.header["verifier"], "thinking": None, "sampling": sampling, "finish_reason": finish_reason},
            }


class SynthesisOutput:
    """Where a synthesis goes: a folder of conversations, or a JSONL file of chat rows, with the journal of the run.

    Attributes:
        journal: finished jobs.
        complete: the output is there already, made with the same settings.

    Args:
        path: a new folder, or a new file that ends in `.jsonl`.
        settings: what the content depends on, as JSON values.

    Raises:
        DataError: the output holds something else, or an unfinished run with other settings.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self._path, self._settings = path, settings
        self._file = JournalledFile(path, settings) if path.suffix == ".jsonl" else None
        self.journal: Journal | None = None
        if self._file is not None:
            self.complete = self._file.complete
            if not self.complete:
                self.journal = self._file.journal
            return
        self.complete = PartialFolder(path, settings).complete  # refuses what is not ours
        notes = PartialFolder.place(path.with_name(f"{path.name}.journal"))
        if self.complete:
            shutil.rmtree(notes, ignore_errors=True)
        else:
            shutil.rmtree(PartialFolder.place(path), ignore_errors=True)
            self.journal = Journal(PartialFolder(path.with_name(f"{path.name}.journal"), settings))

    def write(self, synthesis: Synthesis, verifier: Verifier) -> list[Path]:
        """Write the output, then remove the journal.

        Raises:
            DataError: no conversation was kept; nothing is left behind then.
        """
        assert self.journal is not None
        if not synthesis.conversations:
            self.journal.close()
            self.journal.partial.discard()
            dropped = main_reasons(synthesis.counts) or "none was finished"
            raise DataError(f"no conversation was kept for {self._path}: {dropped}; give it more time, or other settings")
        if self._file is not None:
            self._file.finish(synthesis.rows(verifier), lambda: synthesis.header)
            return [self._path]
        files = synthesis.save(self._path, self._settings)
        self.journal.close()
        self.journal.partial.discard()
        return files


def synthesize(
    verifier: Verifier,
    settings: SynthesisSettings | None = None,
    *,
    conversations: int | None = None,
    seconds: float | None = None,
    exclude: Iterable[str | Path] = (),
    topics: Sequence[Topic] = TOPICS,
    slots: int | None = None,
    progress: bool = True,
    journal: Journal | None = None,
) -> Synthesis:
    """Let the verifier write questions and answer them.

    Ctrl-C ends early and keeps what is finished.

    Args:
        verifier: an instruction-tuned model with a chat template.
        settings: lengths, temperatures, seed.
        conversations: stop at this many kept ones.
        seconds: stop after this time of generation (captures and loading not counted). One of the two is needed.
        exclude: prompt files that no conversation may overlap, see `PromptIndex`.
        topics: what to ask about.
        slots: sequences decoded at once, see `TokenGenerator`.
        progress: show a progress bar.
        journal: where finished jobs are noted, and found again after a kill.

    Raises:
        ConfigError: neither a number nor a time was given.
        DataError: the verifier has no chat template, or a prompt file cannot be read.
    """
    settings = settings or SynthesisSettings()
    if conversations is None and seconds is None:
        raise ConfigError("say when to stop: a number of conversations, a number of seconds, or both")
    frame = ChatFrame(verifier)
    index = PromptIndex.from_prompt_files(exclude, verifier)
    collector = _Collector(index, conversations, Counter())

    def check(text: str, token_ids: Sequence[int]) -> str | None:
        if len(text) < 8:
            return _TOO_SHORT
        # Against those decided upon already: whatever repeats them repeats the lower numbers too.
        return _BENCHMARK_OVERLAP if index.overlaps(token_ids) else collector.seen.known(text)

    def jobs() -> Iterator[tuple[int, Job[Exchange]]]:
        for number in count():
            topic = random.Random(f"{settings.seed}/topic/{number}").choices(topics, [topic.weight for topic in topics])[0]
            yield number, question_and_reply(frame, topic, settings, number, check)

    generator = TokenGenerator(verifier, slots=slots, max_length=settings.max_tokens, seed=settings.seed)
    return _collect(generator, jobs(), verifier, settings, collector, conversations, seconds, progress, journal)


def answer_prompts(
    verifier: Verifier,
    prompts: Sequence[Prompt],
    settings: SynthesisSettings | None = None,
    *,
    seconds: float | None = None,
    exclude: Iterable[str | Path] = (),
    max_prompt_tokens: int = 1024,
    slots: int | None = None,
    progress: bool = True,
    journal: Journal | None = None,
) -> Synthesis:
    """Let the verifier answer the first turn of given prompts.

    Args:
        prompts: from `read_prompts`.
        max_prompt_tokens: longer prompts, template included, are dropped and counted.
        verifier, settings, seconds, exclude, slots, progress, journal: as for `synthesize`.

    Raises:
        DataError: the verifier has no chat template, no prompt is short enough, or a prompt file cannot be read.
    """
    settings = settings or SynthesisSettings()
    encoded = [verifier.encode_chat(prompt.messages) for prompt in prompts]
    fitting = [ids for ids in encoded if len(ids) <= max_prompt_tokens]
    if not fitting:
        raise DataError(f"none of {len(prompts)} prompts has at most {max_prompt_tokens} tokens; raise max_prompt_tokens")
    text = partial(plain_text, verifier.tokenizer)
    jobs = (
        (number, reply(ids, "prompts", settings, random.Random(f"{settings.seed}/{number}"), text)) for number, ids in enumerate(fitting)
    )
    generator = TokenGenerator(
        verifier,
        slots=slots,
        max_length=max(map(len, fitting)) + settings.max_reply_tokens,
        seed=settings.seed,
    )
    too_long = Counter({"prompt too long": len(prompts) - len(fitting)})
    collector = _Collector(PromptIndex.from_prompt_files(exclude, verifier), len(fitting), too_long)
    return _collect(generator, jobs, verifier, settings, collector, len(fitting), seconds, progress, journal)


class _Collector:
    """Takes finished jobs in any order and decides about them in the order of their numbers.

    What is kept is then the same whatever the number of slots, and after a kill and a rerun: a question repeats another if
    one of a lower number was like it, not if one happened to be finished earlier.
    """

    def __init__(self, index: PromptIndex, wanted: int | None, counts: Counter[str]) -> None:
        self.kept: list[Conversation] = []
        self.counts = +counts  # a copy without zeros
        self.by_topic: Counter[str] = Counter()
        self.seen = SeenQuestions()
        self._index, self._wanted = index, wanted
        self._next = 0
        self._waiting: dict[int, Exchange] = {}

    @property
    def full(self) -> bool:
        """Whether as many are kept as are wanted."""
        return self._wanted is not None and len(self.kept) >= self._wanted

    def take(self, number: int, exchange: Exchange) -> None:
        """Note what a job returned."""
        self._waiting[number] = exchange
        while not self.full and self._next in self._waiting:
            self._decide(self._waiting.pop(self._next))
            self._next += 1

    def take_rest(self) -> None:
        """Decide about what waits for jobs that will not be finished any more."""
        for number in sorted(self._waiting):
            if not self.full:
                self._decide(self._waiting.pop(number))

    def _decide(self, exchange: Exchange) -> None:
        conversation, dropped = exchange.conversation, exchange.dropped
        if exchange.question and dropped not in _BEFORE_ASKING:
            dropped = self.seen.repeats(exchange.question) or dropped
        if dropped is None and conversation is not None and self._index.overlaps(conversation):
            dropped = _BENCHMARK_OVERLAP
        self.counts[dropped or "kept"] += 1
        if dropped is None and conversation is not None:
            self.kept.append(conversation)
            self.by_topic[conversation.topic] += 1


def _collect(
    generator: TokenGenerator,
    jobs: Iterable[tuple[int, Job[Exchange]]],
    verifier: Verifier,
    settings: SynthesisSettings,
    collector: _Collector,
    wanted: int | None,
    seconds: float | None,
    progress: bool,
    journal: Journal | None,
) -> Synthesis:
    """Run jobs until enough conversations are kept, the time is over, the jobs end or the user interrupts."""
    started = shown = time.monotonic()
    total = seconds if wanted is None else wanted
    bar: Any = tqdm(total=total, unit="s" if wanted is None else " conversations", disable=not progress, desc="generating")

    def show() -> None:
        elapsed = time.monotonic() - started
        bar.n = round(elapsed) if wanted is None else len(collector.kept)
        reply_tokens = sum(conversation.reply_tokens for conversation in collector.kept)
        speed = round(generator.generated_tokens / max(elapsed, 1e-9))
        bar.set_postfix(kept=len(collector.kept), reply_tokens=reply_tokens, tokens_per_second=speed)

    def numbered(job: Job[Exchange], number: int) -> Job[tuple[int, Exchange]]:
        return number, (yield from job)

    for number, stored in journal.in_order() if journal is not None else ():
        collector.take(number, _exchange(stored))
    waiting = ((number, numbered(job, number)) for number, job in jobs if journal is None or number not in journal)
    try:
        for number, exchange in () if collector.full else generator.run_numbered(waiting, seconds=seconds):
            if journal is not None:
                journal.add(number, _stored(exchange))
            collector.take(number, exchange)
            now = time.monotonic()
            if now - shown > 0.5:
                shown = now
                show()
            if collector.full:
                break
    except KeyboardInterrupt:
        tqdm.write(f"interrupted: {len(collector.kept)} finished conversations are kept")
    collector.take_rest()
    elapsed = time.monotonic() - started
    show()  # the end too, which the last half second may have hidden
    bar.close()
    kept = collector.kept
    header = {
        "verifier": verifier.weights.name_or_path,
        "dtype": str(verifier.dtype).removeprefix("torch."),
        "settings": dataclasses.asdict(settings),
        "slots": generator.slots,
        "counts": dict(collector.counts),
        "conversations_by_topic": dict(collector.by_topic),
        "truncated_replies": sum(conversation.truncated for conversation in kept),
        "statistics": statistics(kept),
        "seconds": round(elapsed, 1),
        "steps": generator.steps,
        "generated_tokens": generator.generated_tokens,
        "generated_tokens_per_second": round(generator.generated_tokens / max(elapsed, 1e-9), 1),
    }
    return Synthesis(kept, dict(collector.counts), header, verifier.vocab_size)


def _stored(exchange: Exchange) -> dict[str, Any]:
    """An exchange as JSON values; a reply is the end of its conversation."""
    conversation = exchange.conversation
    stored: dict[str, Any] = {"topic": exchange.topic, "dropped": exchange.dropped, "question": exchange.question}
    if conversation is not None:
        reply = conversation.reply_tokens
        stored |= {"input_ids": conversation.input_ids, "reply": reply, "truncated": conversation.truncated}
    return stored


def _exchange(stored: Mapping[str, Any]) -> Exchange:
    conversation = None
    if "input_ids" in stored:
        ids, reply = stored["input_ids"], stored["reply"]
        mask = [False] * (len(ids) - reply) + [True] * reply
        conversation = Conversation(ids, mask, stored["topic"], stored["truncated"])
    return Exchange(stored["topic"], conversation, stored["dropped"], stored["question"])
