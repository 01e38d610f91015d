"""Replies written anew: by our engine with exact tokens, by a server over HTTP, after kills, and what is flagged or dropped."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_tokenizer import END, chat_tokenizer
from test_conversations import write_rows
from tiny_models import tiny_model

from speculators.data.answers import AnswerSettings, EngineWriter, Reply, answer_file, dialogue
from speculators.data.chat import ChatEncoder
from speculators.data.endpoint import EndpointWriter
from speculators.data.forms import Chat, Tokens, read_record
from speculators.data.generation import StageResult, TokenGenerator
from speculators.data.journal import Journal, JournalledFile
from speculators.data.languages import LANGUAGES, chosen_topics
from speculators.data.partial import PartialFolder
from speculators.data.questions import SynthesisSettings
from speculators.data.rows import Conversation
from speculators.data.sources import Source
from speculators.data.statistics import statistics
from speculators.data.storage import load_conversations
from speculators.data.synthesis import SynthesisOutput, synthesize
from speculators.data.topics import TOPICS
from speculators.errors import ConfigError, DataError
from speculators.verifier import Verifier

TOKENIZER = chat_tokenizer()
SETTINGS = AnswerSettings(temperature=0.0, max_new_tokens=12, max_tokens=240)
TWO_TURNS = {
    "id": "a",
    "messages": [
        {"role": "system", "content": "Be short"},
        {"role": "user", "content": "First?"},
        {"role": "assistant", "content": "written by somebody else"},
        {"role": "user", "content": "Second?"},
        {"role": "assistant", "content": "by somebody else too"},
    ],
}


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    stops = [TOKENIZER.eos_token_id, *range(150, 216)]  # many, so that a random model ends some of its replies
    model = tiny_model("llama", seed=1, vocab_size=len(TOKENIZER), layers=2, initializer_range=0.3, eos_token_id=stops)
    return Verifier(model, TOKENIZER, "tiny-chat")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def answered(tmp_path: Path, rows: list[Any], writer: Any, settings: AnswerSettings = SETTINGS, name: str = "answers") -> dict[str, Any]:
    source = Source.open(str(write_rows(tmp_path / "rows.jsonl", rows)))
    return answer_file([source], writer, tmp_path / f"{name}.jsonl", settings, progress=False)


# -- the dialogue --------------------------------------------------------------------------------------------------


def play(chat: Chat, *replies: Reply | None, settings: AnswerSettings = SETTINGS) -> tuple[list[list[str]], Any]:
    """What a writer is shown before each reply, and what comes of the conversation."""
    conversation, shown, waiting = dialogue(chat, settings, "model"), [], iter(replies)
    try:
        messages = next(conversation)
        while True:
            shown.append([message["content"] for message in messages])
            messages = conversation.send(next(waiting))
    except StopIteration as end:
        return shown, end.value


def test_old_replies_are_replaced_turn_by_turn_by_those_just_written() -> None:
    chat = read_record(TWO_TURNS)
    assert isinstance(chat, Chat)
    shown, result = play(chat, Reply("one", None, "stop"), Reply("two", None, "stop"))
    assert shown == [["Be short", "First?"], ["Be short", "First?", "one", "Second?"]]
    (row,) = result.rows
    assert [message["content"] for message in row["messages"]] == ["Be short", "First?", "one", "Second?", "two"]
    assert (row["id"], row["metadata"]["model"], row["metadata"]["thinking"]) == ("a", "model", None)
    assert row["metadata"]["sampling"] == SETTINGS.sampling


def test_tokens_of_turns_join_where_a_prompt_continues_them_and_else_make_rows_of_their_own() -> None:
    chat = read_record(TWO_TURNS)
    assert isinstance(chat, Chat)
    first = Reply("one", None, "stop", [1, 2], [3, 4])
    _, result = play(chat, first, Reply("two", None, "stop", [1, 2, 3, 4, 5], [6]))
    assert [(row["input_ids"], row["loss_mask"]) for row in result.rows] == [([1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 1])]
    _, result = play(chat, first, Reply("two", None, "stop", [1, 2, 9, 5], [6]))
    assert [(row["input_ids"], row["loss_mask"]) for row in result.rows] == [
        ([1, 2, 3, 4], [0, 0, 1, 1]),
        ([1, 2, 9, 5, 6], [0, 0, 0, 0, 1]),
    ]


@pytest.mark.parametrize(
    ("reply", "ended", "kept"),
    [
        (Reply("cut", None, "length"), "reply cut", True),
        (Reply("again and " * 30, None, "stop"), "reply loops", False),
        (Reply(" ", None, "stop"), "empty reply", False),
        (Reply("one", None, "stop", repeatable=False), "the template does not show the reply as written", True),
        (Reply("", "so", "tool_calls"), "reply finished by tool_calls", True),
        (None, "no room for a reply", False),
    ],
)
def test_a_reply_that_cannot_be_built_upon_ends_its_conversation(reply: Reply | None, ended: str, kept: bool) -> None:
    chat = read_record(TWO_TURNS)
    assert isinstance(chat, Chat)
    shown, result = play(chat, reply)
    assert len(shown) == 1
    assert result.ended == ended
    assert len(result.rows) == kept
    assert result.dropped == (None if kept else ended)


def test_truncated_replies_are_flagged_or_dropped_by_rule() -> None:
    chat = read_record({"prompt": "Hi"})
    assert isinstance(chat, Chat)
    cut = Reply("cut", None, "length", [1], [2])
    _, kept = play(chat, cut)
    assert kept.rows[0]["truncated"] and kept.rows[0]["metadata"]["finish_reason"] == "length"
    _, dropped = play(chat, cut, settings=AnswerSettings(keep_truncated=False))
    assert (dropped.rows, dropped.dropped) == ([], "reply cut")


# -- our engine ----------------------------------------------------------------------------------------------------


def test_the_engines_rows_hold_what_the_verifier_generates_from_the_served_prompt(verifier: Verifier, tmp_path: Path) -> None:
    questions = [{"prompt": word * 3, "system": f"Be {word}"} for word in ("brief", "kind", "rude", "long")]
    card = answered(tmp_path, [TWO_TURNS, *questions, "broken", {"prompt": "x" * 300}], EngineWriter(verifier, slots=2))
    assert card["model"] == "tiny-chat"
    assert (card["counts"]["dropped: not valid JSON"], card["counts"]["dropped: no room for a reply"]) == (1, 1)
    encoder = ChatEncoder.for_verifier(verifier)
    rows = read(tmp_path / "answers.jsonl")
    assert len(rows) >= 2
    for row in rows:
        parsed = read_record(row)
        assert isinstance(parsed, Tokens)
        ids, mask = parsed.conversation.input_ids, parsed.conversation.loss_mask
        start = mask.index(True)
        replies = [index for index, message in enumerate(row["messages"]) if message["role"] == "assistant"]
        assert ids[:start] == encoder.prompt_ids(row["messages"][: replies[0]])
        end = next((index for index in range(start, len(mask)) if not mask[index]), len(mask))
        prompt = torch.tensor([ids[:start]])
        output = verifier.model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=12, pad_token_id=0)
        assert output[0, start:].tolist() == ids[start:end]


def test_a_reply_of_special_tokens_alone_is_dropped_as_empty(verifier: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    start, end = TOKENIZER.convert_tokens_to_ids(["<|im_start|>", END])

    def run_numbered(self: TokenGenerator, jobs: Any) -> Iterator[tuple[int, Any]]:
        for number, job in jobs:
            stage = next(job)
            written = [end] if number == 0 else [start, end]
            with pytest.raises(StopIteration) as finished:
                job.send(StageResult(list(stage.forced), written, "stop"))
            yield finished.value.value

    monkeypatch.setattr(TokenGenerator, "run_numbered", run_numbered)
    chats = [(number, chat) for number in range(2) if isinstance(chat := read_record({"prompt": "Hi"}), Chat)]
    results = [result for _, result in EngineWriter(verifier, slots=1).answer(chats, SETTINGS)]
    assert [(result.rows, result.dropped) for result in results] == [([], "empty reply")] * 2


def test_a_file_without_an_answer_is_refused_and_leaves_nothing(verifier: Verifier, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none of 2 conversations was answered: 1 not valid JSON; 1 no room for a reply"):
        answered(tmp_path, ["broken", {"prompt": "x" * 300}], EngineWriter(verifier))
    assert not list(tmp_path.glob("*answers*")) and not list(tmp_path.glob(".*"))


def test_our_engine_refuses_what_it_does_not_draw_by(verifier: Verifier, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leave top_p and top_k to a server"):
        answered(tmp_path, [{"prompt": "Hi"}], EngineWriter(verifier), AnswerSettings(top_p=0.9))
    for bad in ({"temperature": -1.0}, {"top_p": 0.0}, {"max_new_tokens": 9, "max_tokens": 9}):
        with pytest.raises(ConfigError):
            AnswerSettings(**bad)  # type: ignore[arg-type]


# -- a server ------------------------------------------------------------------------------------------------------


class Server:
    """A small OpenAI-compatible server that answers with the number of words it was sent."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.failures: list[tuple[int, str]] = []
        self.tells_ids = self.strict = False
        self.finish_reason = "stop"
        self.running = self.most_at_once = 0
        self.lock = threading.Lock()
        self.together: threading.Barrier | None = None
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send(200, {"data": [{"id": "served"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.send(*owner.respond(body))

            def send(self, code: int, answer: dict[str, Any]) -> None:
                content = json.dumps(answer).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *arguments: Any) -> None:
                return

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"

    def respond(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with self.lock:
            if self.failures:
                code, message = self.failures.pop(0)
                return code, {"error": {"message": message}}
            if self.strict and "return_token_ids" in body:
                return 400, {"error": {"message": "unknown field return_token_ids"}}
            self.requests.append(body)
            self.running += 1
            self.most_at_once = max(self.most_at_once, self.running)
        if self.together is not None:
            self.together.wait(timeout=60)
        with self.lock:
            self.running -= 1
        words = sum(len(message["content"].split()) for message in body["messages"])
        choice: dict[str, Any] = {"message": {"role": "assistant", "content": f"{words} words"}, "finish_reason": self.finish_reason}
        answer: dict[str, Any] = {"choices": [choice]}
        if self.tells_ids and body.get("return_token_ids"):
            choice["token_ids"], answer["prompt_token_ids"] = [7, 2], list(range(10, 10 + words))
        return 200, answer


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.http.serve_forever, daemon=True)
    thread.start()
    yield server
    server.http.shutdown()
    server.http.server_close()


def writer(server: Server, **options: Any) -> EndpointWriter:
    return EndpointWriter(server.url, **{"pause": 0.0, **options})


def test_a_server_answers_turn_by_turn_and_is_told_sampling_seed_and_thinking_mode(server: Server, tmp_path: Path) -> None:
    settings = AnswerSettings(temperature=0.5, top_p=0.9, top_k=20, max_new_tokens=30, thinking=False)
    card = answered(tmp_path, [TWO_TURNS, {"prompt": "One two three"}], writer(server), settings)
    assert (card["model"], card["thinking"], card["counts"]["answered"]) == ("served", False, 2)
    first, second = read(tmp_path / "answers.jsonl")
    assert [message["content"] for message in first["messages"]] == ["Be short", "First?", "3 words", "Second?", "6 words"]
    assert second["messages"][-1]["content"] == "3 words"
    assert first["metadata"]["thinking"] is False
    for request in server.requests:
        assert (request["temperature"], request["top_p"], request["top_k"], request["max_tokens"]) == (0.5, 0.9, 20, 30)
        assert request["chat_template_kwargs"]["enable_thinking"] is False
    assert len({request["seed"] for request in server.requests}) == 3


def test_token_ids_that_a_server_tells_become_exact_rows(server: Server, tmp_path: Path) -> None:
    server.tells_ids = True
    answered(tmp_path, [{"prompt": "One two three"}], writer(server))
    (row,) = read(tmp_path / "answers.jsonl")
    assert (row["input_ids"], row["loss_mask"]) == ([10, 11, 12, 7, 2], [0, 0, 0, 1, 1])


def test_a_server_that_knows_no_token_ids_is_asked_without(server: Server, tmp_path: Path) -> None:
    server.strict = True
    answered(tmp_path, [{"prompt": "One"}, {"prompt": "Two"}], writer(server, concurrency=1))
    assert ["input_ids" in row for row in read(tmp_path / "answers.jsonl")] == [False, False]


def test_requests_run_at_the_same_time_up_to_the_limit(server: Server, tmp_path: Path) -> None:
    server.together = threading.Barrier(3)  # nobody is answered before three ask
    answered(tmp_path, [{"prompt": str(number)} for number in range(6)], writer(server, concurrency=3))
    assert server.most_at_once == 3


def test_passing_failures_are_tried_again_and_refusals_drop_their_row_alone(server: Server, tmp_path: Path) -> None:
    server.failures = [(503, "busy"), (429, "slow down"), (400, "prompt too long")]
    card = answered(tmp_path, [{"prompt": "One"}, {"prompt": "Two"}], writer(server, concurrency=1))
    assert card["counts"]["answered"] == 1
    assert card["counts"]["dropped: the endpoint refuses it: prompt too long"] == 1


def test_a_dead_or_wrong_server_is_one_sentence_and_nothing_answered_is_lost(server: Server, tmp_path: Path) -> None:
    rows = [{"prompt": str(number)} for number in range(4)]
    server.failures = []
    alive = writer(server, concurrency=1, retries=1)
    real = server.respond

    def dies_after_two(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return real(body) if len(server.requests) < 2 else (500, {"error": "out of memory"})

    server.respond = dies_after_two  # type: ignore[method-assign]
    with pytest.raises(DataError, match=r"failed 2 times \(500: out of memory\); the same command goes on"):
        answered(tmp_path, rows, alive)
    assert not (tmp_path / "answers.jsonl").exists()
    server.respond = real  # type: ignore[method-assign]
    answered(tmp_path, rows, alive)
    assert [row["messages"][0]["content"] for row in read(tmp_path / "answers.jsonl")] == ["0", "1", "2", "3"]
    assert len(server.requests) == 4, "what was answered before is not asked again"
    answered(tmp_path, rows, alive)
    assert len(server.requests) == 4, "a complete file asks for nothing"
    server.failures = [(401, "no key")]
    with pytest.raises(DataError, match=r"answers 401: no key; check the address, the model and OPENAI_API_KEY"):
        answered(tmp_path, rows, alive, name="other")
    with pytest.raises(DataError, match="must begin with http"):
        EndpointWriter("localhost:8000")


def test_replies_cut_by_the_server_are_flagged_and_their_stop_token_is_no_label(server: Server, tmp_path: Path) -> None:
    server.finish_reason = "length"
    card = answered(tmp_path, [{"prompt": "Hi"}], writer(server))
    assert card["counts"]["truncated replies"] == 1
    chat = read_record(read(tmp_path / "answers.jsonl")[0])
    assert isinstance(chat, Chat)
    (document,) = ChatEncoder(TOKENIZER, [TOKENIZER.eos_token_id], "tiny").documents(chat)
    assert document.truncated and TOKENIZER.decode(document.labels) == "1 words"


# -- kills and reruns ----------------------------------------------------------------------------------------------


def killed_at_line(line: int, action: Callable[[], object]) -> bool:
    """Run an action in a child that is killed in the middle of its n-th line of the journal; True when it was."""
    child = os.fork()
    if child == 0:
        add, count = Journal.add, iter(range(1, 10**6))

        def counted(journal: Journal, number: int, result: Any) -> None:
            if next(count) == line:
                journal._stream.write(b'[%d, {"half' % number)
                journal._stream.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            add(journal, number, result)

        Journal.add = counted  # type: ignore[method-assign]
        try:
            action()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_generation_killed_in_the_middle_of_a_line_and_repeated_gives_one_runs_file(verifier: Verifier, tmp_path: Path) -> None:
    rows = [TWO_TURNS, "broken", *({"prompt": f"Question {number}"} for number in range(6))]
    answered(tmp_path, rows, EngineWriter(verifier, slots=2), name="whole")
    for line in (1, 4, 7):
        name = f"killed{line}"
        assert killed_at_line(line, lambda name=name: answered(tmp_path, rows, EngineWriter(verifier, slots=2), name=name))  # type: ignore[misc]
        answered(tmp_path, rows, EngineWriter(verifier, slots=2), name=name)
        assert (tmp_path / f"{name}.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


@pytest.mark.parametrize("name", ["folder", "rows.jsonl"])
def test_synthesis_killed_and_repeated_gives_one_runs_output(verifier: Verifier, tmp_path: Path, name: str) -> None:
    settings = SynthesisSettings(max_question_tokens=40, max_reply_tokens=20, min_reply_tokens=2, max_tokens=200, seed=4)

    def run(folder: str, slots: int = 3) -> None:
        (tmp_path / folder).mkdir(exist_ok=True)
        output = SynthesisOutput(tmp_path / folder / name, {"seed": 4})
        assert not output.complete
        made = synthesize(verifier, settings, conversations=5, slots=slots, progress=False, journal=output.journal)
        output.write(made, verifier)

    def content(folder: str) -> Any:
        path = tmp_path / folder / name
        assert {entry.name for entry in path.parent.iterdir()} <= {name, "rows.card.json"}, "the journal is gone"
        return load_conversations(path)[0] if path.is_dir() else path.read_bytes()

    run("whole")
    run("wider", slots=6)
    assert content("wider") == content("whole"), "what is kept does not depend on the number of slots"
    assert killed_at_line(4, lambda: run("killed"))
    run("killed")
    assert content("killed") == content("whole")
    assert SynthesisOutput(tmp_path / "killed" / name, {"seed": 4}).complete
    with pytest.raises(DataError, match="exists already"):
        SynthesisOutput(tmp_path / "killed" / name, {"seed": 5})


def test_chat_rows_of_a_synthesis_carry_text_and_exact_tokens(verifier: Verifier, tmp_path: Path) -> None:
    settings = SynthesisSettings(max_question_tokens=40, max_reply_tokens=20, min_reply_tokens=2, max_tokens=200, seed=4)
    output = SynthesisOutput(tmp_path / "rows.jsonl", {})
    made = synthesize(verifier, settings, conversations=3, slots=3, progress=False, journal=output.journal)
    output.write(made, verifier)
    for row, conversation in zip(read(tmp_path / "rows.jsonl"), made.conversations, strict=True):
        parsed = read_record(row)
        assert isinstance(parsed, Tokens) and parsed.conversation == conversation
        assert TOKENIZER.decode(conversation.input_ids).startswith(
            f"<|im_start|>system\nBe kind{END}\n<|im_start|>user\n{row['messages'][0]['content']}{END}\n<|im_start|>assistant\n"
        )
        assert row["metadata"]["model"] == "tiny-chat"
    assert made.header["statistics"]["reply_tokens"] == sum(conversation.reply_tokens for conversation in made.conversations)


def test_a_journal_of_other_settings_is_left_alone(tmp_path: Path) -> None:
    file = JournalledFile(tmp_path / "a.jsonl", {"seed": 1})
    file.journal.add(0, {"rows": []})
    with pytest.raises(DataError, match=r"unfinished run with other settings \(seed\)"):
        JournalledFile(tmp_path / "a.jsonl", {"seed": 2})
    assert 0 in JournalledFile(tmp_path / "a.jsonl", {"seed": 1}).journal
    with pytest.raises(DataError, match=r"must end in \.jsonl"):
        JournalledFile(tmp_path / "a.txt", {})
    assert PartialFolder.place(tmp_path / "a.jsonl").name == ".a.jsonl.partial"


# -- topics, languages, statistics ---------------------------------------------------------------------------------


def test_languages_take_their_share_of_the_questions_and_leave_the_topics_theirs() -> None:
    topics = chosen_topics([], ["de=0.25", "zh"])
    weights = {topic.name: topic.weight for topic in topics}
    assert weights["language/de"] == 0.25 and weights["language/zh"] == 0.1
    assert sum(weights.values()) == pytest.approx(1.0)
    assert weights[TOPICS[0].name] == pytest.approx(0.65 * TOPICS[0].weight)
    assert len(LANGUAGES) >= 10
    for bad, message in ((["xx=0.1"], "no questions in 'xx'"), (["de=2"], "at most 1 together"), (["de=much"], "code with a share")):
        with pytest.raises(ConfigError, match=message):
            chosen_topics([], bad)


def test_topics_come_from_files(tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "topics.jsonl", [{"name": "sql", "seeds": ["Write a query"], "weight": 2}, {"name": "git", "seeds": ["How do I"]}]
    )
    assert [(topic.name, topic.weight, topic.seeds) for topic in chosen_topics([path], [])] == [
        ("sql", 2.0, ("Write a query",)),
        ("git", 1.0, ("How do I",)),
    ]
    for line in ("{", '{"name": "x"}', '{"name": "x", "seeds": []}', '{"name": "x", "seeds": ["a"], "weight": 0}'):
        with pytest.raises(DataError, match="line 1"):
            chosen_topics([write_rows(tmp_path / "bad.jsonl", [line])], [])


def test_statistics_count_what_is_wrong_with_a_set() -> None:
    fine = Conversation([1, 2, 3, 4], [False, False, True, True], "a")
    loop = Conversation([9] * 40, [True] * 40, "b", truncated=True)
    numbers = statistics([fine, fine, fine, loop])
    assert (numbers["conversations"], numbers["tokens"], numbers["reply_tokens"]) == (4, 52, 46)
    assert (numbers["truncated_share"], numbers["looping_share"]) == (0.25, 0.25)
    assert numbers["conversations_by_topic"] == {"a": 3, "b": 1}
    assert numbers["reply_length"] == {"p10": 2, "p50": 2, "p90": 28, "max": 40}
    assert (numbers["different_reply_tokens"], numbers["tokens_for_90_percent"]) == (3, 2)
    assert statistics([])["conversations"] == 0
