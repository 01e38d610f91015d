"""Settings every test shares."""

from __future__ import annotations

import gc
import os

# Set before torch starts its thread pool. Several workers share the cores, and threads that wait for one another by spinning
# make each other many times slower; a worker inherits its parent's environment, so here it must overrule it.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", str(min(2, os.cpu_count() or 1)))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may depend on a model hub

import pytest
import torch

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
