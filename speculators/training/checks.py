"""Everything that can be refused of a run, before it computes or writes anything: for training, and for its dry run."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from speculators.data.rows import PackedRows
from speculators.errors import ConfigError, DataError
from speculators.positions import check_documents
from speculators.speculator import Speculator
from speculators.training.build import build_speculator
from speculators.training.config import TrainingConfig
from speculators.training.estimate import disk_bytes
from speculators.training.loggers import check_loggers
from speculators.training.meters import evaluated_numbers
from speculators.training.resume import StoredState, fingerprint, run_settings
from speculators.training.run_folder import RunFolder
from speculators.training.source import ResidentRows, VerifierSource, open_store
from speculators.training.step import training_dtype
from speculators.training.stopping import check_best_by
from speculators.training.world import World
from speculators.verifier import Verifier

logger = logging.getLogger("speculators")


@dataclass(frozen=True)
class CheckedRun:
    """A run that nothing speaks against.

    Attributes:
        speculator: to be trained: float32, attached, with the weights it begins or goes on with.
        stored: the state that it resumes from; None for a new run.
        dtype: that matrices are multiplied in.
        settings: what a later resume is compared with, see `run_settings`.
        data: `fingerprint` of the rows.
    """

    speculator: Speculator
    stored: StoredState | None
    dtype: torch.dtype
    settings: dict[str, Any]
    data: str


def check_run(
    verifier: Verifier,
    rows: PackedRows,
    config: TrainingConfig,
    *,
    held_out: PackedRows | None = None,
    init_from: Speculator | str | Path | None = None,
    resume: bool = False,
) -> CheckedRun:
    """Refuse what could not run; see `speculators.training.trainer.train` for the arguments. Every process calls it.

    Raises:
        ConfigError: settings contradict each other, the verifier, the hidden states, or the run that is resumed; a package is missing.
        DataError: the output folder, the disk or the store of hidden states cannot be used, conversations exceed the verifier's context, or
            nothing can be learned from them.
        CheckpointError, PairingError: what training starts from cannot be.
    """
    world = World.current()
    dtype = training_dtype(config, verifier.device, verifier.dtype)
    config.rows_per_micro_batch(world.size)
    check_loggers(config.loggers)
    for part in (rows, held_out):
        if part is not None:
            check_documents(part.position_ids, verifier.weights)
    _check_learnable(rows, held_out)
    folder = None if config.output is None else RunFolder(config.output)
    stored = _stored_state(folder, resume, world)
    data, settings = fingerprint(rows), run_settings(config, dtype, verifier)
    if stored is not None:
        stored.check(settings, data)
        if world.is_main and (changes := stored.changes(settings)):
            logger.warning("the run in %s goes on with other settings than it had: %s", config.output, "; ".join(changes))
    speculator = build_speculator(
        config, verifier, rows, None if stored else init_from, None if stored is None else stored.config(config.method)
    )
    if stored is not None:
        stored.load_weights(speculator)
    _check_evaluations(config, held_out, world)
    if config.best_by is not None and held_out is not None:
        _check_best_by(config.best_by, verifier, speculator, held_out, dtype)
    if config.hidden_states is not None:
        for part in (rows, held_out):
            if part is not None:
                open_store(config.hidden_states, part, speculator.aux_hidden_state_layer_ids, verifier)
    if folder is not None and world.is_main:
        folder.check_space(disk_bytes(speculator, config))
    return CheckedRun(speculator, stored, dtype, settings, data)


def _stored_state(folder: RunFolder | None, resume: bool, world: World) -> StoredState | None:
    """Check the output folder; return the state to resume. The folder is made when nothing can be refused any more."""
    if folder is None:
        if resume:
            raise ConfigError("resume needs an output folder that holds the run to continue")
        return None
    folder.check()
    # One process looks: another may come before a file system shows it what the first one wrote.
    (step,) = world.largest(folder.newest_step() if world.is_main else -1)
    newest = folder.checkpoint(int(step)) if step >= 0 else None
    if newest is not None and not resume:
        raise ConfigError(f"{folder.path} already holds a training run; pass resume=True (--resume) to continue it, or name another folder")
    if world.is_main:  # alone: it is also the one that makes the folder, once nothing can be refused any more
        folder.check_free(int(step))
        if newest is None:
            folder.check_new()
    if newest is None and resume and world.is_main:
        logger.warning("there is no checkpoint in %s to resume: a new run starts at step 0", folder.path)
    return StoredState.read(newest) if newest is not None else None


def _check_learnable(rows: PackedRows, held_out: PackedRows | None) -> None:
    """Rows in which no label follows another would be trained on, or evaluated, without any loss."""
    for kind, part, way_out in (
        ("training", rows, "take conversations with longer replies"),
        ("held-out", held_out, "hold more of the conversations out, or none"),
    ):
        if part is not None and not part.learnable_tokens:
            raise DataError(
                f"nothing can be learned from the {kind} rows ({len(part)} of {part.input_ids.shape[1]} tokens): no conversation in them"
                f" has two reply tokens one after the other behind a prompt; {way_out}, or a larger row_length if that cuts replies off"
            )


def _check_evaluations(config: TrainingConfig, held_out: PackedRows | None, world: World) -> None:
    """Settings that wait for evaluations wait forever where no rows are held out."""
    if held_out is not None:
        return
    for name in ("best_by", "patience"):
        if (value := getattr(config, name)) is not None:
            raise ConfigError(f"{name} = {value!r} needs evaluations, and there are no held-out rows: hold some out, or leave it out")
    if config.evaluate_every is not None and world.is_main:
        logger.warning("evaluate_every = %d has no effect: there are no held-out rows", config.evaluate_every)


def _check_best_by(metric: str, verifier: Verifier, speculator: Speculator, held_out: PackedRows, dtype: torch.dtype) -> None:
    """The loss of a single row tells which numbers an evaluation will have, long before the first one."""
    fullest = held_out.loss_mask.sum(dim=1).argmax().view(1)
    batch = ResidentRows(VerifierSource(verifier, speculator.aux_hidden_state_layer_ids), held_out[fullest]).batch(
        torch.zeros_like(fullest).to(verifier.device)
    )
    with torch.no_grad(), torch.autocast(verifier.device.type, dtype=dtype, enabled=dtype != torch.float32, cache_enabled=False):
        check_best_by(metric, evaluated_numbers(speculator.training_loss(batch).metrics))
