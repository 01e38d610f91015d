"""Settings every test shares."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

# Set before torch starts its thread pool. Several workers share the cores, and threads that wait for one another by spinning
# make each other many times slower; a worker inherits its parent's environment, so here it must overrule it.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", str(min(2, os.cpu_count() or 1)))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may depend on a model hub

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    # Triton reads this when a kernel is decorated, so it must stand before any test module is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from speculators.data.default_verifier import load_default_verifier
from speculators.verifier import Verifier


def pytest_collection_finish() -> None:
    """All modules are imported: exempt them from garbage collection, which otherwise walks them through every long test."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Give them back, so that libraries find their objects when they shut down."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def default_verifier() -> Verifier:
    """The embedded default verifier in float32 on the CPU; prepared in the cache folder on the first run."""
    return load_default_verifier(dtype=torch.float32, device="cpu")


@pytest.fixture
def garbage_in_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is allocated without a value holds NaN and the extremes of its type, as memory that was used before may."""

    def leaving_garbage(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocate_and_fill(*arguments: Any, **options: Any) -> Tensor:
            tensor = allocate(*arguments, **options)
            values = extremes(tensor.dtype)
            in_memory = tensor.as_strided((tensor.numel(),), (1,))  # whatever the order of its dimensions
            places = torch.arange(tensor.numel(), dtype=torch.int32, device=tensor.device)  # no more bytes than the tensor in float32
            which = (places * 40503 >> 8) % len(values)  # in no order a shape could share
            for i, value in enumerate(values):
                in_memory.masked_fill_(which == i, value)
            return tensor

        return allocate_and_fill

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, leaving_garbage(getattr(owner, name)))


def extremes(dtype: torch.dtype) -> tuple[float, ...]:
    """NaN where there is one, the largest and the lowest value."""
    if dtype == torch.bool:
        return True, False
    if dtype.is_floating_point:
        return float("nan"), torch.finfo(dtype).max, torch.finfo(dtype).min
    return torch.iinfo(dtype).max, torch.iinfo(dtype).min
