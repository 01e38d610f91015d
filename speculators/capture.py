"""What captures of CUDA graphs and what runs beside them need."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

__all__ = ["current_device", "without_collection"]


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a CUDA device the current one, whose stream graphs are captured on and events are recorded on; no other device has any."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def without_collection() -> Iterator[None]:
    """No garbage collection while a graph is captured: an older graph that it found would be reset, which a capture forbids.

    Nor before it: among the objects of a few imported libraries one takes longer than a capture, and rounds capture many graphs.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
