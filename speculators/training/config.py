"""TrainingConfig: everything a training run is told, one documented field each. The `train` command has the same names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import ConfigDict, Field, ValidationError, model_validator

from speculators.errors import ConfigError
from speculators.json_values import NoTruthValues

# Far beyond any run: a slip of the keyboard must be refused, not allocated or counted to.
_MOST_STEPS, _MOST_EPOCHS, _MOST_ROWS, _LONGEST_ROW = 10**12, 10**6, 1 << 20, 1 << 20


class TrainingConfig(NoTruthValues):
    """How a drafter is trained.

    The run's length is `steps`, `epochs` or `time_budget_seconds`; with a budget beside one of the others, whichever
    is further decides, so the schedule always reaches its end within the budget.

    Attributes:
        method: the algorithm's method string.
        options: the algorithm's own settings, by name.
        draft_vocabulary: file that `speculators data vocabulary --save` wrote: the tokens that the drafter proposes. None takes all,
            or with the option draft_vocab_size those that the training rows' replies use most.
        output: folder of the run (settings, log, checkpoints, the trained drafter); None keeps everything in memory.
        steps: optimizer steps.
        epochs: passes over the rows; may be fractional.
        time_budget_seconds: wall time of this process, from the start of setup to the end of the last evaluation.
        rows_per_step: packed rows an optimizer step learns from.
        accumulation: micro-batches that each process cuts its share of a step into; it changes memory, not the gradient.
            Accumulation times processes divides `rows_per_step`.
        row_length: tokens of a packed row, for whoever packs the conversations.
        learning_rate: peak.
        learning_rate_scale: factors on it for parameters whose name contains a key; the longest key wins.
        learning_rate_floor: where the cosine ends, as a fraction of the peak.
        warmup: fraction of the run in which the learning rate rises linearly.
        ema_decay: evaluate and save a moving average of the weights with this decay, such as 0.999; None saves the weights.
        optimizer: "adamw", or "muon" for matrices and AdamW for tables, norms, biases and everything else.
        betas: AdamW's decay rates.
        muon_momentum: Muon's momentum.
        weight_decay: decoupled, on matrices and tables only.
        gradient_clip: largest norm of the gradient of a step.
        precision: "bfloat16" is autocast over float32 weights; "auto" takes it on CUDA and for bfloat16 verifiers.
        seed: of initial weights, row order and everything that the algorithm draws.
        hidden_states: a store that `speculators data store` wrote for these rows, to read hidden states from; None runs the verifier.
        cache_states: compute or read the verifier's hidden states once and keep them on the device, where they fit.
        cache_memory_fraction: the most of the device's free memory that they may take.
        cuda_graphs: replay whole steps as CUDA graphs (on CUDA only) where launching kernels takes longer than running them; see
            `graph.is_large` for where it does not.
        parallel: with several processes, "ddp" keeps the drafter whole in each, "fsdp" spreads weights and optimizer state.
        shard_verifier: spread the verifier's layers over the processes too; its hidden states are then computed at every visit.
        log_every: steps between records of `log.jsonl`.
        loggers: dashboards that get the records too: "tensorboard", "wandb", "trackio", "mlflow".
        run_name: what dashboards call the run; the name of the output folder when None.
        evaluate_every: steps between evaluations on the held-out rows; None evaluates at both ends only.
        best_by: the number of an evaluation that decides which checkpoint is the best, such as "loss"; None takes
            "acceptance_length", or "loss" where the drafter reports no acceptance.
        patience: stop after this many evaluations without improvement; None never stops early.
        min_improvement: in `best_by`, less than this is none.
        save_every: steps between checkpoints; None saves at the end, on a signal, and where an evaluation was the best.
        keep_checkpoints: the last ones that stay, besides the best.
        profile_steps: trace this many steps with torch.profiler into `output/profile`, after the first few.
        peak_tflops: what one device can do, for the share of it that training uses; None looks common GPUs up.
        max_damaged_fraction: training stops when more rows than this have hidden states that are not finite.
        checkpoint_form: "full", or "compact" without the tensors that equal the verifier's.
        progress: show a progress bar.

    Raises:
        ConfigError: a field is unknown or out of range, or none of the three lengths is given.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    method: str
    options: dict[str, Any] = Field(default_factory=dict)
    draft_vocabulary: Path | None = None
    output: Path | None = None

    steps: int | None = Field(None, ge=1, le=_MOST_STEPS)
    epochs: float | None = Field(None, gt=0, le=_MOST_EPOCHS)
    time_budget_seconds: float | None = Field(None, gt=0)

    rows_per_step: int = Field(16, ge=1, le=_MOST_ROWS)
    accumulation: int = Field(1, ge=1, le=_MOST_ROWS)
    row_length: int = Field(1024, ge=2, le=_LONGEST_ROW)

    learning_rate: float = Field(6e-4, gt=0, le=100)
    learning_rate_scale: dict[str, float] = Field(default_factory=dict)
    learning_rate_floor: float = Field(0.0, ge=0, le=1)
    warmup: float = Field(0.04, ge=0, lt=1)
    ema_decay: float | None = Field(None, gt=0, lt=1)
    optimizer: Literal["adamw", "muon"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    muon_momentum: float = Field(0.95, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    gradient_clip: float = Field(1.0, gt=0)
    precision: Literal["auto", "bfloat16", "float32"] = "auto"
    seed: int = Field(0, ge=0, lt=2**63)

    hidden_states: Path | None = None
    cache_states: bool = True
    cache_memory_fraction: float = Field(0.6, gt=0, le=1)
    cuda_graphs: bool = True

    parallel: Literal["ddp", "fsdp"] = "ddp"
    shard_verifier: bool = False

    log_every: int = Field(20, ge=1, le=_MOST_STEPS)
    loggers: list[Literal["tensorboard", "wandb", "trackio", "mlflow"]] = Field(default_factory=list)
    run_name: str | None = None
    evaluate_every: int | None = Field(None, ge=1, le=_MOST_STEPS)
    best_by: str | None = None
    patience: int | None = Field(None, ge=1, le=_MOST_STEPS)
    min_improvement: float = Field(0.0, ge=0)
    save_every: int | None = Field(None, ge=1, le=_MOST_STEPS)
    keep_checkpoints: int = Field(1, ge=1, le=_MOST_STEPS)
    profile_steps: int = Field(0, ge=0, le=_MOST_STEPS)
    peak_tflops: float | None = Field(None, gt=0)
    max_damaged_fraction: float = Field(0.05, ge=0, le=1)
    checkpoint_form: Literal["full", "compact"] = "full"
    progress: bool = True

    if not TYPE_CHECKING:  # type checkers keep the generated signature

        def __init__(self, **fields: Any) -> None:
            try:
                super().__init__(**fields)
            except ValidationError as error:
                first = error.errors()[0]
                key = ".".join(str(part) for part in first["loc"])
                if first["type"] == "extra_forbidden":
                    reason = f"there is no such field; known are {', '.join(type(self).model_fields)}"
                else:
                    reason = first["msg"].removeprefix("Value error, ")
                where = f"{key} = {first['input']!r}: " if key else ""
                raise ConfigError(f"training: {where}{reason}") from None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.steps is None and self.epochs is None and self.time_budget_seconds is None:
            raise ValueError("give the run a length: steps, epochs or time_budget_seconds")
        if self.steps is not None and self.epochs is not None:
            raise ValueError("steps and epochs both say how long to train; give one of them")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas {list(self.betas)} must be at least 0 and below 1")
        if (least := min(self.learning_rate_scale.values(), default=0.0)) < 0:
            raise ValueError(f"learning_rate_scale holds {least}, a factor must be at least 0")
        if self.rows_per_step % self.accumulation:
            raise ValueError(f"accumulation {self.accumulation} must divide rows_per_step {self.rows_per_step}")
        fastest = self.learning_rate * max([1.0, *self.learning_rate_scale.values()])
        if fastest * self.weight_decay >= 1:
            raise ValueError(
                f"weight_decay {self.weight_decay} times the learning rate {fastest} is the share of the weights that a step takes away;"
                " it must be below 1"
            )
        if self.shard_verifier and self.hidden_states is not None:
            raise ValueError("shard_verifier spreads a verifier that runs; with hidden_states it does not, leave one of them out")
        if self.patience is not None and self.evaluate_every is None:
            raise ValueError("patience counts evaluations; set evaluate_every")
        return self

    def rows_per_micro_batch(self, processes: int = 1) -> int:
        """Packed rows of one forward and backward pass of one of so many processes.

        Raises:
            ConfigError: the rows of a step cannot be cut into equal micro-batches.
        """
        rows, rest = divmod(self.rows_per_step, self.accumulation * processes)
        if rest:
            raise ConfigError(
                f"training: accumulation {self.accumulation} times {processes} processes must divide rows_per_step {self.rows_per_step}"
            )
        return rows

    def total_steps(self, num_rows: int) -> int | None:
        """Optimizer steps over `num_rows` packed rows; None when only the time budget limits the run.

        Rows that do not fill a last step are left out.
        """
        if self.epochs is None:
            return self.steps
        return max(1, int(self.epochs * num_rows) // self.rows_per_step)
