"""What a run keeps: the best and the latest checkpoint, averaged weights, and never a finger on the user's files."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_verifier
from tiny_training import DRAFTERS, packed_rows, tiny_config

from speculators import checkpoint
from speculators.errors import ConfigError, DataError
from speculators.training.average import WeightAverage
from speculators.training.run_folder import STATE_FILE, RunFolder
from speculators.training.step import TrainingStep
from speculators.training.stopping import Best
from speculators.training.trainer import train
from speculators.verifier import Verifier


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    return tiny_verifier(seed=3)


def held_out_losses(monkeypatch: pytest.MonkeyPatch, *losses: float) -> None:
    """From now on evaluations give these losses, one after the other."""
    coming = iter(losses)
    counts = {"tokens": 1.0, "damaged_rows": 0.0, "empty_batches": 0.0}
    monkeypatch.setattr(TrainingStep, "evaluate", lambda self: {"loss": next(coming), **counts})


def checkpoints_of(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_training_stops_once_evaluations_no_longer_improve_and_links_the_best(
    verifier: Verifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, steps = tmp_path / "run", []
    held_out_losses(monkeypatch, 9.0, 5.0, 4.0, 4.05, 3.99, 4.2, 1.0, 2.0, 2.0, 2.0, 2.0)

    def go(patience: int, resume: bool) -> None:
        settings: dict[str, Any] = {"evaluate_every": 1, "min_improvement": 0.05, "best_by": "loss", "steps": 40, "patience": patience}
        records: list[int] = []
        config = tiny_config(output=run, **settings)
        train(verifier, packed_rows(), config, held_out=packed_rows(2), resume=resume, on_record=lambda r: records.append(r["step"]))
        steps.append(max(records, default=None))

    go(3, resume=False)  # neither 4.05, nor 3.99, nor 4.2 is better than 4.0 by more than 0.05
    assert steps == [5] and checkpoints_of(run) == ["step-00000002", "step-00000005"]
    assert (os.readlink(run / "best"), os.readlink(run / "latest")) == ("checkpoints/step-00000002", "checkpoints/step-00000005")
    go(3, resume=True)  # the spent patience is part of the state
    go(4, resume=True)
    assert steps == [5, None, 10] and checkpoints_of(run) == ["step-00000006", "step-00000010"]
    assert checkpoint.load(run / "best", verifier.weights).method == "toy"  # loads like any drafter


def test_a_best_that_nobody_measures_is_refused(verifier: Verifier, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"best_by = 'bleu', but evaluations of this drafter have .*loss"):
        train(verifier, packed_rows(), tiny_config(output=tmp_path / "run", best_by="bleu"), held_out=packed_rows(2))
    assert not (tmp_path / "run").exists(), "before anything is made for the run"
    with pytest.raises(ConfigError, match="patience counts evaluations; set evaluate_every"):
        tiny_config(patience=2)


@pytest.mark.parametrize(
    ("metric", "better"), [("loss", 1.0), ("confidence_cross_entropy", 1.0), ("acceptance_length", 3.0), ("greedy_acceptance_length", 3.0)]
)
def test_losses_are_better_when_smaller_and_acceptance_lengths_when_larger(metric: str, better: float) -> None:
    first = Best().after({"step": 1, metric: 2.0}, metric, 0.0)
    assert first.after({"step": 2, metric: better}, metric, 0.0) == Best(better, 2, 0)
    assert first.after({"step": 2, metric: 4.0 - better}, metric, 0.0) == Best(2.0, 1, 1)


@pytest.mark.parametrize("method", ["toy", "dflash", "dspark"])
def test_what_best_by_may_name_is_what_an_evaluation_reports(verifier: Verifier, method: str) -> None:
    records: list[dict[str, Any]] = []
    settings = {"method": method, "options": DRAFTERS[method], "steps": 1}
    train(verifier, packed_rows(), tiny_config(**settings), held_out=packed_rows(2), on_record=records.append)
    reported = {name for name, value in records[0].items() if isinstance(value, float)} - {"seconds"}
    with pytest.raises(ConfigError) as refused:
        train(verifier, packed_rows(), tiny_config(**settings, best_by="bleu"), held_out=packed_rows(2))
    named = str(refused.value).partition(" have ")[2].partition(";")[0]
    assert set(named.split(", ")) == reported and "loss" in reported


def test_the_average_of_the_weights_is_the_recursion_of_its_definition() -> None:
    weight = torch.tensor([1.0, -2.0])
    average, expected, skip = WeightAverage({"w": weight}, decay=0.9), weight.double(), torch.zeros(())
    for update in range(100):
        weight.add_(torch.tensor([0.5, 0.25]))
        average.prepare(update)
        average.update(skip)
        decay = min(0.9, (1 + update) / (10 + update))
        expected = decay * expected + (1 - decay) * weight.double()
    torch.testing.assert_close(average.state()["w"].double(), expected, rtol=1e-5, atol=0)
    before = average.state()["w"].clone()
    average.update(skip=torch.ones(()))  # a step that was skipped
    assert torch.equal(average.state()["w"], before)
    with average.in_place():
        assert torch.equal(weight, before)
    assert weight.tolist() == [51.0, 23.0] and torch.equal(average.state()["w"], before)


def test_the_averaged_weights_are_the_ones_that_are_evaluated_and_saved(verifier: Verifier, tmp_path: Path) -> None:
    held_out, seen = packed_rows(3, seed=9), []
    plain = train(verifier, packed_rows(), tiny_config(steps=6), held_out=held_out)
    records: list[dict[str, Any]] = []
    config = tiny_config(steps=6, ema_decay=0.8, output=tmp_path / "run")
    averaged = train(verifier, packed_rows(), config, held_out=held_out, on_record=records.append)
    for name, value in averaged.state_dict().items():
        assert not torch.equal(value, plain.state_dict()[name])
    start = tiny_config(steps=1, learning_rate=1e-30)
    train(verifier, packed_rows(), start, held_out=held_out, init_from=averaged, on_record=lambda record: seen.append(record["loss"]))
    assert seen[0] == pytest.approx(records[-1]["loss"], rel=1e-6)
    for folder in (tmp_path / "run", tmp_path / "run" / "latest"):
        loaded = checkpoint.load(folder, verifier.weights).state_dict()
        for name, value in averaged.state_dict().items():
            torch.testing.assert_close(loaded[name].float(), value, rtol=2**-8, atol=0)  # stored in bfloat16


# -- the user's files ------------------------------------------------------------------------------------------------


def test_whatever_the_user_put_into_the_folder_stays(verifier: Verifier, tmp_path: Path) -> None:
    run = tmp_path / "run"
    mine = [run / "notes.txt", run / "README.md", run / "checkpoints" / "keep.txt", run / "checkpoints" / "step-00000002" / "notes.txt"]
    (run / "checkpoints").mkdir(parents=True)
    for file in mine[:3]:
        file.write_text("mine")
    train(verifier, packed_rows(), tiny_config(output=run, steps=2, save_every=2))
    mine[3].write_text("mine")
    train(verifier, packed_rows(), tiny_config(output=run, steps=6, save_every=2), resume=True)
    assert all(file.read_text() == "mine" for file in mine)
    assert sorted(path.name for path in mine[3].parent.iterdir()) == ["notes.txt"]  # the checkpoint around it has gone
    assert checkpoints_of(run) == ["keep.txt", "step-00000002", "step-00000006"]


def test_a_log_that_a_crash_has_garbled_costs_its_bad_lines_alone(verifier: Verifier, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(verifier, packed_rows(), tiny_config(output=run, steps=2))
    good = (run / "log.jsonl").read_bytes()
    (run / "log.jsonl").write_bytes(good + b'\xff\x00\n[]\n5\n{"kind": "train"}\n{"kind": "tr')
    train(verifier, packed_rows(), tiny_config(output=run, steps=3), resume=True)
    assert (run / "log.jsonl").read_bytes().startswith(good)
    assert [json.loads(line)["step"] for line in (run / "log.jsonl").read_text().splitlines()][-1] == 3


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model-00001-of-00002.safetensors"])
def test_a_run_is_not_begun_where_a_model_lies_and_its_files_stay(verifier: Verifier, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    for resume in (False, True):
        with pytest.raises(ConfigError, match=f"holds a model .{name}., which the trained drafter would replace"):
            train(verifier, packed_rows(), tiny_config(output=tmp_path), resume=resume)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "mine")]


@pytest.mark.parametrize("name", ["latest", "best"])
def test_a_file_where_a_link_would_be_is_refused_and_kept(verifier: Verifier, tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=rf"{name} is not a link that training made; move it away or name another"):
        train(verifier, packed_rows(), tiny_config(output=tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [name]


def contents(folder: Path) -> dict[str, str | None]:
    """Every path below a folder, with a file's text or a link's target."""
    found = {}
    for path in folder.rglob("*"):
        found[str(path.relative_to(folder))] = os.readlink(path) if path.is_symlink() else path.read_text() if path.is_file() else None
    return found


@pytest.mark.parametrize(
    "mine",
    [
        *("log.jsonl", "training.yaml", ".lock", "latest", "best", "checkpoints/step-00000500/model.safetensors"),
        *("checkpoints/step-00000002/notes.txt", "checkpoints/step-00000002", "checkpoints/.step-00000002.partial/notes.txt"),
        *("checkpoints/.step-00000002.partial", "checkpoints"),
    ],
)
def test_a_new_run_replaces_nothing_that_is_no_runs(verifier: Verifier, tmp_path: Path, mine: str) -> None:
    run = tmp_path / "run"
    (run / mine).parent.mkdir(parents=True)
    (run / mine).symlink_to("../elsewhere") if mine in ("latest", "best") else (run / mine).write_text("mine")
    before = contents(run)
    for resume in (False, True):
        with pytest.raises(ConfigError, match=r"; move it away or name another output folder$") as refused:
            train(verifier, packed_rows(), tiny_config(output=run), resume=resume)
        assert str(run / Path(mine).parts[0]) in str(refused.value) and contents(run) == before


@pytest.mark.parametrize("name", ["log.jsonl", "training.yaml", ".lock", "README.md"])
def test_a_folder_where_a_file_would_be_is_refused(verifier: Verifier, tmp_path: Path, name: str) -> None:
    train(verifier, packed_rows(), tiny_config(output=tmp_path / "old", steps=1))
    (tmp_path / "old" / name).unlink()
    for run, resume in ((tmp_path / "old", True), (tmp_path / "new", False)):
        (run / name).mkdir(parents=True)
        with pytest.raises(ConfigError, match=rf"{re.escape(name)} is a folder where training writes a file; move it away"):
            train(verifier, packed_rows(), tiny_config(output=run), resume=resume)


def test_a_run_that_died_before_its_first_checkpoint_may_begin_anew(verifier: Verifier, tmp_path: Path) -> None:
    def crash(record: dict[str, Any]) -> None:
        raise RuntimeError("power cut")

    for resume in (False, False, True):
        with pytest.raises(RuntimeError, match="power cut"):
            train(verifier, packed_rows(), tiny_config(output=tmp_path / "run", steps=2), on_record=crash, resume=resume)
    train(verifier, packed_rows(), tiny_config(output=tmp_path / "run", steps=2))
    assert [json.loads(line)["step"] for line in (tmp_path / "run" / "log.jsonl").open()] == [1, 2]


def test_pruning_and_clearing_touch_only_what_the_run_made(verifier: Verifier, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(verifier, packed_rows(), tiny_config(output=run, steps=2))
    mine = {"step-00000001/model.safetensors", "step-00000002/README.md", ".mystep-1.partial/x", "..step-1.partial/x", "step-9/x"}
    for name in mine:
        (run / "checkpoints" / name).parent.mkdir(exist_ok=True)
        (run / "checkpoints" / name).write_text("mine")
    (run / ".lock").write_text("mine")
    train(verifier, packed_rows(), tiny_config(output=run, steps=6, save_every=2), resume=True)
    left = {str(path.relative_to(run / "checkpoints")) for path in (run / "checkpoints").rglob("*") if path.is_file()}
    assert {name for name in left if not name.startswith("step-00000006/")} == mine
    assert (run / ".lock").read_text() == "mine"


def test_what_lies_in_a_later_checkpoints_place_is_refused_before_any_training(verifier: Verifier, tmp_path: Path) -> None:
    run, steps = tmp_path / "run", []
    train(verifier, packed_rows(), tiny_config(output=run, steps=4, save_every=2, keep_checkpoints=2))
    (run / "checkpoints" / "step-00000004" / STATE_FILE).unlink()
    with pytest.raises(ConfigError, match=rf"step-00000004 lies where .* holds no {STATE_FILE} to resume from; move it away"):
        train(verifier, packed_rows(), tiny_config(output=run, steps=6), resume=True, on_record=lambda record: steps.append(record["step"]))
    assert steps == []
    (run / "checkpoints" / "step-00000004").rename(tmp_path / "away")
    train(verifier, packed_rows(), tiny_config(output=run, steps=6), resume=True, on_record=lambda record: steps.append(record["step"]))
    assert steps == [3, 4, 5, 6]


def test_what_comes_into_a_checkpoints_place_during_the_run_stays(verifier: Verifier, tmp_path: Path) -> None:
    place = tmp_path / "run" / "checkpoints" / "step-00000004"

    def make(record: dict[str, Any]) -> None:
        if record["step"] == 3:
            place.mkdir()
            (place / "notes.txt").write_text("mine")

    with pytest.raises(DataError, match=r"cannot write the checkpoint of step 4: something else lies at .*; move it away and resume"):
        train(verifier, packed_rows(), tiny_config(output=tmp_path / "run", save_every=2), on_record=make)
    assert (place / "notes.txt").read_text() == "mine" and checkpoints_of(tmp_path / "run") == ["step-00000002", "step-00000004"]


def test_two_processes_do_not_train_in_one_folder(verifier: Verifier, tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    with (tmp_path / ".lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=r"another process is training in .*; wait for it or name another output folder"):
            train(verifier, packed_rows(), tiny_config(output=tmp_path, steps=1))
    train(verifier, packed_rows(), tiny_config(output=tmp_path, steps=1))


def test_a_disk_too_small_for_the_checkpoints_is_refused_first(verifier: Verifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000))  # type: ignore[attr-defined]
    with pytest.raises(DataError, match=r"need .* GB, and .* has 0\.0 GB free; make room"):
        train(verifier, packed_rows(), tiny_config(output=tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_reader_never_sees_half_a_checkpoint(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.open()
    with pytest.raises(RuntimeError), folder.writing(1) as staged:
        (staged / "half").touch()
        assert folder.newest_step() == -1 and not (tmp_path / "latest").exists()
        raise RuntimeError
    assert checkpoints_of(tmp_path) == []
    folder.close()
