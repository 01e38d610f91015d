"""Weighted cross-entropy of a drafter's logits against labels, and its gradient written over the logits: one launch.

For every row with logits z (`log_sums.py`), p = softmax(z), label y and weight w

    CE = -log p_y            d(w CE)/dz = w * (p - e_y)

What `distillation_loss` does to a chunk of rows with a Markov bias where nothing depends on the verifier's distribution.
"""

# Triton's kernels are typed by what they are launched with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from speculators.kernels.frozen_head import FrozenHead
from speculators.kernels.log_sums import head_flags, row_tiles

try:
    import triton
    import triton.language as tl

    from speculators.kernels.log_sums import LOG2E, exp2, load_logits, row_log_sum, store_gradient
except ImportError:  # no build for this platform: the reference serves it
    triton = None

__all__ = ["cross_entropy_"]


def _reference(
    product: Tensor, bias: Tensor | None, head: FrozenHead, labels: Tensor, weights: Tensor, gradient_scale: float | None
) -> tuple[Tensor, Tensor]:
    leaves = [x.detach().requires_grad_() for x in (product, bias) if x is not None]
    with torch.enable_grad():
        logits = head.finish(leaves[0])
        log_p = F.log_softmax(logits if bias is None else logits + leaves[1], dim=1)
        counts = (labels >= 0) & (labels < log_p.shape[1]) & (weights != 0)
        cross_entropy = torch.where(counts, -log_p.gather(1, torch.where(counts, labels, 0)[:, None])[:, 0], 0.0)
        loss = (weights * cross_entropy).sum()
    if gradient_scale is not None:
        for target, gradient in zip((product, bias), torch.autograd.grad(loss * gradient_scale, leaves), strict=False):
            assert target is not None
            target.copy_(gradient)
    return cross_entropy.detach(), (log_p.argmax(dim=1) == labels) & counts


if triton is not None:

    @triton.jit
    def _cross_entropy_kernel(
        logits,  # [n, size] W h; becomes its gradient
        bias,  # [n, size] m; becomes its gradient
        head_bias,  # [size]
        rows,  # [n] where a row's label and weight stand, if LISTED; else they stand from `first` on
        labels,  # [M] columns
        weights,  # [M]
        cross_entropy,  # [M] float32
        matches,  # [M] uint8
        first,
        size,
        scale: tl.constexpr,  # 1 costs no product
        softcap,
        gradient_scale,
        HAS_BIAS: tl.constexpr,
        HAS_HEAD_BIAS: tl.constexpr,
        HAS_SOFTCAP: tl.constexpr,
        LISTED: tl.constexpr,
        WITH_GRADIENT: tl.constexpr,
        LANES: tl.constexpr,
        COLUMNS: tl.constexpr,
    ):
        """One program a row: its sum, then its gradient from the far end, whose logits the cache still holds."""
        program = tl.program_id(0).to(tl.int64)
        row, bias_row = logits + program * size, bias + program * size
        place = first + program
        if LISTED:
            place = tl.load(rows + program)
        label = tl.load(labels + place)
        weight = tl.load(weights + place)
        known = (label >= 0) & (label < size)
        label = tl.where(known, label, -1).to(tl.int32)
        # Read before the sum, which all threads wait for: after it the logits are overwritten.
        of_label, _ = load_logits(
            row, bias_row, head_bias, tl.maximum(label, 0), known, scale, softcap, HAS_BIAS, HAS_HEAD_BIAS, HAS_SOFTCAP
        )
        log_sum, choice = row_log_sum(
            row, bias_row, head_bias, head_bias, size, scale, softcap, HAS_BIAS, HAS_HEAD_BIAS, HAS_SOFTCAP, False, LANES, COLUMNS
        )
        tl.debug_barrier()  # all threads have read the row; below it is overwritten
        counts = known & (weight != 0)
        tl.store(cross_entropy + place, tl.where(counts, log_sum - of_label, 0.0))
        tl.store(matches + place, (counts & (choice == label)).to(tl.uint8))
        if WITH_GRADIENT:
            factor = tl.where(known, gradient_scale * weight, 0.0)
            reference = log_sum * LOG2E
            BLOCK: tl.constexpr = LANES * COLUMNS
            for number in range(0, tl.cdiv(size, BLOCK)):
                columns = (tl.cdiv(size, BLOCK) - 1 - number) * BLOCK + tl.arange(0, BLOCK)
                inside = columns < size
                z, capped = load_logits(row, bias_row, head_bias, columns, inside, scale, softcap, HAS_BIAS, HAS_HEAD_BIAS, HAS_SOFTCAP)
                gradient = factor * (exp2(z * LOG2E - reference) - tl.where(columns == label, 1.0, 0.0))
                store_gradient(row, bias_row, columns, inside, gradient, capped, scale, softcap, HAS_BIAS, HAS_SOFTCAP)


def cross_entropy_(
    product: Tensor,
    bias: Tensor | None,
    head: FrozenHead,
    rows: Tensor | slice,
    labels: Tensor,
    weights: Tensor,
    cross_entropy: Tensor,
    matches: Tensor,
    *,
    gradient_scale: float | None,
    implementation: Literal["auto", "reference", "triton"] = "auto",
) -> None:
    """Cross-entropy of some rows into places of `cross_entropy` and `matches`, and the gradients over `product` and `bias`.

    Args:
        product: [n, V] W h; overwritten by its gradient.
        bias: [n, V] added after the head's cap and overwritten by its gradient, or None.
        head: gives scale, bias and cap.
        rows: [n] int64, each row's place in the tensors of M that follow, or the slice of them.
        labels: [M] int64 columns; any other number is no label: no cross-entropy and no gradient.
        weights: [M] float32; a row of weight 0 has neither.
        cross_entropy: [M] float32 nats, written.
        matches: [M] bool, whether the likeliest column is the label, written.
        gradient_scale: factor on the gradients; None leaves product and bias as they are.
        implementation: "auto" takes the kernel on CUDA.
    """
    if implementation == "reference" or (implementation == "auto" and (triton is None or not product.is_cuda)):
        cross_entropy[rows], matches[rows] = _reference(product, bias, head, labels[rows], weights[rows], gradient_scale)
        return
    _cross_entropy_kernel[(len(product),)](
        product,
        product if bias is None else bias,
        head.bias,
        None if isinstance(rows, slice) else rows,
        labels,
        weights,
        cross_entropy,
        matches.view(torch.uint8),
        rows.start if isinstance(rows, slice) else 0,
        product.shape[1],
        head.scale,
        head.softcap or 1.0,
        0.0 if gradient_scale is None else gradient_scale,
        HAS_BIAS=bias is not None,
        LISTED=not isinstance(rows, slice),
        WITH_GRADIENT=gradient_scale is not None,
        **head_flags(head),
        **row_tiles(product.shape[1]),
    )
