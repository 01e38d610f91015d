"""Anchors: where training blocks start, what they may see and which of their slots are supervised.

A block drafts K tokens after its anchor. Everything here is index arithmetic on packed rows; no dense masks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from speculators.training.batch import TrainingBatch


def eligible_anchors(loss_mask: Tensor, document_ids: Tensor) -> Tensor:
    """Tokens that may anchor a block: reply tokens followed by a reply token of the same document.

    Args:
        loss_mask: [R, S] bool.
        document_ids: [R, S] int64.

    Returns:
        [R, S] bool (DeepSpec's rule, arXiv 2607.05147 code).
    """
    eligible = torch.zeros_like(loss_mask)
    eligible[:, :-1] = loss_mask[:, :-1] & loss_mask[:, 1:] & (document_ids[:, :-1] == document_ids[:, 1:])
    return eligible


@dataclass(frozen=True)
class Anchors:
    """N anchors a row. Neighbours see nearly the same context where they ascend, which attention likes.

    Attributes:
        index: [R, N] int64, row index of each anchor token.
        valid: [R, N] bool; False where a row has fewer eligible tokens than N (such a block has no supervised slot).
        document_start: [R, N] int64, row index of the first token of the anchor's document.
        position: [R, N] int64, position of the anchor inside its document.
        rank: [R, N] int64, a permutation of 0 .. N - 1 in every row, valid anchors first: "the first n of them" is a
            random choice, whatever their order.
    """

    index: Tensor
    valid: Tensor
    document_start: Tensor
    position: Tensor
    rank: Tensor

    @classmethod
    def at(cls, batch: TrainingBatch, index: Tensor, valid: Tensor | None = None, rank: Tensor | None = None) -> Anchors:
        """Anchors at given row indices, [R, N], ranked as they stand unless `rank` says otherwise."""
        position = batch.position_ids.gather(1, index)
        valid = torch.ones_like(index, dtype=torch.bool) if valid is None else valid
        rank = torch.arange(index.shape[1], device=index.device).expand_as(index) if rank is None else rank
        return cls(index, valid, index - position, position, rank)

    @classmethod
    def sample(cls, batch: TrainingBatch, count: int) -> Anchors:
        """Draw `count` anchors a row uniformly without replacement (DFlash, arXiv 2602.06036, section 4.2), in ascending order.

        Never the first token of a document: drafting always follows at least one token of context.
        """
        eligible = eligible_anchors(batch.loss_mask, batch.document_ids) & (batch.position_ids > 0)
        keys = torch.rand(eligible.shape, device=eligible.device).masked_fill(~eligible, -1.0)
        top = keys.topk(min(count, keys.shape[1]), dim=1)  # the largest keys first: a random order
        index = torch.where(top.values >= 0, top.indices, keys.shape[1])
        index, rank = index.sort(dim=1, stable=True)
        valid = index < keys.shape[1]
        return cls.at(batch, index.masked_fill(~valid, 0), valid, rank)

    def part(self, number: int, parts: int) -> Anchors:
        """The anchors whose rank is `number` modulo `parts`, in their order, with ranks of their own: the same number in every row."""
        count = len(range(number, self.index.shape[1], parts))
        chosen = (self.rank % parts != number).to(torch.int8).argsort(dim=1, stable=True)[:, :count]
        index, valid, start, position, rank = (
            x.gather(1, chosen) for x in (self.index, self.valid, self.document_start, self.position, self.rank)
        )
        return Anchors(index, valid, start, position, rank // parts)

    def input_ids(self, batch: TrainingBatch) -> Tensor:
        """[R, N] the anchor tokens."""
        return batch.input_ids.gather(1, self.index)


@dataclass(frozen=True)
class Supervision:
    """What the K draft slots of every block are trained on.

    Attributes:
        labels: [R, N, K] int64, token at anchor + 1 .. anchor + K.
        previous: [R, N, K] int64, token before each label (teacher forcing).
        teacher_rows: [R, N, K] int64, row index whose verifier output predicts the label: label index - 1.
        mask: [R, N, K] bool, supervised slots: the longest prefix of reply tokens inside the anchor's document.
    """

    labels: Tensor
    previous: Tensor
    teacher_rows: Tensor
    mask: Tensor

    @classmethod
    def of(cls, batch: TrainingBatch, anchors: Anchors, count: int, first: int = 1) -> Supervision:
        """Supervise `count` slots, the first of them on the token at anchor + `first`."""
        length = batch.input_ids.shape[1]
        offsets = torch.arange(first, first + count, device=anchors.index.device)
        index = anchors.index[..., None] + offsets
        inside = index < length
        index = index.clamp(max=length - 1)

        def gather(values: Tensor, at: Tensor) -> Tensor:
            return values.gather(1, at.flatten(1)).view_as(at)

        same_document = gather(batch.document_ids, index) == batch.document_ids.gather(1, anchors.index)[..., None]
        kept = inside & same_document & gather(batch.loss_mask, index) & anchors.valid[..., None]
        return cls(
            labels=gather(batch.input_ids, index),
            previous=gather(batch.input_ids, index - 1),
            teacher_rows=index - 1,
            mask=kept.cumprod(dim=-1).bool(),
        )

    def teacher_hidden(self, batch: TrainingBatch) -> Tensor:
        """[R, N, K, hidden]: the verifier's last hidden states (before the final norm) that predict the labels."""
        rows = self.teacher_rows.flatten(1)[..., None].expand(-1, -1, batch.last_hidden_state.shape[-1])
        return batch.last_hidden_state.gather(1, rows).view(*self.teacher_rows.shape, -1)
