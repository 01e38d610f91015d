"""Cross-entropy of a head's logits against labels, straight from hidden states, in one sweep over the vocabulary.

For rows h with logits z = softcap(scale * W h + b), label y and p = softmax(z)

    CE = -log p_y            dCE/dh = sum_{v != y} p_v dz_v/dh - (1 - p_y) dz_y/dh

The softmax's sum is known only at the end of the vocabulary, but the gradient is linear in its inverse. So both are summed up tile
by tile, as attention sums values over keys (online softmax, arXiv 1805.02867; FlashAttention, arXiv 2205.14135):

    r: a reference of the row,  S = sum_{v != y} exp(z_v - r),  G = sum_{v != y} exp(z_v - r) dz_v/dh,

after which CE = softplus(log S + r - z_y) and dCE/dh = (G - S dz_y/dh) / (S + exp(z_y - r)). The label stays out of the sums, so
that 1 - p_y loses no digits where p_y is nearly 1. The reference moves, and G with it, only where an exponential might overflow.

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
from speculators.kernels.log_sums import head_flags

try:
    import triton
    import triton.language as tl

    from speculators.kernels.log_sums import load_logits, store_gradient
except ImportError:  # no build for this platform: the reference serves it
    triton = None

__all__ = ["linear_cross_entropy", "sweep_rows"]

_TILE = 8192  # columns of a tile, the most
_SWEEP_BYTES = 72 << 20  # of a tile's logits and the sums of its rows together
_WARPS = 16
# How far logits may lie above the reference of their row: exp(40) times a vocabulary is far from the largest float32 and bfloat16.
_SLACK = {torch.float16: 0.0}
_SLACK_BY_DEFAULT = 40.0


def sweep_rows(head: FrozenHead) -> int:
    """Rows [n] that go through the vocabulary together on a GPU: what fits in `_SWEEP_BYTES`, whole tiles of its products."""
    vocabulary, hidden_size = head.weight.shape
    rows = _SWEEP_BYTES // (4 * hidden_size + min(_TILE, vocabulary) * head.weight.element_size())
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
    def _tile_kernel(
        logits,  # [n, stride] W h of a tile; becomes exp(z - r) dz/d(W h), 0 at the label
        head_bias,  # [V]
        labels,  # [n] columns
        references,  # [n] r
        others,  # [n] S
        label_logits,  # [n] z_y
        peaks,  # [n] the largest logit up to here
        choices,  # [n] int64, its column
        sums,  # [n, hidden_size] G
        start,  # the tile's first column
        size,  # its columns
        stride,
        hidden_size,
        scale: tl.constexpr,  # 1 costs no product
        softcap,
        slack,
        FIRST: tl.constexpr,
        HAS_HEAD_BIAS: tl.constexpr,
        HAS_SOFTCAP: tl.constexpr,
        WITH_GRADIENT: tl.constexpr,
        BLOCK: tl.constexpr,
        HIDDEN_BLOCK: tl.constexpr,
    ):
        """One program a row."""
        row = tl.program_id(0).to(tl.int64)
        tile = logits + row * stride
        tile_bias = head_bias
        if HAS_HEAD_BIAS:
            tile_bias = head_bias + start
        columns = tl.arange(0, BLOCK)
        inside = columns < size
        z, capped = load_logits(tile, tile, tile_bias, columns, inside, scale, softcap, False, HAS_HEAD_BIAS, HAS_SOFTCAP)
        label = tl.load(labels + row) - start
        at_label = columns == label
        label_inside = (label >= 0) & (label < size)
        peak = tl.max(z, 0)
        choice = start + tl.min(tl.where(z == peak, columns, size - 1), 0)
        reference = tl.maximum(peak, -1.0e30)  # finite, so that exp(-inf - reference) is 0 and never NaN
        of_others = 0.0
        of_label = 0.0
        if not FIRST:
            before = tl.load(references + row)
            reference = tl.where(peak > before + slack, peak, before)
            shrink = tl.exp(before - reference)
            of_others = tl.load(others + row) * shrink
            of_label = tl.load(label_logits + row)
            largest = tl.load(peaks + row)
            choice = tl.where(peak > largest, choice, tl.load(choices + row))
            peak = tl.maximum(peak, largest)
            if WITH_GRADIENT:  # noqa: SIM102  # known when compiling, the other is not
                if reference > before:
                    for first in range(0, hidden_size, HIDDEN_BLOCK):
                        place = first + tl.arange(0, HIDDEN_BLOCK)
                        old = tl.load(sums + row * hidden_size + place, mask=place < hidden_size, other=0.0)
                        tl.store(sums + row * hidden_size + place, old * shrink, mask=place < hidden_size)
        exponential = tl.where(at_label, 0.0, tl.exp(z - reference))
        if WITH_GRADIENT:
            store_gradient(tile, tile, columns, inside, exponential, capped, scale, softcap, False, HAS_SOFTCAP)
        tl.store(references + row, reference)
        tl.store(others + row, of_others + tl.sum(exponential, 0))
        tl.store(label_logits + row, tl.where(label_inside, tl.sum(tl.where(at_label & inside, z, 0.0), 0), of_label))
        tl.store(peaks + row, peak)
        tl.store(choices + row, choice)

    @triton.jit
    def _gradient_kernel(
        sums,  # [n, size] G
        references,  # [n]
        others,  # [n]
        label_logits,  # [n]
        labels,  # [n] columns
        factors,  # [n]
        head,  # [V, size]
        gradient,  # [M, size]
        rows,  # [n] where a row's gradient goes, if LISTED; else they go from `first` on
        first,
        vocabulary,
        size,
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
        label_row = head + tl.where(counts, label, 0) * size
        for start in range(0, size, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < size
            total = tl.load(sums + program * size + columns, mask=inside, other=0.0)
            w = tl.load(label_row + columns, mask=inside, other=0.0).to(tl.float32)
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
    device = hidden.device
    width = min(_TILE, triton.next_power_of_2(vocabulary))
    buffer = hidden.new_empty(count, width)
    sums = torch.empty(count if weigh is not None else 0, hidden_size, dtype=torch.float32, device=device)
    references, others, label_logits, peaks = torch.empty(4, count, dtype=torch.float32, device=device)
    choices = torch.empty(count, dtype=torch.int64, device=device)
    for start in range(0, vocabulary, width):
        weight = head.weight[start : start + width]
        tile = torch.mm(hidden, weight.T, out=buffer[:, : len(weight)])
        _tile_kernel[(count,)](
            tile,
            head.bias,
            labels,
            references,
            others,
            label_logits,
            peaks,
            choices,
            sums,
            start,
            len(weight),
            width,
            hidden_size,
            head.scale,
            head.softcap or 1.0,
            _SLACK.get(hidden.dtype, _SLACK_BY_DEFAULT),
            FIRST=start == 0,
            WITH_GRADIENT=weigh is not None,
            BLOCK=width,
            HIDDEN_BLOCK=min(2048, triton.next_power_of_2(hidden_size)),
            num_warps=_WARPS,
            **head_flags(head),
        )
        if weigh is not None:
            _accumulate(sums, tile, weight, start == 0)
    known = (labels >= 0) & (labels < vocabulary)
    cross_entropy = torch.where(known, F.softplus(others.log() + references - label_logits), 0.0)
    if weigh is not None and gradient is not None:
        listed = not isinstance(rows, slice)
        _gradient_kernel[(count,)](
            sums,
            references,
            others,
            label_logits,
            labels,
            weigh(cross_entropy),
            head.weight,
            gradient,
            rows if listed else None,
            rows.start if isinstance(rows, slice) else 0,
            vocabulary,
            hidden_size,
            head.scale,
            head.softcap or 1.0,
            HAS_SOFTCAP=head.softcap is not None,
            LISTED=listed,
            BLOCK=min(2048, triton.next_power_of_2(hidden_size)),
            num_warps=4,
        )
    return cross_entropy, (choices == labels) & known


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
        gradient: [M, H], of which `rows` are written; None without `weigh`.
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
        return _kernel(hidden, head, labels, weigh, gradient, rows)
