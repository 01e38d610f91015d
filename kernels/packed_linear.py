"""Linear maps of a few tokens on a CPU, from weights that lie as oneDNN likes to read them.

A product of a few tokens should cost what reading the weights once costs, however many tokens there are: that is what a round of
speculative decoding lives on. In float32 BLAS lays the weights out anew in every call of more than one token, which takes two to three
times as long (`benchmarks/results/products_cpu_float32.txt`). A copy in oneDNN's own layout, as torch.compile makes of frozen
weights, is made once and read as it is. In 16 bits torch takes oneDNN anyway.

Copies are made of weights that were announced (`announce`), at their first product of few tokens, and belong to the tensor. They
take the memory of the weights again, so a quarter of the machine's stays free, and a weight without a copy is multiplied as ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["MAX_TOKENS", "PackedLinear", "announce", "packed_linear"]

MAX_TOKENS = 16  # of a product from a copy
_LEAST_NUMBERS = 1 << 16  # of a weight; smaller ones stay in the processor's cache
_LAYOUT_TOKENS = 8  # that oneDNN chooses the layout for
_FREE_SHARE = 4  # a quarter


@dataclass
class _Copy:
    """Of one weight.

    Attributes:
        packed: opaque to torch; None until the first product, and where there was no room.
        state, checksum: of the weight when the copy was made; see `_state` and `_checksum`.
        refused: no room.
    """

    packed: Tensor | None = None
    state: tuple[int, int, torch.Size] | None = None
    checksum: float = 0.0
    refused: bool = False


_copies = WeakTensorKeyDictionary()  # of announced weights


def announce(weights: Iterable[Tensor]) -> None:
    """Say before decoding that products with these weights [out, in] come. Copies of those that changed are dropped.

    Cheap enough for every call of `generate`: a weight that has a copy is read once, so that a change is seen that torch does not
    count, as through `.data`. Weights that would gain nothing (not float32, not on a CPU, small, not contiguous) are passed over.
    """
    for weight in weights:
        copy = _copies.get(weight)
        if copy is None:
            if _gains(weight):
                _copies[weight] = _Copy()
        elif not _gains(weight):
            del _copies[weight]
        elif copy.packed is not None and (copy.state != _state(weight) or copy.checksum != _checksum(weight)):
            _copies[weight] = _Copy()


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, from the copy of an announced weight where few tokens and no gradient are concerned.

    Args:
        x: [..., in].
        weight: [out, in].
        bias: [out] or None.

    Returns:
        [..., out].
    """
    few = x.numel() <= MAX_TOKENS * x.shape[-1] and x.dtype == torch.float32 and x.device.type == "cpu"
    plain = not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")  # which asks for another dtype
    copy = _copies.get(weight) if few and plain else None
    if copy is not None and copy.packed is None and not copy.refused:
        _pack(copy, weight)
    if copy is None or copy.packed is None or copy.state != _state(weight):
        return F.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    bias = None if bias is None else bias.contiguous()  # its strides are not looked at
    out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, copy.packed, bias, "none", [], "")
    return out.view(*x.shape[:-1], len(weight))


class PackedLinear(torch.nn.Linear):
    """A linear map of a verifier on a CPU; see `packed_linear`.

    A class and no `forward` of the instance: that would overwrite one that is there, as hooks of accelerate are, and refer to its own
    module, whose weights then stay in memory until Python looks for cycles.
    """

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return packed_linear(input, self.weight, self.bias)


def _gains(weight: Tensor) -> bool:
    frozen = type(weight) in (Tensor, torch.nn.Parameter) and not weight.is_inference()
    suits = weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.dim() == 2 and weight.is_contiguous()
    return suits and frozen and weight.numel() >= _LEAST_NUMBERS and _available()


def _state(weight: Tensor) -> tuple[int, int, torch.Size]:
    """Where it lies, torch's count of its changes, and its shape."""
    return weight.data_ptr(), weight._version, weight.shape


def _checksum(weight: Tensor) -> float:
    """A sum in which every place counts differently, so that moved rows show too; reads the weight once."""
    with torch.autocast("cpu", enabled=False):
        outer, inner = (torch.linspace(1.0, 2.0, size, dtype=torch.float32, device="cpu") for size in weight.shape)
        return float(outer.double() @ (weight.detach() @ inner).double())


def _pack(copy: _Copy, weight: Tensor) -> None:
    free, total = _memory()
    if free - weight.nbytes < total / _FREE_SHARE:
        copy.refused = True
        return
    with torch.inference_mode(False), torch.no_grad():
        copy.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _LAYOUT_TOKENS)
    copy.state, copy.checksum = _state(weight), _checksum(weight)


@cache
def _available() -> bool:
    """Whether this build of torch has the operations, under the names and with the results that are expected here."""
    like: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    weight, x = torch.arange(6, **like).view(2, 3), torch.ones(2, 3, **like)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _LAYOUT_TOKENS)
        out = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return False
    return torch.equal(out, x @ weight.T)


def _memory() -> tuple[int, int]:
    """Bytes that this process can still get, and of the whole machine or container; none where Linux does not say."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        total, free = (1024 * int(lines[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
        limit, used = (Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory.current"))
        if limit.is_file() and used.is_file() and (most := limit.read_text().strip()).isdigit():
            total, free = min(total, int(most)), min(free, int(most) - int(used.read_text()))
    except (OSError, KeyError, ValueError):
        return 0, 1
    return free, total
