"""Where the numbers of a run go: `log.jsonl` always, dashboards on request. One interface, one small class a service."""

from __future__ import annotations

import importlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from speculators.errors import ConfigError
from speculators.files import write_text_atomically

logger = logging.getLogger("speculators")

LOG_FILE = "log.jsonl"
Record = Mapping[str, Any]


@dataclass(frozen=True)
class RunFacts:
    """What a logger is told of the run.

    Attributes:
        output: the run's folder.
        name: shown by dashboards.
        run_id: the same for a run and its resumptions.
        settings: the resolved settings, as plain data.
        step: steps that are done; 0 unless the run is resumed.
        evaluated: step of the last evaluation that the resumed state knows of; -1 without one.
    """

    output: Path
    name: str
    run_id: str
    settings: Mapping[str, Any]
    step: int
    evaluated: int = -1


class Logger(Protocol):
    """Takes every record of a run, in order. A record has "kind", "step", "seconds" and numbers or lists of them by position."""

    def log(self, record: Record) -> None:
        """Take one record."""
        ...

    def flush(self) -> None:
        """A checkpoint was saved: whatever of the run's own record still waits must be written now.

        Raises:
            OSError: the file system refuses.
        """

    def close(self) -> None:
        """The run has ended, or was interrupted."""
        ...


def scalars(record: Record) -> dict[str, float]:
    """The numbers of a record by name: `train/loss`, and `train/acceptance/1` for a list's first draft position."""
    kind = record["kind"]
    numbers: dict[str, float] = {}
    for name, value in record.items():
        if name in ("kind", "step"):
            continue
        if isinstance(value, int | float):
            numbers[f"{kind}/{name}"] = float(value)
        elif isinstance(value, list):
            numbers |= {f"{kind}/{name}/{place}": float(part) for place, part in enumerate(value, start=1) if part is not None}
    return numbers


def open_loggers(names: Sequence[str], facts: RunFacts) -> list[Logger]:
    """`log.jsonl` and the named dashboards.

    Raises:
        ConfigError: a dashboard's package is not installed.
    """
    return [JsonLines(facts), *(LOGGERS[name](facts) for name in names)]


def check_loggers(names: Sequence[str]) -> None:
    """Refuse dashboards whose package is missing, before any work is done.

    Raises:
        ConfigError: see `open_loggers`.
    """
    for name in names:
        _package(name)


class JsonLines(Logger):
    """One JSON object a line in `log.jsonl`. Of an existing log it keeps what lies before the point of the resume.

    Lines that the file system has no room for wait for those after them, and for `flush`.
    """

    def __init__(self, facts: RunFacts) -> None:
        self._path = facts.output / LOG_FILE
        self._waiting = ""
        kept: list[str] = []
        if facts.step and self._path.exists():
            for line in self._path.read_text(encoding="utf-8", errors="replace").splitlines():
                try:
                    record = json.loads(line)
                    step, limit = record["step"], facts.step if record["kind"] == "train" else facts.evaluated
                    if step <= limit:
                        kept.append(line)
                except (ValueError, KeyError, TypeError):
                    continue  # a process was killed, or the machine stopped, while this line was written
        write_text_atomically(self._path, "".join(f"{line}\n" for line in kept))

    def log(self, record: Record) -> None:
        """See `Logger.log`."""
        self._waiting += json.dumps(record) + "\n"
        try:
            self.flush()
        except OSError as error:
            logger.warning("cannot write %s (%s): the record of step %d waits", self._path, error.strerror, record["step"])

    def flush(self) -> None:
        """See `Logger.flush`; what waits is written whole or not at all."""
        if not self._waiting:
            return
        with self._path.open("ab", buffering=0) as stream:
            end = stream.seek(0, os.SEEK_END)
            line = self._waiting.encode()
            try:
                while line:
                    line = line[stream.write(line) :]
            except OSError:
                stream.truncate(end)
                raise
        self._waiting = ""

    def close(self) -> None:
        """See `Logger.close`."""
        try:
            self.flush()
        except OSError as error:
            logger.warning("cannot write %s (%s): its last records are lost", self._path, error.strerror)


class TensorBoard(Logger):
    """Event files in `output/tensorboard`."""

    def __init__(self, facts: RunFacts) -> None:
        _package("tensorboard")
        tensorboard = importlib.import_module("torch.utils.tensorboard")
        self._writer = tensorboard.SummaryWriter(facts.output / "tensorboard", purge_step=facts.step + 1 if facts.step else None)
        self._writer.add_text("settings", f"```json\n{json.dumps(facts.settings, indent=2)}\n```", facts.step)

    def log(self, record: Record) -> None:
        """See `Logger.log`."""
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        """See `Logger.close`."""
        self._writer.close()


class WeightsAndBiases(Logger):
    """A run of the project "speculators" at Weights & Biases; offline where WANDB_MODE says so."""

    def __init__(self, facts: RunFacts) -> None:
        wandb = _package("wandb")
        self._run = wandb.init(
            project="speculators", name=facts.name, id=facts.run_id, dir=str(facts.output), config=dict(facts.settings), resume="allow"
        )

    def log(self, record: Record) -> None:
        """See `Logger.log`."""
        self._run.log(scalars(record), step=record["step"])

    def close(self) -> None:
        """See `Logger.close`."""
        self._run.finish()


class Trackio(Logger):
    """A run of the project "speculators" in trackio's local dashboard."""

    def __init__(self, facts: RunFacts) -> None:
        self._trackio = _package("trackio")
        self._trackio.init(project="speculators", name=f"{facts.name}-{facts.run_id}", config=dict(facts.settings), resume="allow")

    def log(self, record: Record) -> None:
        """See `Logger.log`."""
        self._trackio.log(scalars(record), step=record["step"])

    def close(self) -> None:
        """See `Logger.close`."""
        self._trackio.finish()


class MLflow(Logger):
    """A run of the experiment "speculators" at MLFLOW_TRACKING_URI."""

    def __init__(self, facts: RunFacts) -> None:
        self._mlflow = _package("mlflow")
        self._mlflow.set_experiment("speculators")
        found = self._mlflow.search_runs(filter_string=f"tags.run_id = '{facts.run_id}'", output_format="list") if facts.step else []
        if found:
            self._mlflow.start_run(run_id=found[0].info.run_id)
            return
        self._mlflow.start_run(run_name=facts.name, tags={"run_id": facts.run_id})
        self._mlflow.log_params({key: str(value)[:500] for key, value in facts.settings.items()})

    def log(self, record: Record) -> None:
        """See `Logger.log`."""
        self._mlflow.log_metrics(scalars(record), step=record["step"])

    def close(self) -> None:
        """See `Logger.close`."""
        self._mlflow.end_run()


def _package(name: str) -> Any:
    """Every logger is called like the package it needs."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(f"logger {name!r} needs the package of that name, which is not installed: pip install {name}") from None


LOGGERS: dict[str, Callable[[RunFacts], Logger]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
    "mlflow": MLflow,
}
