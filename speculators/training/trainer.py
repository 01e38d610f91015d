"""The training run: the loop, its records and its checkpoints; on one device or many, the same for every algorithm."""

from __future__ import annotations

import gc
import logging
import signal
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from speculators.checkpoint.card import ModelCard
from speculators.data.rows import PackedRows
from speculators.errors import DataError, TrainingInterrupted
from speculators.speculator import Speculator
from speculators.training.checks import check_run
from speculators.training.config import TrainingConfig
from speculators.training.graph import Capture, is_large
from speculators.training.loggers import Logger, RunFacts, open_loggers
from speculators.training.memory import clear_when_memory_runs_out
from speculators.training.meters import with_acceptance_lengths
from speculators.training.optimizer import DrafterOptimizer
from speculators.training.order import EpochOrder
from speculators.training.parallel import parallelise, shard_verifier
from speculators.training.profiling import StepProfiler, peak_flops
from speculators.training.progress_bar import ProgressBar
from speculators.training.resume import ResumePoint
from speculators.training.run_folder import BEST, RunFolder
from speculators.training.saving import RunState
from speculators.training.schedule import Progress, learning_rate_factor
from speculators.training.settings import SETTINGS_FILE, write_settings
from speculators.training.source import HiddenStateSource, StoredRows, hidden_state_source
from speculators.training.step import TrainingStep
from speculators.training.stopping import Best, stop_signals
from speculators.training.world import World, local_device
from speculators.verifier import Verifier

logger = logging.getLogger("speculators")

Record = dict[str, Any]

_NOT_LEARNING = "their gradients were not finite, or nothing in their rows was supervised; lower learning_rate, or check the data"


@dataclass(frozen=True)
class Provenance:
    """What only the caller knows of a run, for its settings file and its model cards.

    Attributes:
        settings: settings beside the configuration's (data, verifier ...), by their flags' names.
        card: what is known of data and command; steps, time, seed and hardware are filled in here.
    """

    settings: Mapping[str, Any]
    card: ModelCard


def train(
    verifier: Verifier,
    rows: PackedRows,
    config: TrainingConfig,
    *,
    held_out: PackedRows | None = None,
    init_from: Speculator | str | Path | None = None,
    resume: bool = False,
    provenance: Provenance | None = None,
    on_record: Callable[[Record], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Speculator:
    """Train a drafter.

    Fills `config.output` as `speculators.training.run_folder` describes. Records of the log are labelled `train` (one an
    interval) or `teacher-forced` (one an evaluation); vectors are by draft position.

    Where torch.distributed is initialised, every process calls this with the same arguments and its own verifier.

    Args:
        verifier: gives hidden states; training runs on its device.
        rows: packed conversations.
        config: the run.
        held_out: packed rows that are only evaluated.
        init_from: a speculator or checkpoint whose weights to start from, at step 0.
        resume: continue the run in `config.output` at its last checkpoint; where there is none, start (from `init_from`, if given)
            and say so.
        provenance: for the settings file and the model cards.
        on_record: called with every record of the log, in the process of rank 0.
        clock: seconds from any origin.

    Returns:
        The trained speculator in the verifier's dtype, ready to decode. The float32 weights are in the last checkpoint.

    Raises:
        ConfigError: settings contradict each other, the verifier, or the run that is resumed; or memory ran out.
        DataError: there are no rows, too many of them have hidden states that are not finite, or a checkpoint cannot be written.
        TrainingInterrupted: SIGINT or SIGTERM came; the state was saved first.
    """
    if config.shard_verifier:
        shard_verifier(verifier, World.current(), local_device() or verifier.device)
    device = verifier.device
    on_cuda = device.type == "cuda"
    folder = None if config.output is None else RunFolder(config.output)
    try:
        with (
            clear_when_memory_runs_out(config, device, World.current().size),
            torch.cuda.device(device) if on_cuda else nullcontext(),
            torch.random.fork_rng([device] if on_cuda else []),
        ):
            trainer = Trainer(
                *(verifier, rows, config, folder),
                held_out=held_out,
                init_from=init_from,
                resume=resume,
                provenance=provenance,
                on_record=on_record,
                clock=clock,
            )
            try:
                speculator = trainer.run()
            finally:
                trainer.close()
    finally:
        if folder is not None:
            folder.close()
    if on_cuda:
        del trainer
        gc.collect()  # gigabytes of cached states must not wait for the collector's own time if something refers in a circle
    return speculator


class Trainer:
    """A training run; see `train`.

    Attributes:
        speculator: what is trained.
        step: optimizer steps done.
    """

    def __init__(
        self,
        verifier: Verifier,
        rows: PackedRows,
        config: TrainingConfig,
        folder: RunFolder | None,
        *,
        held_out: PackedRows | None = None,
        init_from: Speculator | str | Path | None = None,
        resume: bool = False,
        provenance: Provenance | None = None,
        on_record: Callable[[Record], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._clock, self._on_record = config, clock, on_record
        created = clock()
        self._world = world = World.current()
        self._verifier, self._held_out, self._folder = verifier, held_out, folder
        self._order = EpochOrder(rows.input_ids.shape[0], config.seed)
        checked = check_run(verifier, rows, config, held_out=held_out, init_from=init_from, resume=resume)
        stored, dtype, rows_per_micro_batch = checked.stored, checked.dtype, config.rows_per_micro_batch(world.size)
        self.speculator = speculator = checked.speculator
        parallel = parallelise(speculator, world, config.parallel, dtype)
        optimizer = DrafterOptimizer(speculator, config, parallel.sharding, world)
        if stored is not None:
            self._point = replace(stored.point, settings=checked.settings)
        else:
            self._point = ResumePoint(0, 0.0, 0.0, checked.settings, checked.data, uuid.uuid4().hex[:8])
        self.step, self._seconds_before = self._point.step, self._point.seconds
        self._saved = self.step if stored is not None else -1
        self._learned = stored is not None  # whether any step changed the weights
        total_steps = config.total_steps(self._order.num_rows)
        self._progress = Progress(total_steps, config.time_budget_seconds, done=self._point.fraction, created=created, clock=clock)

        # Collectives inside of a captured step would have to be captured with it, and a store's reads cannot be.
        uncaptured = parallel.sharded or config.shard_verifier or config.hidden_states is not None
        trainable = sum(parameter.numel() for parameter in speculator.parameters() if parameter.requires_grad)
        uncaptured |= is_large(trainable, rows_per_micro_batch * rows.input_ids.shape[1])
        capture = Capture(verifier.device, enabled=config.cuda_graphs and not uncaptured)

        def source(of: PackedRows) -> HiddenStateSource:
            return hidden_state_source(
                verifier,
                speculator.aux_hidden_state_layer_ids,
                of,
                cache_states=config.cache_states and not config.shard_verifier,
                dtype=dtype,
                memory_fraction=config.cache_memory_fraction,
                rows_per_forward=rows_per_micro_batch,
                capture=capture,
                store=config.hidden_states,
            )

        if folder is not None and world.is_main:
            folder.open()
        held_out_source = source(held_out) if held_out is not None else None
        training_source = source(rows)
        if isinstance(training_source, StoredRows) or isinstance(held_out_source, StoredRows):
            capture = Capture(verifier.device, enabled=False)  # they wait for the disk
        self._step = TrainingStep(parallel, training_source, held_out_source, optimizer, config, dtype, capture)
        card = provenance.card if provenance is not None else ModelCard()
        self._state = RunState(speculator, self._step, optimizer, parallel, config, card, rows)
        if stored is not None:
            self._state.load(stored)
        self._peak = peak_flops(verifier.device, config.peak_tflops)
        self._flops = self._step.count_flops() if self._peak else 0
        self._loggers = self._open_loggers(provenance)
        self._profiler = StepProfiler(config.output if world.is_main else None, config.profile_steps, self.step)
        shown = config.progress and world.is_main
        self._bar = ProgressBar(config.method, total_steps, self._progress.fraction(self.step), shown=shown)
        self._began = self._logged = clock()
        self._logged_step = self.step

    # -- the loop --------------------------------------------------------------------------------------------

    def run(self) -> Speculator:
        """Train to the end of the schedule, save and return the speculator."""
        config, progress = self._config, self._progress
        self._begin()
        with stop_signals() as stop:
            while True:
                # Every process has a clock and gets signals of its own; what they do next must be one thing.
                now, midway = progress.fraction(self.step), progress.fraction(self.step + 0.5)
                now, midway, number = self._world.largest(now, midway, stop.signal or 0)
                if number:
                    self._save()
                    raise self._interrupted(int(number))
                if now >= 1.0 or self._no_longer_improves():
                    break
                self._learning_rate = config.learning_rate * learning_rate_factor(midway, config.warmup, config.learning_rate_floor)
                rows = self._order.rows(self.step * config.rows_per_step, config.rows_per_step)
                self._profiler.before(self.step)
                self._step.run(self.step, rows, self._learning_rate)
                self.step += 1
                self._profiler.after(self.step)
                if _due(self.step, config.log_every):
                    self._log()
                last = self.step == progress.total_steps
                improved = (last or _due(self.step, config.evaluate_every)) and self._evaluate()
                if improved or _due(self.step, config.save_every):
                    self._save()
            if self.step > self._logged_step:
                self._log()
            self._check_learned()
            self._evaluate()
            self._save()
            (number,) = self._world.largest(stop.signal or 0)
            if number:
                raise self._interrupted(int(number))
            return self._finish().to(self._verifier.dtype)  # which a signal does not end: the run is complete

    def close(self) -> None:
        """End what was opened, also after an interruption."""
        self._profiler.close(self.step)
        self._bar.close()
        for each in self._loggers:
            try:
                each.close()
            except OSError as error:
                logger.warning("%s cannot end its records (%s)", type(each).__name__, error)

    def _begin(self) -> None:
        started = self._clock()
        if self.step == 0:
            self._evaluate()
        elif self._held_out is not None and self._config.time_budget_seconds is not None:
            self._step.evaluate()  # only to learn how long the last evaluation will take
        self._progress.begin(reserve_seconds=1.2 * (self._clock() - started))
        self._began = self._logged = self._clock()

    def _no_longer_improves(self) -> bool:
        patience = self._config.patience
        return patience is not None and self._point.best.since >= patience

    def _interrupted(self, number: int) -> TrainingInterrupted:
        output = self._config.output
        where = "there is no output folder, nothing was kept"
        if output is not None:
            where = f"the state is in {output}; resume=True continues it (--resume on the command line)"
        return TrainingInterrupted(f"training stopped by {signal.Signals(number).name} after step {self.step}: {where}", number)

    # -- records ---------------------------------------------------------------------------------------------

    def _log(self) -> None:
        readings = self._step.read()
        now = self._clock()
        damaged, tokens = readings.pop("damaged_rows"), readings.pop("tokens")
        assert isinstance(damaged, float) and isinstance(tokens, float)
        elapsed, steps = max(now - self._logged, 1e-9), self.step - self._logged_step
        speed = tokens / elapsed
        record = {
            **with_acceptance_lengths(readings),
            "learning_rate": self._learning_rate,
            "tokens": int(tokens),
            "tokens_per_second": speed,
            "damaged_rows": int(damaged),
        }
        if self._peak:
            record["mfu"] = self._flops * steps / (elapsed * self._peak * self._world.size)
        self._logged, self._logged_step = now, self.step
        self._record("train", record)
        self._check_damaged(int(damaged))
        if record["gradient_norm"] is not None:
            self._learned = True
        elif self._world.is_main:
            logger.warning("no step since the last record changed a weight, up to step %d: %s", self.step, _NOT_LEARNING)
        self._bar.show(self.step, self._progress.fraction(self.step), record)

    def _evaluate(self) -> bool:
        """Evaluate, unless there are no held-out rows or this was done at this very step. Returns whether it is the best so far."""
        if self._held_out is None or self._point.evaluated == self.step:
            return False
        readings = self._step.evaluate()
        for count in ("tokens", "damaged_rows", "empty_batches"):
            readings.pop(count)
        record = {"step": self.step, **with_acceptance_lengths(readings)}
        self._record("teacher-forced", record)
        if record["loss"] is None:
            raise DataError(
                f"the evaluation after step {self.step} has no finite loss: the weights have diverged, or the verifier's hidden states are"
                " not finite; lower learning_rate, or check the verifier's dtype and the data"
            )
        best = self._point.best.after(record, self._config.best_by, self._config.min_improvement)
        # The start is not what training made: it is evaluated, and never the best.
        self._point = replace(self._point, evaluated=self.step, best=best if self.step else Best())
        return self.step > 0 and best.step == self.step

    def _record(self, kind: str, values: Record) -> None:
        record = {"kind": kind, "step": self.step, "seconds": round(self._seconds(), 3), **values}
        if not self._world.is_main:
            return
        for each in self._loggers:
            try:
                each.log(record)
            except OSError as error:
                logger.warning("%s cannot take the record of step %d (%s)", type(each).__name__, self.step, error)
        if self._on_record is not None:
            self._on_record(record)

    def _seconds(self) -> float:
        """Seconds of training, over all resumptions of the run."""
        return self._seconds_before + self._clock() - self._began

    def _check_damaged(self, damaged: int) -> None:
        if not damaged:
            return
        interval = min(self._config.log_every, self.step) * self._config.rows_per_step
        if damaged > self._config.max_damaged_fraction * interval:
            raise DataError(
                f"{damaged} of the last {interval} training rows had hidden states that are not finite,"
                f" more than max_damaged_fraction = {self._config.max_damaged_fraction}; check the verifier's dtype and the data"
            )
        logger.warning("skipped %d training rows whose hidden states are not finite", damaged)

    def _check_learned(self) -> None:
        if self.step and not self._learned:
            raise DataError(f"none of the {self.step} steps of this run changed a weight: {_NOT_LEARNING}; no drafter was written")

    def _open_loggers(self, provenance: Provenance | None) -> list[Logger]:
        """Write the settings and open the log; only in the process that writes."""
        output = self._files_of_main()
        if output is None:
            return []
        settings = {**self._config.model_dump(mode="json"), **(provenance.settings if provenance is not None else {})}
        write_settings(output / SETTINGS_FILE, settings)
        name = self._config.run_name or output.absolute().name
        return open_loggers(self._config.loggers, RunFacts(output, name, self._point.run_id, settings, self.step, self._point.evaluated))

    # -- files -----------------------------------------------------------------------------------------------

    def _files_of_main(self) -> Path | None:
        """The output folder, in the process that writes to it."""
        return self._config.output if self._world.is_main else None

    def _save(self) -> None:
        """Write a checkpoint of this step, unless there is one, and point the links where they belong."""
        folder, config = self._folder, self._config
        if folder is None:
            return
        if self._saved != self.step:
            self._point = replace(self._point, step=self.step, fraction=self._progress.fraction(self.step), seconds=self._seconds())
            try:
                with folder.writing(self.step) if self._world.is_main else nullcontext() as staged:
                    self._state.write(staged, self._point)
            except OSError as error:
                raise self._unwritten(f"the checkpoint of step {self.step} to {folder.path}", error) from error
            self._saved = self.step
        best = self._point.best
        if self._world.is_main:
            try:
                for each in self._loggers:
                    each.flush()
                if best.value is not None and best.step == self.step:
                    folder.link(BEST, best.step)
                folder.prune(config.keep_checkpoints, best.step if best.value is not None else None)
            except OSError as error:
                raise self._unwritten(f"the log or the links in {folder.path}, or remove old checkpoints there", error) from error
        self._world.wait()

    def _finish(self) -> Speculator:
        """The trained drafter, which is saved too."""
        output = self._files_of_main()
        try:
            return self._state.finish(output, self._point)
        except OSError as error:
            raise self._unwritten(f"the trained drafter to {output}", error) from error

    def _unwritten(self, what: str, error: OSError) -> DataError:
        assert self._folder is not None
        newest = self._folder.newest_step()
        kept = f"the checkpoint of step {newest} is whole: make room and resume" if newest >= 0 else "make room and start again"
        return DataError(f"cannot write {what} ({error.strerror or error}); {kept}")


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
