"""The training objective all algorithms share: weights by draft position, the distillation loss, metrics."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from speculators.algorithms.anchors import Supervision
from speculators.algorithms.layers import Checkpointing
from speculators.config import FormatModel
from speculators.json_values import NoTruthValues
from speculators.kernels.distillation_loss import DistillationOutput, distillation_loss
from speculators.speculator import Speculator
from speculators.training.batch import LossOutput, TrainingBatch


class Objective(NoTruthValues, FormatModel):
    """Loss of a drafter: sum over supervised slots of w_k (ce * CE + l1 * L1 + kl * KL), divided by the sum of w_k.

    CE is against a token, L1 = sum |p - q| (twice the total variation) and KL = KL(verifier || drafter)
    against the verifier's distribution at temperature 1.

    Attributes:
        cross_entropy, l1, kl: the terms' weights.
        labels: the token of CE and D-PACE: the "data"'s, or the "verifier"'s likeliest one.
        position_weights: "decay" w_k = exp(-(k-1) / decay) (DFlash, arXiv 2602.06036, section 4.2), "dpace" (D-PACE,
            arXiv 2605.18810: a slot weighs the estimated probability that a block reaches it), or "uniform".
        decay: lambda of "decay", in draft positions.
        dpace_alpha: smoothing of "dpace", in [0, 1].
        depth_weights: explicit w_1 .. w_K; overrides position_weights.
        activation_checkpointing: what decoder layers compute again in the backward pass instead of keeping it: nothing, the
            "feed_forward" (half of their memory for a sixth more arithmetic), or whole "layers" (all but their inputs, for a
            third more). The gradients are the same.
        acceptance_in_training: whether training steps measure acceptance and L1 also where the loss is cross-entropy against the data's
            labels alone. False then leaves the verifier's logits out of them, a third of the loss's arithmetic; validation, which runs
            without gradients, always measures. Without effect where the loss (or a confidence head's) needs those logits.
    """

    cross_entropy: float = Field(0.0, ge=0)
    l1: float = Field(0.0, ge=0)
    kl: float = Field(0.0, ge=0)
    labels: Literal["data", "verifier"] = "data"
    position_weights: Literal["decay", "dpace", "uniform"] = "decay"
    decay: float = Field(4.0, gt=0)
    dpace_alpha: float = Field(0.5, ge=0, le=1)
    depth_weights: list[float] | None = None
    activation_checkpointing: Checkpointing = "none"
    acceptance_in_training: bool = True

    @property
    def needs_verifier(self) -> bool:
        """Whether the loss depends on the verifier's distribution, and not on labels of the data alone."""
        return self.labels == "verifier" or self.l1 > 0 or self.kl > 0


@lru_cache(maxsize=64)
def on_device(values: tuple[float, ...], device: torch.device) -> Tensor:
    """A constant vector, copied to the device once: a captured CUDA graph must not copy from the host."""
    return torch.tensor(values, device=device)


def decay_weights(count: int, decay: float, device: torch.device | None = None) -> Tensor:
    """w_k = exp(-(k-1) / decay) for k = 1 .. count, [count] float32."""
    return torch.exp(-torch.arange(count, dtype=torch.float32, device=device) / decay)


def dpace_weights(log_probability: Tensor, mask: Tensor, alpha: float) -> Tensor:
    """D-PACE weights (arXiv 2605.18810): how much of the expected acceptance depends on each slot.

    With s_k = (1 - alpha) p(label_k) + alpha on supervised slots and 1 elsewhere, and P_k = s_1 ... s_k, slot k weighs
    the sum of P_j over the supervised j >= k.

    Args:
        log_probability: [..., K] the drafter's log probability of each label; no gradient flows.
        mask: [..., K] bool, supervised slots.
        alpha: smoothing in [0, 1].

    Returns:
        [..., K] float32, zero on unsupervised slots.
    """
    smoothed = torch.where(mask, (1 - alpha) * log_probability.float().exp() + alpha, 1.0)
    reach = smoothed.cumprod(dim=-1) * mask
    return reach.flip(-1).cumsum(dim=-1).flip(-1) * mask


def block_loss(
    speculator: Speculator,
    objective: Objective,
    batch: TrainingBatch,
    supervision: Supervision,
    hidden: Tensor,
    *,
    mask: Tensor | None = None,
    elements: Tensor | None = None,
    bias_factors: Tensor | None = None,
    bias_head: Tensor | None = None,
    confidence_logits: Tensor | None = None,
    confidence: float = 0.0,
) -> tuple[LossOutput, DistillationOutput, Tensor]:
    """The objective on blocks of draft slots.

    Args:
        speculator: whose verifier gives head and final norm.
        objective: terms and weights.
        batch: the packed rows.
        supervision: labels and teacher rows of [R, N, K] slots.
        hidden: [R, N, K, hidden], the drafter's output after its final norm; [R, E, hidden] with `elements`.
        mask: [R, N, K] bool; supervised slots, `supervision.mask` when None.
        elements: [R, E] int64, which of a row's N * K slots take part at all, each once; None for all. The others are left
            out of the computation, not merely weighted with zero. Not for D-PACE, whose weights depend on whole blocks.
        bias_factors: [R, N, K, rank] of a sequential head whose bias on the logits is `bias_factors @ bias_head.T`.
        bias_head: [draft vocabulary, rank].
        confidence_logits: [R, N, K] of the drafter's own estimate of its acceptance.
        confidence: weight of its binary cross entropy, beside the other terms.

    Returns:
        The loss with metrics by draft position ("l1" and both acceptances where the verifier was asked), the raw terms of the slots
        that took part ([R * N * K], or [R * E]), and the weights [R, N, K].
    """
    verifier = speculator.verifier
    mask = supervision.mask if mask is None else mask
    rows, slots = len(mask), mask.shape[-1]

    def select(values: Tensor) -> Tensor:
        """[R, N, K] -> [M], the slots that take part."""
        return values.flatten() if elements is None else values.flatten(1).gather(1, elements).flatten()

    def restore(values: Tensor) -> Tensor:
        """[M] -> [R, N, K] float32; zero in slots that take no part."""
        if elements is None:
            return values.float().view(mask.shape)
        full = torch.zeros((rows, mask[0].numel()), device=mask.device)
        return full.scatter(1, elements, values.float().view(rows, -1)).view(mask.shape)

    kept = mask.float()
    weights, reweigh = kept, None
    if objective.depth_weights is not None:
        weights = kept * on_device(tuple(objective.depth_weights[:slots]), mask.device)
    elif objective.position_weights == "decay":
        weights = kept * decay_weights(slots, objective.decay, mask.device)
    elif objective.position_weights == "dpace":

        def reweigh(log_probability: Tensor, index: Tensor) -> Tensor:
            """D-PACE weights of some slots, all of a block at once."""
            full = torch.zeros(mask.numel(), device=mask.device).index_put((index,), log_probability.float())
            return dpace_weights(full.view(mask.shape), mask, objective.dpace_alpha).flatten()[index]

    measures = objective.acceptance_in_training or not torch.is_grad_enabled()
    teacher = teacher_rows = None
    if measures or objective.needs_verifier or confidence_logits is not None:
        with torch.no_grad():
            teacher = verifier.final_norm(batch.last_hidden_state).flatten(0, 1)
            first_row = torch.arange(rows, device=mask.device)[:, None, None] * batch.last_hidden_state.shape[1]
            teacher_rows = select(supervision.teacher_rows + first_row)
    terms = distillation_loss(
        hidden.flatten(0, -2),
        verifier.head,
        teacher,
        select(supervision.labels) if objective.labels == "data" else None,
        select(weights),
        teacher_rows=teacher_rows,
        bias_factors=None if bias_factors is None else bias_factors.flatten(0, -2),
        bias_head=bias_head,
        confidence_logits=None if confidence_logits is None else confidence_logits.flatten(),
        cross_entropy=objective.cross_entropy,
        l1=objective.l1,
        kl=objective.kl,
        confidence=confidence,
        reweigh=reweigh,
        block_rows=1 if reweigh is None else slots,
        logit_scale=verifier.logit_scale,
        logit_softcap=verifier.logit_softcap,
        head_bias=verifier.head_bias,
        draft_rows=speculator.draft_token_ids() if speculator.has_reduced_vocabulary else None,
    )
    # D-PACE's weights say how much a block counts; they are not normalised away.
    denominator = kept.sum() if reweigh is not None else weights.sum()
    loss = terms.loss / denominator.clamp_min(1e-6)

    measured = kept * (weights > 0)  # a slot that weighs nothing is not computed: unknown, and no mismatch

    def by_position(values: Tensor) -> tuple[Tensor, Tensor]:
        return (restore(values) * measured).sum((0, 1)), measured.sum((0, 1))

    metrics = {
        "loss": (terms.loss.detach(), denominator.detach()),
        "cross_entropy": by_position(terms.cross_entropy),
    }
    if terms.l1 is not None and terms.acceptance is not None:
        metrics["l1"] = by_position(terms.l1)
        metrics["acceptance"] = by_position(terms.acceptance)
        metrics["greedy_acceptance"] = by_position(terms.matches)
    return LossOutput(loss, metrics), terms, restore(terms.weights)


def expected_acceptance_length(conditional: list[float]) -> float:
    """tau = 1 + sum over k of the product of the first k conditional acceptances (DSpark, arXiv 2607.05147, section 3)."""
    return 1.0 + sum(math.prod(conditional[: k + 1]) for k in range(len(conditional)))
