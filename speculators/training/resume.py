"""The resumable state of a run: one safetensors file, whole or absent, holding float32 weights, optimizer state and position.

The order of rows and every random draw follow from the seed and the step number, so there is no generator state to keep.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from speculators.config import SpeculatorConfig
from speculators.data.rows import PackedRows
from speculators.errors import CheckpointError, ConfigError
from speculators.registry import get_algorithm
from speculators.speculator import Speculator
from speculators.training.config import TrainingConfig
from speculators.training.optimizer import DrafterOptimizer

STATE_FILE = "training_state.safetensors"

# Changing one of these makes another run of it; the other fields may change between an interruption and its resume.
_MUST_MATCH = ("method", "options", "optimizer", "seed", "rows_per_step")


@dataclass(frozen=True)
class ResumePoint:
    """Where a run stands.

    Attributes:
        step: optimizer steps done.
        fraction: of the schedule that is done.
        seconds: of training so far, over all processes.
        settings: the configuration fields that a resume must share.
        data: sha256 of the packed rows.
    """

    step: int
    fraction: float
    seconds: float
    settings: dict[str, Any]
    data: str


def essential_settings(config: TrainingConfig) -> dict[str, Any]:
    """The fields a resumed run must share with the one it continues, as plain data."""
    return config.model_dump(mode="json", include=set(_MUST_MATCH))


def fingerprint(rows: PackedRows) -> str:
    """sha256 of the rows' token ids and loss mask."""
    digest = hashlib.sha256()
    for values in (rows.input_ids.to(torch.int32), rows.loss_mask.to(torch.uint8)):
        digest.update(str(tuple(values.shape)).encode())
        digest.update(values.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def save_state(folder: Path, speculator: Speculator, optimizer: DrafterOptimizer, point: ResumePoint) -> None:
    """Write the state beside its place and rename it there, so that a reader sees the old one or the new one."""
    tensors = {f"speculator.{name}": value for name, value in speculator.state_dict().items()}
    tensors.update({f"optimizer.{name}": value for name, value in optimizer.state().items()})
    # Tied or sliced tensors share memory, which safetensors refuses.
    owned = {name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()}
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{STATE_FILE}.")
    os.close(handle)
    try:
        save_file(owned, temporary, metadata={"point": json.dumps(asdict(point)), "speculator": speculator.config.model_dump_json()})
        with open(temporary, "rb") as stream:
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, folder / STATE_FILE)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def stored_config(folder: Path, method: str) -> SpeculatorConfig | None:
    """Configuration of the speculator whose state lies in a folder; None where `load_state` will refuse the state.

    It need not follow from the run's options: a run that started from another drafter has that one's taps and shape.
    """
    try:
        with safe_open(folder / STATE_FILE, framework="pt") as stream:
            data = json.loads((stream.metadata() or {}).get("speculator", "null"))
    except (SafetensorError, OSError, ValueError):
        return None
    if data is None or data.get("speculators_model_type") != method:
        return None
    return get_algorithm(method).speculator_class.config_class.parse(data, str(folder / STATE_FILE))


def load_state(folder: Path, speculator: Speculator, optimizer: DrafterOptimizer, config: TrainingConfig, rows: PackedRows) -> ResumePoint:
    """Load weights and optimizer state in place.

    Raises:
        CheckpointError: the file is damaged or holds other tensors than this speculator needs.
        ConfigError: the run it belongs to has other settings or other data.
    """
    path = folder / STATE_FILE
    try:
        with safe_open(path, framework="pt") as stream:
            point = ResumePoint(**json.loads(stream.metadata()["point"]))
            tensors: dict[str, Tensor] = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"cannot read the training state {path}: {error}; remove it to start anew") from error
    for key, ours in essential_settings(config).items():
        if point.settings.get(key) != ours:
            theirs = point.settings.get(key)
            raise ConfigError(f"{path} belongs to a run with {key} = {theirs!r}, not {ours!r}; choose another output folder")
    if point.data != fingerprint(rows):
        raise ConfigError(f"{path} belongs to a run on other training rows; choose another output folder or the same data")
    weights = {name.removeprefix("speculator."): value for name, value in tensors.items() if name.startswith("speculator.")}
    try:
        speculator.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(f"the training state {path} does not fit this {speculator.method} speculator: {error}") from error
    optimizer.load_state({name.removeprefix("optimizer."): value for name, value in tensors.items() if name.startswith("optimizer.")})
    return point
