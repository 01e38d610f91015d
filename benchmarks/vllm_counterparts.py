"""What a counterpart of one of our kernels is, and how outputs are compared in words; see `vllm_operations`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

PAGE = 16  # positions of a page of vLLM's cache


@dataclass(frozen=True)
class Counterpart:
    """What vLLM runs for one operation at one shape.

    Attributes:
        name: its functions.
        run: them, static enough for a CUDA graph.
        agrees: called after `run` with our kernel's result: how far the outputs agree, a few words.
        difference: what it does less or more than our kernel; empty where both do the same, and then the faster one counts.
    """

    name: str
    run: Callable[[], Any]
    agrees: Callable[[Any], str]
    difference: str = ""


def unavailable() -> str | None:
    """Why vLLM's kernels cannot run here, or None."""
    try:
        from vllm.v1.spec_decode import utils  # noqa: F401
    except Exception as error:  # a missing package, or one that does not load on this machine
        return f"vLLM: {type(error).__name__}: {error}"
    return None


def equal(*pairs: tuple[Tensor, Tensor]) -> str:
    """In words, whether all pairs of tensors hold the same values."""
    return "outputs equal" if all(bool((a == b).all()) for a, b in pairs) else "OUTPUTS DIFFER"


def close(*pairs: tuple[Tensor, Tensor]) -> str:
    """In words, the largest difference of pairs of tensors."""
    return f"largest difference {max((a.float() - b.float()).abs().max().item() for a, b in pairs):.2g}"
