"""Linear maps of one input as one product: their weights lie one after the other in one storage.

Queries, keys and values, or SwiGLU's gate and up, read the same vector. A product of its own for each starts and drains the
memory pipeline once more, which at a handful of tokens costs as much as a small matrix does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["joined", "lay_together"]


def lay_together(projections: Sequence[nn.Linear]) -> None:
    """Give projections of one input one storage, so that decoding reads them with one product; see `joined`.

    Each parameter stays what it is, under its name, and becomes a view of its rows. What gives parameters storages of their own
    again (`to`, a copy) only takes the speed away until the next call. Parameters of several devices' tensors stay as they are.
    """
    for tensors in ([p.weight for p in projections], [p.bias for p in projections if p.bias is not None]):
        # Not one that is spread over processes, has no values or was made for inference alone.
        ordinary = all(type(t) is nn.Parameter and t.device.type != "meta" and not t.is_inference() for t in tensors)
        if not tensors or not ordinary or _adjacent(tensors) is not None:
            continue
        with torch.inference_mode(False), torch.no_grad():  # they may serve training after they served decoding
            parts = torch.cat([tensor.detach() for tensor in tensors]).split([len(tensor) for tensor in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.data = part


def joined(projections: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None] | None:
    """Weight [out of all, in] and bias of projections that lie together, without a copy; None where they do not."""
    weight = _adjacent([projection.weight for projection in projections])
    if weight is None or projections[0].bias is None:
        return None if weight is None else (weight, None)
    bias = _adjacent([projection.bias for projection in projections])
    return None if bias is None else (weight, bias)


def _adjacent(tensors: Sequence[Tensor]) -> Tensor | None:
    """One view of tensors that lie one after the other in one storage, else None."""
    first, end = tensors[0], tensors[0].data_ptr()
    for tensor in tensors:
        same = tensor.dtype == first.dtype and tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (same and tensor.data_ptr() == end and tensor.is_contiguous()):
            return None
        end += tensor.numel() * tensor.element_size()
    rows = sum(len(tensor) for tensor in tensors)
    return first.as_strided((rows, *first.shape[1:]), first.stride())
