"""Prompt files, loss masks, packing, storage, held-out split, decontamination and deduplication."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from speculators.data.decontamination import PromptIndex
from speculators.data.deduplication import SeenQuestions
from speculators.data.prompts import read_prompts
from speculators.data.rows import Conversation, pack, split_held_out
from speculators.data.storage import load_conversations, save_conversations
from speculators.errors import DataError


def conversation(prompt: int, reply: int, draw: random.Random, **facts: Any) -> Conversation:
    """A document of random tokens: a prompt, then a reply."""
    return Conversation([draw.randrange(1, 1000) for _ in range(prompt + reply)], [False] * prompt + [True] * reply, **facts)


def random_conversations(count: int, longest: int = 60, seed: int = 0) -> list[Conversation]:
    draw = random.Random(seed)
    return [conversation(draw.randint(1, longest // 2), draw.randint(1, longest // 2), draw, topic=draw.choice("ab")) for _ in range(count)]


# -- prompt files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "text", "system"),
    [
        ({"turns": ["first", "second"]}, "first", None),
        ({"messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "first"}]}, "first", "be kind"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "first"}]}]}, "first", None),
        ({"conversations": [{"from": "human", "value": "first"}, {"from": "gpt", "value": "answer"}]}, "first", None),
        ({"prompt": "first"}, "first", None),
        ({"prompt": [{"role": "user", "content": "first"}]}, "first", None),
        ({"instruction": "first", "input": "extra"}, "first\n\nextra", None),
        ({"instruction": "first", "input": ""}, "first", None),
    ],
)
def test_every_accepted_form_gives_the_first_user_turn(tmp_path: Path, record: dict[str, Any], text: str, system: str | None) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n" + json.dumps(record) + "\n\n", encoding="utf-8")
    (prompt,) = read_prompts(path)
    assert (prompt.text, prompt.system, prompt.identifier) == (text, system, "prompts.jsonl:2")
    assert prompt.messages[-1] == {"role": "user", "content": text}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "prompts.jsonl is missing"),
        ("", "prompts.jsonl holds no prompts"),
        (" \n\n", "prompts.jsonl holds no prompts"),
        ('{"turns": ["fine"]}\n{"turns": [', "line 2: not valid JSON"),
        ("[1, 2]", "line 1: a JSON list where an object is expected"),
        ('{"question": "?"}', "line 1: no prompt among the keys 'question'"),
        ('{"turns": []}', "line 1: the prompt is empty"),
        ('{"prompt": " "}', "line 1: the prompt is empty"),
        ('{"prompt": 3}', 'line 1: "prompt" must be text, not int'),
        ('{"turns": "text"}', '"turns" must be a list of strings'),
        ('{"messages": [{"role": "assistant", "content": "hi"}]}', "it must start with a user turn"),
        ('{"messages": [{"role": "wizard", "content": "hi"}]}', "unknown role 'wizard'"),
        ('{"messages": [{"text": "hi"}]}', 'each entry of "messages" needs "role" and "content"'),
    ],
)
def test_a_bad_prompt_file_is_named_with_its_line(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(DataError) as error:
        read_prompts(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)


def test_a_limit_reads_the_first_prompts_only(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one"}\n{"prompt": "two"}\nbroken', encoding="utf-8")
    assert [prompt.text for prompt in read_prompts(path, limit=2)] == ["one", "two"]


# -- loss masks and packing ----------------------------------------------------------------------------------------


def test_labels_are_the_masked_tokens_by_identity() -> None:
    assert Conversation([1, 2, 3, 4, 10, 11, 12, 2], [False] * 4 + [True] * 4).labels == [10, 11, 12, 2]


def test_tokens_and_mask_of_different_length_are_refused() -> None:
    with pytest.raises(DataError, match="3 tokens and 2 loss mask entries"):
        Conversation([1, 2, 3], [True, False])


@pytest.mark.parametrize("row_length", [60, 61, 128])
def test_packing_keeps_every_document_whole_with_its_mask_and_restarts_positions(row_length: int) -> None:
    conversations = random_conversations(70)
    rows = pack(conversations, row_length, seed=3)
    found = []
    for row in range(len(rows)):
        documents, mask = rows.document_ids[row], rows.loss_mask[row]
        used = int((documents >= 0).sum())
        assert (documents[:used] >= 0).all()
        assert (documents[used:] == -1).all()
        assert not mask[used:].any()
        for document in range(int(documents.max()) + 1):
            at = torch.nonzero(documents == document).flatten()
            assert torch.equal(at, torch.arange(int(at[0]), int(at[0]) + len(at)))  # contiguous: no other document inside
            assert torch.equal(rows.position_ids[row, at], torch.arange(len(at), dtype=torch.int32))
            found.append((rows.input_ids[row, at].tolist(), mask[at].tolist()))
    assert sorted(found) == sorted((c.input_ids, c.loss_mask) for c in conversations)


def test_packing_fills_rows_as_well_as_their_contents_allow() -> None:
    draw = random.Random(0)
    lengths = [70, 30, 60, 40, 50, 50, 90, 10]
    rows = pack([conversation(1, length - 1, draw) for length in lengths], 100)
    assert (len(rows), rows.fill) == (4, 1.0)


def test_documents_longer_than_a_row_are_cut_and_those_cut_before_their_reply_left_out() -> None:
    draw = random.Random(0)
    long, without_reply = conversation(5, 20, draw), conversation(12, 5, draw)
    rows = pack([long, without_reply], 10)
    assert rows.input_ids.tolist() == [long.input_ids[:10]]
    assert rows.reply_tokens == 5
    with pytest.raises(DataError, match="none of 1 conversations holds a reply within its first 10 tokens"):
        pack([without_reply], 10)


def test_packing_is_the_same_for_a_seed_and_another_for_another() -> None:
    conversations = random_conversations(40)
    first, same, other = (pack(conversations, 64, seed=seed).input_ids for seed in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_equal_numbers_of_rows_are_equal_work_on_every_rank() -> None:
    draw = random.Random(2)
    rows = pack([conversation(draw.randint(5, 200), draw.randint(5, 400), draw) for _ in range(1200)], 1024)
    assert rows.fill > 0.98
    ranks = 8
    each = len(rows) // ranks * ranks // ranks
    tokens = [int((rows.document_ids[rank * each : (rank + 1) * each] >= 0).sum()) for rank in range(ranks)]
    labels = [int(rows.loss_mask[rank * each : (rank + 1) * each].sum()) for rank in range(ranks)]
    assert max(tokens) / min(tokens) < 1.03
    assert max(labels) / min(labels) < 1.1


# -- held-out split ------------------------------------------------------------------------------------------------


def test_the_split_is_disjoint_complete_and_keeps_equal_prompts_together() -> None:
    conversations = random_conversations(400)
    again = [Conversation([*c.input_ids, 7], [*c.loss_mask, True]) for c in conversations]  # the same prompts, other replies
    train, held_out = split_held_out(conversations + again, 0.25)
    assert len(train) + len(held_out) == 800
    prompts = [{tuple(c.input_ids[: c.loss_mask.index(True)]) for c in side} for side in (train, held_out)]
    assert not prompts[0] & prompts[1]
    assert 0.15 < len(held_out) / 800 < 0.35  # 0.25 plus or minus five standard deviations


def test_more_data_leaves_earlier_conversations_on_their_side() -> None:
    conversations = random_conversations(100)
    assert split_held_out(conversations[:50], 0.3)[1] == [c for c in split_held_out(conversations, 0.3)[1] if c in conversations[:50]]
    assert split_held_out(conversations, 0.0) == (conversations, [])


# -- storage -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [1000, 200_000])
def test_saved_conversations_come_back_equal_from_several_shards(tmp_path: Path, vocab_size: int) -> None:
    draw = random.Random(1)
    conversations = [conversation(30, 50, draw, topic=draw.choice(["code", "chat"]), truncated=bool(i % 2)) for i in range(60)]
    files = save_conversations(tmp_path / "data", conversations, {"verifier": "tiny"}, vocab_size=vocab_size, max_shard_bytes=105_000)
    loaded, header = load_conversations(tmp_path / "data")
    assert loaded == conversations
    assert len(files) == header["shards"] > 1
    assert all(file.stat().st_size <= 105_000 for file in files)
    assert (header["verifier"], header["tokens"], header["reply_tokens"]) == ("tiny", 60 * 80, 60 * 50)


def test_saving_writes_nothing_where_something_is_or_where_a_token_does_not_fit(tmp_path: Path) -> None:
    conversations = random_conversations(3)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(DataError, match="exists already"):
        save_conversations(tmp_path / "full", conversations, {}, vocab_size=1000)
    with pytest.raises(DataError, match="do not fit a vocabulary of 5"):
        save_conversations(tmp_path / "small", conversations, {}, vocab_size=5)
    with pytest.raises(DataError, match="no conversations to save"):
        save_conversations(tmp_path / "empty", [], {}, vocab_size=5)
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_shards_can_be_read_by_others_than_their_owner(tmp_path: Path) -> None:
    save_conversations(tmp_path / "data", random_conversations(1), {"verifier": "tiny"}, vocab_size=1000)
    assert [file.stat().st_mode & 0o777 for file in (tmp_path / "data").glob("*.safetensors")] == [0o644]


def test_a_missing_or_damaged_shard_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"header.json is missing"):
        load_conversations(tmp_path)
    (file,) = save_conversations(tmp_path / "data", random_conversations(3), {}, vocab_size=1000)
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(DataError, match=f"{file.name} is damaged"):
        load_conversations(tmp_path / "data")
    file.unlink()
    with pytest.raises(DataError, match=f"{file.name} is missing"):
        load_conversations(tmp_path / "data")


# -- decontamination and deduplication -----------------------------------------------------------------------------

PROMPT = "the quick brown fox jumps over one lazy dog while seven old cats watch from a wall nearby"
WORDS = PROMPT.split()


def word_index(*texts: str) -> PromptIndex:
    """An index whose tokens are letters, so that only words can overlap where letters differ."""
    return PromptIndex(texts, lambda text: [ord(letter) for letter in text], lambda ids: "".join(chr(token) for token in ids))


def test_a_planted_13_gram_of_tokens_is_caught_and_a_12_gram_passes() -> None:
    prompt = list(range(100, 140))
    index = PromptIndex(["prompt"], lambda text: prompt, lambda ids: "")
    draw = random.Random(0)
    before, after = ([draw.randrange(1000, 2000) for _ in range(30)] for _ in range(2))
    for start in (0, 11, len(prompt) - 13):
        assert index.overlaps([*before, *prompt[start : start + 13], *after])
        assert not index.overlaps([*before, *prompt[start : start + 12], *after])
    assert not index.overlaps(prompt[:12])
    assert index.overlaps(Conversation(prompt, [True] * 40))


def test_13_words_in_a_row_are_caught_in_any_spacing_and_case_and_12_pass() -> None:
    index = word_index(PROMPT)
    spaced = [word.upper() if i % 2 else word for i, word in enumerate(WORDS)]
    text = "\n something before  " + "\n\t".join(spaced[2:15]) + " something behind"
    assert index.overlaps([ord(letter) for letter in text])
    text = "something before " + "\n".join(spaced[2:14]) + " something behind"
    assert not index.overlaps([ord(letter) for letter in text])


def test_prompts_shorter_than_13_tokens_cannot_overlap() -> None:
    index = word_index("a short one")
    assert not index.overlaps([ord(letter) for letter in "a short one"])


def test_equal_and_nearly_equal_questions_are_asked_once() -> None:
    seen = SeenQuestions()
    question = "A farmer has 12 cows and buys 5 more. How many cows does he have at the end of the year?"
    assert seen.repeats(question) is None
    assert seen.repeats(question.upper().replace(" ", "  ")) == "question repeated"
    assert seen.repeats(question.replace("year", "month")) == "question nearly repeated"
    assert seen.repeats("A farmer has 12 cows and sells each cow for 300 dollars. What does he earn with all of them?") is None
