"""The one training batch: packed rows with the verifier's hidden states."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class TrainingBatch:
    """Packed rows. R rows of S tokens; a row holds whole documents one after the other, then padding.

    Attributes:
        input_ids: [R, S] int64.
        hidden_states: [R, S, taps * hidden], aux hidden states, ascending layer ids.
        last_hidden_state: [R, S, hidden], the residual stream before the final norm.
        loss_mask: [R, S] bool, True where the token is the verifier's own reply (a label), stop token included.
        position_ids: [R, S] int64, restarting at 0 with every document.
        document_ids: [R, S] int64, ascending inside a row, -1 on padding.
    """

    input_ids: Tensor
    hidden_states: Tensor
    last_hidden_state: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    document_ids: Tensor


@dataclass(frozen=True)
class LossOutput:
    """What `training_loss` returns.

    Attributes:
        loss: scalar, differentiable.
        metrics: name -> (numerator, denominator), detached scalars or [K] vectors by draft position. Ratios are
            formed only after summing over micro-batches and ranks, so that means weigh tokens right. The denominator of
            "loss" is the batch's weight: `loss` times it must be a sum over the batch, zero for an empty one.
    """

    loss: Tensor
    metrics: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
