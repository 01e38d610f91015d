"""The resumable state of a run: one safetensors file with float32 weights, optimizer state, averages and the run's position.

The order of rows and every random draw follow from the seed and the step number, so there is no generator state to keep. Saves
lie between steps, so there is no half-accumulated gradient either. Tensors are stored whole, however they were spread: a run may
go on with another number of processes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from speculators.checkpoint.shared import embedding_sha256
from speculators.config import SpeculatorConfig
from speculators.data.rows import PackedRows
from speculators.errors import CheckpointError, ConfigError
from speculators.files import saving_tensors
from speculators.registry import get_algorithm
from speculators.speculator import Speculator
from speculators.training.config import TrainingConfig
from speculators.training.run_folder import STATE_FILE, RunFolder
from speculators.training.stopping import Best
from speculators.verifier import Verifier

WEIGHTS, OPTIMIZER, AVERAGE, METERS = "speculator.", "optimizer.", "average.", "meters."

# Changing one of these makes another run of it.
_MUST_MATCH = ("method", "options", "draft_vocabulary", "optimizer", "seed", "rows_per_step", "ema_decay", "best_by")
# Another verifier makes another run too; runs of before this was recorded resume with any.
_VERIFIER, _VERIFIER_DTYPE = "embedding and head of the verifier", "dtype of the verifier"
# Changing one of these changes what the rest of the run computes: allowed, and said. Whatever is in neither list (where results
# go, how often, what is cached, how the run is spread) changes no step, up to rounding.
_SAID = (
    *("steps", "epochs", "time_budget_seconds", "learning_rate", "learning_rate_scale", "learning_rate_floor", "warmup"),
    *("betas", "muon_momentum", "weight_decay", "gradient_clip", "accumulation", "hidden_states"),
)


@dataclass(frozen=True)
class ResumePoint:
    """Where a run stands.

    Attributes:
        step: optimizer steps done.
        fraction: of the schedule that is done.
        seconds: of training so far, over all processes.
        settings: what a resume is compared with, see `run_settings`.
        data: sha256 of the packed rows.
        run_id: names the run to dashboards, so that a resumed one continues its curves.
        evaluated: step of the last evaluation; -1 before the first.
        best: the best evaluation.
    """

    step: int
    fraction: float
    seconds: float
    settings: dict[str, Any]
    data: str
    run_id: str
    evaluated: int = -1
    best: Best = field(default_factory=Best)


def run_settings(config: TrainingConfig, dtype: torch.dtype, verifier: Verifier) -> dict[str, Any]:
    """What decides the steps of a run, as plain data: fields of its configuration, what "auto" came to, and the verifier.

    Args:
        config: of the run.
        dtype: that matrices are multiplied in.
        verifier: whose hidden states are learned from. Models of one shape differ in their embeddings and heads (sha256), as a
            rule; where only layers between them differ, as after some fine-tunings, only its name tells.
    """
    resolved = {
        "precision": str(dtype).removeprefix("torch."),
        _VERIFIER_DTYPE: str(verifier.dtype).removeprefix("torch."),
        "name of the verifier": verifier.weights.name_or_path,
        _VERIFIER: [embedding_sha256(table) for table in (verifier.weights.embedding, verifier.weights.head)],
    }
    return config.model_dump(mode="json", include={*_MUST_MATCH, *_SAID}) | resolved


def fingerprint(rows: PackedRows) -> str:
    """sha256 of the rows' token ids and loss mask."""
    digest = hashlib.sha256()
    for values in (rows.input_ids.to(torch.int32), rows.loss_mask.to(torch.uint8)):
        digest.update(str(tuple(values.shape)).encode())
        digest.update(values.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def write_state(folder: Path, tensors: Mapping[str, Tensor], speculator: SpeculatorConfig, point: ResumePoint) -> None:
    """Write the state into a checkpoint folder.

    Args:
        folder: of the checkpoint.
        tensors: on the CPU, contiguous, sharing no memory; named with one of the prefixes above.
        speculator: its configuration.
        point: the run's position.

    Raises:
        OSError: the file system refuses.
    """
    metadata = {"point": json.dumps(asdict(point)), "speculator": speculator.model_dump_json()}
    with saving_tensors():
        save_file(dict(tensors), folder / STATE_FILE, metadata=metadata)
    (folder / STATE_FILE).chmod(0o644)  # safetensors makes it readable by its owner alone


@dataclass(frozen=True)
class StoredState:
    """A state as it lies on disk.

    Attributes:
        path: of the file.
        point: the run's position.
        speculator: configuration of the drafter. It need not follow from the run's options: a run that started from another
            drafter has that one's taps and shape.
        tensors: by name, on the CPU, whole.
    """

    path: Path
    point: ResumePoint
    speculator: dict[str, Any]
    tensors: dict[str, Tensor]

    @classmethod
    def read(cls, folder: Path) -> StoredState:
        """Read the state of a checkpoint folder.

        Raises:
            CheckpointError: the file is damaged, or is not one that a run wrote there.
        """
        path = folder / STATE_FILE
        try:
            with safe_open(path, framework="pt") as stream:
                metadata = stream.metadata() or {}
                point = TypeAdapter(ResumePoint).validate_json(metadata.get("point", "null"), strict=True)
                speculator = json.loads(metadata.get("speculator", "null"))
                tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(["point", *map(str, first["loc"])])
            raise _damaged(path, f"its {place} is not right ({first['msg']})") from None
        except (SafetensorError, OSError, ValueError) as error:
            raise _damaged(path, str(error)) from error
        if not isinstance(speculator, dict):
            raise _damaged(path, "it has no configuration of a speculator")
        if RunFolder(folder.parent.parent).checkpoint(point.step).name != folder.name:
            raise _damaged(path, f"it is the state of step {point.step}")
        return cls(path, point, speculator, tensors)

    def damaged(self, what: str) -> CheckpointError:
        """One sentence for a state that cannot be resumed from."""
        return _damaged(self.path, what)

    def check(self, settings: Mapping[str, Any], data: str) -> None:
        """Refuse to continue another run than this one.

        Args:
            settings: `run_settings` of the resuming run.
            data: `fingerprint` of its rows.

        Raises:
            ConfigError: settings, verifier or data differ.
        """
        for key in _MUST_MATCH:
            theirs, ours = self.point.settings.get(key), settings[key]
            if theirs != ours:
                raise ConfigError(f"{self.path} belongs to a run with {key} = {theirs!r}, not {ours!r}; choose another output folder")
        dtypes = {self.point.settings.get(_VERIFIER_DTYPE), settings[_VERIFIER_DTYPE]}
        rounded = "float16" in dtypes and len(dtypes) > 1  # it holds not every value of the others, so the sums differ
        if not rounded and self.point.settings.get(_VERIFIER, settings[_VERIFIER]) != settings[_VERIFIER]:
            raise ConfigError(
                f"{self.path} belongs to a run with another verifier than {settings['name of the verifier']!r} (their embeddings or heads"
                " differ); choose another output folder or the same verifier"
            )
        if self.point.data != data:
            raise ConfigError(f"{self.path} belongs to a run on other training rows; choose another output folder or the same data")

    def changes(self, settings: Mapping[str, Any]) -> list[str]:
        """What the rest of the run will do otherwise than its beginning, a few words each; `settings` as for `check`."""
        theirs = self.point.settings
        return [f"{key} {ours} instead of {theirs[key]}" for key, ours in settings.items() if key in theirs and theirs[key] != ours]

    def config(self, method: str) -> SpeculatorConfig:
        """The drafter's configuration."""
        return get_algorithm(method).speculator_class.config_class.parse(self.speculator, str(self.path))

    def part(self, prefix: str) -> dict[str, Tensor]:
        """The tensors under a prefix, without it."""
        return {name.removeprefix(prefix): value for name, value in self.tensors.items() if name.startswith(prefix)}

    def load_weights(self, speculator: Speculator) -> None:
        """Fill a drafter of the same configuration. Averaged weights are checked here and loaded later, once they are spread.

        Raises:
            CheckpointError: the tensors do not fit.
        """
        self._check_part(WEIGHTS, speculator.state_dict())
        if self.point.settings.get("ema_decay") is not None:
            self._check_part(AVERAGE, {name: value for name, value in speculator.named_parameters() if value.requires_grad})
        speculator.load_state_dict(self.part(WEIGHTS))

    def _check_part(self, prefix: str, expected: Mapping[str, Tensor]) -> None:
        stored = self.part(prefix)
        for name in sorted(expected.keys() | stored.keys()):
            theirs, ours = (tuple(part[name].shape) if name in part else None for part in (stored, expected))
            if theirs != ours:
                found = "is missing" if theirs is None else f"has shape {theirs}"
                wanted = "none is expected" if ours is None else f"shape {ours} is expected"
                raise self.damaged(f"{prefix}{name} {found}, {wanted}")


def _damaged(path: Path, what: str) -> CheckpointError:
    folder = path.parent
    earlier = [step for step in RunFolder(folder.parent.parent).steps() if step < int(folder.name.rpartition("-")[2])]
    way_out = f"to resume from the checkpoint of step {earlier[-1]}" if earlier else "and start again, there is no checkpoint before it"
    return CheckpointError(f"cannot read the training state {path}: {what}; move {folder} away {way_out}")
