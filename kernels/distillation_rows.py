"""A chunk of the distillation loss: draft logits become their gradients, beside the teacher's, and leave each row's statistics.

The losses are those of `distillation_loss.py`.
"""

# Triton's kernels are typed by what they are launched with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from speculators.kernels.frozen_head import FrozenHead
from speculators.kernels.log_sums import head_flags

try:
    import triton
    import triton.language as tl

    from speculators.kernels.log_sums import LN2, LOG2E, exp2, load_logits, store_gradient
except ImportError:  # no build for this platform: the reference serves it
    triton = None

__all__ = ["RowSums", "distil_rows_", "row_losses"]


@dataclass(frozen=True)
class RowSums:
    """What is known of n draft and t teacher rows before their losses: log-sums in float32, likeliest columns in int64.

    Attributes:
        draft: [n] log-sum-exp of the draft logits.
        draft_choices: [n] their likeliest columns.
        teacher: [t] log-sum-exp of the teacher's.
        teacher_choices: [t] their likeliest columns, verifier ids.
        reached: [t] log-sum-exp of the teacher's over the draft vocabulary.
    """

    draft: Tensor
    draft_choices: Tensor
    teacher: Tensor
    teacher_choices: Tensor
    reached: Tensor


def row_losses(log_p: Tensor, teacher_logits: Tensor | None, columns: Tensor, known: Tensor, draft_rows: Tensor | None) -> Tensor:
    """The definition, for autograd to differentiate.

    Args:
        log_p: [n, Vd], the drafter's log-probabilities.
        teacher_logits: [n, V] or None.
        columns: [n] int64, the label's column.
        known: [n] bool, whether it has one.
        draft_rows: [Vd] int64 or None.

    Returns:
        [4, n] cross-entropy, L1, KL and acceptance; [1, n] without a teacher.
    """
    cross_entropy = torch.where(known, -log_p.gather(1, columns[:, None])[:, 0], 0.0)
    if teacher_logits is None:
        return cross_entropy[None]
    log_q, p = F.log_softmax(teacher_logits, dim=1), log_p.exp()
    q = log_q.exp()
    unreachable = torch.zeros_like(cross_entropy)
    if draft_rows is not None:
        unreachable = q.index_fill(1, draft_rows, 0.0).sum(dim=1)
        q, log_q = q[:, draft_rows], F.log_softmax(teacher_logits[:, draft_rows], dim=1)
    l1 = (p - q).abs().sum(dim=1) + unreachable
    q_reached = log_q.exp()
    kl = (q_reached * torch.where(q_reached > 0, log_q - log_p, 0.0)).sum(dim=1)  # a masked token has neither
    return torch.stack([cross_entropy, l1, kl, torch.minimum(p, q).sum(dim=1)])


if triton is not None:

    @triton.jit
    def _distillation_kernel(
        draft,  # [n, Vd] W h; becomes the gradient of W h
        bias,  # [n, Vd] M f; becomes the gradient of M f
        teacher,  # [t, V] W h_teacher
        draft_head_bias,  # [Vd]
        teacher_head_bias,  # [V]
        draft_ids,  # [Vd] verifier ids, if REDUCED
        positions,  # [n] rows of the teacher
        draft_log_sums,  # [n]
        draft_choices,  # [n]
        teacher_log_sums,  # [t]
        teacher_choices,  # [t]
        reached_log_sums,  # [t], over the draft vocabulary
        columns_of_ids,  # [V] columns, -1 for none, if REDUCED without HAS_LABELS
        labels,  # [M] columns, -1 for none, if HAS_LABELS
        weights,  # [M]
        statistics,  # [4, M] cross-entropy, L1, KL, acceptance
        matches,  # [M] uint8
        rows,  # [n] where a row's label, weight and statistics stand, if LISTED; else they stand from `first` on
        first,
        count,  # M
        draft_size,
        teacher_size,
        scale: tl.constexpr,  # 1 costs no product
        softcap,
        ce_coefficient,
        l1_coefficient,
        kl_coefficient,
        HAS_BIAS: tl.constexpr,
        HAS_HEAD_BIAS: tl.constexpr,
        HAS_SOFTCAP: tl.constexpr,
        REDUCED: tl.constexpr,
        HAS_LABELS: tl.constexpr,
        HAS_CROSS_ENTROPY: tl.constexpr,
        HAS_L1: tl.constexpr,
        WITH_GRADIENT: tl.constexpr,
        LISTED: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """One program a row. The L1 gradient needs <p, s> first, hence a second pass; the other losses need one.

        The acceptance is not summed: p and q each sum to 1, so that sum min(p, q) = 1 - L1 / 2.
        """
        program = tl.program_id(0).to(tl.int64)
        draft_row = draft + program * draft_size
        bias_row = bias + program * draft_size
        place = first + program
        if LISTED:
            place = tl.load(rows + program)
        weight = tl.load(weights + place)
        position = tl.load(positions + program)
        teacher_row = teacher + position * teacher_size
        used = weight != 0
        target = tl.load(teacher_choices + position)
        choice = tl.load(draft_choices + program)
        label = target
        if HAS_LABELS:
            label = tl.load(labels + place)
        if REDUCED:
            choice = tl.load(draft_ids + choice)
            if not HAS_LABELS:
                label = tl.load(columns_of_ids + target)
        of_label = load_logits(
            draft_row, bias_row, draft_head_bias, tl.maximum(label, 0), label >= 0, scale, softcap, HAS_BIAS, HAS_HEAD_BIAS, HAS_SOFTCAP
        )[0]
        log_draft = tl.load(draft_log_sums + program)
        tl.debug_barrier()  # all threads have read the label's logit; below one of them overwrites it
        tl.store(statistics + place, tl.where(used & (label >= 0), log_draft - of_label, 0.0))
        tl.store(matches + place, (used & (choice == target)).to(tl.uint8))
        label = label.to(tl.int32)
        # Logarithms to base 2 from here on.
        log_draft = log_draft * LOG2E
        log_teacher = tl.load(teacher_log_sums + position) * LOG2E
        log_reached = tl.load(reached_log_sums + position) * LOG2E
        # The gradient of cross-entropy and KL: p - onehot and p - q, weighted.
        label_weight = tl.where(label >= 0, weight * ce_coefficient, 0.0)
        teacher_weight = weight * kl_coefficient
        draft_weight = label_weight + teacher_weight
        l1 = tl.zeros((BLOCK,), tl.float32)  # of every lane by itself, as in `row_log_sum`
        kl = tl.zeros((BLOCK,), tl.float32)
        signed = tl.zeros((BLOCK,), tl.float32)
        sign_mean = 0.0  # <p, s>
        PASSES: tl.constexpr = 2 if WITH_GRADIENT and HAS_L1 else 1
        for number in tl.static_range(PASSES):
            for start in range(0, draft_size, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                inside = columns < draft_size
                z, capped = load_logits(
                    draft_row, bias_row, draft_head_bias, columns, inside, scale, softcap, HAS_BIAS, HAS_HEAD_BIAS, HAS_SOFTCAP
                )
                ids = columns
                if REDUCED:
                    ids = tl.load(draft_ids + columns, mask=inside, other=0)
                t = load_logits(
                    teacher_row, teacher_row, teacher_head_bias, ids, inside, scale, softcap, False, HAS_HEAD_BIAS, HAS_SOFTCAP
                )[0]
                log_p = z * LOG2E - log_draft
                log_q = t * LOG2E - log_reached
                p = exp2(log_p)
                q_reached = exp2(log_q)
                q = q_reached
                if REDUCED:
                    q = exp2(t * LOG2E - log_teacher)
                difference = p - q
                sign = tl.minimum(tl.maximum(difference * 3.0e38, -1.0), 1.0)  # in three instructions
                if number == 0:
                    l1 += tl.abs(difference)
                    kl += q_reached * tl.where(q_reached > 0, log_q - log_p, 0.0)
                    signed += p * sign
                if WITH_GRADIENT and number == PASSES - 1:
                    gradient = draft_weight * p - teacher_weight * q_reached
                    if HAS_CROSS_ENTROPY:
                        gradient -= tl.where(columns == label, label_weight, 0.0)
                    if HAS_L1:
                        gradient += weight * l1_coefficient * p * (sign - sign_mean)
                    store_gradient(draft_row, bias_row, columns, inside, gradient, capped, scale, softcap, HAS_BIAS, HAS_SOFTCAP)
            if HAS_L1 and number == 0:
                sign_mean = tl.sum(signed, 0)
        distance = tl.sum(l1, 0)
        if REDUCED:  # the teacher's mass outside the draft vocabulary
            distance += tl.maximum(1.0 - exp2(log_reached - log_teacher), 0.0)
        distance = tl.where(distance > 2.0, 2.0, distance)  # by rounding alone
        tl.store(statistics + count + place, tl.where(used, distance, 0.0))
        tl.store(statistics + 2 * count + place, tl.where(used, tl.sum(kl, 0) * LN2, 0.0))
        tl.store(statistics + 3 * count + place, tl.where(used, 1.0 - 0.5 * distance, 0.0))


def distil_rows_(
    draft: Tensor,
    bias: Tensor | None,
    teacher: Tensor,
    positions: Tensor,
    rows: Tensor | slice,
    head: FrozenHead,
    draft_head: FrozenHead,
    draft_rows: Tensor | None,
    sums: RowSums,
    labels: Tensor | None,
    columns_of_ids: Tensor | None,
    weights: Tensor,
    statistics: Tensor,
    matches: Tensor,
    *,
    cross_entropy: float,
    l1: float,
    kl: float,
    with_gradient: bool,
) -> None:
    """Statistics of n rows, and the gradients over their logits, by the kernel (`row_losses` is its definition).

    Args:
        draft: [n, Vd] W h; overwritten by its gradient where `with_gradient`.
        bias: [n, Vd] added after the head's cap, likewise, or None.
        teacher: [t, V] W h_teacher.
        positions: [n] int64, the teacher row of each draft row.
        rows: [n] int64, each row's place in the tensors of M, or the slice of them.
        head, draft_head: the verifier's, and that of the draft vocabulary.
        draft_rows: [Vd] int64 or None.
        sums: of these rows.
        labels: [M] int64 columns, -1 for none; None takes the teacher's likeliest.
        columns_of_ids: [V] int64 the column of a verifier id, -1 for none; needed with `draft_rows` and without `labels`.
        weights: [M] float32; a row of weight 0 has neither statistics nor a gradient.
        statistics: [4, M] float32 cross-entropy, L1, KL and acceptance, written.
        matches: [M] bool, whether drafter and teacher like the same token most, written.
        cross_entropy, l1, kl: coefficients of the gradient.
        with_gradient: whether there is one.
    """
    listed = not isinstance(rows, slice)
    block = min(4096, triton.next_power_of_2(draft.shape[1]))
    _distillation_kernel[(len(draft),)](
        draft,
        draft if bias is None else bias,
        teacher,
        draft_head.bias,
        head.bias,
        draft_rows,
        positions,
        sums.draft,
        sums.draft_choices,
        sums.teacher,
        sums.teacher_choices,
        sums.reached,
        columns_of_ids,
        labels,
        weights,
        statistics,
        matches.view(torch.uint8),
        rows if listed else None,
        rows.start if isinstance(rows, slice) else 0,
        statistics.shape[1],
        draft.shape[1],
        teacher.shape[1],
        head.scale,
        head.softcap or 1.0,
        cross_entropy,
        l1,
        kl,
        **head_flags(head),
        HAS_BIAS=bias is not None,
        REDUCED=draft_rows is not None,
        HAS_LABELS=labels is not None,
        HAS_CROSS_ENTROPY=cross_entropy != 0,
        HAS_L1=l1 != 0,
        WITH_GRADIENT=with_gradient,
        LISTED=listed,
        BLOCK=block,
        num_warps=max(1, min(16, block // 32)),  # a thread at most a column: two of one would race for it
    )
