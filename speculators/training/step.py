"""One optimizer step: micro-batches forward and backward, then sum, clip and update. Static tensors in, running sums out.

On CUDA each of the functions below is captured once and replayed; on the CPU the same functions are called.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from speculators.errors import ConfigError
from speculators.training.average import WeightAverage
from speculators.training.batch import LossOutput, TrainingBatch
from speculators.training.config import TrainingConfig
from speculators.training.graph import Capture, Pace
from speculators.training.meters import Meters, Reading
from speculators.training.optimizer import DrafterOptimizer
from speculators.training.order import mix
from speculators.training.parallel import Parallel
from speculators.training.source import HiddenStateSource, without_damaged_rows

# What the random draws of a training batch and of an evaluation batch are seeded with, besides the run's seed.
_TRAIN, _EVALUATE = 0, 1


def training_dtype(config: TrainingConfig, device: torch.device, verifier_dtype: torch.dtype) -> torch.dtype:
    """The dtype matrices are multiplied in.

    Raises:
        ConfigError: float32 was asked for beside a verifier in another dtype.
    """
    if config.precision == "float32" and verifier_dtype != torch.float32:
        raise ConfigError(
            f"precision float32 needs a float32 verifier, this one is {verifier_dtype}; load it with dtype=torch.float32 or choose bfloat16"
        )
    if config.precision == "auto":
        return torch.float32 if device.type == "cpu" and verifier_dtype == torch.float32 else torch.bfloat16
    return torch.bfloat16 if config.precision == "bfloat16" else torch.float32


class TrainingStep:
    """Everything that happens to the weights, and the numbers it leaves behind.

    Micro-batches weigh by the denominator of their "loss" metric (their supervised tokens, if the algorithm reports
    none), so that a step's gradient does not depend on how it is cut. A step without any weight, or whose gradient is
    not finite, changes nothing and is counted.

    A step's rows are cut into accumulation x processes micro-batches of equal size, numbered through. What an algorithm draws
    for one follows from the seed, the step and that number: one process with accumulation 8 and eight processes with
    accumulation 1 learn from the same draws.

    Args:
        parallel: the speculator's loss (float32 weights, attached to its verifier) and the processes.
        source: of the training rows.
        held_out: of the rows that are only evaluated.
        optimizer: of the speculator.
        config: the run's configuration.
        dtype: of `training_dtype`.
        capture: for CUDA graphs.

    Attributes:
        average: of the weights; None where none is kept.
        meters: sums of the current log interval.
    """

    def __init__(
        self,
        parallel: Parallel,
        source: HiddenStateSource,
        held_out: HiddenStateSource | None,
        optimizer: DrafterOptimizer,
        config: TrainingConfig,
        dtype: torch.dtype,
        capture: Capture,
    ) -> None:
        self.optimizer = optimizer
        self.config = config
        self.meters, self._held_out_meters = Meters(), Meters()
        self.average: WeightAverage | None = None
        if config.ema_decay is not None:
            self.average = WeightAverage(dict(zip(optimizer.names, optimizer.parameters, strict=True)), config.ema_decay)
        self._parallel, self._world = parallel, parallel.world
        self._source, self._held_out, self._dtype = source, held_out, dtype
        self._device = optimizer.learning_rate.device
        self._pace = Pace(self._device)
        self._index = torch.zeros(config.rows_per_micro_batch(self._world.size), dtype=torch.int64, device=self._device)
        self._weight = torch.zeros((), device=self._device)
        self._gradients = parallel.gradients(optimizer)
        self._run_first = capture(self.first_micro_batch)
        self._run_further = capture(self.micro_batch) if config.accumulation > 1 else self._run_first
        self._weight.zero_()
        # Without weight a warm-up update changes nothing. Several processes share its work, which is not captured.
        self._run_update = capture(self.update) if self._world.size == 1 else self.update
        self._gradients.release()
        self._run_evaluation = capture(self.evaluation_batch) if held_out is not None else None
        self.meters.reset()
        self._held_out_meters.reset()

    # -- the captured bodies -----------------------------------------------------------------------------------

    def _loss(self, batch: TrainingBatch) -> tuple[LossOutput, Tensor]:
        """The loss of a batch and its weight."""
        with torch.autocast(self._device.type, dtype=self._dtype, enabled=self._dtype != torch.float32, cache_enabled=False):
            output = self._parallel.loss(batch)
        weight = output.metrics["loss"][1] if "loss" in output.metrics else batch.loss_mask.sum()
        return output, weight.detach().float()

    def _metered_loss(self, source: HiddenStateSource, meters: Meters) -> tuple[Tensor, Tensor]:
        batch, damaged = without_damaged_rows(source.batch(self._index))
        output, weight = self._loss(batch)
        counted = torch.where(output.loss.isfinite(), weight, 0.0)  # one overflow must not hide the loss of a whole interval
        meters.add("loss", torch.where(counted > 0, output.loss.float() * weight, 0.0), counted)
        for name, (numerator, denominator) in output.metrics.items():
            if name != "loss":
                meters.add(name, numerator, denominator)
        meters.add("tokens", (batch.document_ids >= 0).sum())
        meters.add("damaged_rows", damaged.sum())
        meters.add("empty_batches", (weight <= 0).float())
        return output.loss, weight

    def first_micro_batch(self) -> None:
        """Begin the sums of a step with its first micro-batch."""
        self._weight.zero_()
        self._gradients.begin()
        self.micro_batch()
        self._gradients.complete()

    def micro_batch(self) -> None:
        """Add a micro-batch's gradient (times its weight) and its metrics to the running sums."""
        loss, weight = self._metered_loss(self._source, self.meters)
        (loss.float() * weight).backward()
        self._weight.add_(weight)

    @torch.no_grad()
    def update(self) -> None:
        """Update the weights from the summed gradient, divided by the summed weight and clipped."""
        mean = 1.0 / self._weight.clamp_min(1e-6)
        norm = self._gradients.norm() * mean
        usable = norm.isfinite() & (self._weight > 0)
        skip = 1.0 - usable.float()
        self.optimizer.step(skip, mean * (self.config.gradient_clip / (norm + 1e-6)).clamp_max(1.0))
        if self.average is not None:
            self.average.update(skip)
        # Every process computes the same two numbers; one of them reports.
        self.meters.add("gradient_norm", torch.where(usable, norm, 0.0) * self._world.is_main, usable.float() * self._world.is_main)
        self.meters.add("skipped_steps", skip * self._world.is_main)

    @torch.no_grad()
    def evaluation_batch(self) -> None:
        """Add the metrics of a held-out micro-batch to their running sums."""
        assert self._held_out is not None
        self._metered_loss(self._held_out, self._held_out_meters)

    # -- what the trainer calls --------------------------------------------------------------------------------

    def run(self, step: int, rows: Tensor, learning_rate: float) -> None:
        """One optimizer step. Returns when the device has begun it, not when it is done.

        Args:
            step: number of the step; with the seed it decides what the algorithm draws.
            rows: [rows_per_step] int64 on the CPU, the same in every process.
            learning_rate: of this step.
        """
        self.optimizer.learning_rate.fill_(learning_rate)
        if self.average is not None:
            self.average.prepare(step)
        first = self._world.rank * self.config.accumulation
        mine = list(enumerate(rows.view(-1, len(self._index))))[first : first + self.config.accumulation]
        for number, micro_batch in mine:
            torch.manual_seed(mix(self.config.seed, _TRAIN, step, number))
            self._index.copy_(micro_batch, non_blocking=True)
            if number == mine[-1][0]:
                self._gradients.begin_last()
            (self._run_first if number == first else self._run_further)()
        self._gradients.reduce()
        self._world.sum_(self._weight)
        self._run_update()
        self._gradients.release()
        self._pace.step()

    def evaluate(self) -> dict[str, Reading]:
        """Metrics over all held-out rows, with the same draws at every call; of the averaged weights, where there are some."""
        assert self._held_out is not None and self._run_evaluation is not None
        rows, size, processes = self._held_out.num_rows, len(self._index), self._world.size
        with self.average.in_place() if self.average is not None else nullcontext():
            # Every process runs as many batches, so that what they gather of each other is always there.
            for turn in range(-(-rows // (size * processes))):
                number = turn * processes + self._world.rank
                torch.manual_seed(mix(self.config.seed, _EVALUATE, number))
                index = torch.arange(number * size, (number + 1) * size)
                self._index.copy_(index.masked_fill(index >= rows, -1), non_blocking=True)
                self._run_evaluation()
        return self._held_out_meters.read(self._world)

    def read(self) -> dict[str, Reading]:
        """Metrics of all processes since the last call; waits for the device."""
        return self.meters.read(self._world)

    def count_flops(self) -> int:
        """Floating-point operations of one step over all processes, as torch's FlopCounterMode sees them.

        Forward and backward of the drafter, without the verifier and the update. What is no operation of torch's own (a Triton
        kernel without a registered formula) is not seen, so this is a lower bound. Runs one micro-batch and forgets it.
        """
        from torch.utils.flop_counter import FlopCounterMode

        self._index.copy_(torch.arange(len(self._index)) % self._source.num_rows)
        batch, _ = without_damaged_rows(self._source.batch(self._index))
        self._gradients.begin()
        with FlopCounterMode(display=False) as counter:
            output, weight = self._loss(batch)
            (output.loss.float() * weight).backward()
        self._gradients.release()
        return int(counter.get_total_flops()) * self.config.accumulation * self._world.size
