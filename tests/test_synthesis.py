"""Self-synthesised conversations: what is asked, what is a label, what is dropped and counted."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from chat_tokenizer import END, chat_tokenizer
from tiny_models import tiny_model, tiny_verifier

from speculators.data.decontamination import NGRAM_SIZE, PromptIndex
from speculators.data.generation import Job, StageResult
from speculators.data.prompts import Prompt
from speculators.data.questions import ChatFrame, Exchange, SynthesisSettings, question_and_reply, reply
from speculators.data.storage import load_conversations
from speculators.data.synthesis import answer_prompts, synthesize
from speculators.data.topics import TOPICS, Topic
from speculators.errors import ConfigError, DataError
from speculators.verifier import Verifier

SETTINGS = SynthesisSettings(max_question_tokens=60, max_reply_tokens=30, min_reply_tokens=3, max_tokens=256, seed=4)
TOKENIZER = chat_tokenizer()


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    stops = [TOKENIZER.eos_token_id, *range(200, 216)]  # many, so that a random model ends its questions; no ASCII
    model = tiny_model("llama", seed=1, vocab_size=len(TOKENIZER), layers=2, initializer_range=0.3, eos_token_id=stops)
    return Verifier(model, TOKENIZER, "tiny-chat")


@pytest.fixture(scope="module")
def frame(verifier: Verifier) -> ChatFrame:
    return ChatFrame(verifier)


def topic(*seeds: str, **facts: object) -> Topic:
    return Topic("test", 1.0, seeds, **facts)  # type: ignore[arg-type]


def play(job: Job[Exchange], answer: Callable[[str], str]) -> tuple[Exchange, list[str]]:
    """Run a job with `answer(what was forced)` in a model's place; returns its exchange and each stage's forced text."""
    context: list[int] = []
    forced = []
    try:
        stage = next(job)
        while True:
            forced.append(TOKENIZER.decode(stage.forced))
            context = [*context, *stage.forced]
            tokens = TOKENIZER(answer(forced[-1]))["input_ids"]
            stopped = tokens[-1] in ({TOKENIZER.eos_token_id} if stage.stop_token_ids is None else stage.stop_token_ids)
            result = StageResult(context, tokens, "stop" if stopped else "length")
            context = context + tokens[: len(tokens) - stopped]
            stage = job.send(result)
    except StopIteration as end:
        return end.value, forced


def in_turn(*texts: str) -> Callable[[str], str]:
    """Answers one after the other."""
    remaining = iter(texts)
    return lambda forced: next(remaining)


def test_labels_are_exactly_the_reply_and_its_stop_token(frame: ChatFrame) -> None:
    job = question_and_reply(frame, topic("Tell"), SETTINGS, 0, lambda text, ids: None)
    exchange, forced = play(job, in_turn(f" me more.{END}", f"Gladly so.{END}"))
    assert forced == [frame.opening + "Tell", f"{END}\n<|im_start|>assistant\n"]
    conversation = exchange.conversation
    assert conversation is not None
    assert TOKENIZER.decode(conversation.labels) == f"Gladly so.{END}"
    expected = f"<|im_start|>system\nBe kind{END}\n<|im_start|>user\nTell me more.{END}\n<|im_start|>assistant\nGladly so.{END}"
    assert TOKENIZER.decode(conversation.input_ids) == expected
    assert not conversation.truncated


def test_a_reply_cut_by_its_budget_is_kept_without_a_stop_token_and_marked(frame: ChatFrame) -> None:
    job = question_and_reply(frame, topic("Tell"), SETTINGS, 0, lambda text, ids: None)
    exchange, _ = play(job, in_turn(f" me more.{END}", "Gladly, but"))
    assert exchange.conversation is not None
    assert TOKENIZER.decode(exchange.conversation.labels) == "Gladly, but"
    assert exchange.conversation.truncated


def test_a_suffix_stands_between_the_question_and_the_end_of_its_turn(frame: ChatFrame) -> None:
    job = question_and_reply(frame, topic("What", suffixes=("\nThink.",), suffix_share=1.0), SETTINGS, 0, lambda text, ids: None)
    _, forced = play(job, in_turn(f" is 1 + 1?{END}", f"Two, I think.{END}"))
    assert forced[1] == f"\nThink.{END}\n<|im_start|>assistant\n"


def test_a_function_to_complete_is_fenced_and_closed(frame: ChatFrame) -> None:
    functions = topic("def count_", wrappers=("Complete:\n```python\n",))

    def answer(forced: str) -> str:
        if forced.endswith("def count_"):
            return "words(text: str) -> int:\n"
        if forced.endswith(">>> count_words("):
            return '"one two")\n    2\n    """'
        return f"Here is a body.{END}" if forced.endswith("assistant\n") else ' all the words."""'

    prompts = set()
    for number in range(12):
        exchange, _ = play(question_and_reply(frame, functions, SETTINGS, number, lambda text, ids: None), answer)
        assert exchange.conversation is not None
        assert TOKENIZER.decode(exchange.conversation.labels) == f"Here is a body.{END}"
        prompts.add(TOKENIZER.decode(exchange.conversation.input_ids).split("user\n")[1].split("<|im_start|>")[0])
    examples = '\n    >>> count_words("one two")\n    2\n    '
    for prompt in prompts:
        assert prompt.startswith('Complete:\n```python\ndef count_words(text: str) -> int:\n    """')
        assert prompt.removesuffix(f'"""\n```{END}\n').removesuffix(examples).endswith(" all the words.")
    assert {examples in prompt for prompt in prompts} == {True, False}
    assert len(prompts) > 2  # the docstring opens in different ways


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        ((" me more, and more",), "question too long"),
        ((f" me.{END}", f"No{END}"), "reply too short"),
        ((f" me.{END}", END), "empty reply"),
        ((f" me.{END}", f"\n \n{END}"), "empty reply"),
        ((f" me.{END}", "again and " * 5), "reply loops"),
    ],
)
def test_unusable_conversations_are_dropped_with_their_reason(frame: ChatFrame, texts: tuple[str, ...], reason: str) -> None:
    settings = SynthesisSettings(max_question_tokens=60, max_reply_tokens=60, min_reply_tokens=4)
    job = question_and_reply(frame, topic("Tell"), settings, 0, lambda text, ids: None)
    exchange, _ = play(job, in_turn(*texts))
    assert (exchange.conversation, exchange.dropped) == (None, reason)


def test_a_rejected_question_is_never_answered(frame: ChatFrame) -> None:
    seen: list[str] = []

    def check(text: str, ids: Sequence[int]) -> str:
        seen.append(text)
        return "asked before"

    exchange, forced = play(question_and_reply(frame, topic("Tell"), SETTINGS, 0, check), in_turn(f" me.{END}"))
    assert exchange.dropped == "asked before"
    assert len(forced) == 1
    assert seen == ["Tell me."]


def test_malformed_functions_are_dropped(frame: ChatFrame) -> None:
    functions = topic("def count_", wrappers=("",))
    for signature in ("words\n", "words(text)\n", "words(text: str) -> int: return 3"):
        exchange, _ = play(question_and_reply(frame, functions, SETTINGS, 0, lambda text, ids: None), in_turn(signature))
        assert exchange.dropped == "malformed function"


def test_reply_temperatures_are_drawn_with_their_shares(frame: ChatFrame) -> None:
    settings = SynthesisSettings(reply_temperatures=((1.0, 0.0), (3.0, 1.0)))
    temperatures = [next(reply([1], "test", settings, random.Random(number), TOKENIZER.decode)).temperature for number in range(400)]
    assert set(temperatures) == {0.0, 1.0}
    assert 265 < sum(temperatures) < 335  # 300 plus or minus four standard deviations


def test_greedy_labels_are_what_transformers_generates_from_the_same_context(verifier: Verifier) -> None:
    settings = SynthesisSettings(
        max_question_tokens=60, max_reply_tokens=20, min_reply_tokens=1, reply_temperatures=((1.0, 0.0),), max_tokens=256
    )
    made = synthesize(verifier, settings, conversations=4, topics=[topic("Tell me", "Why is")], slots=16, progress=False)
    assert len(made.conversations) == 4
    for conversation in made.conversations:
        start = conversation.loss_mask.index(True)
        input_ids = torch.tensor([conversation.input_ids[:start]])
        output = verifier.model.generate(
            input_ids, attention_mask=torch.ones_like(input_ids), do_sample=False, max_new_tokens=20, pad_token_id=0
        )
        assert conversation.labels == output[0, start:].tolist()
        assert verifier.tokenizer is not None
        assert verifier.tokenizer.decode(conversation.input_ids[:start]).endswith(f"{END}\n<|im_start|>assistant\n")
        assert conversation.truncated != (conversation.labels[-1] in verifier.stop_token_ids)


def test_counts_cover_every_finished_job_and_travel_with_the_data(verifier: Verifier, tmp_path: Path) -> None:
    made = synthesize(verifier, SETTINGS, conversations=6, topics=[topic("Tell me", "", "Why")], slots=16, progress=False)
    assert made.counts["kept"] == len(made.conversations) == 6
    made.save(tmp_path / "data")
    loaded, header = load_conversations(tmp_path / "data")
    assert loaded == made.conversations
    assert header["verifier"] == "tiny-chat"
    assert header["counts"] == made.counts
    assert header["settings"]["max_reply_tokens"] == 30


def test_the_same_seed_makes_the_same_data(verifier: Verifier) -> None:
    first, same = (synthesize(verifier, SETTINGS, conversations=4, slots=16, progress=False).conversations for _ in range(2))
    assert first == same
    other = SynthesisSettings(**{**vars(SETTINGS), "seed": 5})
    assert first != synthesize(verifier, other, conversations=4, slots=16, progress=False).conversations


def test_no_kept_conversation_shares_a_13_gram_with_an_excluded_prompt_file(verifier: Verifier, tmp_path: Path) -> None:
    prompts = tmp_path / "benchmark.jsonl"
    prompts.write_text(json.dumps({"turns": ["Something else.", "The lighthouse keeper sleeps."]}) + "\n", encoding="utf-8")
    topics = [topic("Tell me"), Topic("planted", 1.0, ("A lighthouse keeper",))]  # " lighthouse keeper" has 18 tokens of one byte
    made = synthesize(verifier, SETTINGS, conversations=6, topics=topics, slots=16, exclude=[prompts], progress=False)
    index = PromptIndex.from_prompt_files([prompts], verifier)
    assert not any(index.overlaps(conversation) for conversation in made.conversations)
    assert {conversation.topic for conversation in made.conversations} == {"test"}
    assert made.counts["shares 13 tokens or words with a benchmark prompt"] > 0


def test_given_prompts_are_answered_once_each_and_long_ones_counted(verifier: Verifier, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [Prompt((f"Question {number}?",)) for number in range(5)] + [Prompt(("long " * 100,))]
    settings = SynthesisSettings(max_reply_tokens=24, min_reply_tokens=1)
    made = answer_prompts(verifier, prompts, settings, max_prompt_tokens=200)
    asked = {tuple(c.input_ids[: c.loss_mask.index(True)]) for c in made.conversations}
    assert asked <= {tuple(verifier.encode_chat(prompt.messages)) for prompt in prompts[:5]}
    assert f"kept={len(made.conversations)}, " in capsys.readouterr().err.rpartition("\r")[2], "the bar ends with the final numbers"
    assert made.counts.pop("prompt too long") == 1
    assert sum(made.counts.values()) == 5


def test_an_interrupt_keeps_what_is_finished(verifier: Verifier) -> None:
    def interrupting() -> Iterator[Topic]:
        yield from [topic("Tell me")] * 12
        raise KeyboardInterrupt

    class Topics(list[Topic]):
        remaining = interrupting()

        def __iter__(self) -> Iterator[Topic]:
            return iter([next(self.remaining)])

    made = synthesize(verifier, SETTINGS, conversations=10_000, topics=Topics([topic("Tell me")]), slots=2, progress=False)
    assert sum(made.counts.values()) > 0


def test_what_cannot_work_is_said_in_one_sentence(verifier: Verifier, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="say when to stop"):
        synthesize(verifier, SETTINGS)
    with pytest.raises(DataError, match="has no chat template"):
        synthesize(tiny_verifier(), SETTINGS, conversations=1)
    with pytest.raises(DataError, match=r"nowhere.jsonl is missing"):
        synthesize(verifier, SETTINGS, conversations=1, exclude=[tmp_path / "nowhere.jsonl"])
    with pytest.raises(DataError, match="none of 1 prompts has at most 3 tokens"):
        answer_prompts(verifier, [Prompt(("Hello there",))], SETTINGS, max_prompt_tokens=3)
    for bad in ({"max_question_tokens": 2}, {"min_reply_tokens": 400}, {"reply_temperatures": ((1.0, -1.0),)}, {"reply_temperatures": ()}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            SynthesisSettings(**bad)  # type: ignore[arg-type]


def test_topics_cover_mathematics_code_and_conversation_with_many_seeds() -> None:
    assert sum(len(set(topic.seeds)) for topic in TOPICS) >= 150
    assert sum(topic.weight for topic in TOPICS) == pytest.approx(1.0)
    for topic in TOPICS:
        assert all(seed == seed.rstrip(" ") for seed in topic.seeds), topic.name  # tokens begin with their space


def test_forced_texts_are_too_unlike_each_other_and_too_short_to_fill_13_words() -> None:
    for topic in TOPICS:
        for text in (*topic.suffixes, *topic.wrappers, *topic.seeds):
            assert len(text.split()) <= NGRAM_SIZE + 4
