"""Conversations from files: every form, mixtures, the Hub's cache, rejected rows, worker processes, kills and reruns."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chat_tokenizer import END, TEMPLATE, chat_tokenizer
from rich.console import Console

from speculators.data import storage
from speculators.data.chat import ChatEncoder
from speculators.data.forms import Chat, RowError, Tokens, read_line, read_record
from speculators.data.partial import PartialFolder
from speculators.data.prepare import Preparation, prepare
from speculators.data.preview import show
from speculators.data.sources import Source, mix
from speculators.data.storage import ConversationBlock, ConversationWriter, load_conversations, read_header, save_conversations
from speculators.data.workers import map_in_order
from speculators.errors import DataError
from speculators.loading import ChatFacts

TOKENIZER = chat_tokenizer()
FACTS = ChatFacts(TOKENIZER, (TOKENIZER.eos_token_id,), len(TOKENIZER), "tiny-chat")
QUESTION, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def chat_rows(count: int, word: str = "row") -> list[Any]:
    return [{"prompt": f"{word} {number}", "response": f"answer {number}"} for number in range(count)]


def prepared(tmp_path: Path, rows: list[Any], name: str = "out", **options: Any) -> Preparation:
    path = write_rows(tmp_path / "rows.jsonl", rows)
    return prepare(FACTS, [Source.open(str(path))], tmp_path / name, progress=False, **options)


# -- forms ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [QUESTION, ANSWER]},
        {"messages": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, ANSWER]},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]},
        {"conversations": [QUESTION, ANSWER]},
        {"turns": [QUESTION, ANSWER]},
        {"prompt": "Hi", "response": "Yo"},
        {"prompt": [QUESTION], "completion": "Yo"},
        {"instruction": "Hi", "input": "", "output": "Yo"},
    ],
)
def test_every_form_of_a_conversation_is_read_into_the_same_messages(row: dict[str, Any]) -> None:
    chat = read_record(row)
    assert isinstance(chat, Chat)
    assert chat.messages == [QUESTION, ANSWER]


def test_instruction_and_extra_input_both_stand_in_the_prompt() -> None:
    chat = read_record({"instruction": "Add", "input": "1 and 2", "output": "3"})
    assert isinstance(chat, Chat)
    assert chat.user_turns == ["Add\n\n1 and 2"]


def test_system_prompts_tools_calls_and_reasoning_are_kept() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    chat = read_record(
        {
            "system": "Be kind",
            "tools": '[{"name": "add"}]',
            "conversations": [
                {"from": "human", "value": "Add"},
                {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
                {"from": "observation", "value": "3"},
                {"from": "gpt", "value": "<think>\nThree.\n</think>\n\nIt is 3"},
            ],
        }
    )
    assert isinstance(chat, Chat)
    assert chat.tools == [{"name": "add"}]
    assert chat.messages == [
        {"role": "system", "content": "Be kind"},
        {"role": "user", "content": "Add"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "It is 3", "reasoning_content": "Three."},
    ]
    for key in ("reasoning_content", "reasoning", "thinking"):
        chat = read_record({"messages": [QUESTION, {**ANSWER, key: "So."}]})
        assert isinstance(chat, Chat) and chat.messages[1]["reasoning_content"] == "So."


def test_rows_of_tokens_are_taken_as_they_are_also_beside_their_text() -> None:
    for key in ("input_ids", "token_ids"):
        row = read_record({key: [5, 6, 7], "loss_mask": [0, 1, 1], "messages": [QUESTION, ANSWER]})
        assert isinstance(row, Tokens)
        assert row.conversation.labels == [6, 7]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[1]", "not an object"),
        ('{"text": "?"}', "none of the known forms"),
        ('{"messages": "Hi"}', "malformed messages"),
        ('{"messages": [{"role": "user"}]}', "malformed messages"),
        ('{"messages": [{"role": "wizard", "content": "x"}]}', "unknown role"),
        ('{"messages": [{"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]}', "no user turn first"),
        ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "content that is not text"),
        ('{"turns": [1]}', "malformed turns"),
        ('{"prompt": "x", "tools": "{"}', "malformed tools"),
        ('{"conversations": [{"from": "human", "value": "x"}, {"from": "function_call", "value": "y"}]}', "malformed tool call"),
        ('{"input_ids": [1], "loss_mask": [1, 0]}', "malformed tokens"),
        ('{"input_ids": [1.5], "loss_mask": [1]}', "malformed tokens"),
        ('{"input_ids": [1], "loss_mask": [2]}', "malformed tokens"),
    ],
)
def test_a_row_in_no_known_form_says_why_in_words_to_count_by(line: str, reason: str) -> None:
    with pytest.raises(RowError) as error:
        read_line(line)
    assert error.value.reason == reason


# -- sources -------------------------------------------------------------------------------------------------------


def test_folders_are_read_with_all_their_files_in_every_format(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    (folder / "deeper").mkdir(parents=True)
    write_rows(folder / "a.jsonl", [{"prompt": "1"}, "", {"prompt": "2"}])
    (folder / "b.json").write_text(json.dumps({"version": 1, "data": [{"prompt": "3"}, {"prompt": "4"}]}))
    (folder / "c.json").write_text('{"prompt": "5"}\n{"prompt": "6"}\n')  # lines under the name of a document
    (folder / "deeper" / "d.jsonl.gz").write_bytes(gzip.compress(b'\xef\xbb\xbf{"prompt": "7"}\n'))
    (folder / ".hidden.jsonl").write_text("not read")
    (folder / "notes.txt").write_text("not read")
    rows = list(mix([Source.open(str(folder))]))
    parsed = [json.loads(row.content) if isinstance(row.content, bytes) else row.content for row in rows]
    assert [record["prompt"] for record in parsed] == list("1234567")
    assert [(Path(row.source).name, row.number) for row in rows[:3]] == [("a.jsonl", 1), ("a.jsonl", 3), ("b.json", 1)]


def test_datasets_of_the_hub_are_read_from_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "datasets--owner--chats"
    snapshot = repository / "snapshots" / "0123456789012345678901234567890123456789"
    (snapshot / "train").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    write_rows(snapshot / "train" / "rows.jsonl", [{"prompt": "cached"}])
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path))
    for location in ("hf://owner/chats", "hf://datasets/owner/chats@main/train", "hf://owner/chats=0.5"):
        (row,) = mix([Source.open(location)])
        assert json.loads(row.content)["prompt"] == "cached"
    with pytest.raises(DataError, match="cannot fetch the dataset hf://owner/absent"):
        Source.open("hf://owner/absent")
    with pytest.raises(DataError, match="hf://owner names no dataset"):
        Source.open("hf://owner")


def test_parquet_files_are_read_where_pyarrow_is_installed_and_else_say_what_they_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.parquet").touch()
    batch = SimpleNamespace(to_pylist=lambda: [{"prompt": "one", "response": None}, {"prompt": "two"}])
    parquet = SimpleNamespace(ParquetFile=lambda file: SimpleNamespace(iter_batches=lambda batch_size: [batch]))
    monkeypatch.setitem(sys.modules, "pyarrow", SimpleNamespace(ArrowException=ValueError, parquet=parquet))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", parquet)
    source = Source.open(str(tmp_path / "rows.parquet"))
    assert [(row.number, row.content) for row in mix([source])] == [(1, {"prompt": "one"}), (2, {"prompt": "two"})]
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    for location in (tmp_path / "rows.parquet", tmp_path):  # at once, not when the first row is wanted
        with pytest.raises(
            DataError, match=r"rows.parquet is a Parquet file, which needs pyarrow: pip install 'unified-speculators\[data\]'"
        ):
            Source.open(str(location))


def test_mixtures_hold_their_shares_at_every_point_and_lose_no_row(tmp_path: Path) -> None:
    many, few = write_rows(tmp_path / "many.jsonl", chat_rows(100)), write_rows(tmp_path / "few=1.jsonl", chat_rows(30))
    sources = [Source.open(f"{many}=3"), Source.open(f"{few}=1")]
    first = Counter(Path(row.source).stem for row in mix(sources, 40))
    assert first == {"many": 30, "few=1": 10}
    assert Counter(Path(row.source).stem for row in mix(sources)) == {"many": 100, "few=1": 30}
    assert [source.weight for source in (Source.open(str(few)), sources[0])] == [1.0, 3.0]


def test_a_limit_takes_rows_of_both_datasets(tmp_path: Path) -> None:
    sources = [Source.open(str(write_rows(tmp_path / f"{name}.jsonl", chat_rows(100)))) for name in "ab"]
    assert Counter(Path(row.source).stem for row in mix(sources, 50)) == {"a": 25, "b": 25}


def test_what_is_no_source_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "rows.csv").touch()
    (tmp_path / "broken.jsonl.gz").write_bytes(b"no gzip")
    for location, message in (
        (tmp_path / "absent", "there is no file or folder"),
        (tmp_path / "empty", "holds no .jsonl"),
        (tmp_path / "rows.csv", "convert it to JSON lines"),
        (f"{tmp_path}/empty=0", "it must be a positive number"),
    ):
        with pytest.raises(DataError, match=message):
            Source.open(str(location))
    with pytest.raises(DataError, match=r"cannot read .*broken.jsonl.gz"):
        list(mix([Source.open(str(tmp_path / "broken.jsonl.gz"))]))


# -- prepare -------------------------------------------------------------------------------------------------------


def test_one_bad_row_is_counted_and_kept_aside_while_the_others_are_prepared(tmp_path: Path) -> None:
    strict = TEMPLATE.replace("{% for", "{% if messages[0]['role'] == 'assistant' %}{{ raise_exception('no') }}{% endif %}{% for", 1)
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = "{% if messages | length > 2 %}{{ raise_exception('roles must alternate') }}{% endif %}" + strict
    facts = ChatFacts(tokenizer, FACTS.stop_token_ids, FACTS.vocab_size, "strict")
    rows = [{"messages": [QUESTION, ANSWER]}, {"messages": [QUESTION, QUESTION, ANSWER]}, {"messages": [QUESTION, ANSWER]}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    result = prepare(facts, [Source.open(str(path))], tmp_path / "out", progress=False)
    reason = "the chat template rejects it: roles must alternate"
    assert (result.header["kept"], result.rejected) == (2, {reason: 1})
    assert len(load_conversations(tmp_path / "out")[0]) == 2
    (line,) = (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()
    rejected = json.loads(line)
    assert (rejected["row"], rejected["reason"], json.loads(rejected["record"])) == (2, reason, rows[1])


def test_bytes_that_are_no_text_reject_their_row_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(json.dumps(chat_rows(1)[0]).encode() + b'\n{"prompt": "\xff"}\n')
    result = prepare(FACTS, [Source.open(str(path))], tmp_path / "out", progress=False)
    assert result.rejected == {"not UTF-8 text": 1}


def test_rows_that_no_template_or_tokenizer_could_take_reject_themselves_alone(tmp_path: Path) -> None:
    calls = [{"messages": [QUESTION, {**ANSWER, "tool_calls": calls}]} for calls in (5, "call", ["call"], {"name": "call"})]
    half = json.loads('"\\ud83d"')  # a surrogate without its other half, which JSON can spell and UTF-8 cannot
    halves = [{"messages": [{**QUESTION, "content": half}, ANSWER]}, {"messages": [QUESTION, ANSWER], "tools": [{"name": half}]}]
    odd = [{"messages": [QUESTION, ANSWER], "metadata": {"thinking": value}} for value in ({"on": 1}, ["on"], "on")]
    result = prepared(tmp_path, [*calls, *halves, *odd])
    assert (result.header["kept"], result.rejected) == (3, {"malformed tool call": 4, "not UTF-8 text": 2})
    assert {entry["thinking"] for entry in result.header["written_by"]} == {None}
    lines = (tmp_path / "out" / "rejected.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(json.loads(lines[-1])["record"]) == halves[-1]

    (tmp_path / "rows.json").write_text(json.dumps([*halves, {"messages": [QUESTION, ANSWER]}]))  # here the reader parses, not the preparer
    result = prepare(FACTS, [Source.open(str(tmp_path / "rows.json"))], tmp_path / "parsed", progress=False)
    assert result.rejected == {"not UTF-8 text": 2}
    lines = (tmp_path / "parsed" / "rejected.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["record"] for line in lines] == halves


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ 9.0 ** 999 }}", "{% for %}"])
def test_a_template_that_raises_whatever_it_likes_rejects_rows_and_leaves_nothing(template: str, tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = template
    path = write_rows(tmp_path / "rows.jsonl", chat_rows(1))
    with pytest.raises(DataError, match="none of 1 rows can be used: 1 the chat template rejects it"):
        prepare(ChatFacts(tokenizer, (1,), 64, "odd"), [Source.open(str(path))], tmp_path / "out", progress=False)
    assert list(tmp_path.iterdir()) == [path]


def test_a_tool_call_that_the_template_leaves_out_is_no_reply_of_a_stop_token_alone(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": "{}"}}
    rows = [{"messages": [QUESTION, {**ANSWER, "content": content, "tool_calls": [call]}]} for content in ("", "Yo")]
    result = prepared(tmp_path, [*rows, *chat_rows(1)])
    assert result.rejected == {"the template does not show the tool calls": 2}


def test_several_templates_without_a_default_are_refused_by_the_encoder() -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = {"tool_use": TEMPLATE}
    with pytest.raises(DataError, match="'odd' has several chat templates and none of them is the default one"):
        ChatEncoder(tokenizer, (1,), "odd")


def test_a_json_file_may_be_one_conversation_or_hold_a_list_of_them(tmp_path: Path) -> None:
    row = {"messages": [QUESTION, ANSWER]}
    for content in (row, [row], {"data": [row]}, {"conversations": [row]}, {"turns": [QUESTION, ANSWER]}):
        (tmp_path / "rows.json").write_text(json.dumps(content))
        (found,) = Source.open(str(tmp_path / "rows.json")).rows()
        chat = read_record(found.content)
        assert isinstance(chat, Chat) and chat.messages == [QUESTION, ANSWER]
    (tmp_path / "rows.json").write_text("[" * 100_000)
    assert len(list(Source.open(str(tmp_path / "rows.json")).rows())) == 1, "a line that is no JSON, to be rejected as such"


def test_rows_may_be_about_more_topics_than_a_byte_counts(tmp_path: Path) -> None:
    rows = [{**row, "metadata": {"topic": f"topic {number}"}} for number, row in enumerate(chat_rows(300))]
    prepared(tmp_path, rows)
    assert [conversation.topic for conversation in load_conversations(tmp_path / "out")[0]] == [f"topic {number}" for number in range(300)]


def test_a_source_that_cannot_be_read_leaves_nothing_before_the_first_shard(tmp_path: Path) -> None:
    content = gzip.compress(b"".join(json.dumps(row).encode() + b"\n" for row in chat_rows(2000)))
    cut = tmp_path / "rows.jsonl.gz"
    cut.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"cannot read .*rows\.jsonl\.gz.*repair or remove it"):
        prepare(FACTS, [Source.open(str(cut))], tmp_path / "out", progress=False, workers=0)
    assert list(tmp_path.iterdir()) == [cut]
    cut.write_bytes(content)
    assert prepare(FACTS, [Source.open(str(cut))], tmp_path / "out", progress=False, workers=0).header["kept"] == 2000


def test_damaged_progress_is_named_with_the_way_out(tmp_path: Path) -> None:
    PartialFolder(tmp_path / "out", {}).seal({})
    (tmp_path / ".out.partial" / "progress.json").write_text("{")
    with pytest.raises(DataError, match=r"progress.json is damaged .*; remove that folder to begin anew"):
        PartialFolder(tmp_path / "out", {})


def test_tokens_outside_the_vocabulary_and_replies_cut_off_are_rejected(tmp_path: Path) -> None:
    beyond = {"input_ids": [1, FACTS.vocab_size], "loss_mask": [0, 1]}
    unlabelled = {"input_ids": [1, 2], "loss_mask": [0, 0]}
    result = prepared(tmp_path, [*chat_rows(1), beyond, unlabelled, {"prompt": "long " * 40, "response": "cut"}], max_tokens=100)
    assert result.rejected == {"token ids beyond the vocabulary": 1, "no labels": 1, "no reply within max_tokens": 1}


def test_nothing_is_written_where_no_row_can_be_used(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none of 2 rows can be used: 2 none of the known forms"):
        prepared(tmp_path, [{"text": "?"}, {"text": "!"}])
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_the_header_says_who_wrote_the_replies_and_a_mismatch_is_warned_of(tmp_path: Path) -> None:
    def row(model: str, thinking: bool) -> dict[str, Any]:
        return {**chat_rows(1)[0], "metadata": {"model": model, "thinking": thinking}}

    own = prepared(tmp_path, [row("tiny-chat", False)], "own", thinking=False)
    assert (own.header["verifier"], own.warnings) == ("tiny-chat", [])
    other = prepared(tmp_path, [row("tiny-chat", False), row("big-chat", True)], "other", thinking=False)
    assert other.header["verifier"] == "several models"
    assert [warning.split(",")[0] for warning in other.warnings] == [
        "1 of 2 rows hold replies by 'big-chat'",
        "replies were written with thinking on",
    ]
    unknown = prepared(tmp_path, chat_rows(3), "unknown")
    assert unknown.warnings[0].startswith("3 of 3 rows hold replies by an unknown writer, not by 'tiny-chat'")


def test_worker_processes_change_nothing_but_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speculators.data.prepare.CHUNK_ROWS", 7)
    rows = [row for index, row in enumerate(chat_rows(60)) for row in ([row, "broken"] if index % 9 == 0 else [row])]
    alone, pooled = (prepared(tmp_path, rows, f"workers{workers}", workers=workers) for workers in (0, 1))
    assert alone.header == pooled.header
    for name in ("rejected.jsonl", "conversations-00001-of-00001.safetensors"):
        assert (tmp_path / "workers0" / name).read_bytes() == (tmp_path / "workers1" / name).read_bytes()


# -- kills and reruns ----------------------------------------------------------------------------------------------


def killed_after(calls: int, action: Callable[[], object]) -> bool:
    """Run an action in a child that is killed as it begins the n-th of its renames; True when it was."""
    child = os.fork()
    if child == 0:
        rename, count = os.replace, iter(range(1, 10**6))

        def counted(*arguments: Any, **options: Any) -> None:
            if next(count) == calls:
                os.kill(os.getpid(), signal.SIGKILL)
            rename(*arguments, **options)

        os.replace = os.rename = counted  # type: ignore[assignment]
        try:
            action()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_a_run_killed_at_any_of_its_saves_and_repeated_gives_the_output_of_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speculators.data.prepare.CHUNK_ROWS", 5)
    monkeypatch.setattr(storage, "MAX_SHARD_BYTES", 101_000)
    monkeypatch.setattr(ConversationWriter.__init__, "__kwdefaults__", {"max_shard_bytes": 101_000})
    rows = [row for index, row in enumerate(chat_rows(40)) for row in ([row, "broken"] if index % 9 == 0 else [row])]
    prepared(tmp_path, rows, "whole", workers=0)
    whole = contents(tmp_path / "whole")
    assert len(whole) > 4
    kills = 0
    for calls in range(1, 12):
        while killed_after(calls, lambda: prepared(tmp_path, rows, "out", workers=0)):
            kills += 1
            assert not (tmp_path / "out").exists()
            calls += 1  # the next attempt gets further
        assert contents(tmp_path / "out") == whole
        prepared(tmp_path, rows, "out", workers=0)  # complete: nothing to do
        assert contents(tmp_path / "out") == whole
        (tmp_path / "out").rename(tmp_path / f"done{calls}-{kills}")
    assert kills > 10


def test_an_unfinished_run_with_other_settings_is_left_alone(tmp_path: Path) -> None:
    PartialFolder(tmp_path / "out", {"seed": 1}).seal({"rows": 3})
    with pytest.raises(DataError, match=r"unfinished run with other settings \(seed\); repeat its command to finish it"):
        PartialFolder(tmp_path / "out", {"seed": 2})
    assert PartialFolder(tmp_path / "out", {"seed": 1}).state == {"rows": 3}


def test_saving_at_once_begins_anew_after_a_kill(tmp_path: Path) -> None:
    documents = list(load_conversations(prepared_folder(tmp_path))[0])
    ConversationWriter(tmp_path / "saved", {}, vocab_size=500).add(ConversationBlock.of(documents[:1]), {})
    save_conversations(tmp_path / "saved", documents, {}, vocab_size=500)
    assert load_conversations(tmp_path / "saved")[0] == documents
    assert read_header(tmp_path / "saved")["conversations"] == 3


def prepared_folder(tmp_path: Path) -> Path:
    prepared(tmp_path, chat_rows(3), "prepared")
    return tmp_path / "prepared"


# -- worker pools --------------------------------------------------------------------------------------------------


def test_work_in_flight_is_bounded_and_results_keep_their_order() -> None:
    taken = 0

    def items() -> Iterator[int]:
        nonlocal taken
        for number in range(-20, 20):
            taken += 1
            yield number

    results = map_in_order(abs, items(), workers=2)
    assert list(islice(results, 3)) == [20, 19, 18]
    assert taken <= 6  # one item in each worker, and one on its way
    assert list(results) == [abs(number) for number in range(-17, 20)]


def test_a_worker_that_dies_ends_the_run_with_a_sentence_and_errors_come_through() -> None:
    with pytest.raises(DataError, match="a worker process ended early"):
        list(map_in_order(os._exit, [3], workers=1))
    with pytest.raises(TypeError):
        list(map_in_order(abs, ["text"], workers=1))


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    ready, ours = os.pipe()
    child = os.fork()
    if child == 0:
        os.set_inheritable(ours, True)
        results = map_in_order(os.readlink, repeat("/proc/self"), workers=2)  # its own process id
        os.write(ours, f"{next(results)} {next(results)}\n".encode())
        signal.pause()
    os.close(ours)
    workers = [int(word) for word in os.read(ready, 100).split()]
    assert len(set(workers)) == 2
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for worker in workers:
        wait_for_end(worker)


def wait_for_end(process: int, tries: int = 600) -> None:
    """Until a process is gone, or a zombie that nobody reaps."""
    for _ in range(tries):
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state == "Z":
            return
        time.sleep(0.1)
    raise AssertionError(f"process {process} outlives its parent")


# -- preview -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("terminal", "expected"), [(True, f"\x1b[1;30;42mYo{END}"), (False, f"⟦Yo{END}⟧")])
def test_the_preview_colours_what_is_supervised(terminal: bool, expected: str) -> None:
    (document,) = ChatEncoder(TOKENIZER, FACTS.stop_token_ids, "tiny").documents(Chat([QUESTION, ANSWER]))
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=terminal, color_system="standard" if terminal else None, width=200)
    show([document], TOKENIZER, "row 1", console)
    assert expected in screen.getvalue()
    without_codes = re.sub(r"\x1b\[[\d;]*m", "", screen.getvalue())
    assert f"row 1: 3 of {len(document.input_ids)} tokens supervised" in without_codes
