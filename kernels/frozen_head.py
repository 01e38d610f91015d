"""The verifier's frozen output head as drafters use it."""

from dataclasses import dataclass

import torch
from torch import Tensor

# Bytes of a chunk's logits, the drafter's and, with one, the teacher's together; on the CPU autograd keeps a few more of them.
_CHUNK_BYTES = {"cuda": 1 << 29, "cpu": 1 << 26}


@dataclass(frozen=True)
class FrozenHead:
    """softcap(scale * W h + b), the verifier's map from normed hidden states to logits.

    Attributes:
        weight: [V, H].
        bias: [V] or None.
        scale: factor on W h.
        softcap: cap c of c * tanh(logits / c), or None.
    """

    weight: Tensor
    bias: Tensor | None
    scale: float
    softcap: float | None

    def to(self, dtype: torch.dtype) -> "FrozenHead":
        """The same head, with tensors of another dtype."""
        return FrozenHead(self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype), self.scale, self.softcap)

    def select(self, rows: Tensor | None) -> "FrozenHead":
        """The head of a reduced vocabulary: [Vd] int64 ids, or None for all."""
        if rows is None:
            return self
        return FrozenHead(self.weight[rows], None if self.bias is None else self.bias[rows], self.scale, self.softcap)

    def logits(self, hidden: Tensor, bias_factors: Tensor | None = None, bias_head: Tensor | None = None) -> Tensor:
        """[n, H] -> [n, V] in float32 or float64. A Markov bias, [n, r] and [V, r], is added after the cap."""
        logits = self.finish(hidden @ self.weight.T)
        if bias_factors is not None and bias_head is not None:
            logits = logits + _at_least_float32(bias_factors @ bias_head.T)
        return logits

    def finish(self, product: Tensor, columns: Tensor | None = None) -> Tensor:
        """W h -> logits: scale, bias and cap, in float32 or float64.

        Args:
            product: [..., V], or the entries [...] that `columns` [...] names.
            columns: int64, or None for all.
        """
        logits = _at_least_float32(product)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.bias is not None:
            logits = logits + (self.bias if columns is None else self.bias[columns])
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits

    def default_chunk_rows(self, draft_columns: int, teacher_columns: int = 0) -> int:
        """Rows whose logits fill a chunk of `_CHUNK_BYTES`; whole tiles of a GPU's products where that allows.

        Args:
            draft_columns: logits of a row of the drafter.
            teacher_columns: logits of a teacher row, one for each; 0 without teacher.
        """
        device = self.weight.device.type
        room = _CHUNK_BYTES.get(device, _CHUNK_BYTES["cpu"])
        rows = room // ((draft_columns + teacher_columns) * self.weight.element_size())
        tile = 128 if rows >= 512 else 8
        return rows // tile * tile if rows >= tile else max(rows, 1)


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def label_columns(labels: Tensor, vocabulary: int, draft_rows: Tensor | None) -> Tensor:
    """Find labels among the columns of the draft logits.

    Args:
        labels: [n] int64 verifier ids; anything outside 0 to vocabulary - 1 counts as unknown.
        vocabulary: V.
        draft_rows: [Vd] int64 ids of a reduced draft vocabulary, or None.

    Returns:
        [n] int64 columns, -1 for unknown labels and for those outside the draft vocabulary.
    """
    known = (labels >= 0) & (labels < vocabulary)
    columns = torch.where(known, labels, 0)
    if draft_rows is not None:
        numbers = torch.arange(len(draft_rows), device=labels.device)
        column_of_id = torch.full((vocabulary,), -1, dtype=torch.int64, device=labels.device).index_copy_(0, draft_rows, numbers)
        columns = column_of_id[columns]
    return torch.where(known, columns, -1)
