"""What a run will need, before it runs: sizes, memory of a device, disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from speculators.data.rows import PackedRows
from speculators.speculator import Speculator
from speculators.training.batch import TrainingBatch
from speculators.training.config import TrainingConfig
from speculators.training.optimizer import parameter_groups
from speculators.training.source import CachedRows, ResidentRows, VerifierSource, free_memory
from speculators.training.step import training_dtype
from speculators.verifier import Verifier


def state_bytes(speculator: Speculator, config: TrainingConfig) -> dict[str, int]:
    """Bytes that training keeps of a drafter, by what for: 4 for a weight, 4 for its gradient, then optimizer and average."""
    trainable = sum(parameter.numel() for parameter in speculator.parameters() if parameter.requires_grad)
    groups = parameter_groups(speculator, config)
    moments = {"adamw": 8, "muon": 4}
    optimizer = sum(moments[group.kind] * parameter.numel() for group in groups for parameter in group.parameters.values())
    return {
        "weights": sum(value.nbytes for value in speculator.state_dict().values()),
        "gradients": 4 * trainable,
        "optimizer state": optimizer,
        **({"average of weights": 4 * trainable} if config.ema_decay is not None else {}),
    }


def checkpoint_bytes(speculator: Speculator, config: TrainingConfig) -> int:
    """Bytes of one checkpoint: the resumable state in float32 and the drafter in bfloat16."""
    state = sum(size for name, size in state_bytes(speculator, config).items() if name != "gradients")
    borrowed = speculator.verifier.embedding.numel() * len(speculator.stored_verifier_tensors) if config.checkpoint_form == "full" else 0
    return state + 2 * (sum(parameter.numel() for parameter in speculator.parameters()) + borrowed)


def disk_bytes(speculator: Speculator, config: TrainingConfig) -> int:
    """Bytes that a run's folder can come to hold: kept checkpoints, the best, the one being written, and the final drafter."""
    return checkpoint_bytes(speculator, config) * (config.keep_checkpoints + 2)


@dataclass(frozen=True)
class Estimate:
    """What a run needs.

    Attributes:
        rows, tokens, labels: of the training data; labels are supervised tokens.
        steps: optimizer steps; None where only the clock ends the run.
        epochs: passes over the rows; None likewise.
        trainable, frozen: parameters of the drafter.
        memory: bytes of one device, by what for.
        free_memory: bytes of this device that are free now, with the verifier loaded.
        disk: bytes that the output folder can come to hold.
        free_disk: bytes that are free there; None without an output folder.
    """

    rows: int
    tokens: int
    labels: int
    steps: int | None
    epochs: float | None
    trainable: int
    frozen: int
    memory: dict[str, int]
    free_memory: int
    disk: int
    free_disk: int | None

    def lines(self) -> Iterator[str]:
        """For people."""
        length = "until the clock ends it" if self.steps is None else f"{self.steps:,} steps, {self.epochs:.2f} epochs"
        yield f"data        {self.rows:,} rows, {self.tokens:,} tokens, {self.labels:,} of them labels; {length}"
        yield f"drafter     {self.trainable / 1e6:,.2f} M trainable parameters, {self.frozen / 1e6:,.2f} M frozen"
        for name, size in self.memory.items():
            yield f"memory      {size / 2**30:8.2f} GiB  {name}"
        needed, available = sum(self.memory.values()) / 2**30, self.free_memory / 2**30
        yield f"memory      {needed:8.2f} GiB  on a device in all; {available:.2f} GiB are free there beside the verifier"
        free = "" if self.free_disk is None else f"; {self.free_disk / 1e9:.2f} GB are free"
        yield f"disk        {self.disk / 1e9:8.2f} GB   at most{free}"


def estimate(verifier: Verifier, speculator: Speculator, rows: PackedRows, config: TrainingConfig, processes: int = 1) -> Estimate:
    """Estimate a run without training: passes one micro-batch forward.

    What the backward pass needs of that micro-batch is counted as it is saved; buffers of single operations come on top.

    Args:
        verifier: of the run.
        speculator: that is to be trained, attached.
        rows: of the run.
        config: of the run.
        processes: one a device.

    Raises:
        ConfigError: as training itself would raise it.
    """
    dtype = training_dtype(config, verifier.device, verifier.dtype)
    spread = processes if config.parallel == "fsdp" else 1
    memory = {name: size // spread for name, size in state_bytes(speculator, config).items()}
    resident = ResidentRows(VerifierSource(verifier, speculator.aux_hidden_state_layer_ids), rows)
    free = free_memory(verifier.device)
    cached = CachedRows.bytes_needed(resident, dtype)
    if config.cache_states and not config.shard_verifier and cached <= config.cache_memory_fraction * free:
        memory["hidden states of all rows"] = cached
    memory["tokens"] = 13 * rows.input_ids.numel()
    size = config.rows_per_micro_batch(processes)
    batch = resident.batch(torch.arange(size, device=verifier.device) % len(rows))
    memory[f"saved for the backward pass of a micro-batch of {size} rows"] = saved_bytes(speculator, batch, dtype)
    if spread > 1:
        memory["gathered weights and their gradients"] = 2 * dtype.itemsize * sum(p.numel() for p in speculator.parameters())
    trainable = sum(parameter.numel() for parameter in speculator.parameters() if parameter.requires_grad)
    steps = config.total_steps(len(rows))
    free_disk = None
    if config.output is not None:
        absolute = Path(config.output).absolute()
        free_disk = shutil.disk_usage(next(part for part in (absolute, *absolute.parents) if part.exists())).free
    return Estimate(
        rows=len(rows),
        tokens=int((rows.document_ids >= 0).sum()),
        labels=rows.reply_tokens,
        steps=steps,
        epochs=None if steps is None else steps * config.rows_per_step / len(rows),
        trainable=trainable,
        frozen=sum(parameter.numel() for parameter in speculator.parameters()) - trainable,
        memory=memory,
        free_memory=free,
        disk=disk_bytes(speculator, config),
        free_disk=free_disk,
    )


def saved_bytes(speculator: Speculator, batch: TrainingBatch, dtype: torch.dtype) -> int:
    """Bytes that autograd keeps between forward and backward of one batch; what exists anyway (weights, the batch) not counted."""
    with torch.autocast(batch.input_ids.device.type, dtype=dtype, enabled=dtype != torch.float32, cache_enabled=False), _saved() as saved:
        speculator.training_loss(batch)
    existing = {tensor.untyped_storage().data_ptr() for tensor in (*speculator.state_dict().values(), *vars(batch).values())}
    existing |= {tensor.untyped_storage().data_ptr() for tensor in (speculator.verifier.embedding, speculator.verifier.head)}
    return sum(size for place, size in saved.items() if place not in existing)


@contextmanager
def _saved() -> Iterator[dict[int, int]]:
    """While open, records storage -> bytes of every tensor that autograd saves. The tensors stay alive, so no place is used twice."""
    saved: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved
