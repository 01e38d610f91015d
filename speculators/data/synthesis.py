"""Training data from the verifier alone: its own questions, or given prompts, and its own answers to them."""

from __future__ import annotations

import dataclasses
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from speculators.data.decontamination import PromptIndex
from speculators.data.deduplication import SeenQuestions
from speculators.data.generation import Job, TokenGenerator
from speculators.data.prompts import Prompt
from speculators.data.questions import ChatFrame, Exchange, SynthesisSettings, question_and_reply, reply
from speculators.data.rows import Conversation
from speculators.data.storage import save_conversations
from speculators.data.topics import TOPICS, Topic
from speculators.errors import ConfigError, DataError
from speculators.verifier import Verifier

_BENCHMARK_OVERLAP = "shares 13 tokens or words with a benchmark prompt"


@dataclass(frozen=True)
class Synthesis:
    """Generated conversations and how they came about.

    Attributes:
        conversations: in the order in which they were finished.
        counts: "kept" and, by reason, the number of jobs dropped.
        header: JSON values for `save_conversations`: verifier, settings, counts, topics, speed.
        vocab_size: of the verifier.
    """

    conversations: list[Conversation]
    counts: dict[str, int]
    header: dict[str, Any]
    vocab_size: int

    def save(self, path: str | Path) -> list[Path]:
        """Write a folder of conversations; see `save_conversations`."""
        return save_conversations(path, self.conversations, self.header, vocab_size=self.vocab_size)


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

    Raises:
        ConfigError: neither a number nor a time was given.
        DataError: the verifier has no chat template, or a prompt file cannot be read.
    """
    settings = settings or SynthesisSettings()
    if conversations is None and seconds is None:
        raise ConfigError("say when to stop: a number of conversations, a number of seconds, or both")
    frame = ChatFrame(verifier)
    index = PromptIndex.from_prompt_files(exclude, verifier)
    seen = SeenQuestions()

    def check(text: str, token_ids: Sequence[int]) -> str | None:
        if len(text) < 8:
            return "question too short"
        return _BENCHMARK_OVERLAP if index.overlaps(token_ids) else seen.repeats(text)

    def jobs() -> Iterator[Job[Exchange]]:
        for number in count():
            topic = random.Random(f"{settings.seed}/topic/{number}").choices(topics, [topic.weight for topic in topics])[0]
            yield question_and_reply(frame, topic, settings, number, check)

    generator = TokenGenerator(verifier, slots=slots, max_length=settings.max_tokens, seed=settings.seed)
    return _collect(generator, jobs(), verifier, settings, index, conversations, seconds, progress)


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
) -> Synthesis:
    """Let the verifier answer the first turn of given prompts.

    Args:
        prompts: from `read_prompts`.
        max_prompt_tokens: longer prompts, template included, are dropped and counted.
        verifier, settings, seconds, exclude, slots, progress: as for `synthesize`.

    Raises:
        DataError: the verifier has no chat template, no prompt is short enough, or a prompt file cannot be read.
    """
    settings = settings or SynthesisSettings()
    encoded = [verifier.encode_chat(prompt.messages) for prompt in prompts]
    fitting = [ids for ids in encoded if len(ids) <= max_prompt_tokens]
    if not fitting:
        raise DataError(f"none of {len(prompts)} prompts has at most {max_prompt_tokens} tokens; raise max_prompt_tokens")
    jobs = (reply(ids, "prompts", settings, random.Random(f"{settings.seed}/{number}")) for number, ids in enumerate(fitting))
    generator = TokenGenerator(
        verifier,
        slots=slots,
        max_length=max(map(len, fitting)) + settings.max_reply_tokens,
        seed=settings.seed,
    )
    index = PromptIndex.from_prompt_files(exclude, verifier)
    too_long = Counter({"prompt too long": len(prompts) - len(fitting)})
    return _collect(generator, jobs, verifier, settings, index, len(fitting), seconds, progress, too_long)


def _collect(
    generator: TokenGenerator,
    jobs: Iterable[Job[Exchange]],
    verifier: Verifier,
    settings: SynthesisSettings,
    index: PromptIndex,
    wanted: int | None,
    seconds: float | None,
    progress: bool,
    counts: Counter[str] | None = None,
) -> Synthesis:
    """Run jobs until enough conversations are kept, the time is over, the jobs end or the user interrupts."""
    kept: list[Conversation] = []
    counts = +(counts or Counter())  # a copy without zeros
    by_topic: Counter[str] = Counter()
    reply_tokens = 0
    started = shown = time.monotonic()
    total = seconds if wanted is None else wanted
    bar: Any = tqdm(total=total, unit="s" if wanted is None else " conversations", disable=not progress, desc="generating")

    def show() -> None:
        elapsed = time.monotonic() - started
        bar.n = round(elapsed) if wanted is None else len(kept)
        bar.set_postfix(kept=len(kept), reply_tokens=reply_tokens, tokens_per_second=round(generator.generated_tokens / elapsed))

    try:
        for exchange in generator.run(jobs, seconds=seconds):
            conversation, dropped = exchange.conversation, exchange.dropped
            if conversation is not None and index.overlaps(conversation):
                conversation, dropped = None, _BENCHMARK_OVERLAP
            counts[dropped or "kept"] += 1
            if conversation is not None:
                kept.append(conversation)
                by_topic[conversation.topic] += 1
                reply_tokens += conversation.reply_tokens
            now = time.monotonic()
            if now - shown > 0.5:
                shown = now
                show()
            if wanted is not None and len(kept) >= wanted:
                break
    except KeyboardInterrupt:
        tqdm.write(f"interrupted: {len(kept)} finished conversations are kept")
    elapsed = time.monotonic() - started
    show()  # the end too, which the last half second may have hidden
    bar.close()
    header = {
        "verifier": verifier.weights.name_or_path,
        "dtype": str(verifier.dtype).removeprefix("torch."),
        "settings": dataclasses.asdict(settings),
        "slots": generator.slots,
        "counts": dict(counts),
        "conversations_by_topic": dict(by_topic),
        "truncated_replies": sum(conversation.truncated for conversation in kept),
        "seconds": round(elapsed, 1),
        "steps": generator.steps,
        "generated_tokens": generator.generated_tokens,
        "generated_tokens_per_second": round(generator.generated_tokens / elapsed, 1),
    }
    return Synthesis(kept, dict(counts), header, verifier.vocab_size)
