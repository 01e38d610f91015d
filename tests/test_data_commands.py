"""The data commands as a user types them: from nothing to a trained drafter, and what they say to bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_tokenizer import chat_tokenizer
from test_conversations import write_rows
from tiny_models import tiny_model
from typer.testing import CliRunner

from speculators.cli.main import app
from speculators.data.rows import Conversation
from speculators.data.storage import save_conversations


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def succeeded(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return str(result.stdout)


def refused(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny chat verifier in bfloat16 and chat rows that it made itself."""
    folder = tmp_path_factory.mktemp("world")
    tokenizer = chat_tokenizer()
    stops = [tokenizer.eos_token_id, *range(200, 216)]
    model = tiny_model("llama", seed=1, vocab_size=len(tokenizer), initializer_range=0.3, eos_token_id=stops, dtype=torch.bfloat16)
    model.save_pretrained(folder / "verifier")
    tokenizer.save_pretrained(folder / "verifier")
    common = ("--verifier", folder / "verifier", "--dtype", "bfloat16", "--device", "cpu")
    succeeded("data", "synthesize", *common, "--conversations", 12, "--max-reply-tokens", 40, "--output", folder / "chat.jsonl")
    return folder


def test_chat_rows_become_a_trained_drafter_with_three_commands_and_a_store_changes_no_loss(world: Path) -> None:
    verifier = ("--verifier", world / "verifier")
    common = (*verifier, "--dtype", "bfloat16", "--device", "cpu")
    rows = ("--row-length", 256, "--held-out", 0.2)
    said = succeeded("data", "prepare", world / "chat.jsonl", *verifier, "--output", world / "prepared")
    assert said.startswith("12 of 12 rows: 12 documents")
    store = ("data", "store", world / "prepared", *common, *rows, "--taps", "1,2")
    assert "layers [1, 2] and the last state" in succeeded(*store, "--estimate")
    succeeded(*store, "--output", world / "store")
    assert "is sound" in succeeded("data", "store", world / "store", "--verify")
    options = ("--option", "num_layers=1", "--option", "num_draft_tokens=3", "--option", "aux_hidden_state_layer_ids=[1,2]")
    train = ("train", "--method", "dflash", "--data", world / "prepared", *common, *rows, *options, "--option", "mask_token_id=3")
    losses = {}
    for name, source in (("process", ()), ("store", ("--hidden-states", world / "store"))):
        folder = world / f"drafter-{name}"
        succeeded(*train, "--steps", 3, "--rows-per-step", 2, "--log-every", 1, "--no-progress", "--output", folder, *source)
        records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        losses[name] = [record["loss"] for record in records if "loss" in record]
        assert (folder / "model.safetensors").is_file()
    assert len(losses["process"]) >= 5
    assert losses["store"] == losses["process"], "a bfloat16 verifier's states are stored as they are"
    other = refused(*train, "--steps", 1, "--output", world / "x", "--hidden-states", world / "store", "--seed", 1)
    assert (
        "holds hidden states of other rows than these; it was made with data" in other and "row-length 256, held-out 0.2, seed 0" in other
    )


def test_every_look_at_the_data_prints_what_it_is(world: Path, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "Hi", "response": "Yo"}, "broken"])
    shown = succeeded("data", "preview", path, "--verifier", world / "verifier")
    assert "⟦Yo<|im_end|>⟧" in shown and "row 2: rejected" in shown
    succeeded("data", "prepare", path, "--verifier", world / "verifier", "--output", tmp_path / "out", "--json", tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text())["rejected"] == {"not valid JSON": 1}
    assert "⟦Yo<|im_end|>⟧" in succeeded("data", "preview", tmp_path / "out", "--verifier", world / "verifier")
    assert "reply tokens: 3" in succeeded("data", "statistics", tmp_path / "out")
    covered = succeeded("data", "vocabulary", tmp_path / "out", "--verifier", world / "verifier", "--size", 20, "--size", 40, "--save")
    assert "draft vocabulary 20: covers 100.00%" in covered and "draft vocabulary 40: covers 100.00%" in covered
    assert len(list((tmp_path / "out").glob("draft-vocabulary-*.safetensors"))) == 2


def test_replies_are_written_anew_and_prepared_without_a_warning(world: Path, tmp_path: Path) -> None:
    common = ("--verifier", world / "verifier", "--dtype", "bfloat16", "--device", "cpu")
    path = write_rows(tmp_path / "questions.jsonl", [{"prompt": f"Question {number}"} for number in range(4)])
    said = succeeded("data", "generate", path, *common, "--max-new-tokens", 20, "--max-tokens", 200, "--output", tmp_path / "a.jsonl")
    assert f"of 4 conversations answered by {world / 'verifier'}" in said
    result = run("data", "prepare", tmp_path / "a.jsonl", "--verifier", world / "verifier", "--output", tmp_path / "out")
    assert result.exit_code == 0 and "warning" not in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("prepare", "absent.jsonl", "--output", "out"), "there is no file or folder absent.jsonl"),
        (("generate", "absent.jsonl", "--output", "out.jsonl"), "there is no file or folder absent.jsonl"),
        (("store", "absent", "--output", "out"), "absent holds no conversations"),
        (("store", "absent"), "name a folder with --output, or ask for --estimate"),
        (("store", "absent", "--verify"), "absent is no store of hidden states"),
        (("statistics", "absent"), "absent holds no conversations"),
        (("synthesize", "--conversations", "1", "--language", "xx", "--output", "out"), "there are no questions in 'xx'"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(
    arguments: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert words in refused("data", *arguments)
    assert not list(tmp_path.iterdir())


def test_a_refused_command_leaves_nothing_that_its_corrected_form_would_stumble_over(world: Path, tmp_path: Path) -> None:
    common = ("--verifier", world / "verifier", "--dtype", "bfloat16", "--device", "cpu", "--output")
    rows = [{"prompt": "Question", "response": "Answer"}]
    questions = write_rows(tmp_path / "questions.jsonl", rows)
    succeeded("data", "prepare", questions, "--verifier", world / "verifier", "--output", tmp_path / "prepared")
    before = set(tmp_path.rglob("*"))
    for output, command, wrong, words in (
        ("made", ("synthesize", "--max-reply-tokens", 20), (), "say when to stop"),
        ("made", ("synthesize", "--max-reply-tokens", 20), ("--seconds", 0), "no conversation was kept"),
        ("made.jsonl", ("synthesize", "--max-reply-tokens", 20), ("--seconds", 0), "no conversation was kept"),
        ("new.jsonl", ("generate", questions), ("--top-p", 0.5), "leave top_p and top_k to a server"),
        ("new.jsonl", ("generate", questions), ("--temperature", "nan"), "temperature >= 0"),
        ("store", ("store", tmp_path / "prepared", "--held-out", 0), ("--taps", "1,99"), "layer id 99 is not in 0 to 4"),
    ):
        assert words in refused("data", *command, *common, tmp_path / output, *wrong)
        assert set(tmp_path.rglob("*")) == before, (command, wrong)
    sizes = ("--size", 20, "--size", 10**6, "--save")
    assert "is above the" in refused("data", "vocabulary", tmp_path / "prepared", "--verifier", world / "verifier", *sizes)
    assert set(tmp_path.rglob("*")) == before
    (tmp_path / "empty.jsonl").touch()
    assert "there is no row in" in refused("data", "preview", tmp_path / "empty.jsonl", "--verifier", world / "verifier")


def test_outputs_are_checked_before_the_verifier_is_loaded(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "Hi", "response": "Yo"}])
    save_conversations(tmp_path / "data", [Conversation([1, 2], [False, True])], {"verifier": "x"}, vocab_size=9)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").touch()
    before = set(tmp_path.rglob("*"))
    for command, output, words in (
        (("generate", rows), "answers.txt", "must end in .jsonl"),
        (("generate", rows), "rows.jsonl", "exists already; name a new file"),
        (("generate", rows), "rows.jsonl/answers.jsonl", "rows.jsonl is a file; name another folder"),
        (("prepare", rows), "taken", "exists already; name a new folder"),
        (("store", tmp_path / "data"), "taken", "exists already; name a new folder"),
        (("store", tmp_path / "data"), "rows.jsonl", "exists already; name a new folder"),
        (("synthesize", "--conversations", 1), "taken", "exists already; name a new folder"),
    ):
        said = refused("data", *command, "--verifier", tmp_path / "absent", "--output", tmp_path / output)
        assert words in said and str(tmp_path / "absent") not in said, said
    assert "holds no conversations" in refused("data", "vocabulary", tmp_path / "taken", "--verifier", tmp_path / "absent", "--save")
    assert set(tmp_path.rglob("*")) == before


def test_a_preview_without_anything_usable_says_why(world: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "bad.jsonl", ["broken", {"prompt": ""}, {"prompt": "Hi", "response": "Yo"}])
    unusable = refused("data", "preview", tmp_path / "bad.jsonl", "--verifier", world / "verifier")
    assert unusable.startswith(
        f"error: none of the 2 rows shown of {tmp_path / 'bad.jsonl'} can be used: 1 not valid JSON; 1 no user turn;"
    )
    succeeded("data", "preview", tmp_path / "bad.jsonl", "--verifier", world / "verifier", "--rows", 3)
    (tmp_path / "none").mkdir()
    header = {"shards": 0, "topics": [], "conversations": 0, "rejected": {"not valid JSON": 3}}
    (tmp_path / "none" / "header.json").write_text(json.dumps(header))
    nothing = refused("data", "preview", tmp_path / "none", "--verifier", world / "verifier")
    assert f"{tmp_path / 'none'} holds no document: 3 not valid JSON" in nothing


def test_a_prompt_that_fills_the_verifiers_context_leaves_no_room_for_a_reply(world: Path, tmp_path: Path) -> None:
    questions = write_rows(tmp_path / "questions.jsonl", [{"prompt": "x" * 600}])  # 512 positions; --max-tokens is 4096
    common = ("--verifier", world / "verifier", "--dtype", "bfloat16", "--device", "cpu")
    assert "1 no room for a reply" in refused("data", "generate", questions, *common, "--output", tmp_path / "new.jsonl")
