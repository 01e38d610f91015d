"""Softmax sums of rows whose logits come tile by tile, each tile read while the cache still holds what a product has just written.

A row keeps a reference r and the sum S of exp(z - r) over the columns up to here (online softmax, arXiv 1805.02867). The reference
moves only where an exponential might overflow, so that what others have summed up against it, as `linear_cross_entropy` the
gradient, is rarely touched. A label's column can stay out of S: 1 - p_y then loses no digits where p_y is nearly 1.
"""

# Triton's kernels are typed by what they are launched with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from speculators.kernels.frozen_head import FrozenHead
from speculators.kernels.log_sums import LOWEST_PEAK, head_flags

try:
    import triton
    import triton.language as tl

    from speculators.kernels.log_sums import FLOOR, LOG2E, exp2, load_logits, store_gradient
except ImportError:  # no build for this platform: the reference serves it
    triton = None

__all__ = ["TILE", "RunningSums"]

TILE = 8192  # columns of a tile, the most: two thousand rows of them fit in a GPU's L2 cache
_WARPS = 16
# How far logits may lie above the reference of their row: exp(40) times a vocabulary is far from the largest float32 and bfloat16.
_SLACK = {torch.float16: 0.0}
_SLACK_BY_DEFAULT = 40.0


if triton is not None:

    @triton.jit
    def _tile_kernel(
        logits,  # [n, stride] W h of a tile; becomes exp(z - r) dz/d(W h), 0 at the label, if KEEP
        head_bias,  # [V]
        labels,  # [n] columns, if HAS_LABELS
        references,  # [n] r
        sums,  # [n] S
        label_logits,  # [n] z_y
        peaks,  # [n] the largest logit up to here
        choices,  # [n] int64, its column
        summed,  # [n, summed_size] what is summed up against r, if KEEP
        start,  # the tile's first column
        size,  # its columns
        stride,
        summed_size,
        scale: tl.constexpr,  # 1 costs no product
        softcap,
        slack,
        FIRST: tl.constexpr,
        HAS_HEAD_BIAS: tl.constexpr,
        HAS_SOFTCAP: tl.constexpr,
        HAS_LABELS: tl.constexpr,
        KEEP: tl.constexpr,
        BLOCK: tl.constexpr,
        SUMMED_BLOCK: tl.constexpr,
    ):
        """One program a row."""
        row = tl.program_id(0).to(tl.int64)
        tile = logits + row * stride
        tile_head_bias = head_bias
        if HAS_HEAD_BIAS:
            tile_head_bias = head_bias + start
        columns = tl.arange(0, BLOCK)
        inside = columns < size
        z, capped = load_logits(tile, tile, tile_head_bias, columns, inside, scale, softcap, False, HAS_HEAD_BIAS, HAS_SOFTCAP)
        peak = tl.max(z, 0)
        choice = start + tl.min(tl.where(z == peak, columns, size - 1), 0)
        reference = tl.maximum(peak, FLOOR)  # finite, so that exp(-inf - reference) is 0 and never NaN
        before_sum = 0.0
        before = reference
        of_label_before = 0.0
        if not FIRST:
            before = tl.load(references + row)
            before_sum = tl.load(sums + row)
            largest = tl.load(peaks + row)
            choice = tl.where(peak > largest, choice, tl.load(choices + row))
            peak = tl.maximum(peak, largest)
            if HAS_LABELS:
                of_label_before = tl.load(label_logits + row)
            reference = tl.where(peak > before + slack, peak, before)
        tl.debug_barrier()  # all threads have read what below some of them overwrite
        shrink = exp2((before - reference) * LOG2E)
        if KEEP and not FIRST:  # noqa: SIM102  # known when compiling, the other is not
            if reference > before:
                for first in range(0, summed_size, SUMMED_BLOCK):
                    place = first + tl.arange(0, SUMMED_BLOCK)
                    old = tl.load(summed + row * summed_size + place, mask=place < summed_size, other=0.0)
                    tl.store(summed + row * summed_size + place, old * shrink, mask=place < summed_size)
        exponential = exp2(z * LOG2E - reference * LOG2E)
        if HAS_LABELS:
            label = tl.load(labels + row) - start
            at_label = (columns == label) & inside
            of_label = tl.sum(tl.where(at_label, z, 0.0), 0)
            exponential = tl.where(at_label, 0.0, exponential)
            tl.store(label_logits + row, tl.where((label >= 0) & (label < size), of_label, of_label_before))
        if KEEP:
            store_gradient(tile, tile, columns, inside, exponential, capped, scale, softcap, False, HAS_SOFTCAP)
        tl.store(references + row, reference)
        tl.store(sums + row, before_sum * shrink + tl.sum(exponential, 0))
        tl.store(peaks + row, peak)
        tl.store(choices + row, choice)


@dataclass(frozen=True)
class RunningSums:
    """The sums of n rows up to some column.

    Attributes:
        references: [n] float32 r.
        sums: [n] float32 S, the labels' columns left out where there are labels.
        label_logits: [n] float32 z_y, 0 before the label's tile and without a label.
        peaks: [n] float32 the largest logit.
        choices: [n] int64 its column, the first of equal ones.
        labels: [n] int64 columns, any other number for none; or None.
    """

    references: Tensor
    sums: Tensor
    label_logits: Tensor
    peaks: Tensor
    choices: Tensor
    labels: Tensor | None

    @classmethod
    def of(cls, count: int, labels: Tensor | None, device: torch.device) -> "RunningSums":
        """Before the first tile."""
        references, sums, label_logits, peaks = torch.empty(4, count, dtype=torch.float32, device=device)
        return cls(references, sums, label_logits, peaks, torch.empty(count, dtype=torch.int64, device=device), labels)

    def add(
        self,
        tile: Tensor,
        start: int,
        head: FrozenHead,
        summed: Tensor | None = None,
        *,
        implementation: Literal["reference", "triton"] = "triton",
    ) -> None:
        """Take in the logits of columns `start` to `start` + w; tiles come in order, the first from 0.

        Args:
            tile: [n, w] W h. With `summed` it becomes exp(z - r) dz/d(W h), 0 at the label.
            start: the first column.
            head: gives scale, bias and cap.
            summed: [n, size] float32 what the caller sums up from such tiles; shrunk where r moves.
            implementation: the kernel or its definition.
        """
        slack = _SLACK.get(tile.dtype, _SLACK_BY_DEFAULT)
        if implementation == "reference":
            self._add(tile, start, head, summed, slack)
            return
        size = 1 if summed is None else summed.shape[1]
        _tile_kernel[(len(tile),)](
            tile,
            head.bias,
            self.labels,
            self.references,
            self.sums,
            self.label_logits,
            self.peaks,
            self.choices,
            summed,
            start,
            tile.shape[1],
            tile.stride(0),
            size,
            head.scale,
            head.softcap or 1.0,
            slack,
            FIRST=start == 0,
            HAS_LABELS=self.labels is not None,
            KEEP=summed is not None,
            BLOCK=triton.next_power_of_2(tile.shape[1]),
            SUMMED_BLOCK=min(2048, triton.next_power_of_2(size)),
            num_warps=_WARPS,
            **head_flags(head),
        )

    def _add(self, tile: Tensor, start: int, head: FrozenHead, summed: Tensor | None, slack: float) -> None:
        """The definition."""
        columns = torch.arange(start, start + tile.shape[1], device=tile.device)
        z = head.finish(tile, columns).float()
        peak, choice = z.max(dim=1).values, start + z.argmax(dim=1)
        if start == 0:
            self.references.copy_(peak.clamp(min=LOWEST_PEAK))
            self.sums.zero_()
            self.label_logits.zero_()
            self.peaks.fill_(float("-inf"))
            self.choices.zero_()
        reference = torch.where(peak > self.references + slack, peak, self.references)
        shrink = (self.references - reference).exp()
        if summed is not None and start:
            summed *= shrink[:, None]
        exponential = (z - reference[:, None]).exp()
        if self.labels is not None:
            at_label = columns == self.labels[:, None]
            self.label_logits.copy_(torch.where(at_label.any(dim=1), torch.where(at_label, z, 0.0).sum(dim=1), self.label_logits))
            exponential = exponential.masked_fill(at_label, 0.0)
        self.choices.copy_(torch.where((peak > self.peaks) | (start == 0), choice, self.choices))
        self.peaks.copy_(torch.maximum(peak, self.peaks))
        self.sums.copy_(self.sums * shrink + exponential.sum(dim=1))
        self.references.copy_(reference)
        if summed is not None:
            slope = head.scale if head.softcap is None else head.scale * (1.0 - (z / head.softcap) ** 2)
            tile.copy_(exponential * slope)
