"""Distillation loss: cross-entropy, L1 and KL of a drafter against its verifier, straight from hidden states.

With draft logits z, teacher logits t, p = softmax(z), q = softmax(t) in float32 and label y, for every row

    CE = -log p_y                             dCE/dz = p - e_y
    L1 = sum |p - q| (twice total variation)  dL1/dz = p * (s - <p, s>),  s = sign(p - q)
    KL = sum q * log(q / p)                   dKL/dz = p - q
    acceptance = sum min(p, q) = 1 - L1 / 2, the probability that rejection sampling keeps a token drawn from p

(DSpark section 3.3). Logits come from the verifier's frozen head W and, for DSpark, a low-rank Markov bias:

    z = softcap(scale * W h + b) + M f,    t = softcap(scale * W h_teacher + b).

[rows, vocabulary] never exists as a whole: rows go through in chunks, and as their weights are known beforehand
each chunk leaves the gradients of h, f and M behind, so that the backward pass is one multiplication.

Reduced draft vocabulary (`draft_rows`): p is zero outside it while q stays the full softmax, so L1 and acceptance
charge the drafter for the tokens it cannot propose. CE is zero where the label lies outside. KL, infinite
otherwise, is taken against q renormalised to the draft vocabulary.
"""

# Triton's kernels are typed by what they are launched with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from speculators.kernels.frozen_head import FrozenHead, label_columns, label_log_probability

try:
    import triton
    import triton.language as tl
except ImportError:  # no build for this platform: the reference serves it
    triton = None

__all__ = ["DistillationOutput", "distillation_loss", "label_log_probability"]


@dataclass(frozen=True)
class DistillationOutput:
    """Loss and statistics of `distillation_loss`. A row of weight zero is skipped: its statistics are 0 and False.

    Attributes:
        loss: scalar, sum_i w_i * (ce * CE_i + l1 * L1_i + kl * KL_i); the only differentiable one.
        cross_entropy: [M] nats; 0 where the label lies outside the draft vocabulary.
        l1: [M] in [0, 2].
        kl: [M] nats.
        acceptance: [M] in [0, 1].
        matches: [M] bool, the drafter's likeliest token is the verifier's.
    """

    loss: Tensor
    cross_entropy: Tensor
    l1: Tensor
    kl: Tensor
    acceptance: Tensor
    matches: Tensor


@dataclass(frozen=True)
class _Task:
    """What the rows are compared with and how the losses are weighed."""

    head: FrozenHead
    draft_rows: Tensor | None  # [Vd]
    teacher_hidden: Tensor  # [M, H]
    labels: Tensor  # [M]
    weights: Tensor  # [M]
    cross_entropy: float
    l1: float
    kl: float
    chunk_rows: int


@dataclass(frozen=True)
class _Result:
    """What the chunks fill in."""

    statistics: Tensor  # [4, M]: cross-entropy, L1, KL, acceptance
    matches: Tensor  # [M] bool
    gradients: list[Tensor]  # of hidden, bias_factors and bias_head, as far as these are there


# -- the definition ----------------------------------------------------------------------------------------------


def _row_losses(draft_logits: Tensor, teacher_logits: Tensor, labels: Tensor, draft_rows: Tensor | None) -> tuple[Tensor, Tensor]:
    """The definition, for autograd to differentiate.

    Args:
        draft_logits: [n, Vd].
        teacher_logits: [n, V].
        labels: [n] int64 verifier ids.
        draft_rows: [Vd] int64 or None.

    Returns:
        [4, n] cross-entropy, L1, KL and acceptance; [n] bool matches.
    """
    log_p, log_q = F.log_softmax(draft_logits, dim=1), F.log_softmax(teacher_logits, dim=1)
    p, q = log_p.exp(), log_q.exp()
    columns, known = label_columns(labels, teacher_logits.shape[1], draft_rows)
    cross_entropy = torch.where(known, -log_p.gather(1, columns[:, None])[:, 0], 0.0)
    draft_choice, unreachable = draft_logits.argmax(dim=1), torch.zeros_like(cross_entropy)
    if draft_rows is not None:
        draft_choice = draft_rows[draft_choice]
        unreachable = q.index_fill(1, draft_rows, 0.0).sum(dim=1)
        q, log_q = q[:, draft_rows], F.log_softmax(teacher_logits[:, draft_rows], dim=1)
    l1 = (p - q).abs().sum(dim=1) + unreachable
    kl = (log_q.exp() * (log_q - log_p)).sum(dim=1)
    acceptance = torch.minimum(p, q).sum(dim=1)
    return torch.stack([cross_entropy, l1, kl, acceptance]), draft_choice == teacher_logits.argmax(dim=1)


def _reference(task: _Task, inputs: list[Tensor], with_gradient: bool) -> _Result:
    """Plain PyTorch on any device, gradients by autograd. `inputs`: hidden, and bias_factors with bias_head."""
    hidden, *bias = inputs
    rows, draft_head = len(hidden), task.head.select(task.draft_rows)
    terms = [(c, term) for term, c in enumerate((task.cross_entropy, task.l1, task.kl)) if c]
    statistics, matches = hidden.new_zeros(4, rows), torch.zeros(rows, dtype=torch.bool, device=hidden.device)
    totals = [torch.zeros_like(x) for x in inputs]
    for start in range(0, rows, task.chunk_rows):
        chunk = slice(start, start + task.chunk_rows)
        weights = task.weights[chunk]
        teacher_logits = task.head.logits(task.teacher_hidden[chunk])
        leaves = [x.detach() for x in ([hidden[chunk], bias[0][chunk], bias[1]] if bias else [hidden[chunk]])]
        with torch.set_grad_enabled(with_gradient and bool(terms)):
            for leaf in leaves:
                leaf.requires_grad_(torch.is_grad_enabled())
            rows_of_chunk, matches_of_chunk = _row_losses(draft_head.logits(*leaves), teacher_logits, task.labels[chunk], task.draft_rows)
            if torch.is_grad_enabled():
                loss = torch.stack([(c * weights * rows_of_chunk[term]).sum() for c, term in terms]).sum()
                gradients = torch.autograd.grad(loss, leaves)
                totals[0][chunk] = gradients[0]
                if bias:
                    totals[1][chunk] = gradients[1]
                    totals[2] += gradients[2]
        statistics[:, chunk] = torch.where(weights != 0, rows_of_chunk.detach(), 0.0)
        matches[chunk] = matches_of_chunk & (weights != 0)
    return _Result(statistics, matches, totals)


# -- the kernel --------------------------------------------------------------------------------------------------

if triton is not None:

    @triton.jit
    def _capped(x, softcap):
        """softcap * tanh(x / softcap), from exp alone; saturates cleanly where exp overflows."""
        return softcap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * x / softcap)))

    @triton.jit
    def _load_logits(
        draft_row,
        bias_row,
        teacher_row,
        head_bias,
        reachable,
        columns,
        vocabulary,
        scale,
        softcap,
        HAS_BIAS: tl.constexpr,
        HAS_HEAD_BIAS: tl.constexpr,
        HAS_SOFTCAP: tl.constexpr,
        REDUCED: tl.constexpr,
    ):
        """One tile of draft logits (-inf where the drafter cannot propose), its part under the cap, teacher logits."""
        inside = columns < vocabulary
        capped = tl.load(draft_row + columns, mask=inside, other=0.0).to(tl.float32) * scale
        teacher = tl.load(teacher_row + columns, mask=inside, other=0.0).to(tl.float32) * scale
        if HAS_HEAD_BIAS:
            shift = tl.load(head_bias + columns, mask=inside, other=0.0).to(tl.float32)
            capped += shift
            teacher += shift
        if HAS_SOFTCAP:
            capped = _capped(capped, softcap)
            teacher = _capped(teacher, softcap)
        draft = capped
        if HAS_BIAS:
            draft += tl.load(bias_row + columns, mask=inside, other=0.0).to(tl.float32)
        proposable = inside
        if REDUCED:
            proposable = inside & (tl.load(reachable + columns, mask=inside, other=0) != 0)
        draft = tl.where(proposable, draft, float("-inf"))
        teacher = tl.where(inside, teacher, float("-inf"))
        return draft, capped, teacher, proposable

    @triton.jit
    def _distillation_kernel(
        draft,  # [n, V] W h; becomes the gradient of W h
        bias,  # [n, V] M f; becomes the gradient of M f
        teacher,  # [n, V] W h_teacher
        head_bias,  # [V]
        reachable,  # [V] int8, 1 where the drafter can propose
        labels,  # [n]
        weights,  # [n] float32
        statistics,  # [4, n] float32, rows `statistics_stride` apart
        matches,  # [n] bool
        statistics_stride,
        vocabulary,
        scale,
        softcap,
        ce_coefficient,
        l1_coefficient,
        kl_coefficient,
        HAS_BIAS: tl.constexpr,
        HAS_HEAD_BIAS: tl.constexpr,
        HAS_SOFTCAP: tl.constexpr,
        REDUCED: tl.constexpr,
        WITH_GRADIENT: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """One program a row, three passes over its logits, the later ones from the L2 cache."""
        row = tl.program_id(0).to(tl.int64)
        draft_row = draft + row * vocabulary
        bias_row = bias + row * vocabulary
        teacher_row = teacher + row * vocabulary
        weight = tl.load(weights + row)
        if weight == 0.0:
            if WITH_GRADIENT:
                for start in range(0, vocabulary, BLOCK):
                    columns = start + tl.arange(0, BLOCK)
                    zeros = tl.zeros((BLOCK,), draft.dtype.element_ty)
                    tl.store(draft_row + columns, zeros, mask=columns < vocabulary)
                    if HAS_BIAS:
                        tl.store(bias_row + columns, zeros, mask=columns < vocabulary)
            return
        label = tl.load(labels + row)

        # Pass 1: maxima, sums of exponentials, argmaxes. The finite start keeps exp(-inf - max) at 0, never NaN.
        draft_max = -1.0e30
        teacher_max = -1.0e30
        draft_sum = 0.0
        teacher_sum = 0.0
        draft_choice = 0
        teacher_choice = 0
        label_logit = 0.0
        label_known = 0.0
        for start in range(0, vocabulary, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            z, capped, t, proposable = _load_logits(
                draft_row, bias_row, teacher_row, head_bias, reachable, columns, vocabulary, scale, softcap,
                HAS_BIAS, HAS_HEAD_BIAS, HAS_SOFTCAP, REDUCED,
            )  # fmt: skip
            z_max = tl.max(z, 0)
            t_max = tl.max(t, 0)
            draft_choice = tl.where(z_max > draft_max, tl.min(tl.where(z == z_max, columns, vocabulary), 0), draft_choice)
            teacher_choice = tl.where(t_max > teacher_max, tl.min(tl.where(t == t_max, columns, vocabulary), 0), teacher_choice)
            z_max = tl.maximum(z_max, draft_max)
            t_max = tl.maximum(t_max, teacher_max)
            draft_sum = draft_sum * tl.exp(draft_max - z_max) + tl.sum(tl.exp(z - z_max), 0)
            teacher_sum = teacher_sum * tl.exp(teacher_max - t_max) + tl.sum(tl.exp(t - t_max), 0)
            draft_max = z_max
            teacher_max = t_max
            is_label = (columns == label) & proposable
            label_logit += tl.sum(tl.where(is_label, z, 0.0), 0)
            label_known += tl.sum(tl.where(is_label, 1.0, 0.0), 0)
        log_draft_sum = draft_max + tl.log(draft_sum)
        log_teacher_sum = teacher_max + tl.log(teacher_sum)

        # Pass 2: the sums over p and q.
        l1 = 0.0
        acceptance = 0.0
        sign_mean = 0.0  # <p, s>
        reached = 0.0  # the teacher's mass on the draft vocabulary
        cross = 0.0  # sum of q (log q - log p) there
        for start in range(0, vocabulary, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            z, capped, t, proposable = _load_logits(
                draft_row, bias_row, teacher_row, head_bias, reachable, columns, vocabulary, scale, softcap,
                HAS_BIAS, HAS_HEAD_BIAS, HAS_SOFTCAP, REDUCED,
            )  # fmt: skip
            log_p = z - log_draft_sum
            log_q = t - log_teacher_sum
            p = tl.exp(log_p)
            q = tl.exp(log_q)
            sign = tl.where(p > q, 1.0, tl.where(p < q, -1.0, 0.0))
            l1 += tl.sum((p - q) * sign, 0)
            acceptance += tl.sum(tl.minimum(p, q), 0)
            sign_mean += tl.sum(p * sign, 0)
            reached += tl.sum(tl.where(proposable, q, 0.0), 0)
            cross += tl.sum(tl.where(proposable, q, 0.0) * (tl.where(proposable, log_q, 0.0) - tl.where(proposable, log_p, 0.0)), 0)
        kl = cross
        if REDUCED:
            reached = tl.maximum(reached, 1.0e-30)
            kl = cross / reached - tl.log(reached)
        else:
            reached = 1.0
        tl.store(statistics + row, label_known * (log_draft_sum - label_logit))
        tl.store(statistics + statistics_stride + row, l1)
        tl.store(statistics + 2 * statistics_stride + row, kl)
        tl.store(statistics + 3 * statistics_stride + row, acceptance)
        tl.store(matches + row, draft_choice == teacher_choice)

        # Pass 3: the gradient of the weighted loss, in place.
        if WITH_GRADIENT:
            for start in range(0, vocabulary, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                z, capped, t, proposable = _load_logits(
                    draft_row, bias_row, teacher_row, head_bias, reachable, columns, vocabulary, scale, softcap,
                    HAS_BIAS, HAS_HEAD_BIAS, HAS_SOFTCAP, REDUCED,
                )  # fmt: skip
                p = tl.exp(z - log_draft_sum)
                q = tl.exp(t - log_teacher_sum)
                sign = tl.where(p > q, 1.0, tl.where(p < q, -1.0, 0.0))
                gradient = ce_coefficient * label_known * (p - tl.where(columns == label, 1.0, 0.0))
                gradient += l1_coefficient * p * (sign - sign_mean) + kl_coefficient * (p - q / reached)
                gradient = tl.where(proposable, weight * gradient, 0.0)
                inside = columns < vocabulary
                if HAS_BIAS:
                    tl.store(bias_row + columns, gradient.to(bias.dtype.element_ty), mask=inside)
                gradient = gradient * scale
                if HAS_SOFTCAP:
                    gradient = gradient * (1.0 - (capped / softcap) * (capped / softcap))
                tl.store(draft_row + columns, gradient.to(draft.dtype.element_ty), mask=inside)


def _kernel(task: _Task, inputs: list[Tensor], with_gradient: bool) -> _Result:
    """Matrix products in the head's dtype around the kernel, which turns a chunk's logits into their gradients."""
    head = task.head
    hidden, *bias = inputs
    rows, vocabulary, device = len(hidden), len(head.weight), hidden.device
    reachable = None
    products = [(hidden, head.weight)]
    if bias:
        products.append((bias[0], bias[1]))
    if task.draft_rows is not None:
        # The drafter keeps all columns, at -inf those it cannot propose: more arithmetic, but one kernel for all.
        reachable = torch.zeros(vocabulary, dtype=torch.int8, device=device).index_fill_(0, task.draft_rows, 1)
        if bias:
            products[1] = (bias[0], bias[1].new_zeros(vocabulary, bias[1].shape[1]).index_copy(0, task.draft_rows, bias[1]))
    if bias and head.softcap is None and head.scale == 1.0:
        # Nothing comes between W h and M f: one product, summed in float32 before it is rounded.
        features, weights = zip(*products, strict=True)
        products = [(torch.cat(features, dim=1), torch.cat(weights, dim=1))]

    def buffer() -> Tensor:
        return hidden.new_empty(min(task.chunk_rows, rows), vocabulary)

    buffers, teacher_buffer = [buffer() for _ in products], buffer()
    statistics = torch.zeros(4, rows, dtype=torch.float32, device=device)
    matches = torch.zeros(rows, dtype=torch.bool, device=device)
    feature_gradients = [torch.zeros_like(features) for features, _ in products]
    bias_head_gradient = torch.zeros(vocabulary, bias[1].shape[1] if bias else 0, dtype=torch.float32, device=device)
    for start in range(0, rows, task.chunk_rows):
        chunk = slice(start, min(start + task.chunk_rows, rows))
        count = chunk.stop - start
        logits = [torch.mm(features[chunk], weight.T, out=out[:count]) for (features, weight), out in zip(products, buffers, strict=True)]
        teacher_logits = torch.mm(task.teacher_hidden[chunk], head.weight.T, out=teacher_buffer[:count])
        with torch.cuda.device_of(hidden):
            _distillation_kernel[(count,)](
                logits[0],
                logits[-1],
                teacher_logits,
                head.bias,
                reachable,
                task.labels[chunk],
                task.weights[chunk],
                statistics[:, chunk],
                matches[chunk],
                rows,
                vocabulary,
                head.scale,
                head.softcap or 1.0,
                task.cross_entropy,
                task.l1,
                task.kl,
                HAS_BIAS=len(products) == 2,
                HAS_HEAD_BIAS=head.bias is not None,
                HAS_SOFTCAP=head.softcap is not None,
                REDUCED=reachable is not None,
                WITH_GRADIENT=with_gradient,
                BLOCK=min(4096, triton.next_power_of_2(vocabulary)),
                num_warps=8,
            )
        if with_gradient:
            for (_, weight), logits_gradient, gradient in zip(products, logits, feature_gradients, strict=True):
                torch.mm(logits_gradient, weight, out=gradient[chunk])
            if bias:
                bias_head_gradient += logits[-1].T @ bias[0][chunk]
    if not bias:
        return _Result(statistics, matches, feature_gradients)
    if task.draft_rows is not None:
        bias_head_gradient = bias_head_gradient[task.draft_rows]
    if len(products) == 1:
        feature_gradients = list(feature_gradients[0].split([hidden.shape[1], bias[0].shape[1]], dim=1))
    return _Result(statistics, matches, [*feature_gradients, bias_head_gradient])


# -- the public functions ----------------------------------------------------------------------------------------


class _DistillationLoss(torch.autograd.Function):
    """Computes the gradients together with the loss; backward scales them."""

    @staticmethod
    def forward(ctx: Any, task: _Task, use_kernel: bool, with_gradient: bool, *inputs: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast(inputs[0].device.type, enabled=False):
            result = (_kernel if use_kernel else _reference)(task, [x.detach() for x in inputs], with_gradient)
        cross_entropy, l1, kl, acceptance = result.statistics.unbind()
        loss = (task.weights * (task.cross_entropy * cross_entropy + task.l1 * l1 + task.kl * kl)).sum()
        ctx.save_for_backward(*(gradient.to(x.dtype) for gradient, x in zip(result.gradients, inputs, strict=True)))
        ctx.mark_non_differentiable(cross_entropy, l1, kl, acceptance, result.matches)
        return loss, cross_entropy, l1, kl, acceptance, result.matches

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *(gradient * loss_gradient for gradient in ctx.saved_tensors)


def distillation_loss(
    hidden: Tensor,
    head: Tensor,
    teacher_hidden: Tensor,
    labels: Tensor,
    weights: Tensor,
    *,
    bias_factors: Tensor | None = None,
    bias_head: Tensor | None = None,
    cross_entropy: float,
    l1: float,
    kl: float,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    head_bias: Tensor | None = None,
    draft_rows: Tensor | None = None,
    chunk_rows: int | None = None,
    implementation: Literal["auto", "reference", "triton"] = "auto",
) -> DistillationOutput:
    """Weighted sum of the losses in the module's text, and each row's statistics, without [M, V] in memory.

    Differentiable once, in hidden, bias_factors and bias_head; the head is frozen. No host synchronisation and no
    shape that depends on data, so it can be captured in a CUDA graph. On CUDA the matrix products run in the
    head's dtype and the softmax in float32; elsewhere, and in float64, everything runs in float32 or float64.

    Args:
        hidden: [M, H] drafter states after its final norm.
        head: [V, H] the verifier's head.
        teacher_hidden: [M, H] verifier states after its final norm, at the position that predicts the label.
        labels: [M] int64 verifier ids; an id outside the draft vocabulary (or no id at all, as -1) adds no CE.
        weights: [M] float32. A row of weight zero is skipped, whatever it holds.
        bias_factors: [M, r] rows f of the Markov bias M f, or None.
        bias_head: [Vd, r] the Markov bias's M, or None.
        cross_entropy: coefficient ce.
        l1: coefficient of sum |p - q|, the full L1 distance and not half of it.
        kl: coefficient of KL(verifier || drafter).
        logit_scale: factor on W h.
        logit_softcap: cap c of c * tanh(logits / c), or None.
        head_bias: [V] or None.
        draft_rows: [Vd] int64 different verifier ids, the reduced draft vocabulary, or None where Vd = V.
        chunk_rows: rows a chunk; None keeps a chunk of logits near 1 GB on a GPU, 32 MB elsewhere.
        implementation: "auto" takes the kernel on CUDA below float64.

    Raises:
        ValueError: only one of bias_factors and bias_head is given.
    """
    if (bias_factors is None) != (bias_head is None):
        raise ValueError("distillation_loss needs bias_factors and bias_head together; give both or neither")
    use_kernel = implementation == "triton" or (
        implementation == "auto" and head.is_cuda and head.dtype != torch.float64 and triton is not None
    )
    # The kernel takes the products as the tensor cores leave them; the reference is exact to float32.
    accurate = torch.promote_types(head.dtype, torch.float32)
    dtype = head.dtype if use_kernel else accurate
    frozen = FrozenHead(head.detach(), head_bias, float(logit_scale), logit_softcap).to(dtype)

    # A skipped row may hold anything, but 0 * nan is nan: it enters no product.
    used = (weights != 0)[:, None]
    task = _Task(
        frozen,
        draft_rows,
        torch.where(used, teacher_hidden.detach().to(dtype), 0.0),
        labels.contiguous(),
        weights.detach().to(accurate).contiguous(),
        float(cross_entropy),
        float(l1),
        float(kl),
        frozen.default_chunk_rows() if chunk_rows is None else chunk_rows,
    )
    inputs = [torch.where(used, hidden.to(dtype), 0.0)]
    if bias_factors is not None and bias_head is not None:
        inputs += [torch.where(used, bias_factors.to(dtype), 0.0), bias_head.to(dtype)]
    with_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    outputs = _DistillationLoss.apply(task, use_kernel, with_gradient, *inputs)  # type: ignore[no-untyped-call]
    return DistillationOutput(*outputs)
