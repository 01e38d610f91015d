"""Distillation loss: cross-entropy, L1 and KL of a drafter against its verifier, straight from hidden states.

With draft logits z, teacher logits t, p = softmax(z), q = softmax(t) in float32 and label y, for every row

    CE = -log p_y                             dCE/dz = p - e_y
    L1 = sum |p - q| (twice total variation)  dL1/dz = p * (s - <p, s>),  s = sign(p - q)
    KL = sum q * log(q / p)                   dKL/dz = p - q
    acceptance a = sum min(p, q) = 1 - L1 / 2, the probability that rejection sampling keeps a token drawn from p
    BCE = -a log c - (1 - a) log(1 - c)       dBCE/dlogit = c - a, of the drafter's own estimate c of a; a is constant there

(DSpark section 3.3). The label is the data's token or the verifier's likeliest one. Logits come from the verifier's frozen
head W and, for DSpark, a low-rank Markov bias:

    z = softcap(scale * W h + b) + M f,    t = softcap(scale * W h_teacher + b).

[rows, vocabulary] never exists as a whole: rows go through in chunks (`row_chunks.py`), and each chunk leaves the gradients of h,
f and M behind, so that the backward pass is one multiplication. Rows of weight zero are left out, and a teacher row that
serves several draft rows of a chunk is computed once. Arithmetic for n draft and t teacher rows: 2 V H (2 n + t).
Cross-entropy against the data's labels needs no teacher: without one t is 0, and L1, KL and acceptance stay unknown.

Weights may depend on the drafter's own log p_y (D-PACE): a chunk asks for them between its logits and their gradients.

Reduced draft vocabulary (`draft_rows`): p is zero outside it while q stays the full softmax, so L1 and acceptance
charge the drafter for the tokens it cannot propose. CE is zero where the label lies outside. KL, infinite
otherwise, is taken against q renormalised to the draft vocabulary. Draft logits have its columns only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from speculators.kernels.cross_entropy import cross_entropy_
from speculators.kernels.distillation_rows import RowSums, distil_rows_, row_losses
from speculators.kernels.frozen_head import FrozenHead, label_columns
from speculators.kernels.linear_cross_entropy import linear_cross_entropy, sweep_rows
from speculators.kernels.log_sums import log_sums
from speculators.kernels.row_chunks import Chunk, row_chunks
from speculators.kernels.scaled import scaled

try:
    import triton
except ImportError:  # no build for this platform: the reference serves it
    triton = None

__all__ = ["DistillationOutput", "distillation_loss"]

# Log-probabilities of the labels [n] of some rows and which rows these are [n] -> their weights [n] float32.
Reweigh = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class DistillationOutput:
    """Loss and statistics of `distillation_loss`. A row of weight zero is skipped: its statistics are 0 and False.

    Without a teacher, `l1`, `kl` and `acceptance` are None.

    Attributes:
        loss: scalar, sum_i w_i * (ce * CE_i + l1 * L1_i + kl * KL_i + confidence * BCE_i); the only differentiable one.
        cross_entropy: [M] nats; 0 where the label lies outside the draft vocabulary.
        l1: [M] in [0, 2].
        kl: [M] nats.
        acceptance: [M] in [0, 1].
        matches: [M] bool, the drafter's likeliest token is the verifier's; without a teacher, the label.
        weights: [M] w_i.
        confidence_cross_entropy: [M] nats, BCE; None without confidence logits.
    """

    loss: Tensor
    cross_entropy: Tensor
    l1: Tensor | None
    kl: Tensor | None
    acceptance: Tensor | None
    matches: Tensor
    weights: Tensor
    confidence_cross_entropy: Tensor | None = None


@dataclass(frozen=True)
class _Task:
    """What the rows are compared with and how the losses are weighed."""

    head: FrozenHead
    draft_head: FrozenHead  # of the draft vocabulary
    draft_rows: Tensor | None  # [Vd]
    teacher_hidden: Tensor | None  # [T, H]
    labels: Tensor | None  # [M], None for the verifier's likeliest token; there without a teacher
    columns: Tensor | None  # [M] of the labels among the draft logits, -1 for none
    columns_of_ids: Tensor | None  # [V] of verifier ids, likewise; None where they are the ids
    weights: Tensor  # [M]
    reweigh: Reweigh | None
    cross_entropy: float
    l1: float
    kl: float
    chunks: list[Chunk]

    def targets(self, chunk: Chunk, teacher_choices: Tensor | None) -> Tensor:
        """The tokens [n] that the drafter should like most: the likeliest ones [t] of the teacher rows, or else the labels."""
        if teacher_choices is not None:
            return teacher_choices[chunk.positions]
        assert self.labels is not None
        return self.labels[chunk.rows]

    def label_columns(self, chunk: Chunk, targets: Tensor) -> Tensor:
        """Columns [n] of a chunk's labels among the draft logits, -1 for none."""
        if self.columns is not None:
            return self.columns[chunk.rows]
        return targets if self.columns_of_ids is None else self.columns_of_ids[targets]

    def weigh(self, chunk: Chunk, log_probability: Tensor, columns: Tensor) -> Tensor:
        """Weights of a chunk's rows, kept in `weights` too."""
        if self.reweigh is None:
            return self.weights[chunk.rows]
        log_probability = torch.where(columns >= 0, log_probability, float("-inf"))
        weights = self.reweigh(log_probability, chunk.row_numbers()).to(self.weights.dtype)
        weights = torch.where(self.weights[chunk.rows] != 0, weights, 0.0)
        self.weights[chunk.rows] = weights
        return weights

    def matches(self, draft_choices: Tensor, targets: Tensor) -> Tensor:
        """Whether the drafter's likeliest columns [n] are the targets."""
        return (draft_choices if self.draft_rows is None else self.draft_rows[draft_choices]) == targets


@dataclass(frozen=True)
class _Result:
    """What the chunks fill in."""

    statistics: Tensor  # [4, M]: cross-entropy, L1, KL, acceptance; [1, M] without a teacher
    matches: Tensor  # [M] bool
    gradients: list[Tensor]  # of hidden, bias_factors and bias_head, as far as these are there; empty without gradient

    @classmethod
    def empty(cls, task: _Task, inputs: list[Tensor]) -> "_Result":
        rows, device = len(task.weights), task.weights.device
        statistics = torch.zeros(1 if task.teacher_hidden is None else 4, rows, dtype=task.weights.dtype, device=device)
        gradients = [torch.zeros(x.shape, dtype=x.dtype, device=device) for x in inputs[:2]]  # contiguous, whatever x is
        gradients += [torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=device) for x in inputs[2:]]
        return cls(statistics, torch.zeros(rows, dtype=torch.bool, device=device), gradients)


# -- the definition ----------------------------------------------------------------------------------------------


def _reference(task: _Task, inputs: list[Tensor], with_gradient: bool) -> _Result:
    """Plain PyTorch on any device, gradients by autograd. `inputs`: hidden, and bias_factors with bias_head."""
    terms = [(c, term) for term, c in enumerate((task.cross_entropy, task.l1, task.kl)) if c]
    result = _Result.empty(task, inputs if with_gradient else [])
    for chunk in task.chunks:
        teacher_logits = teacher_choices = None
        if task.teacher_hidden is not None:
            teacher_logits = task.head.logits(chunk.take_teacher(task.teacher_hidden))
            teacher_choices, teacher_logits = teacher_logits.argmax(dim=1), teacher_logits[chunk.positions]
        targets = task.targets(chunk, teacher_choices)
        columns = task.label_columns(chunk, targets)
        places = columns.clamp(min=0)
        leaves = [chunk.take(x) for x in inputs[:2]] + inputs[2:]
        with torch.set_grad_enabled(with_gradient and bool(terms)):
            leaves = [leaf.detach().requires_grad_(torch.is_grad_enabled()) for leaf in leaves]
            draft_logits = task.draft_head.logits(*leaves)
            log_p = F.log_softmax(draft_logits, dim=1)
            with torch.no_grad():
                weights = task.weigh(chunk, log_p.gather(1, places[:, None])[:, 0], columns)
            losses = row_losses(log_p, teacher_logits, places, columns >= 0, task.draft_rows)
            if torch.is_grad_enabled():
                loss = torch.stack([(c * weights * losses[term]).sum() for c, term in terms]).sum()
                gradients = torch.autograd.grad(loss, leaves)
                for total, gradient in zip(result.gradients[:2], gradients[:2], strict=False):
                    total[chunk.rows] = gradient
                for total, gradient in zip(result.gradients[2:], gradients[2:], strict=True):
                    total += gradient
        used = weights != 0
        result.statistics[:, chunk.rows] = torch.where(used, losses.detach(), 0.0)
        result.matches[chunk.rows] = task.matches(draft_logits.detach().argmax(dim=1), targets) & used
    return result


# -- the kernels -------------------------------------------------------------------------------------------------


def _kernel(task: _Task, inputs: list[Tensor], with_gradient: bool) -> _Result:
    """Matrix products in the head's dtype around the kernels, which turn a chunk's logits into their gradients."""
    result = _Result.empty(task, inputs if with_gradient else [])
    if not task.chunks:
        return result
    head, draft_head = task.head, task.draft_head
    hidden, *bias = inputs
    if task.teacher_hidden is None and not bias:
        for chunk in task.chunks:
            _sweep(task, chunk, hidden, result, with_gradient)
        return result
    # Where nothing comes between W h and M f, the bias is added to the logits; a capped or scaled head keeps the two apart.
    apart = bool(bias) and (head.softcap is not None or head.scale != 1.0)
    joint = task.draft_rows is None and not apart  # rows of drafter and teacher in one product
    most, most_teachers = (max(counts) for counts in zip(*((c.count, c.teacher_count) for c in task.chunks), strict=True))
    if task.teacher_hidden is None:
        most_teachers = 0
    buffer = hidden.new_empty(most + most_teachers if joint else most, len(draft_head.weight))
    teacher_buffer = hidden.new_empty(0 if joint else most_teachers, len(head.weight))
    bias_buffer = torch.empty_like(buffer) if apart else None
    for chunk in task.chunks:
        count = chunk.count
        states, draft, factors = chunk.take(hidden), buffer[:count], chunk.take(bias[0]) if bias else None
        bias_logits = None if bias_buffer is None else bias_buffer[:count]
        if joint and task.teacher_hidden is not None:
            logits = buffer[: count + chunk.teacher_count]
            teacher = logits[count:]
            torch.mm(torch.cat([states, chunk.take_teacher(task.teacher_hidden)]), head.weight.T, out=logits)
        else:
            torch.mm(states, draft_head.weight.T, out=draft)
            teacher = teacher_buffer[: chunk.teacher_count]
            if task.teacher_hidden is not None:
                torch.mm(chunk.take_teacher(task.teacher_hidden), head.weight.T, out=teacher)
        if factors is not None and bias_logits is not None:
            torch.mm(factors, bias[1].T, out=bias_logits)
        elif factors is not None:
            draft.addmm_(factors, bias[1].T)
        with torch.cuda.device_of(hidden):
            if task.teacher_hidden is None:
                _launch_alone(task, chunk, draft, bias_logits, result, with_gradient)
            else:
                _launch(task, chunk, draft, bias_logits, teacher, result, with_gradient)
        if with_gradient:
            _multiply(draft, draft_head.weight, result.gradients[0], chunk)
            if factors is not None:  # without a buffer of its own, M f has the gradient of W h
                of_bias = draft if bias_logits is None else bias_logits
                _multiply(of_bias, bias[1], result.gradients[1], chunk)
                result.gradients[2].add_(torch.mm(of_bias.T, factors))
    return result


def _multiply(left: Tensor, right: Tensor, target: Tensor, chunk: Chunk) -> None:
    """left @ right into the chunk's rows of a target; without a copy where they are a range."""
    if isinstance(chunk.rows, slice):
        torch.mm(left, right, out=target[chunk.rows])
    else:
        target[chunk.rows] = torch.mm(left, right)


def _launch(
    task: _Task, chunk: Chunk, draft: Tensor, bias_logits: Tensor | None, teacher: Tensor, result: _Result, with_gradient: bool
) -> None:
    """One chunk beside its teacher: statistics into `result`, the gradients of the logits over the logits."""
    draft_head = task.draft_head
    draft_log_sums, draft_choices = log_sums(draft, draft_head, bias_logits, implementation="triton")
    teacher_log_sums, teacher_choices = log_sums(teacher, task.head, implementation="triton")
    reached = teacher_log_sums
    if task.draft_rows is not None:
        reached = log_sums(teacher, task.head, chosen=task.draft_rows, implementation="triton")[0]
    if task.reweigh is not None:
        columns = task.label_columns(chunk, teacher_choices[chunk.positions])
        places = columns.clamp(min=0)
        label_logits = draft_head.finish(draft.gather(1, places[:, None])[:, 0], places)
        if bias_logits is not None:
            label_logits = label_logits + bias_logits.gather(1, places[:, None])[:, 0]
        task.weigh(chunk, label_logits - draft_log_sums, columns)
    distil_rows_(
        draft,
        bias_logits,
        teacher,
        chunk.positions,
        chunk.rows,
        task.head,
        draft_head,
        task.draft_rows,
        RowSums(draft_log_sums, draft_choices, teacher_log_sums, teacher_choices, reached),
        task.columns,
        task.columns_of_ids,
        task.weights,
        result.statistics,
        result.matches,
        cross_entropy=task.cross_entropy,
        l1=task.l1,
        kl=task.kl,
        with_gradient=with_gradient,
    )


def _sweep(task: _Task, chunk: Chunk, hidden: Tensor, result: _Result, with_gradient: bool) -> None:
    """One chunk without teacher and Markov bias."""
    assert task.columns is not None
    columns = task.columns[chunk.rows]

    def weigh(cross_entropy: Tensor) -> Tensor:
        return task.cross_entropy * task.weigh(chunk, -cross_entropy, columns)

    cross_entropy, matches = linear_cross_entropy(
        chunk.take(hidden),
        task.draft_head,
        columns,
        chunk.rows,
        weigh=weigh if with_gradient else None,
        gradient=result.gradients[0] if with_gradient else None,
        implementation="triton",
    )
    if not with_gradient:
        weigh(cross_entropy)  # for the weights that it keeps
    used = task.weights[chunk.rows] != 0
    result.statistics[0, chunk.rows] = torch.where(used, cross_entropy, 0.0)
    result.matches[chunk.rows] = matches & used


def _launch_alone(task: _Task, chunk: Chunk, draft: Tensor, bias_logits: Tensor | None, result: _Result, with_gradient: bool) -> None:
    """One chunk without teacher, with a Markov bias."""
    columns = task.columns
    assert columns is not None

    def launch(gradient_scale: float | None) -> None:
        cross_entropy_(
            draft,
            bias_logits,
            task.draft_head,
            chunk.rows,
            columns,
            task.weights,
            result.statistics[0],
            result.matches,
            gradient_scale=gradient_scale,
            implementation="triton",
        )

    if task.reweigh is not None:
        launch(None)
        task.weigh(chunk, -result.statistics[0, chunk.rows], columns[chunk.rows])
    launch(task.cross_entropy if with_gradient else None)


# -- the public function -----------------------------------------------------------------------------------------


class _DistillationLoss(torch.autograd.Function):
    """Computes the gradients together with the loss; backward scales them."""

    @staticmethod
    def forward(ctx: Any, task: _Task, use_kernel: bool, with_gradient: bool, *inputs: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast(inputs[0].device.type, enabled=False):
            result = (_kernel if use_kernel else _reference)(task, [x.detach() for x in inputs], with_gradient)
        terms = [c * values for c, values in zip((task.cross_entropy, task.l1, task.kl), result.statistics, strict=False) if c]
        loss = (task.weights * sum(terms, torch.zeros_like(task.weights))).sum()
        if with_gradient:
            ctx.save_for_backward(*(gradient.to(x.dtype) for gradient, x in zip(result.gradients, inputs, strict=True)))
        ctx.mark_non_differentiable(result.statistics, result.matches)
        return loss, result.statistics, result.matches

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *(scaled(gradient, loss_gradient) for gradient in ctx.saved_tensors)


def distillation_loss(
    hidden: Tensor,
    head: Tensor,
    teacher_hidden: Tensor | None,
    labels: Tensor | None,
    weights: Tensor,
    *,
    teacher_rows: Tensor | None = None,
    bias_factors: Tensor | None = None,
    bias_head: Tensor | None = None,
    confidence_logits: Tensor | None = None,
    cross_entropy: float,
    l1: float,
    kl: float,
    confidence: float = 1.0,
    reweigh: Reweigh | None = None,
    block_rows: int = 1,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    head_bias: Tensor | None = None,
    draft_rows: Tensor | None = None,
    chunk_rows: int | None = None,
    implementation: Literal["auto", "reference", "triton"] = "auto",
) -> DistillationOutput:
    """Weighted sum of the losses in the module's text, and each row's statistics, without [M, V] in memory.

    Differentiable once, in hidden, bias_factors, bias_head and confidence_logits; the head is frozen. Captured in a CUDA
    graph, it synchronises nothing and takes all rows; otherwise it asks the device once which rows count. On CUDA the
    matrix products run in the head's dtype and the softmax in float32; elsewhere, and in float64, everything runs in float32 or
    float64.

    Args:
        hidden: [M, H] drafter states after its final norm.
        head: [V, H] the verifier's head.
        teacher_hidden: [T, H] verifier states after its final norm; T = M where `teacher_rows` is None. None computes nothing of the
            verifier, for cross-entropy against labels alone.
        labels: [M] int64 verifier ids; an id outside the draft vocabulary (or no id at all, as -1) adds no CE. None takes the
            verifier's likeliest token.
        weights: [M] float32. A row of weight zero is skipped, whatever it holds.
        teacher_rows: [M] int64, the row of `teacher_hidden` at the position that predicts the label; None for row i.
        bias_factors: [M, r] rows f of the Markov bias M f, or None.
        bias_head: [Vd, r] the Markov bias's M, or None.
        confidence_logits: [M] logits of the drafter's estimate of its acceptance, or None.
        cross_entropy: coefficient ce.
        l1: coefficient of sum |p - q|, the full L1 distance and not half of it.
        kl: coefficient of KL(verifier || drafter).
        confidence: coefficient of the BCE.
        reweigh: gives the weights of rows from the log-probabilities of their labels, -inf outside the draft vocabulary;
            `weights` then says only which rows count. It is called with whole blocks.
        block_rows: rows of a block of `reweigh`; divides M.
        logit_scale: factor on W h.
        logit_softcap: cap c of c * tanh(logits / c), or None.
        head_bias: [V] or None.
        draft_rows: [Vd] int64 different verifier ids, the reduced draft vocabulary, or None where Vd = V.
        chunk_rows: rows a chunk; None takes `FrozenHead.default_chunk_rows`, or `sweep_rows` for the kernel without teacher and bias.
        implementation: "auto" takes the kernel on CUDA below float64.

    Raises:
        ValueError: only one of bias_factors and bias_head is given, or no teacher where something depends on it.
    """
    if (bias_factors is None) != (bias_head is None):
        raise ValueError("distillation_loss needs bias_factors and bias_head together; give both or neither")
    if teacher_hidden is None and (labels is None or l1 or kl or confidence_logits is not None):
        raise ValueError(
            "distillation_loss without teacher_hidden is cross-entropy against labels alone: it needs labels, l1 = kl = 0"
            f" (here {l1} and {kl}) and no confidence_logits"
        )
    use_kernel = implementation == "triton" or (
        implementation == "auto" and head.is_cuda and head.dtype != torch.float64 and triton is not None
    )
    # The kernel takes the products as the tensor cores leave them; the reference is exact to float32.
    accurate = torch.promote_types(head.dtype, torch.float32)
    dtype = head.dtype if use_kernel else accurate
    head_bias = None if head_bias is None else head_bias.contiguous()
    draft_rows = None if draft_rows is None else draft_rows.contiguous()
    frozen = FrozenHead(head.detach(), head_bias, float(logit_scale), logit_softcap).to(dtype)
    draft_head = frozen.select(draft_rows)
    weights = weights.detach().to(accurate)
    if chunk_rows is None and teacher_hidden is None and bias_factors is None and use_kernel:
        chunk_rows = sweep_rows(draft_head)
    chunk_rows = chunk_rows or frozen.default_chunk_rows(len(draft_head.weight), 0 if teacher_hidden is None else len(head))
    columns = columns_of_ids = None
    if labels is not None:
        columns = label_columns(labels, len(head), draft_rows)
    elif draft_rows is not None:
        columns_of_ids = label_columns(torch.arange(len(head), device=head.device), len(head), draft_rows)
    task = _Task(
        frozen,
        draft_head,
        draft_rows,
        None if teacher_hidden is None else teacher_hidden.detach().to(dtype),
        labels,
        columns,
        columns_of_ids,
        weights.contiguous() if reweigh is None else weights.clone(),
        reweigh,
        float(cross_entropy),
        float(l1),
        float(kl),
        row_chunks(weights != 0, None if teacher_hidden is None else teacher_rows, chunk_rows=chunk_rows, block_rows=block_rows),
    )
    inputs = [hidden.to(dtype)]
    if bias_factors is not None and bias_head is not None:
        inputs += [bias_factors.to(dtype), bias_head.to(dtype)]
    with_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    loss, statistics, matches = _DistillationLoss.apply(task, use_kernel, with_gradient, *inputs)  # type: ignore[no-untyped-call]
    cross_entropy_rows, *others = statistics.unbind()
    l1_rows, kl_rows, acceptance = others or (None, None, None)
    entropy = None
    if confidence_logits is not None:
        assert acceptance is not None
        used = weights != 0
        logits = torch.where(used, confidence_logits.to(accurate), 0.0)
        entropy = torch.where(used, F.binary_cross_entropy_with_logits(logits, acceptance, reduction="none"), 0.0)
        loss = loss + confidence * (task.weights * entropy).sum()
        entropy = entropy.detach()
    return DistillationOutput(loss, cross_entropy_rows, l1_rows, kl_rows, acceptance, matches, task.weights, entropy)
