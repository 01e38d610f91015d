"""Hidden state scatter: real features to real slots of a draft pass, the learned placeholder to all others.

    out[i] = hidden[rows[i]] where rows[i] >= 0, placeholder elsewhere

(P-EAGLE, arXiv 2602.01469, section 2: MASK slots share one learned hidden state.) `rows` is what `draft_inputs` calls
`hidden_rows`. Reads each feature once and writes each slot once; the placeholder stays in cache.
"""

# Triton's kernels are typed by what they are launched with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Literal

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # no build for this platform: the reference serves it
    triton = None

__all__ = ["hidden_state_scatter"]


def _reference(hidden: Tensor, rows: Tensor, placeholder: Tensor) -> Tensor:
    return torch.where((rows >= 0)[:, None], hidden[rows.clamp(min=0)], placeholder)


if triton is not None:

    @triton.jit
    def _hidden_state_scatter_kernel(hidden, rows, placeholder, out, size, BLOCK: tl.constexpr):
        """One program a slot and block of columns."""
        slot = tl.program_id(0).to(tl.int64)
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < size
        row = tl.load(rows + slot) + tl.zeros((BLOCK,), tl.int64)
        real = tl.load(hidden + row * size + columns, mask=inside & (row >= 0), other=0.0)
        shared = tl.load(placeholder + columns, mask=inside & (row < 0), other=0.0)
        tl.store(out + slot * size + columns, tl.where(row >= 0, real, shared), mask=inside)


def _kernel(hidden: Tensor, rows: Tensor, placeholder: Tensor) -> Tensor:
    hidden, placeholder = hidden.contiguous(), placeholder.contiguous()
    size = hidden.shape[1]
    out = hidden.new_empty(len(rows), size)
    block = min(2048, triton.next_power_of_2(size))
    with torch.cuda.device_of(hidden):
        _hidden_state_scatter_kernel[(len(rows), triton.cdiv(size, block))](hidden, rows, placeholder, out, size, BLOCK=block, num_warps=4)
    return out


def hidden_state_scatter(
    hidden: Tensor, rows: Tensor, placeholder: Tensor, *, implementation: Literal["auto", "reference", "triton"] = "auto"
) -> Tensor:
    """Features of the slots of a draft pass. A copy: kernel and reference agree exactly.

    Args:
        hidden: [T, H] features of the verified tokens, any float dtype.
        rows: [N] int64, the verified token of each slot, or a negative number.
        placeholder: [H], in the dtype of `hidden`.
        implementation: "auto" takes the kernel on CUDA.

    Returns:
        [N, H] in the dtype of `hidden`.
    """
    use_kernel = implementation == "triton" or (implementation == "auto" and hidden.is_cuda and triton is not None)
    return (_kernel if use_kernel else _reference)(hidden, rows, placeholder)
