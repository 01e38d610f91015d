"""A full disk: one sentence, no half files, and everything from before whole. The limit on file sizes stands in for the disk."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_verifier
from tiny_training import packed_rows, tiny_config

from speculators import checkpoint
from speculators.errors import DataError
from speculators.files import write_text_atomically
from speculators.training.run_folder import STATE_FILE, RunFolder
from speculators.training.saving import RunState
from speculators.training.trainer import train
from speculators.verifier import Verifier


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    return tiny_verifier(seed=3)


@pytest.fixture
def limit_files() -> Iterator[Callable[[int | None], None]]:
    """Call it with the most bytes that any file may have from now on; None for no limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size: int | None) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft if size is None else size, hard))

    yield limit
    limit(None)


def logged_steps(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("room", [2000, 60_000])  # for no file of tensors; for the drafter, and not for the state
def test_a_checkpoint_that_finds_no_room_is_one_sentence_and_the_one_before_it_is_whole(
    verifier: Verifier, tmp_path: Path, limit_files: Callable[[int | None], None], room: int
) -> None:
    run = tmp_path / "run"
    config = tiny_config(output=run, save_every=2)
    with pytest.raises(DataError) as refused:
        train(verifier, packed_rows(), config, on_record=lambda record: limit_files(room) if record["step"] == 3 else None)
    limit_files(None)
    kept = "the checkpoint of step 2 is whole: make room and resume"
    assert str(refused.value) == f"cannot write the checkpoint of step 4 to {run} (File too large); {kept}"
    assert sorted(path.name for path in run.rglob("*step*")) == ["step-00000002"]
    train(verifier, packed_rows(), config, resume=True)
    assert logged_steps(run) == [1, 2, 3, 4, 5, 6]


def test_records_that_find_no_room_wait_and_the_run_goes_on(
    verifier: Verifier, tmp_path: Path, limit_files: Callable[[int | None], None], caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"

    def fill_and_clear(record: dict[str, Any]) -> None:
        if record["step"] in (2, 5):
            limit_files((run / "log.jsonl").stat().st_size + 10 if record["step"] == 2 else None)

    train(verifier, packed_rows(), tiny_config(output=run), on_record=fill_and_clear)
    assert "log.jsonl (File too large): the record of step 3 waits" in caplog.text
    assert logged_steps(run) == [1, 2, 3, 4, 5, 6]


def test_records_without_room_end_the_run_once_their_checkpoint_is_saved(
    verifier: Verifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit_files: Callable[[int | None], None]
) -> None:
    run, real = tmp_path / "run", RunState.write

    def write_with_room(self: RunState, *arguments: Any) -> None:
        limit_files(None)
        real(self, *arguments)
        limit_files(10)

    monkeypatch.setattr(RunState, "write", write_with_room)
    with pytest.raises(
        DataError, match=r"cannot write the log .*\(File too large\); the checkpoint of step 3 is whole: make room and resume"
    ):
        train(verifier, packed_rows(), tiny_config(output=run, save_every=3), on_record=lambda record: limit_files(10))
    limit_files(None)
    assert (run / "latest" / STATE_FILE).is_file() and logged_steps(run) == [1]


def test_a_finished_drafter_that_finds_no_room_is_written_by_the_resume(
    verifier: Verifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit_files: Callable[[int | None], None]
) -> None:
    run, real = tmp_path / "run", RunState.finish

    def finish_without_room(self: RunState, *arguments: Any) -> Any:
        limit_files(10)
        return real(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(RunState, "finish", finish_without_room)
        with pytest.raises(DataError, match=r"cannot write the trained drafter to .*\(File too large\); the checkpoint of step 6 is whole"):
            train(verifier, packed_rows(), tiny_config(output=run))
    limit_files(None)
    assert not (run / "model.safetensors").exists()
    train(verifier, packed_rows(), tiny_config(output=run), resume=True)
    assert checkpoint.load(run, verifier.weights).method == "toy"


@pytest.mark.parametrize(("room", "file"), [(0, ".lock"), (100, "training.yaml")])
def test_a_run_that_finds_no_room_to_begin_is_one_sentence(
    verifier: Verifier, tmp_path: Path, limit_files: Callable[[int | None], None], room: int, file: str
) -> None:
    limit_files(room)
    with pytest.raises(DataError, match=rf"cannot write {tmp_path / 'run' / file} \(File too large\); make room"):
        train(verifier, packed_rows(), tiny_config(output=tmp_path / "run"))
    limit_files(None)
    train(verifier, packed_rows(), tiny_config(output=tmp_path / "run", steps=1))
    assert RunFolder(tmp_path / "run").steps() == [1]


def test_a_text_file_without_room_stays_as_it_was(tmp_path: Path, limit_files: Callable[[int | None], None]) -> None:
    write_text_atomically(tmp_path / "file", "before")
    limit_files(3)
    with pytest.raises(DataError, match=r"cannot write .*file \(File too large\); make room, or name another file"):
        write_text_atomically(tmp_path / "file", "afterwards")
    limit_files(None)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "before")]
