"""Dashboards through one interface, each with a stand-in for its package; profiles; the share of a device that training uses."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_verifier
from tiny_training import packed_rows, tiny_config

from speculators.errors import ConfigError
from speculators.training.loggers import scalars
from speculators.training.trainer import train
from speculators.verifier import Verifier


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    return tiny_verifier(seed=3)


class Recorder(types.ModuleType):
    """A package that remembers every call: (name, arguments, keyword arguments)."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*arguments: Any, **more: Any) -> Any:
            self.calls.append((name, arguments, more))
            return [] if name == "search_runs" else self

        return call

    def of(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(arguments, more) for called, arguments, more in self.calls if called == name]


def test_a_record_becomes_numbers_named_by_kind_and_draft_position() -> None:
    record = {"kind": "train", "step": 7, "seconds": 1.5, "loss": 2.0, "tokens": 3, "acceptance": [0.5, None, 0.25], "gradient_norm": None}
    expected = {"train/seconds": 1.5, "train/loss": 2.0, "train/tokens": 3.0, "train/acceptance/1": 0.5, "train/acceptance/3": 0.25}
    assert scalars(record) == expected


# Dashboard -> package, the call that takes numbers, where they and their step are, the call that ends.
SERVICES = {
    "wandb": ("wandb", "log", "finish"),
    "trackio": ("trackio", "log", "finish"),
    "mlflow": ("mlflow", "log_metrics", "end_run"),
    "tensorboard": ("torch.utils.tensorboard", "add_scalar", "close"),
}


@pytest.mark.parametrize("name", list(SERVICES))
def test_a_dashboard_gets_every_number_and_a_resumed_run_goes_on_in_it(
    verifier: Verifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    module, call, end = SERVICES[name]
    package = Recorder(module)
    monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setitem(sys.modules, module, package)
    records: list[dict[str, Any]] = []
    config = tiny_config(output=tmp_path / "run", loggers=[name], steps=2)
    train(verifier, packed_rows(), config, held_out=packed_rows(2, seed=9), on_record=records.append)
    expected = [(scalars(record), record["step"]) for record in records]
    if name == "tensorboard":
        sent = [(arguments[0], arguments[1], arguments[2]) for arguments, _ in package.of(call)]
        assert sent == [(key, value, step) for numbers, step in expected for key, value in numbers.items()]
    else:
        assert [(arguments[0], more["step"]) for arguments, more in package.of(call)] == expected
    assert len(package.of(end)) == 1

    before = len(package.calls)
    train(verifier, packed_rows(), tiny_config(output=tmp_path / "run", loggers=[name], steps=3), resume=True)
    again = Recorder(module)
    again.calls = package.calls[before:]
    if name == "wandb":
        (first,), (second,) = ([more for _, more in part.of("init")] for part in (_head(package, before), again))
        assert first["id"] == second["id"] and second["resume"] == "allow" and first["name"] == "run"
        assert first["config"]["learning_rate"] == 3e-3
    if name == "tensorboard":
        assert again.of("SummaryWriter")[0][1] == {"purge_step": 3}  # what the lost steps had written is hidden


def _head(package: Recorder, count: int) -> Recorder:
    head = Recorder("head")
    head.calls = package.calls[:count]
    return head


@pytest.mark.parametrize("name", list(SERVICES))
def test_a_missing_package_is_one_sentence_before_any_work(
    verifier: Verifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"logger '{name}' needs the package of that name, which is not installed: pip install {name}"):
        train(verifier, packed_rows(), tiny_config(output=tmp_path / "run", loggers=[name]))
    assert not (tmp_path / "run").exists()


def test_a_profile_traces_the_steps_asked_for(verifier: Verifier, tmp_path: Path) -> None:
    train(verifier, packed_rows(), tiny_config(output=tmp_path / "run", profile_steps=2))
    trace = json.loads((tmp_path / "run" / "profile" / "steps-3-4.trace.json").read_text())
    assert any("addmm" in event.get("name", "") or "mm" in event.get("name", "") for event in trace["traceEvents"])
    assert "aten::" in (tmp_path / "run" / "profile" / "steps-3-4.txt").read_text()


def test_utilisation_is_the_floating_point_operations_of_the_drafter_over_what_the_device_can_do(verifier: Verifier) -> None:
    records: list[dict[str, Any]] = []
    now = [0.0]

    def clock() -> float:
        now[0] += 0.125
        return now[0]

    config = tiny_config(steps=4, log_every=2, peak_tflops=1e-6, accumulation=2)
    train(verifier, packed_rows(), config, on_record=records.append, clock=clock)
    # Toy: 3 slots of a [64 -> 32] map over 24 - 4 anchors, and the head of 64 tokens over each; a multiply-add is two. Maps: forward
    # and the weight's gradient; the head, frozen: forward and the hidden states' gradient. The teacher's head: forward only.
    anchors = 4 * (24 - 3 - 1)
    slots = 3 * anchors
    flops = 2 * slots * (2 * 64 * 32 + 2 * 32 * 64 + 32 * 64)
    times = [record["seconds"] for record in records]
    elapsed = records[1]["tokens"] / records[1]["tokens_per_second"]
    assert times[1] > times[0]
    assert records[1]["mfu"] == pytest.approx(2 * flops / (elapsed * 1e6), rel=1e-6)
