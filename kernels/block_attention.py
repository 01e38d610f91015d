"""Block attention: many small blocks of queries, each over a slice of its row's context and over its own block.

The one attention of training and drafting (DFlash section 4.2, P-EAGLE's prediction chains, DSpark's parallel
stage). Block n of row r sees

    context slots c with context_start[r, n] <= c < context_end[r, n], and
    its own block keys j: all of them, or j <= i + Bk - B for query i when causal,

never another block. Slots count positions: context slot c sits at position c and block key j at position
context_end + j, so query i, the last B of the Bk block slots, sits at p = context_end + i + Bk - B. A sliding
window W hides keys at positions <= p - W.

This is the reference: scaled dot-product attention with an additive mask, over some blocks of a row at a time.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

# Blocks of a row go through in groups of about this many queries: a query then meets the keys of its group's blocks,
# all masked but its own, instead of those of every block in the row.
_GROUP_QUERIES = 256

# The memory-efficient CUDA kernel wants every stride of the mask to be a multiple of this many elements;
# any other mask is copied at each call.
_MASK_ALIGNMENT = 16


@dataclass(frozen=True)
class BlockAttentionMask:
    """The visibility of one batch of blocks, shared by all layers with the same window; `block_attention_mask` makes it.

    Attributes:
        groups: for each group of consecutive blocks, how many they are and [R, 1, their queries, keys rounded up], 0
            where visible, -inf elsewhere, in the queries' dtype.
        block_valid: [R, N] bool or None.
    """

    groups: tuple[tuple[int, Tensor], ...]
    block_valid: Tensor | None


def block_attention_table(
    context_start: Tensor,
    context_end: Tensor,
    *,
    context_length: int,
    block_queries: int,
    block_keys: int,
    causal: bool,
    window: int | None = None,
    block_valid: Tensor | None = None,
) -> Tensor:
    """Which query sees which key.

    Args:
        context_start: [R, N] int64, the first context slot of each block.
        context_end: [R, N] int64, one past the last context slot of each block.
        context_length: S.
        block_queries: B.
        block_keys: Bk >= B; the queries are the last B of the block's slots.
        causal: whether a query sees only block keys up to itself.
        window: keys a query sees counted back from itself, itself included, or None for all.
        block_valid: [R, N] bool; the rows of an invalid block are all False.

    Returns:
        [R, N * B, S + N * Bk] bool: columns are the row's context, then the block keys of all blocks.
    """
    rows, blocks = context_end.shape
    device = context_end.device
    start, end = context_start[:, :, None, None], context_end[:, :, None, None]  # [R, N, 1, 1]
    query_slot = torch.arange(block_keys - block_queries, block_keys, device=device)[:, None]  # [B, 1]
    key_slot = torch.arange(block_keys, device=device)  # [Bk]
    context_slot = torch.arange(context_length, device=device)  # [S]

    sees_context = (context_slot >= start) & (context_slot < end)
    sees_context = sees_context.expand(rows, blocks, block_queries, context_length)
    sees_block = torch.ones(block_queries, block_keys, dtype=torch.bool, device=device)
    if causal:
        sees_block = sees_block & (key_slot <= query_slot)
    if window is not None:
        sees_context = sees_context & (context_slot > end + query_slot - window)
        sees_block = sees_block & (key_slot > query_slot - window)
    own_block = torch.eye(blocks, dtype=torch.bool, device=device)
    sees_blocks = (own_block[:, None, :, None] & sees_block[None, :, None, :]).expand(rows, -1, -1, -1, -1)  # [R, N, B, N, Bk]

    table = torch.cat([sees_context.flatten(1, 2), sees_blocks.flatten(3, 4).flatten(1, 2)], dim=2)
    if block_valid is not None:
        table = table & block_valid.repeat_interleave(block_queries, dim=1, output_size=blocks * block_queries)[:, :, None]
    return table


def block_attention_mask(
    context_start: Tensor,
    context_end: Tensor,
    *,
    context_length: int,
    block_queries: int,
    block_keys: int,
    causal: bool,
    dtype: torch.dtype,
    window: int | None = None,
    block_valid: Tensor | None = None,
) -> BlockAttentionMask:
    """Build the mask of `block_attention` once for all layers of a step. Arguments as in `block_attention_table`.

    Args:
        dtype: the queries' dtype.
    """
    groups = []
    size = max(1, _GROUP_QUERIES // block_queries)
    for first in range(0, context_end.shape[1], size):
        # Invalid blocks attend as valid ones here, so that no softmax is empty; `block_attention` zeroes their output.
        visible = block_attention_table(
            context_start[:, first : first + size],
            context_end[:, first : first + size],
            context_length=context_length,
            block_queries=block_queries,
            block_keys=block_keys,
            causal=causal,
            window=window,
        )
        rows, queries, keys = visible.shape
        aligned = math.ceil(keys / _MASK_ALIGNMENT) * _MASK_ALIGNMENT
        additive = torch.full((rows, 1, queries, aligned), float("-inf"), dtype=dtype, device=visible.device)
        additive[:, 0, :, :keys].masked_fill_(visible, 0.0)
        groups.append((queries // block_queries, additive))
    return BlockAttentionMask(tuple(groups), block_valid)


def block_attention(
    query: Tensor,
    block_key: Tensor,
    block_value: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    context_start: Tensor,
    context_end: Tensor,
    *,
    causal: bool,
    window: int | None = None,
    block_valid: Tensor | None = None,
    scale: float | None = None,
    mask: BlockAttentionMask | None = None,
) -> Tensor:
    """Attention of small blocks over a slice of a shared context and over themselves.

    R rows of N blocks; grouped-query heads are native (query head h reads key head h // (Hq / Hk)). Differentiable,
    without host synchronisation or shapes that depend on data, so it can be captured in a CUDA graph. Keys and
    values of context slots that no block sees must be finite.

    Args:
        query: [R, N, B, Hq, D].
        block_key: [R, N, Bk, Hk, D], Bk >= B: the queries are the last B of the block's slots.
        block_value: [R, N, Bk, Hk, D].
        context_key: [R, S, Hk, D].
        context_value: [R, S, Hk, D].
        context_start: [R, N] int64; block n sees context slots context_start <= c < context_end of its row, none
            where the two are equal.
        context_end: [R, N] int64.
        causal: whether query i sees only block keys j <= i + Bk - B.
        window: sliding window in positions, the query's own included (see the module's text), or None.
        block_valid: [R, N] bool; the output of an invalid block is exactly zero and sends back no gradient.
        scale: factor on the scores; 1 / sqrt(D) when None.
        mask: what `block_attention_mask` made of the same start, end, causal, window and block_valid, which are
            then not read: layers of one step share it.

    Returns:
        [R, N, B, Hq, D] in the query's dtype.
    """
    block_queries, block_keys = query.shape[2], block_key.shape[2]
    if mask is None:
        mask = block_attention_mask(
            context_start,
            context_end,
            context_length=context_key.shape[1],
            block_queries=block_queries,
            block_keys=block_keys,
            causal=causal,
            dtype=query.dtype,
            window=window,
            block_valid=block_valid,
        )
    outputs, first = [], 0
    for count, additive in mask.groups:
        part = slice(first, first + count)
        first += count
        outputs.append(
            _group_attention(query[:, part], block_key[:, part], block_value[:, part], context_key, context_value, additive, scale)
        )
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
    if mask.block_valid is not None:
        output = torch.where(mask.block_valid[:, :, None, None, None], output, 0.0)
    return output


def _group_attention(
    query: Tensor, block_key: Tensor, block_value: Tensor, context_key: Tensor, context_value: Tensor, additive: Tensor, scale: float | None
) -> Tensor:
    """Attention of one group of blocks under its mask, shapes as in `block_attention`."""
    rows, blocks, block_queries, heads, head_dim = query.shape
    key_heads = block_key.shape[3]
    groups = heads // key_heads
    key = torch.cat([context_key, block_key.flatten(1, 2)], dim=1)  # [R, K, Hk, D]
    value = torch.cat([context_value, block_value.flatten(1, 2)], dim=1)
    queries = query.flatten(1, 2).unflatten(2, (key_heads, groups))  # [R, Q, Hk, G, D]
    if blocks == 1:
        # Drafting: few queries, a long context. The heads of a group become more queries; nothing is repeated
        # but the small mask.
        queries = queries.permute(0, 2, 3, 1, 4).flatten(2, 3)  # [R, Hk, G * Q, D]
        additive = additive.repeat(1, 1, groups, 1)
    else:
        # Training: the mask is the large tensor, so keys and values are repeated instead.
        queries = queries.flatten(2, 3).transpose(1, 2)  # [R, Hq, Q, D]
        key, value = (x[:, :, :, None].expand(-1, -1, -1, groups, -1).flatten(2, 3) for x in (key, value))
    output = F.scaled_dot_product_attention(
        queries,
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=additive[..., : key.shape[1]].expand(-1, queries.shape[1], -1, -1),
        scale=scale,
    )
    if blocks == 1:
        output = output.unflatten(2, (groups, block_queries)).permute(0, 3, 1, 2, 4).flatten(2, 3)  # [R, Q, Hq, D]
    else:
        output = output.transpose(1, 2)
    return output.reshape(rows, blocks, block_queries, heads, head_dim)
