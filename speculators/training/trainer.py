"""The training loop: one process, one device, the same for every algorithm."""

from __future__ import annotations

import gc
import json
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from tqdm import tqdm

from speculators.data.rows import PackedRows
from speculators.errors import ConfigError, DataError, TrainingInterrupted
from speculators.files import check_output_folder, make_folder
from speculators.speculator import Speculator
from speculators.training.build import build_speculator
from speculators.training.config import TrainingConfig
from speculators.training.graph import Capture
from speculators.training.meters import Reading, estimated_acceptance_length
from speculators.training.optimizer import DrafterOptimizer
from speculators.training.order import EpochOrder
from speculators.training.resume import STATE_FILE, ResumePoint, essential_settings, fingerprint, load_state, save_state, stored_config
from speculators.training.schedule import Progress, learning_rate_factor
from speculators.training.source import HiddenStateSource, hidden_state_source
from speculators.training.step import TrainingStep, training_dtype
from speculators.verifier import Verifier

logger = logging.getLogger("speculators")

LOG_FILE = "log.jsonl"
CONFIG_FILE = "training.json"

Record = dict[str, Any]


def train(
    verifier: Verifier,
    rows: PackedRows,
    config: TrainingConfig,
    *,
    held_out: PackedRows | None = None,
    init_from: Speculator | str | Path | None = None,
    resume: bool = False,
    on_record: Callable[[Record], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Speculator:
    """Train a drafter.

    Writes to `config.output`: the checkpoint, `training.json`, `log.jsonl` (one record an interval, labelled `train`, and one
    an evaluation, labelled `teacher-forced`; vectors are by draft position) and the resumable state.

    Args:
        verifier: gives hidden states; training runs on its device.
        rows: packed conversations.
        config: the run.
        held_out: packed rows that are only evaluated.
        init_from: a speculator or checkpoint whose weights to start from, at step 0.
        resume: continue the run in `config.output` where it stopped; where there is none, start (from `init_from`, if given).
        on_record: called with every record of the log.
        clock: seconds from any origin.

    Returns:
        The trained speculator in the verifier's dtype, ready to decode. The float32 weights are in the state file.

    Raises:
        ConfigError: settings contradict each other, the verifier, or the run that is resumed.
        DataError: there are no rows, or too many of them have hidden states that are not finite.
        TrainingInterrupted: SIGINT or SIGTERM came; the state was saved first.
    """
    device = verifier.device
    on_cuda = device.type == "cuda"
    with torch.cuda.device(device) if on_cuda else nullcontext(), torch.random.fork_rng([device] if on_cuda else []):
        speculator = Trainer(
            verifier, rows, config, held_out=held_out, init_from=init_from, resume=resume, on_record=on_record, clock=clock
        ).run()
    if on_cuda:
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
        *,
        held_out: PackedRows | None = None,
        init_from: Speculator | str | Path | None = None,
        resume: bool = False,
        on_record: Callable[[Record], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._clock, self._on_record = config, clock, on_record
        created = clock()
        dtype = training_dtype(config, verifier.device, verifier.dtype)
        self._order = EpochOrder(rows.input_ids.shape[0], config.seed)
        resuming = self._prepare_output(resume)
        self._fingerprint = fingerprint(rows)
        self._verifier = verifier
        resumed = None if resuming is None else stored_config(resuming, config.method)
        self.speculator = build_speculator(config, verifier, rows, None if resuming else init_from, resumed)
        optimizer = DrafterOptimizer(self.speculator, config)
        self._optimizer = optimizer
        start = ResumePoint(0, 0.0, 0.0, essential_settings(config), self._fingerprint)
        if resuming is not None:
            start = load_state(resuming, self.speculator, optimizer, config, rows)
        self.step, self._seconds_before = start.step, start.seconds
        total_steps = config.total_steps(self._order.num_rows)
        self._progress = Progress(total_steps, config.time_budget_seconds, done=start.fraction, created=created, clock=clock)
        self._open_log()

        capture = Capture(verifier.device, enabled=config.cuda_graphs)

        def source(of: PackedRows) -> HiddenStateSource:
            return hidden_state_source(
                verifier,
                self.speculator.aux_hidden_state_layer_ids,
                of,
                cache_states=config.cache_states,
                dtype=dtype,
                memory_fraction=config.cache_memory_fraction,
                rows_per_forward=config.rows_per_micro_batch,
                capture=capture,
            )

        held_out_source = source(held_out) if held_out is not None else None
        self._step = TrainingStep(self.speculator, source(rows), held_out_source, optimizer, config, dtype, capture)
        self._has_held_out = held_out is not None
        self._began = self._logged = clock()

    # -- the loop --------------------------------------------------------------------------------------------

    def run(self) -> Speculator:
        """Train to the end of the schedule, save and return the speculator."""
        config = self._config
        started = self._clock()
        if self._has_held_out:
            self._evaluate()  # also the time to keep for the last one
        self._progress.begin(reserve_seconds=1.2 * (self._clock() - started))
        self._began = self._logged = self._clock()
        with _stop_signals() as stop, self._progress_bar() as bar:
            while not self._progress.finished(self.step):
                self._learning_rate = config.learning_rate * learning_rate_factor(
                    self._progress.fraction(self.step + 0.5), config.warmup, config.learning_rate_floor
                )
                rows = self._order.rows(self.step * config.rows_per_step, config.rows_per_step)
                self._step.run(self.step, rows, self._learning_rate)
                self.step += 1
                if _due(self.step, config.log_every):
                    self._log(bar)
                if self._has_held_out and _due(self.step, config.evaluate_every):
                    self._evaluate()
                if _due(self.step, config.save_every):
                    self._save_state()
                if stop.signal is not None:
                    self._save_state()
                    raise self._interrupted(stop.signal)
            if self.step % config.log_every:
                self._log(bar)
        if self._has_held_out:
            self._evaluate()
        self._save_state()
        return self._finish()

    def _finish(self) -> Speculator:
        speculator = self.speculator.eval()
        for parameter in speculator.parameters():
            parameter.grad = None
        if self._config.output is not None:
            speculator.save_pretrained(self._config.output, form=self._config.checkpoint_form)
        return speculator.to(self._verifier.dtype)

    def _interrupted(self, number: int) -> TrainingInterrupted:
        output = self._config.output
        where = "there is no output folder, nothing was kept"
        if output is not None:
            where = f"the state is in {output}; resume=True continues it (--resume on the command line)"
        return TrainingInterrupted(f"training stopped by {signal.Signals(number).name} after step {self.step}: {where}", number)

    # -- records ---------------------------------------------------------------------------------------------

    def _log(self, bar: tqdm[Any]) -> None:
        readings = self._step.read()
        now = self._clock()
        damaged, tokens = readings.pop("damaged_rows"), readings.pop("tokens")
        assert isinstance(damaged, float) and isinstance(tokens, float)
        speed = tokens / max(now - self._logged, 1e-9)
        record = {
            **_with_acceptance_length(readings),
            "learning_rate": self._learning_rate,
            "tokens": int(tokens),
            "tokens_per_second": speed,
            "damaged_rows": int(damaged),
        }
        self._logged = now
        self._record("train", record)
        self._check_damaged(int(damaged))
        total = f"/{self._progress.total_steps}" if self._progress.total_steps else ""
        length = f"acceptance length {_shown(record.get('acceptance_length'))} (train)"
        bar.set_description_str(f"{self._config.method} step {self.step}{total}")
        bar.set_postfix_str(f"loss {_shown(record['loss'])}, {length}, lr {self._learning_rate:.1e}, {speed:,.0f} tokens/s")
        bar.update(self._progress.fraction(self.step) - bar.n)

    def _evaluate(self) -> None:
        readings = self._step.evaluate()
        for count in ("tokens", "damaged_rows", "empty_batches"):
            readings.pop(count)
        self._record("teacher-forced", _with_acceptance_length(readings))

    def _record(self, kind: str, values: Record) -> None:
        record = {"kind": kind, "step": self.step, "seconds": round(self._seconds(), 3), **values}
        if self._config.output is not None:
            with (self._config.output / LOG_FILE).open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(record) + "\n")
        if self._on_record is not None:
            self._on_record(record)

    def _seconds(self) -> float:
        """Seconds of training, over all processes of the run."""
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

    # -- files -----------------------------------------------------------------------------------------------

    def _prepare_output(self, resume: bool) -> Path | None:
        """Check the output folder; return it if a state in it is to be resumed. It is created when nothing can be refused any more."""
        output = self._config.output
        if output is None:
            if resume:
                raise ConfigError("resume needs an output folder that holds the run to continue")
            return None
        if output.exists() and not output.is_dir():
            raise ConfigError(f"the output {output} is a file; name a folder")
        check_output_folder(output)
        exists = (output / STATE_FILE).exists()
        if exists and not resume:
            raise ConfigError(f"{output} already holds a training run; pass resume=True (--resume) to continue it, or name another folder")
        return output if exists else None

    def _open_log(self) -> None:
        """Write the configuration; keep of an existing log what lies before the point of the resume."""
        output = self._config.output
        if output is None:
            return
        make_folder(output)
        (output / CONFIG_FILE).write_text(self._config.model_dump_json(indent=2) + "\n", encoding="utf-8")
        log = output / LOG_FILE
        lines = log.read_text(encoding="utf-8").splitlines() if log.exists() and self.step else []
        log.write_text("".join(f"{line}\n" for line in lines if json.loads(line)["step"] <= self.step), encoding="utf-8")

    def _save_state(self) -> None:
        output = self._config.output
        if output is not None:
            fraction = self._progress.fraction(self.step)
            point = ResumePoint(self.step, fraction, self._seconds(), essential_settings(self._config), self._fingerprint)
            save_state(output, self.speculator, self._optimizer, point)

    def _progress_bar(self) -> tqdm[Any]:
        return tqdm(
            total=1.0,
            initial=self._progress.fraction(self.step),
            disable=not self._config.progress,
            desc=self._config.method,
            bar_format="{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}, {postfix}",
        )


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _shown(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else "-"


def _with_acceptance_length(readings: dict[str, Reading]) -> Record:
    """Readings plus the acceptance lengths that their conditional acceptances amount to, sampled and greedy."""
    record: Record = dict(readings)
    for metric, name in (("acceptance", "acceptance_length"), ("greedy_acceptance", "greedy_acceptance_length")):
        length = estimated_acceptance_length(readings.get(metric))
        if length is not None:
            record[name] = length
    return record


@dataclass
class _Stop:
    signal: int | None = None


@contextmanager
def _stop_signals() -> Iterator[_Stop]:
    """Turn the first SIGINT or SIGTERM into a request to stop after the current step; a second one acts at once."""
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # Python delivers signals to the main thread only
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def request(number: int, frame: FrameType | None) -> None:
        stop.signal = number
        restore()

    for number in previous:
        signal.signal(number, request)
    try:
        yield stop
    finally:
        restore()
