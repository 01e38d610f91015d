"""Cross-entropy of a head's logits against labels, straight from hidden states, in one sweep over the vocabulary.

For rows h with logits z = softcap(scale * W h + b), label y and p = softmax(z)

    CE = -log p_y            dCE/dh = sum_{v != y} p_v dz_v/dh - (1 - p_y) dz_y/dh

The softmax's sum is known only at the end of the vocabulary, but the gradient is linear in its inverse. So both are summed up tile
by tile, as attention sums values over keys (online softmax, arXiv 1805.02867; FlashAttention, arXiv 2205.14135):

    r: a reference of the row,  S = sum_{v != y} exp(z_v - r),  G = sum_{v != y} exp(z_v - r) dz_v/dh,

after which CE = softplus(log S + r - z_y) and dCE/dh = (G - S dz_y/dh) / (S + exp(z_y - r)).

A tile of logits is written and read once, and a tile of the head serves many rows: they hold [n, tile] logits and [n, H] sums in
float32, never [n, V]. Arithmetic: 4 V H a row; 2 V H without gradient.
"""

# Triton's kernels are typed by what they are launched with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from speculators.kernels.frozen_head import FrozenHead
from speculators.kernels.running_sums import TILE, RunningSums

try:
    import triton
    import triton.language as tl
except ImportError:  # no build for this platform: the reference serves it
    triton = None

__all__ = ["linear_cross_entropy", "sweep_rows"]

_SWEEP_BYTES = 72 << 20  # of a tile's logits and the sums of its rows together


def sweep_rows(head: FrozenHead) -> int:
    """Rows [n] that go through the vocabulary together on a GPU: what fits in `_SWEEP_BYTES`, whole tiles of its products."""
    vocabulary, hidden_size = head.weight.shape
    rows = _SWEEP_BYTES // (4 * hidden_size + min(TILE, vocabulary) * head.weight.element_size())
    whole = 1024 if rows >= 1024 else 128 if rows >= 128 else 1
    return max(rows // whole * whole, 1)


def _reference(
    hidden: Tensor, head: FrozenHead, labels: Tensor, weigh: Callable[[Tensor], Tensor] | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The definition: cross-entropy [n], matches [n] and, with `weigh`, the gradient [n, H] by autograd."""
    with torch.set_grad_enabled(weigh is not None):
        leaf = hidden.detach().requires_grad_(weigh is not None)
        log_p = F.log_softmax(head.logits(leaf), dim=1)
        known = (labels >= 0) & (labels < log_p.shape[1])
        cross_entropy = torch.where(known, -log_p.gather(1, torch.where(known, labels, 0)[:, None])[:, 0], 0.0)
        matches = (log_p.argmax(dim=1) == labels) & known
        if weigh is None:
            return cross_entropy, matches, None
        factors = weigh(cross_entropy.detach())
        (gradient,) = torch.autograd.grad((factors * cross_entropy).sum(), leaf)
        return cross_entropy.detach(), matches, torch.where((factors != 0)[:, None], gradient, 0.0)


if triton is not None:

    @triton.jit
    def _gradient_kernel(
        sums,  # [n, size] G
        references,  # [n]
        others,  # [n]
        label_logits,  # [n]
        labels,  # [n] columns
        factors,  # [n]
        head,  # [V, size], its strides given
        gradient,  # [M, size]
        rows,  # [n] where a row's gradient goes, if LISTED; else they go from `first` on
        first,
        vocabulary,
        size,
        head_row_stride,
        head_column_stride,
        scale: tl.constexpr,
        softcap,
        HAS_SOFTCAP: tl.constexpr,
        LISTED: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """One program a row: factor * dCE/dh."""
        program = tl.program_id(0).to(tl.int64)
        place = first + program
        if LISTED:
            place = tl.load(rows + program)
        label = tl.load(labels + program)
        factor = tl.load(factors + program)
        of_others = tl.load(others + program)
        z = tl.load(label_logits + program)
        counts = (label >= 0) & (label < vocabulary) & (factor != 0)
        share = factor / (of_others + tl.exp(z - tl.load(references + program)))
        of_label = share * of_others * scale
        if HAS_SOFTCAP:
            of_label = of_label * (1.0 - (z / softcap) * (z / softcap))
        label_row = head + tl.where(counts, label, 0) * head_row_stride
        for start in range(0, size, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < size
            total = tl.load(sums + program * size + columns, mask=inside, other=0.0)
            w = tl.load(label_row + columns.to(tl.int64) * head_column_stride, mask=inside, other=0.0).to(tl.float32)
            value = tl.where(counts, share * total - of_label * w, 0.0)
            tl.store(gradient + place * size + columns, value.to(gradient.dtype.element_ty), mask=inside)


def _accumulate(total: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
    """total (+)= left @ right, in float32 whatever the factors are."""
    beta = 0.0 if first else 1.0  # 0 reads nothing of what memory held
    if left.is_cuda and left.dtype in (torch.bfloat16, torch.float16):
        torch.addmm(total, left, right, out_dtype=total.dtype, beta=beta, out=total)
    else:
        torch.addmm(total, left.to(total.dtype), right.to(total.dtype), beta=beta, out=total)


def _kernel(
    hidden: Tensor,
    head: FrozenHead,
    labels: Tensor,
    weigh: Callable[[Tensor], Tensor] | None,
    gradient: Tensor | None,
    rows: Tensor | slice,
) -> tuple[Tensor, Tensor]:
    count, hidden_size = hidden.shape
    vocabulary = len(head.weight)
    buffer = hidden.new_empty(count, min(TILE, vocabulary))
    running = RunningSums.of(count, labels, hidden.device)
    summed = None if weigh is None else torch.empty(count, hidden_size, dtype=torch.float32, device=hidden.device)
    for start in range(0, vocabulary, TILE):
        weight = head.weight[start : start + TILE]
        tile = torch.mm(hidden, weight.T, out=buffer[:, : len(weight)])
        running.add(tile, start, head, summed=summed)
        if summed is not None:
            _accumulate(summed, tile, weight, start == 0)
    known = (labels >= 0) & (labels < vocabulary)
    cross_entropy = torch.where(known, F.softplus(running.sums.log() + running.references - running.label_logits), 0.0)
    if weigh is not None and summed is not None and gradient is not None:
        listed = not isinstance(rows, slice)
        _gradient_kernel[(count,)](
            summed,
            running.references,
            running.sums,
            running.label_logits,
            labels,
            weigh(cross_entropy).contiguous(),
            head.weight,
            gradient,
            rows if listed else None,
            rows.start if isinstance(rows, slice) else 0,
            vocabulary,
            hidden_size,
            *head.weight.stride(),
            head.scale,
            head.softcap or 1.0,
            HAS_SOFTCAP=head.softcap is not None,
            LISTED=listed,
            BLOCK=min(2048, triton.next_power_of_2(hidden_size)),
            num_warps=4,
        )
    return cross_entropy, (running.choices == labels) & known


def linear_cross_entropy(
    hidden: Tensor,
    head: FrozenHead,
    labels: Tensor,
    rows: Tensor | slice,
    *,
    weigh: Callable[[Tensor], Tensor] | None = None,
    gradient: Tensor | None = None,
    implementation: Literal["auto", "reference", "triton"] = "auto",
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of n rows against labels; the gradient of its weighted sum into some rows of `gradient`.

    Args:
        hidden: [n, H] states after the final norm, in the head's dtype.
        head: of V columns.
        labels: [n] int64 columns; any other number is no label: no cross-entropy and no gradient.
        rows: [n] int64, each row's place in `gradient`, or the slice of them.
        weigh: gives the weight [n] float32 of every row from the cross-entropies [n]; a row of weight 0 gets a gradient of 0. None
            computes no gradient.
        gradient: [M, H], contiguous, of which `rows` are written; None without `weigh`.
        implementation: "auto" takes the kernel on CUDA below float64.

    Returns:
        [n] nats in float32 (float64 where the reference gets that), and [n] bool, whether the likeliest column, the first of equal
        ones, is the label.
    """
    if implementation == "reference" or (
        implementation == "auto" and (triton is None or not hidden.is_cuda or hidden.dtype == torch.float64)
    ):
        cross_entropy, matches, made = _reference(hidden, head, labels, weigh)
        if made is not None and gradient is not None:
            gradient[rows] = made.to(gradient.dtype)
        return cross_entropy, matches
    with torch.cuda.device_of(hidden):
        return _kernel(hidden, head, labels.contiguous(), weigh, gradient, rows)
