"""What a checkpoint holds, collected from all processes: a drafter that loads, and the state that a run resumes from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from speculators.checkpoint import save
from speculators.checkpoint.card import ModelCard
from speculators.checkpoint.native import may_write_card
from speculators.checkpoint.storage import CARD_FILE
from speculators.checkpoint.validation import skeleton
from speculators.data.rows import PackedRows
from speculators.errors import CheckpointError
from speculators.speculator import Speculator
from speculators.training.config import TrainingConfig
from speculators.training.optimizer import DrafterOptimizer
from speculators.training.parallel import Parallel
from speculators.training.resume import AVERAGE, METERS, OPTIMIZER, WEIGHTS, ResumePoint, StoredState, write_state
from speculators.training.sharding import full_copy, gathered
from speculators.training.step import TrainingStep


class RunState:
    """The tensors of a run, wherever they lie.

    All processes call its methods together.

    Args:
        speculator: what is trained, spread or not.
        step: holds the averages and the sums of the log interval.
        optimizer: of the speculator.
        parallel: the processes.
        config: of the run.
        card: what the caller knows of the training.
        rows: what is trained on.
    """

    def __init__(
        self,
        speculator: Speculator,
        step: TrainingStep,
        optimizer: DrafterOptimizer,
        parallel: Parallel,
        config: TrainingConfig,
        card: ModelCard,
        rows: PackedRows,
    ) -> None:
        self._speculator, self._step, self._optimizer = speculator, step, optimizer
        self._parallel, self._config = parallel, config
        device = optimizer.learning_rate.device
        hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        if parallel.world.size > 1:
            hardware = f"{parallel.world.size} x {hardware}"
        self._card = replace(card, tokens=rows.reply_tokens, seed=config.seed, hardware=hardware)

    def load(self, stored: StoredState) -> None:
        """Take over optimizer state, averages and sums; the weights are loaded before they are spread.

        Raises:
            CheckpointError: the optimizer state or the sums do not fit.
        """
        try:
            self._optimizer.load_state(stored.part(OPTIMIZER))
        except CheckpointError as error:
            raise stored.damaged(f"{OPTIMIZER}{error}") from None
        if self._step.average is not None:
            for name, value in self._step.average.state().items():
                value.copy_(self._parallel.sharding.take(stored.part(AVERAGE)[name]))
        if self._parallel.world.is_main:  # summed over the processes when they were stored
            try:
                self._step.meters.load_state(stored.part(METERS), self._optimizer.learning_rate.device)
            except (KeyError, RuntimeError):
                raise stored.damaged(f"the sums of the log under {METERS} are incomplete") from None

    def write(self, folder: Path | None, point: ResumePoint) -> None:
        """Write a checkpoint: drafter, card and state. Only rank 0 is given a folder, and only it writes.

        Raises:
            CheckpointError: the drafter breaks a rule of the format.
            OSError: the file system refuses.
        """
        tensors = self._collect(keep=folder is not None)
        if folder is None:
            return
        weights = {name.removeprefix(WEIGHTS): value for name, value in tensors.items() if name.startswith(WEIGHTS)}
        averaged = {name.removeprefix(AVERAGE): value for name, value in tensors.items() if name.startswith(AVERAGE)}
        drafter = skeleton(self._speculator.config)
        drafter.load_state_dict(weights | averaged, assign=True)
        self._save_drafter(drafter, folder, point)
        write_state(folder, tensors, self._speculator.config, point)

    def _collect(self, keep: bool) -> dict[str, Tensor]:
        """Every tensor in full, on the CPU; where they are spread, processes that keep nothing take part in gathering them."""
        kept = {f"{METERS}{name}": value for name, value in self._step.meters.state(self._parallel.world).items()}
        kept = {name: full_copy(value) for name, value in kept.items()}
        if not keep and not self._parallel.sharded:
            return {}
        for name, tensor in self._speculator.state_dict().items():
            full = gathered(tensor, self._parallel.sharding)
            if keep:
                kept[f"{WEIGHTS}{name}"] = full_copy(full)
        for name, full in self._optimizer.full_state():
            if keep:
                kept[f"{OPTIMIZER}{name}"] = full_copy(full)
        for name, full in self._full_average().items():
            if keep:
                kept[f"{AVERAGE}{name}"] = full_copy(full)
        return kept

    def _full_average(self) -> dict[str, Tensor]:
        if self._step.average is None:
            return {}
        rows = dict(zip(self._optimizer.names, self._optimizer.sources, strict=True))
        return {
            name: self._parallel.sharding.gather(value, rows[name].shape[:1].numel()) for name, value in self._step.average.state().items()
        }

    def finish(self, folder: Path | None, point: ResumePoint) -> Speculator:
        """The trained drafter in float32, whole, in every process; with the averaged weights where there are some.

        Args:
            folder: where rank 0 saves it; None does not.
            point: where the run ended.
        """
        speculator = self._speculator.eval()
        for parameter in speculator.parameters():
            parameter.grad = None
        weights = {name: gathered(tensor, self._parallel.sharding) for name, tensor in speculator.state_dict().items()}
        averaged = self._full_average()
        if self._parallel.sharded:
            whole = type(speculator)(speculator.config).to(self._optimizer.learning_rate.device).eval()
            whole.attach(speculator.verifier)
            speculator = whole
        speculator.load_state_dict(weights | averaged)
        if folder is not None:
            self._save_drafter(speculator, folder, point)
        return speculator

    def _save_drafter(self, drafter: Speculator, folder: Path, point: ResumePoint) -> None:
        if not drafter.is_attached:
            drafter.attach(self._speculator.verifier)
        card = replace(self._card, steps=point.step, seconds=point.seconds)
        ours = may_write_card(folder / CARD_FILE)  # a README of the user's stays
        save(drafter, folder, form=self._config.checkpoint_form, card=card if ours else None)
