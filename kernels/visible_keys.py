"""Which keys each query of block attention sees: a range of its row's context and a range of its row's block keys.

Documents, windows, causal and bidirectional blocks, blocks of unequal length and ordinary causal attention (a context
that ends at the query itself) are all such ranges, so that no kernel needs to know any of them.

Positions: context slot c sits at position c and slot j of a block at context_end + j. A causal query sees the slots of its
block up to its own; a sliding window W hides keys at positions <= p - W of a query at p.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class VisibleKeys:
    """The keys of every query of a batch, shared by all layers with the same window. Rows are independent.

    Attributes:
        context_start, context_end: [R, Q] int32, the range of context keys.
        block_start, block_end: [R, Q] int32, the range of block keys.
        reach: a query's block keys lie at most this many away from where it stands among them; for the reference, which
            leaves out the others.
        valid: [R, Q] bool, False where a query sees nothing at all (its output is zero); None where every query sees a key.
    """

    context_start: Tensor
    context_end: Tensor
    block_start: Tensor
    block_end: Tensor
    reach: int
    valid: Tensor | None = None
    _derived: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of_queries(
        cls,
        context_start: Tensor,
        context_end: Tensor,
        first_key: Tensor,
        num_keys: Tensor | int,
        slot: Tensor,
        *,
        causal: bool,
        window: int | None,
        reach: int,
        valid: Tensor | None = None,
    ) -> "VisibleKeys":
        """From where each query stands.

        Args:
            context_start: [R, Q] int64, the first context slot of the query's block.
            context_end: [R, Q] int64, one past the last.
            first_key: [R, Q] int64, index of its block's first key among the row's block keys.
            num_keys: keys of its block, one number or [R, Q] int64.
            slot: [R, Q] int64, its own slot in the block.
            causal: whether it sees only slots up to its own.
            window: keys it sees counted back from itself, itself included, or None for all.
            reach: see the class.
            valid: [R, Q] bool; queries that see nothing where False.
        """
        block_start = first_key
        block_end = first_key + (slot + 1 if causal else num_keys)
        if window is not None:
            hidden = slot + 1 - window  # slots of the block that lie outside; negative: as many context slots are inside
            context_start = torch.minimum(torch.maximum(context_start, context_end + hidden), context_end)
            block_start = first_key + hidden.clamp_min(0)
        if valid is not None:
            context_end = torch.where(valid, context_end, context_start)
            block_end = torch.where(valid, block_end, block_start)

        def compact(x: Tensor) -> Tensor:
            return x.to(torch.int32).expand(context_end.shape).contiguous()

        return cls(compact(context_start), compact(context_end), compact(block_start), compact(block_end), reach, valid)

    def table(self, context_keys: int, block_keys: int) -> Tensor:
        """The definition: [R, Q, context_keys + block_keys] bool, True where the query sees the key."""
        return torch.cat(
            [
                in_range(self.context_start, self.context_end, 0, context_keys),
                in_range(self.block_start, self.block_end, 0, block_keys),
            ],
            dim=2,
        )

    def derived(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What `make()` returned the first time; layers that share this object share it."""
        if key not in self._derived:
            self._derived[key] = make()
        return self._derived[key]


def in_range(start: Tensor, end: Tensor, first: int, last: int) -> Tensor:
    """[R, Q, last - first] bool: which of the keys from `first` to `last` lie in each query's range."""
    index = torch.arange(first, last, device=start.device, dtype=start.dtype)
    return (index >= start[:, :, None]) & (index < end[:, :, None])


def visible_blocks(
    context_start: Tensor,
    context_end: Tensor,
    *,
    block_queries: int,
    block_keys: int,
    causal: bool,
    window: int | None = None,
    block_valid: Tensor | None = None,
) -> VisibleKeys:
    """What the queries of equal blocks see, in the order [N, B].

    Args:
        context_start: [R, N] int64, the first context slot of each block.
        context_end: [R, N] int64, one past the last context slot of each block.
        block_queries: B.
        block_keys: Bk >= B; the queries are the last B of the block's slots.
        causal: whether a query sees only block keys up to itself.
        window: sliding window in positions, or None.
        block_valid: [R, N] bool; the queries of an invalid block see nothing.
    """
    rows, blocks = context_end.shape
    shape = (rows, blocks, block_queries)
    slot = torch.arange(block_keys - block_queries, block_keys, device=context_end.device)
    first_key = torch.arange(blocks, device=context_end.device)[:, None] * block_keys

    def by_query(x: Tensor) -> Tensor:
        return x.expand(shape).flatten(1)

    return VisibleKeys.of_queries(
        by_query(context_start[:, :, None]),
        by_query(context_end[:, :, None]),
        by_query(first_key),
        block_keys,
        by_query(slot),
        causal=causal,
        window=window,
        reach=block_keys,
        valid=None if block_valid is None else by_query(block_valid[:, :, None]),
    )


def visible_documents(position_ids: Tensor, *, window: int | None = None) -> VisibleKeys:
    """Ordinary causal attention inside each document: the row itself is the context, and there are no block keys.

    Args:
        position_ids: [R, S] int64, restarting at 0 with every document.
        window: sliding window in positions, or None.
    """
    index = torch.arange(position_ids.shape[1], device=position_ids.device).expand_as(position_ids)
    nothing = torch.zeros_like(index)
    return VisibleKeys.of_queries(
        index - position_ids, index + 1, nothing, 0, nothing - 1, causal=True, window=window, reach=0
    )  # one slot before the block's first: its position is the last context slot's
