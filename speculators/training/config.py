"""TrainingConfig: everything a training run is told, one documented field each. The `train` command has the same names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from speculators.errors import ConfigError


class TrainingConfig(BaseModel):
    """How a drafter is trained.

    The run's length is `steps`, `epochs` or `time_budget_seconds`; with a budget beside one of the others, whichever
    is further decides, so the schedule always reaches its end within the budget.

    Attributes:
        method: the algorithm's method string.
        options: the algorithm's own settings, by name.
        output: folder of the run (checkpoint, `log.jsonl`, resumable state); None keeps everything in memory.
        steps: optimizer steps.
        epochs: passes over the rows; may be fractional.
        time_budget_seconds: wall time of this process, from the start of setup to the end of the last evaluation.
        rows_per_step: packed rows an optimizer step learns from.
        accumulation: micro-batches a step is cut into; it changes memory, not the result. Divides `rows_per_step`.
        row_length: tokens of a packed row, for whoever packs the conversations.
        learning_rate: peak.
        learning_rate_scale: factors on it for parameters whose name contains a key; the longest key wins.
        learning_rate_floor: where the cosine ends, as a fraction of the peak.
        warmup: fraction of the run in which the learning rate rises linearly.
        optimizer: "adamw", or "muon" for matrices and AdamW for tables, norms, biases and everything else.
        betas: AdamW's decay rates.
        muon_momentum: Muon's momentum.
        weight_decay: decoupled, on matrices and tables only.
        gradient_clip: largest norm of the gradient of a step.
        precision: "bfloat16" is autocast over float32 weights; "auto" takes it on CUDA and for bfloat16 verifiers.
        seed: of initial weights, row order and everything that the algorithm draws.
        cache_states: compute the verifier's hidden states once and keep them on the device, where they fit.
        cache_memory_fraction: the most of the device's free memory that they may take.
        cuda_graphs: replay whole steps as CUDA graphs (on CUDA only).
        log_every: steps between records of `log.jsonl`.
        evaluate_every: steps between evaluations on the held-out rows; None evaluates at both ends only.
        save_every: steps between saves of the resumable state; None saves at the end and on a signal only.
        max_damaged_fraction: training stops when more rows than this have hidden states that are not finite.
        checkpoint_form: "full", or "compact" without the tensors that equal the verifier's.
        progress: show a progress bar.

    Raises:
        ConfigError: a field is unknown or out of range, or none of the three lengths is given.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: str
    options: dict[str, Any] = Field(default_factory=dict)
    output: Path | None = None

    steps: int | None = Field(None, ge=1)
    epochs: float | None = Field(None, gt=0)
    time_budget_seconds: float | None = Field(None, gt=0)

    rows_per_step: int = Field(16, ge=1)
    accumulation: int = Field(1, ge=1)
    row_length: int = Field(1024, ge=2)

    learning_rate: float = Field(6e-4, gt=0)
    learning_rate_scale: dict[str, float] = Field(default_factory=dict)
    learning_rate_floor: float = Field(0.0, ge=0, le=1)
    warmup: float = Field(0.04, ge=0, lt=1)
    optimizer: Literal["adamw", "muon"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    muon_momentum: float = Field(0.95, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    gradient_clip: float = Field(1.0, gt=0)
    precision: Literal["auto", "bfloat16", "float32"] = "auto"
    seed: int = Field(0, ge=0)

    cache_states: bool = True
    cache_memory_fraction: float = Field(0.6, gt=0, le=1)
    cuda_graphs: bool = True

    log_every: int = Field(20, ge=1)
    evaluate_every: int | None = Field(None, ge=1)
    save_every: int | None = Field(None, ge=1)
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
        if self.rows_per_step % self.accumulation:
            raise ValueError(f"accumulation {self.accumulation} must divide rows_per_step {self.rows_per_step}")
        return self

    @property
    def rows_per_micro_batch(self) -> int:
        """Packed rows of one forward and backward pass."""
        return self.rows_per_step // self.accumulation

    def total_steps(self, num_rows: int) -> int | None:
        """Optimizer steps over `num_rows` packed rows; None when only the time budget limits the run.

        Rows that do not fill a last step are left out.
        """
        if self.epochs is None:
            return self.steps
        return max(1, int(self.epochs * num_rows) // self.rows_per_step)
