"""What is said when memory runs out: of what, in what, and which setting to lower."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from speculators.errors import ConfigError
from speculators.training.config import TrainingConfig
from speculators.training.run_folder import RunFolder

# "Tried to allocate 2.00 GiB" on CUDA, "you tried to allocate 4096 bytes" on the CPU, "Unable to allocate 2.00 GiB" by numpy.
_ASKED = re.compile(r"(?:tried|unable) to allocate ([\d.]+) ?([KMGTPE]i?B|bytes)", re.IGNORECASE)
# The CPU's allocator of torch has no exception of its own.
_OF_THE_CPU = re.compile(r"can't allocate memory|not enough memory|out of memory", re.IGNORECASE)


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that a device or the host has no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _OF_THE_CPU.search(str(error)) is not None


@contextmanager
def clear_when_memory_runs_out(config: TrainingConfig, device: torch.device, processes: int = 1) -> Iterator[None]:
    """Turn an allocation that fails into one sentence. Checkpoints that are whole stay so.

    Args:
        config: of the run.
        device: that it trains on.
        processes: of the run.

    Raises:
        ConfigError: memory ran out.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not ran_out_of_memory(error):
            raise
        place = "host memory" if isinstance(error, MemoryError) or device.type == "cpu" else f"the memory of {device}"
        rows = config.rows_per_step // (config.accumulation * processes)
        raise ConfigError(
            f"{place} has no room{_asked(error)}: a micro-batch has {rows} rows of row_length {config.row_length}"
            f" (rows_per_step {config.rows_per_step}, accumulation {config.accumulation}{f', {processes} processes' * (processes > 1)});"
            f" raise accumulation, which changes no gradient, or lower rows_per_step or row_length{_cached(config)}; {_kept(config)}"
        ) from error


def _asked(error: BaseException) -> str:
    found = _ASKED.search(str(error))
    if found is None:
        return ""
    number, unit = found.groups()
    return f" for {int(number) / 2**30:,.1f} GiB more" if unit.lower() == "bytes" else f" for {number} {unit} more"


def _cached(config: TrainingConfig) -> str:
    return ", or switch cache_states off" if config.cache_states else ""


def _kept(config: TrainingConfig) -> str:
    step = -1 if config.output is None else RunFolder(config.output).newest_step()
    if step < 0:
        return "no state was saved yet"
    return f"the state of step {step} is in {config.output}, and --resume goes on from it"
