"""SIGKILL: the resumed run ends bit for bit as the one left alone. The benchmark script does it fifty times at random instants."""

from __future__ import annotations

import importlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import start
from safetensors import safe_open
from tiny_models import tiny_verifier
from tiny_training import DRAFTERS, packed_rows, tiny_config

from speculators.checkpoint import storage
from speculators.training import resume
from speculators.training.loggers import LOG_FILE, JsonLines
from speculators.training.run_folder import CHECKPOINTS, LATEST, STATE_FILE, RunFolder
from speculators.training.trainer import train

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "kill_and_resume.py"


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """As in the processes that are killed: the number of threads may decide the last bit of a sum."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(output: Path) -> None:
    fields: dict[str, Any] = {"method": "dspark", "options": DRAFTERS["dspark"], "optimizer": "muon", "ema_decay": 0.9, "accumulation": 2}
    config = tiny_config(output=output, save_every=2, evaluate_every=3, log_every=2, steps=8, **fields)
    train(tiny_verifier(seed=3), packed_rows(), config, held_out=packed_rows(3, seed=9), resume=True)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# What a process does before it dies, by name of the instant. Each replaces a piece of the library in that process only.


def while_writing_the_state() -> None:
    real = resume.save_file

    def save_file(tensors: dict[str, torch.Tensor], path: Path, **more: Any) -> None:
        real(tensors, path, **more)
        if "step-00000006" in str(path):
            os.truncate(path, path.stat().st_size // 2)
            die()

    resume.save_file = save_file


def after_the_rename_before_the_link() -> None:
    real = RunFolder.link

    def link(self: RunFolder, name: str, step: int) -> None:
        if name == LATEST and step == 6:
            die()
        real(self, name, step)

    RunFolder.link = link  # type: ignore[method-assign]


def while_removing_an_old_checkpoint() -> None:
    real = Path.unlink

    def unlink(self: Path, missing_ok: bool = False) -> None:
        real(self, missing_ok)
        if self.name == STATE_FILE:
            die()

    Path.unlink = unlink  # type: ignore[method-assign]


def while_writing_a_line_of_the_log() -> None:
    real = JsonLines.log

    def log(self: JsonLines, record: Any) -> None:
        if record["step"] == 6:
            with self._path.open("a") as stream:
                stream.write(json.dumps(record)[:40])
            die()
        real(self, record)

    JsonLines.log = log  # type: ignore[method-assign]


def while_the_finished_drafter_takes_its_place() -> None:
    real = storage._replace_files

    def replace_files(staged: Path, target: Path) -> None:
        real(staged, target) if "step-" in staged.name else die()

    storage._replace_files = replace_files


INSTANTS = [
    while_writing_the_state,
    after_the_rename_before_the_link,
    while_removing_an_old_checkpoint,
    while_writing_a_line_of_the_log,
    while_the_finished_drafter_takes_its_place,
]


def prepared(prepare: Callable[[], None], output: Path) -> None:
    torch.set_num_threads(1)
    prepare()
    run(output)


def state_of(output: Path) -> dict[str, torch.Tensor]:
    with safe_open(output / LATEST / STATE_FILE, framework="pt") as stream:
        return {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118


def losses_of(output: Path) -> list[tuple[str, int, float]]:
    records = [json.loads(line) for line in (output / LOG_FILE).read_text().splitlines()]
    return [(record["kind"], record["step"], record["loss"]) for record in records]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("alone") / "run"
    run(output)
    return output


@pytest.mark.parametrize("prepare", INSTANTS, ids=lambda prepare: prepare.__name__)
def test_a_run_killed_at_the_worst_instant_ends_as_the_one_left_alone(prepare: Callable[[], None], alone: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    process = start(prepared, prepare, output)
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    for folder in (output / CHECKPOINTS).glob("step-*/"):  # what a reader could find is whole, or no longer a checkpoint
        if (folder / STATE_FILE).exists():
            with safe_open(folder / STATE_FILE, framework="pt") as stream:
                assert len(list(stream.keys())) > 10
    run(output)
    expected, actual = state_of(alone), state_of(output)
    assert expected.keys() == actual.keys()
    assert all(torch.equal(actual[name], value) for name, value in expected.items())
    assert losses_of(output) == losses_of(alone)
    drafters = [(folder / "model.safetensors").read_bytes() for folder in (alone, output)]
    assert drafters[0] == drafters[1]
    assert sorted(path.name for path in output.rglob("*")) == sorted(path.name for path in alone.rglob("*"))  # nothing is left behind
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_runs_killed_at_random_instants_end_as_the_one_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)  # the processes it starts import it by name
    module = importlib.import_module(SCRIPT.stem)
    result = module.trials(tmp_path, kills=2, steps=20, save_every=2, seed=0, report=lambda line: None)
    assert result["kills"] == result["identical"] == 2 and result["left_behind"] == 0
