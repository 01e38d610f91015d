"""`speculators train` as a user runs it: settings files, dry runs, what a run leaves behind, torchrun's environment."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from chat_tokenizer import chat_tokenizer
from safetensors import safe_open
from tiny_models import tiny_model
from typer.testing import CliRunner, Result

from speculators.cli.main import app
from speculators.data.rows import Conversation, split_held_out
from speculators.data.storage import save_conversations
from speculators.training.config import TrainingConfig
from speculators.training.run_folder import STATE_FILE, RunFolder
from speculators.training.settings import SETTINGS_FILE

VOCAB_SIZE = len(chat_tokenizer())
OPTIONS = {"num_layers": 1, "num_draft_tokens": 3, "aux_hidden_state_layer_ids": [1, 2], "mask_token_id": 3}


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verifier") / "tiny"
    tiny_model("llama", vocab_size=VOCAB_SIZE).save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, VOCAB_SIZE, (40, 20), generator=generator).tolist()
    conversations = [Conversation(tokens, [place >= 4 for place in range(20)]) for tokens in drawn]
    folder = tmp_path_factory.mktemp("data") / "replies"
    save_conversations(folder, conversations, {"verifier": str(verifier)}, vocab_size=VOCAB_SIZE)
    return folder


def settings_file(folder: Path, verifier: Path, data: Path, **changes: Any) -> Path:
    settings: dict[str, Any] = {
        "method": "dflash",
        "options": OPTIONS,
        "verifier": str(verifier),
        "data": str(data),
        "dtype": "float32",
        "device": "cpu",
        "steps": 2,
        "rows-per-step": 2,  # dashes, as on the command line
        "row_length": 64,
        "held_out": 0.2,
        "progress": False,
        **changes,
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({name: value for name, value in settings.items() if value is not None}))
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["train", *map(str, arguments)], env={"COLUMNS": "200"})


def refused(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    sentence = result.stderr.strip().splitlines()[-1]  # behind what transformers says while it loads
    assert sentence.startswith("error: ")
    return sentence


def weights_of(run_folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(run_folder / "latest" / STATE_FILE, framework="pt") as stream:
        return {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118


def test_options_override_the_settings_file_and_the_resolved_one_repeats_the_run(verifier: Path, data: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    path = settings_file(tmp_path, verifier, data, learning_rate=5e-4)
    result = run("--config", path, "--output", first, "--steps", 3, "--option", "num_draft_tokens=2")
    assert result.exit_code == 0, result.output
    resolved = yaml.safe_load((first / SETTINGS_FILE).read_text())
    assert resolved["steps"] == 3 and resolved["learning_rate"] == 5e-4 and resolved["rows_per_step"] == 2
    assert resolved["options"] == {**OPTIONS, "num_draft_tokens": 2}  # key by key
    assert set(TrainingConfig.model_fields) | {"data", "verifier", "held_out", "init_from", "dtype", "device"} == set(resolved)

    assert run("--config", first / SETTINGS_FILE, "--output", second).exit_code == 0
    assert all(torch.equal(value, weights_of(second)[name]) for name, value in weights_of(first).items())


def test_a_trained_drafter_says_where_it_comes_from(verifier: Path, data: Path, tmp_path: Path) -> None:
    assert run("--config", settings_file(tmp_path, verifier, data), "--output", tmp_path / "run").exit_code == 0
    for card in (tmp_path / "run" / "README.md", tmp_path / "run" / "latest" / "README.md"):
        text = card.read_text()
        assert "conversations of replies, replies by" in text and "| steps | 2 |" in text and "| seed | 0 |" in text
        assert "| reply tokens |" in text and "| hardware | CPU |" in text and "speculators " in text


@pytest.mark.parametrize(
    ("changes", "arguments", "words"),
    [
        ({"learning_rates": 1e-3}, (), ("no setting 'learning_rates'", "learning_rate,")),
        ({"options": "num_layers=1"}, (), ("options = 'num_layers=1'", "mapping")),
        ({"method": None}, (), ("missing --method", "as method in the file of --config")),
        ({"steps": "many"}, (), ("steps = 'many'",)),
        ({"held_out": "much"}, (), ("run.yaml: held_out = 'much' must be a number",)),
        ({"dtype": 7}, (), ("run.yaml: dtype = 7 must be text",)),
        ({"betas": [0.9, 1.5]}, (), ("betas [0.9, 1.5]", "below 1")),
        ({"learning_rate_scale": {"norm": -1}}, (), ("learning_rate_scale holds -1.0",)),
        ({"steps": None, "epochs": float("inf")}, (), ("epochs = inf", "finite")),
        ({"held_out": 0.9999}, (), ("there are no conversations to pack", "hold fewer of them out")),
        ({"row_length": 2**50}, (), ("row_length = 1125899906842624", "less than or equal to 1048576")),
        ({"rows-per-step": 10**19}, (), ("rows_per_step = 10000000000000000000", "less than or equal to")),
        ({"keep_checkpoints": 10**320}, ("--dry-run",), ("keep_checkpoints", "less than or equal to")),
        ({"steps": None, "epochs": 1e308}, (), ("epochs = 1e+308", "less than or equal to")),
        ({"options": {"num_layers": 10**12}}, (), ("dflash option num_layers = 1000000000000", "less than or equal to 1024")),
        ({"steps": True}, (), ("steps = True: true and false are no numbers",)),
        ({"learning_rate_scale": {"fc": True}}, (), ("learning_rate_scale = {'fc': True}: true and false are no numbers",)),
        ({"options": OPTIONS | {"training": {"anchors": True}}}, (), ("option training.anchors = True: true and false are no numbers",)),
        ({"options": OPTIONS | {"training": {"anchor": 1}}}, (), ("dflash has no option 'training.anchor'", "anchors")),
        ({}, ("--option", 'training={"nope":1}'), ("dflash has no option 'training.nope'", "anchors")),
        ({"rows_per_step": 2}, (), ("run.yaml: 'rows_per_step' is set 2 times",)),  # with underscores and with dashes
        ({"weight_decay": 1e30}, (), ("weight_decay 1e+30 times the learning rate 0.0006", "below 1")),
        ({}, ("--loggers", "papyrus"), ("loggers", "papyrus", "tensorboard")),
    ],
)
def test_a_settings_file_that_cannot_be_used_is_one_sentence(
    verifier: Path, data: Path, tmp_path: Path, changes: dict[str, Any], arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    path = settings_file(tmp_path, verifier, data, **changes)
    sentence = refused("--config", path, "--output", tmp_path / "run", *arguments)
    assert all(word in sentence for word in words), sentence
    assert not (tmp_path / "run").exists()


def test_held_out_conversations_without_a_reply_in_a_row_do_not_stop_training(verifier: Path, tmp_path: Path) -> None:
    def conversations(prompt: int) -> list[Conversation]:
        return [Conversation([number] * prompt + [5] * 9, [False] * prompt + [True] * 9) for number in range(40)]

    early, late = split_held_out(conversations(4), 0.5)[0], split_held_out(conversations(30), 0.5)[1]
    assert early and late
    save_conversations(tmp_path / "data", [*early, *late], {"verifier": str(verifier)}, vocab_size=VOCAB_SIZE)
    path = settings_file(tmp_path, verifier, tmp_path / "data", row_length=24, held_out=0.5)
    result = run("--config", path, "--output", tmp_path / "run", "--json", tmp_path / "result.json")
    assert result.exit_code == 0, result.output
    assert [record["kind"] for record in json.loads((tmp_path / "result.json").read_text())["records"]] == ["train"]


def test_a_missing_or_broken_settings_file_is_one_sentence(tmp_path: Path) -> None:
    assert "cannot read the settings" in refused("--config", tmp_path / "none.yaml")
    (tmp_path / "broken.yaml").write_text("steps: [1,")
    assert "no valid YAML" in refused("--config", tmp_path / "broken.yaml")
    (tmp_path / "list.yaml").write_text("- steps")
    assert "must be a mapping" in refused("--config", tmp_path / "list.yaml")
    (tmp_path / "twice.yaml").write_text("steps: 1\noptions: {}\nsteps: 2\n")
    assert "twice.yaml: 'steps' is set 2 times" in refused("--config", tmp_path / "twice.yaml")
    (tmp_path / "inside.yaml").write_text("options: {training: {anchors: 1, anchors: 2}}\n")
    assert "inside.yaml: 'anchors' is set 2 times" in refused("--config", tmp_path / "inside.yaml")
    (tmp_path / "deep.yaml").write_text("[" * 5000)
    assert "nested too deeply" in refused("--config", tmp_path / "deep.yaml")
    (tmp_path / "date.yaml").write_text("run_name: 2020-13-45")
    assert "no valid YAML: month must be in 1..12" in refused("--config", tmp_path / "date.yaml")


def test_a_dry_run_says_what_the_run_needs_and_leaves_nothing(verifier: Path, data: Path, tmp_path: Path) -> None:
    path = settings_file(tmp_path, verifier, data, ema_decay=0.9)
    result = run("--config", path, "--output", tmp_path / "run", "--dry-run", "--json", tmp_path / "needs.json")
    assert result.exit_code == 0, result.output
    assert "2 steps" in result.output and "GiB" in result.output and "GB are free" in result.output
    assert not (tmp_path / "run").exists()
    needs = json.loads((tmp_path / "needs.json").read_text())
    # float32: 4 bytes a weight, 4 its gradient, 8 AdamW's moments, 4 the average.
    assert needs["memory"]["gradients"] == needs["memory"]["average of weights"] == 4 * needs["trainable"]
    assert needs["memory"]["optimizer state"] == 8 * needs["trainable"]

    # What was promised for the disk holds.
    assert run("--config", path, "--output", tmp_path / "run").exit_code == 0
    used = sum(file.stat().st_size for file in (tmp_path / "run" / "checkpoints").rglob("*.safetensors"))
    assert 0.5 * needs["disk"] / 3 < used < needs["disk"]


def test_a_dry_run_refuses_what_the_run_would_refuse_and_leaves_nothing(
    verifier: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = settings_file(tmp_path, verifier, data)
    (tmp_path / "file").touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").touch()
    (tmp_path / "busy").mkdir()
    other = RunFolder(tmp_path / "busy")
    other.open()
    monkeypatch.setitem(sys.modules, "wandb", None)
    in_the_way = ("log.jsonl", "training.yaml", ".lock", "checkpoints/step-00000002")
    for number, name in enumerate(in_the_way):
        (tmp_path / f"way-{number}" / name).mkdir(parents=True)
    (tmp_path / "way").mkdir()
    (tmp_path / "way" / "checkpoints").touch()
    before = set(tmp_path.rglob("*"))
    for output, arguments, words in (
        ("run", ("--init-from", tmp_path / "absent"), "absent"),
        ("run", ("--hidden-states", tmp_path / "absent"), "is no store of hidden states"),
        ("run", ("--loggers", "wandb"), "logger 'wandb' needs the package of that name"),
        ("run", ("--best-by", "bleu"), "best_by = 'bleu', but evaluations of this drafter have loss"),
        ("run", ("--best-by", "loss", "--held-out", 0), "best_by = 'loss' needs evaluations, and there are no held-out rows"),
        ("run", ("--patience", 1, "--evaluate-every", 1, "--held-out", 0), "patience = 1 needs evaluations, and there are no"),
        ("run", ("--row-length", 5), "nothing can be learned from the training rows"),  # cut behind the first token of every reply
        ("run", ("--accumulation", 2, "--rows-per-step", 3), "accumulation 2 must divide rows_per_step 3"),
        ("run", ("--learning-rate-scale", "nowhere=2"), "nowhere"),
        ("file", (), "is a file; name a folder"),
        ("file/run", (), "is a file; name another folder"),
        ("model", (), "holds a model (model.safetensors)"),
        ("busy", (), "another process is training in"),
        ("way", (), "checkpoints is no folder; move it away"),
        *((f"way-{number}", (), f"{name} is a folder where training writes a file") for number, name in enumerate(in_the_way[:3])),
        ("way-3", (), "step-00000002 lies where a checkpoint would be written"),
    ):
        sentences = {refused("--config", path, "--output", tmp_path / output, *arguments, *dry) for dry in ((), ("--dry-run",))}
        assert len(sentences) == 1 and words in sentences.pop(), arguments
        assert set(tmp_path.rglob("*")) == before, arguments
    other.close()


def test_settings_that_lie_in_a_new_runs_own_folder_are_not_replaced(verifier: Path, data: Path, tmp_path: Path) -> None:
    mine = settings_file(tmp_path, verifier, data).rename(tmp_path / SETTINGS_FILE)
    before = mine.read_text()
    for arguments in ((), ("--resume",), ("--dry-run",)):
        sentence = refused("--config", mine, "--output", tmp_path, *arguments)
        assert f"would replace {mine}, which is of no run; move it away or name another output folder" in sentence
        assert mine.read_text() == before


def test_resuming_what_never_began_starts_and_says_so(verifier: Path, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = settings_file(tmp_path, verifier, data)
    assert run("--config", path, "--output", tmp_path / "run", "--resume").exit_code == 0
    assert f"there is no checkpoint in {tmp_path / 'run'} to resume: a new run starts at step 0" in caplog.text
    assert "already holds a training run; pass resume=True (--resume)" in refused("--config", path, "--output", tmp_path / "run")
