"""Block attention: many small blocks of queries, each over a slice of its row's context and over its own block.

The one attention of training and drafting (DFlash section 4.2, P-EAGLE's prediction chains, DSpark's parallel
stage). Every query sees two ranges of keys and nothing else:

    context keys c with context_start <= c < context_end, and
    block keys j with block_start <= j < block_end.

`visible_keys.py` makes these ranges of documents, windows and blocks; neither kernel nor reference knows any of those.

The kernel is FlashAttention-2's (arXiv 2307.08691), forward and backward, with two ranges instead of a causal mask. Its query tiles
hold consecutive queries with all query heads of one key head: K and V are read once for the group, and 128 rows are two
blocks of 16 queries and 4 heads, so that a tile's limits lie close together. Between them only the tiles that cross a limit
are masked. That is fast where neighbours see nearly the same keys, which anchors in ascending order do, and right for any order.
The gradients of K and V are summed by one program a key tile, in a fixed order: no atomics, the same bits every time.
"""

# Triton's kernels are typed by what they are launched with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from speculators.kernels.dot import dot
from speculators.kernels.draft_attention import draft_attention
from speculators.kernels.launch import shared_memory
from speculators.kernels.visible_keys import VisibleKeys, in_range, visible_blocks

try:
    import triton
    import triton.language as tl
except ImportError:  # no build for this platform: the reference serves it
    triton = None

__all__ = ["attention", "block_attention", "block_attention_table"]

Implementation = Literal["auto", "reference", "triton"]

# The reference takes queries in groups of about this many: a query then meets the block keys near its group, all masked but
# its own, instead of those of the whole row.
_GROUP_QUERIES = 256

# Up to this many queries a row, the query heads of a key head become more queries; beyond, K and V are repeated instead.
# Drafting is on one side, training on the other. The kernel does not split a long context, so it serves the latter only;
# `draft_attention` does.
_FEW_QUERIES = 32

# The memory-efficient CUDA kernel wants every stride of the mask to be a multiple of this many elements;
# any other mask is copied at each call.
_MASK_ALIGNMENT = 16


# -- the public functions ----------------------------------------------------------------------------------------


def attention(
    query: Tensor,
    block_key: Tensor | None,
    block_value: Tensor | None,
    context_key: Tensor,
    context_value: Tensor,
    visible: VisibleKeys,
    *,
    scale: float | None = None,
    implementation: Implementation = "auto",
) -> Tensor:
    """Attention of every query over its two ranges of keys.

    Grouped-query heads are native (query head h reads key head h // (Hq / Hk)). Differentiable, without host
    synchronisation or shapes that depend on data, so it can be captured in a CUDA graph; no kernel is compiled for a number
    of queries or keys. Keys and values that no query sees must be finite. Scores and sums are float32.

    Args:
        query: [R, Q, Hq, D].
        block_key, block_value: [R, U, Hk, D], or None where no query sees a block key.
        context_key, context_value: [R, S, Hk, D].
        visible: the keys of each query.
        scale: factor on the scores, positive; 1 / sqrt(D) when None.
        implementation: "auto" takes the kernel on CUDA for 16-bit inputs and more than a few queries a row, and for few queries
            and no gradient `draft_attention`.

    Returns:
        [R, Q, Hq, D] in the query's dtype; zero where a query sees nothing.
    """
    if block_key is None or block_value is None:
        block_key, block_value = context_key[:, :0], context_value[:, :0]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    use_kernel = implementation == "triton" or (
        implementation == "auto"
        and triton is not None
        and query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[1] > _FEW_QUERIES
        and query.shape[-1] <= 256
    )
    if not use_kernel:
        few = implementation == "auto" and triton is not None and query.is_cuda and query.shape[1] <= _FEW_QUERIES
        if few and query.dtype != torch.float64 and query.shape[-1] <= 256 and not torch.is_grad_enabled():
            return draft_attention(query, block_key, block_value, context_key, context_value, visible, scale=scale)
        return _reference(query, block_key, block_value, context_key, context_value, visible, scale)
    inputs = (x.contiguous() for x in (query, block_key, block_value, context_key, context_value))
    output: Tensor = _BlockAttention.apply(visible, scale, *inputs)  # type: ignore[no-untyped-call]
    return output


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
    visible: VisibleKeys | None = None,
    implementation: Implementation = "auto",
) -> Tensor:
    """Attention of R rows of N equal blocks over a slice of their row's context and over themselves; see `attention`.

    Args:
        query: [R, N, B, Hq, D].
        block_key, block_value: [R, N, Bk, Hk, D], Bk >= B: the queries are the last B of the block's slots.
        context_key, context_value: [R, S, Hk, D].
        context_start: [R, N] int64; block n sees context slots context_start <= c < context_end of its row, none
            where the two are equal.
        context_end: [R, N] int64.
        causal: whether query i sees only block keys j <= i + Bk - B.
        window: sliding window in positions, the query's own included (see the module's text), or None.
        block_valid: [R, N] bool; the output of an invalid block is exactly zero and sends back no gradient.
        scale: factor on the scores, positive; 1 / sqrt(D) when None.
        visible: what `visible_blocks` made of the same start, end, causal, window and block_valid, which are
            then not read: layers of one step share it.
        implementation: as in `attention`.

    Returns:
        [R, N, B, Hq, D] in the query's dtype.
    """
    if visible is None:
        visible = visible_blocks(
            context_start,
            context_end,
            block_queries=query.shape[2],
            block_keys=block_key.shape[2],
            causal=causal,
            window=window,
            block_valid=block_valid,
        )
    output = attention(
        query.flatten(1, 2),
        block_key.flatten(1, 2),
        block_value.flatten(1, 2),
        context_key,
        context_value,
        visible,
        scale=scale,
        implementation=implementation,
    )
    blocks: Tensor = output.view(query.shape)
    return blocks


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
    """Which query of `block_attention` sees which key, for tests and drawings; arguments as in `visible_blocks`.

    Returns:
        [R, N * B, context_length + N * Bk] bool: columns are the row's context, then the block keys of all blocks.
    """
    visible = visible_blocks(
        context_start,
        context_end,
        block_queries=block_queries,
        block_keys=block_keys,
        causal=causal,
        window=window,
        block_valid=block_valid,
    )
    return visible.table(context_length, context_end.shape[1] * block_keys)


# -- the reference -----------------------------------------------------------------------------------------------


class _Group(NamedTuple):
    """Queries that the reference takes together, the block keys near them, and the mask between them."""

    queries: slice
    keys: slice
    additive: Tensor  # [R, 1, queries, context + block keys rounded up], 0 where visible, -inf elsewhere


def _groups(visible: VisibleKeys, queries: int, context_keys: int, block_keys: int, dtype: torch.dtype) -> list[_Group]:
    groups = []
    for first in range(0, queries, _GROUP_QUERIES):
        last = min(first + _GROUP_QUERIES, queries)
        start = max(0, first * block_keys // queries - visible.reach)
        stop = min(block_keys, -(-last * block_keys // queries) + visible.reach)
        part = slice(first, last)
        seen = torch.cat(
            [
                in_range(visible.context_start[:, part], visible.context_end[:, part], 0, context_keys),
                in_range(visible.block_start[:, part], visible.block_end[:, part], start, stop),
            ],
            dim=2,
        )
        if visible.valid is not None:  # no softmax may be empty; the output of these queries is dropped
            seen = seen | ~visible.valid[:, part, None]
        width = math.ceil(seen.shape[2] / _MASK_ALIGNMENT) * _MASK_ALIGNMENT
        additive = torch.full((len(seen), 1, last - first, width), float("-inf"), dtype=dtype, device=seen.device)
        additive[:, 0, :, : seen.shape[2]].masked_fill_(seen, 0.0)
        groups.append(_Group(part, slice(start, stop), additive))
    return groups


def _reference(
    query: Tensor,
    block_key: Tensor,
    block_value: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    visible: VisibleKeys,
    scale: float,
) -> Tensor:
    """Scaled dot-product attention with an additive mask, over some queries of a row at a time."""
    queries, context_keys, block_keys = query.shape[1], context_key.shape[1], block_key.shape[1]
    sizes = (queries, context_keys, block_keys, query.dtype)
    outputs: list[Tensor] = []
    for group in visible.derived(("groups", *sizes, _GROUP_QUERIES), lambda: _groups(visible, *sizes)):
        key = torch.cat([context_key, block_key[:, group.keys]], dim=1)
        value = torch.cat([context_value, block_value[:, group.keys]], dim=1)
        outputs.append(_masked_attention(query[:, group.queries], key, value, group.additive, scale))
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
    if visible.valid is not None:
        output = torch.where(visible.valid[:, :, None, None], output, 0.0)
    return output


def _masked_attention(query: Tensor, key: Tensor, value: Tensor, additive: Tensor, scale: float) -> Tensor:
    """[R, q, Hq, D] over [R, k, Hk, D] under a mask [R, 1, q, k or more]."""
    count, heads, key_heads = query.shape[1], query.shape[2], key.shape[2]
    groups = heads // key_heads
    if count <= _FEW_QUERIES:
        queries = query.unflatten(2, (key_heads, groups)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [R, Hk, G * q, D]
        additive = additive.repeat(1, 1, groups, 1)
    else:
        queries = query.transpose(1, 2)
        key, value = (x[:, :, :, None].expand(-1, -1, -1, groups, -1).flatten(2, 3) for x in (key, value))
    output: Tensor = F.scaled_dot_product_attention(
        queries,
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=additive[..., : key.shape[1]].expand(-1, queries.shape[1], -1, -1),
        scale=scale,
    )
    if count > _FEW_QUERIES:
        return output.transpose(1, 2)
    folded: Tensor = output.unflatten(2, (groups, count))
    return folded.permute(0, 3, 1, 2, 4).flatten(2, 3)


# -- the kernels -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tiles:
    """Shape of one kernel's work: rows of queries (times heads) by keys, warps, pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int


# Fixed by head size and never tuned at run time: another tile is another order of summation, and a resumed run must
# give the same bits. benchmarks/training.py sweeps them. For the kernels forward, query gradient, key gradient.
TILES: dict[int, tuple[Tiles, Tiles, Tiles]] = {
    64: (Tiles(128, 128, 8, 3), Tiles(128, 64, 8, 3), Tiles(64, 128, 8, 3)),
    128: (Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 2), Tiles(64, 128, 8, 2)),
    256: (Tiles(64, 64, 8, 2), Tiles(64, 32, 8, 2), Tiles(32, 64, 8, 2)),
}
# For GPUs with 227 KB of shared memory a block, as H100 and H200: a stage more hides the loads of both gradients.
LARGE_TILES = TILES | {128: (Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 3), Tiles(64, 128, 8, 3))}
# For GPUs with 99 KB, as most outside data centres.
SMALL_TILES: dict[int, tuple[Tiles, Tiles, Tiles]] = {
    64: (Tiles(128, 64, 4, 2), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2)),
    128: (Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 2), Tiles(32, 64, 4, 2)),
    256: (Tiles(32, 32, 4, 2), Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1)),
}
_BLOCK_MEMORY, _LARGE_BLOCK_MEMORY = 163_840, 232_448  # bytes that TILES and LARGE_TILES need


def _tiles(head_dim: int, device: torch.device) -> tuple[Tiles, Tiles, Tiles]:
    memory = shared_memory(device)
    table = SMALL_TILES if memory < _BLOCK_MEMORY else TILES if memory < _LARGE_BLOCK_MEMORY else LARGE_TILES
    return table[next(size for size in table if head_dim <= size)]


if triton is not None:

    @triton.jit
    def _query_rows(tile, row, head, queries, KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
        """Of the rows of a query tile: index in [R, Q], in queries [R, Q, Hq] and in statistics [R, Hk, Q, Hq / Hk], whether it exists."""
        flat = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = flat // GROUP < queries
        index = row * queries + flat // GROUP
        slot = (index * KEY_HEADS + head) * GROUP + flat % GROUP
        return index, slot, (row * KEY_HEADS + head) * queries * GROUP + flat, inside

    @triton.jit
    def _load_queries(
        pointer, tile, queries,
        KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
        WHOLE: tl.constexpr,
    ):  # fmt: skip
        """[BLOCK_M, BLOCK_D]: a query tile, from where its row and key head begin. Cheap in a loop: tiles lie at equal distances."""
        within = tl.arange(0, BLOCK_M)
        inside = tile * BLOCK_M + within < queries * GROUP
        if BLOCK_M % GROUP == 0:
            pointer += tl.full((), BLOCK_M * KEY_HEADS * HEAD_DIM, tl.int64) * tile
            offsets = (within // GROUP * (KEY_HEADS * GROUP) + within % GROUP) * HEAD_DIM
        else:
            flat = (tile * BLOCK_M + within).to(tl.int64)
            offsets = (flat // GROUP * (KEY_HEADS * GROUP) + flat % GROUP) * HEAD_DIM
        return _load(pointer, offsets, inside, HEAD_DIM, BLOCK_D, WHOLE)

    @triton.jit
    def _load(pointer, offsets, inside, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, WHOLE: tl.constexpr):
        """[n, BLOCK_D]: vectors at element offsets; zero outside, unless the caller knows that nothing is (WHOLE)."""
        column = tl.arange(0, BLOCK_D)
        address = pointer + offsets[:, None] + column[None, :]
        if WHOLE and HEAD_DIM == BLOCK_D:
            return tl.load(address)
        return tl.load(address, mask=inside[:, None] & (column < HEAD_DIM)[None, :], other=0.0)

    @triton.jit
    def _store(pointer, offsets, inside, x, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
        column = tl.arange(0, BLOCK_D)
        mask = inside[:, None] & (column < HEAD_DIM)[None, :]
        tl.store(pointer + offsets[:, None] + column[None, :], x.to(pointer.dtype.element_ty), mask=mask)

    @triton.jit
    def _limits(start, end, inside, BLOCK_N: tl.constexpr):
        """Key tiles of a query tile: from `low` to `first` masked, to `last` seen by every row, to `high` masked."""
        seen = inside & (end > start)
        low = tl.min(tl.where(seen, start, 1 << 30), 0) // BLOCK_N * BLOCK_N
        high = tl.max(tl.where(seen, end, 0), 0)
        first = tl.maximum(low, tl.cdiv(tl.max(tl.where(inside, start, 0), 0), BLOCK_N) * BLOCK_N)
        last = tl.maximum(first, tl.min(tl.where(inside, end, 1 << 30), 0) // BLOCK_N * BLOCK_N)
        return low, first, last, high

    @triton.jit
    def _forward_keys(
        accumulator, total, maximum, q, key, value, length, low, high, start, end, scale,
        STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
    ):  # fmt: skip
        """Online softmax over the key tiles from `low` to `high`."""
        for first in range(low, high, BLOCK_N):
            column = first + tl.arange(0, BLOCK_N)
            k = _load(key, column * STRIDE, column < length, HEAD_DIM, BLOCK_D, not MASKED)
            scores = dot(q, tl.trans(k))
            if MASKED:
                scores = tl.where((column[None, :] >= start[:, None]) & (column[None, :] < end[:, None]), scores, float("-inf"))
            largest = tl.maximum(maximum, tl.max(scores, 1) * scale)
            p = tl.exp2(scores * scale - largest[:, None])
            correction = tl.exp2(maximum - largest)
            total = total * correction + tl.sum(p, 1)
            v = _load(value, column * STRIDE, column < length, HEAD_DIM, BLOCK_D, not MASKED)
            accumulator = accumulator * correction[:, None] + dot(p.to(v.dtype), v)
            maximum = largest
        return accumulator, total, maximum

    @triton.jit(do_not_specialize=["queries", "context_keys", "block_keys"])
    def _forward_kernel(
        query, block_key, block_value, context_key, context_value,
        context_start, context_end, block_start, block_end,
        output, log_sum, queries, context_keys, block_keys, scale,
        HAS_CONTEXT: tl.constexpr, HAS_BLOCK: tl.constexpr, KEY_HEADS: tl.constexpr, GROUP: tl.constexpr,
        HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ):  # fmt: skip
        """One query tile of one key head. The last tiles, usually with the longest contexts, start first."""
        head, row, tile = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(2) - 1 - tl.program_id(2)
        index, slot, statistic, inside = _query_rows(tile, row, head, queries, KEY_HEADS, GROUP, BLOCK_M)
        q = _load(query, slot * HEAD_DIM, inside, HEAD_DIM, BLOCK_D, False)
        accumulator = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        maximum = tl.full((BLOCK_M,), -1.0e30, tl.float32)  # finite, so that a row that has seen nothing is no NaN
        STRIDE: tl.constexpr = KEY_HEADS * HEAD_DIM
        if HAS_CONTEXT:
            start = tl.load(context_start + index, mask=inside, other=0)
            end = tl.load(context_end + index, mask=inside, other=0)
            low, first, last, high = _limits(start, end, inside, BLOCK_N)
            offset = row * context_keys * STRIDE + head * HEAD_DIM
            key, value = context_key + offset, context_value + offset
            accumulator, total, maximum = _forward_keys(
                accumulator, total, maximum, q, key, value, context_keys, low, tl.minimum(first, high), start, end, scale,
                STRIDE, HEAD_DIM, BLOCK_D, BLOCK_N, True,
            )  # fmt: skip
            accumulator, total, maximum = _forward_keys(
                accumulator, total, maximum, q, key, value, context_keys, first, last, start, end, scale,
                STRIDE, HEAD_DIM, BLOCK_D, BLOCK_N, False,
            )  # fmt: skip
            accumulator, total, maximum = _forward_keys(
                accumulator, total, maximum, q, key, value, context_keys, last, high, start, end, scale,
                STRIDE, HEAD_DIM, BLOCK_D, BLOCK_N, True,
            )  # fmt: skip
        if HAS_BLOCK:
            start = tl.load(block_start + index, mask=inside, other=0)
            end = tl.load(block_end + index, mask=inside, other=0)
            low, first, last, high = _limits(start, end, inside, BLOCK_N)
            offset = row * block_keys * STRIDE + head * HEAD_DIM
            accumulator, total, maximum = _forward_keys(
                accumulator, total, maximum, q, block_key + offset, block_value + offset, block_keys, low, high, start, end, scale,
                STRIDE, HEAD_DIM, BLOCK_D, BLOCK_N, True,
            )  # fmt: skip
        empty = total == 0.0
        accumulator = accumulator / tl.where(empty, 1.0, total)[:, None]
        _store(output, slot * HEAD_DIM, inside, accumulator, HEAD_DIM, BLOCK_D)
        tl.store(log_sum + statistic, tl.where(empty, 0.0, maximum + tl.log2(tl.where(empty, 1.0, total))), mask=inside)

    @triton.jit
    def _query_gradient_keys(
        gradient, q, output_gradient, log_sum, delta, key, value, length, low, high, start, end, scale,
        STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
    ):  # fmt: skip
        """Add the key tiles from `low` to `high`: dS = P * (dO V^T - delta), dQ += dS K."""
        for first in range(low, high, BLOCK_N):
            column = first + tl.arange(0, BLOCK_N)
            k = _load(key, column * STRIDE, column < length, HEAD_DIM, BLOCK_D, not MASKED)
            v = _load(value, column * STRIDE, column < length, HEAD_DIM, BLOCK_D, not MASKED)
            p = tl.exp2(dot(q, tl.trans(k)) * scale - log_sum[:, None])
            if MASKED:
                p = tl.where((column[None, :] >= start[:, None]) & (column[None, :] < end[:, None]), p, 0.0)
            ds = p * (dot(output_gradient, tl.trans(v)) - delta[:, None])
            gradient += dot(ds.to(k.dtype), k)
        return gradient

    @triton.jit(do_not_specialize=["queries", "context_keys", "block_keys"])
    def _query_gradient_kernel(
        query, block_key, block_value, context_key, context_value,
        context_start, context_end, block_start, block_end,
        output, output_gradient, log_sum, delta, query_gradient, queries, context_keys, block_keys, scale, gradient_scale,
        HAS_CONTEXT: tl.constexpr, HAS_BLOCK: tl.constexpr, KEY_HEADS: tl.constexpr, GROUP: tl.constexpr,
        HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ):  # fmt: skip
        """dQ of one query tile, and delta = sum of dO * O, which the key gradients need as well."""
        head, row, tile = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(2) - 1 - tl.program_id(2)
        index, slot, statistic, inside = _query_rows(tile, row, head, queries, KEY_HEADS, GROUP, BLOCK_M)
        q = _load(query, slot * HEAD_DIM, inside, HEAD_DIM, BLOCK_D, False)
        do = _load(output_gradient, slot * HEAD_DIM, inside, HEAD_DIM, BLOCK_D, False)
        o = _load(output, slot * HEAD_DIM, inside, HEAD_DIM, BLOCK_D, False)
        product = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
        tl.store(delta + statistic, product, mask=inside)
        logs = tl.load(log_sum + statistic, mask=inside, other=0.0)
        gradient = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        STRIDE: tl.constexpr = KEY_HEADS * HEAD_DIM
        if HAS_CONTEXT:
            start = tl.load(context_start + index, mask=inside, other=0)
            end = tl.load(context_end + index, mask=inside, other=0)
            low, first, last, high = _limits(start, end, inside, BLOCK_N)
            offset = row * context_keys * STRIDE + head * HEAD_DIM
            key, value = context_key + offset, context_value + offset
            gradient = _query_gradient_keys(
                gradient, q, do, logs, product, key, value, context_keys, low, tl.minimum(first, high), start, end, scale,
                STRIDE, HEAD_DIM, BLOCK_D, BLOCK_N, True,
            )  # fmt: skip
            gradient = _query_gradient_keys(
                gradient, q, do, logs, product, key, value, context_keys, first, last, start, end, scale,
                STRIDE, HEAD_DIM, BLOCK_D, BLOCK_N, False,
            )  # fmt: skip
            gradient = _query_gradient_keys(
                gradient, q, do, logs, product, key, value, context_keys, last, high, start, end, scale,
                STRIDE, HEAD_DIM, BLOCK_D, BLOCK_N, True,
            )  # fmt: skip
        if HAS_BLOCK:
            start = tl.load(block_start + index, mask=inside, other=0)
            end = tl.load(block_end + index, mask=inside, other=0)
            low, first, last, high = _limits(start, end, inside, BLOCK_N)
            offset = row * block_keys * STRIDE + head * HEAD_DIM
            gradient = _query_gradient_keys(
                gradient, q, do, logs, product, block_key + offset, block_value + offset, block_keys, low, high, start, end, scale,
                STRIDE, HEAD_DIM, BLOCK_D, BLOCK_N, True,
            )  # fmt: skip
        _store(query_gradient, slot * HEAD_DIM, inside, gradient * gradient_scale, HEAD_DIM, BLOCK_D)

    @triton.jit
    def _key_gradient_queries(
        key_gradient, value_gradient, k, v, column, query, output_gradient, log_sum, delta, starts, ends, queries, first, last, scale,
        KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
        STAGES: tl.constexpr, MASKED: tl.constexpr,
    ):  # fmt: skip
        """Add the query tiles from `first` to `last`: dV += P^T dO, dK += dS^T Q. All pointers begin at the row (and key head)."""
        for tile in tl.range(first, last, num_stages=STAGES):  # said here, the statistics are loaded ahead as well
            within = tl.arange(0, BLOCK_M)
            statistic = tile * BLOCK_M + within
            inside = statistic < queries * GROUP
            q = _load_queries(query, tile, queries, KEY_HEADS, GROUP, HEAD_DIM, BLOCK_D, BLOCK_M, not MASKED)
            do = _load_queries(output_gradient, tile, queries, KEY_HEADS, GROUP, HEAD_DIM, BLOCK_D, BLOCK_M, not MASKED)
            if MASKED:
                logs = tl.load(log_sum + statistic, mask=inside, other=0.0)
                product = tl.load(delta + statistic, mask=inside, other=0.0)
            else:
                logs, product = tl.load(log_sum + statistic), tl.load(delta + statistic)
            # What is subtracted of a product is what its sums start with: no registers hold it while the product is awaited.
            p = tl.exp2((dot(k, tl.trans(q)) + (logs * (-1.0 / scale))[None, :]) * scale)  # [keys, queries]
            if MASKED:
                index = tile * (BLOCK_M // GROUP) + within // GROUP if BLOCK_M % GROUP == 0 else statistic // GROUP
                start = tl.load(starts + index, mask=inside, other=0)
                end = tl.load(ends + index, mask=inside, other=0)
                p = tl.where((column[:, None] >= start[None, :]) & (column[:, None] < end[None, :]), p, 0.0)
            value_gradient += dot(p.to(do.dtype), do)
            ds = p * (dot(v, tl.trans(do)) + (-product)[None, :])
            key_gradient += dot(ds.to(q.dtype), q)
        return key_gradient, value_gradient

    @triton.jit(do_not_specialize=["queries", "keys"])
    def _key_gradient_kernel(
        query, key, value, starts, ends, schedule, output_gradient, log_sum, delta, key_gradient, value_gradient,
        queries, keys, scale, gradient_scale,
        KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
        BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    ):  # fmt: skip
        """dK and dV of one tile of context or block keys. The first tiles, usually seen by most queries, start first."""
        head, row, tile = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
        column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = column < keys
        offsets = ((row * keys + column) * KEY_HEADS + head) * HEAD_DIM
        k = _load(key, offsets, inside, HEAD_DIM, BLOCK_D, False)
        v = _load(value, offsets, inside, HEAD_DIM, BLOCK_D, False)
        dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        limits = schedule + (row * tl.num_programs(2) + tile) * 4
        low, first, last, high = tl.load(limits), tl.load(limits + 1), tl.load(limits + 2), tl.load(limits + 3)
        slot, statistic = (row * queries * KEY_HEADS + head) * GROUP, (row * KEY_HEADS + head) * queries * GROUP
        query, output_gradient = query + slot * HEAD_DIM, output_gradient + slot * HEAD_DIM
        log_sum, delta = log_sum + statistic, delta + statistic
        starts, ends = starts + row * queries, ends + row * queries
        dk, dv = _key_gradient_queries(
            dk, dv, k, v, column, query, output_gradient, log_sum, delta, starts, ends, queries, low, first, scale,
            KEY_HEADS, GROUP, HEAD_DIM, BLOCK_D, BLOCK_M, STAGES, True,
        )  # fmt: skip
        dk, dv = _key_gradient_queries(
            dk, dv, k, v, column, query, output_gradient, log_sum, delta, starts, ends, queries, first, last, scale,
            KEY_HEADS, GROUP, HEAD_DIM, BLOCK_D, BLOCK_M, STAGES, False,
        )  # fmt: skip
        dk, dv = _key_gradient_queries(
            dk, dv, k, v, column, query, output_gradient, log_sum, delta, starts, ends, queries, last, high, scale,
            KEY_HEADS, GROUP, HEAD_DIM, BLOCK_D, BLOCK_M, STAGES, True,
        )  # fmt: skip
        _store(key_gradient, offsets, inside, dk * gradient_scale, HEAD_DIM, BLOCK_D)
        _store(value_gradient, offsets, inside, dv, HEAD_DIM, BLOCK_D)


def _key_schedule(start: Tensor, end: Tensor, keys: int, group: int, tiles: Tiles) -> Tensor:
    """Which query tiles a key tile meets: [R, key tiles, 4] int32 (low, first, last, high).

    Query tiles from low to high contain every query that sees the key tile; those from first to last are full of queries that see all
    of it.
    """
    queries = start.shape[1]
    device, far = start.device, torch.iinfo(torch.int32).max
    count = -(-queries * group // tiles.queries)
    element = (torch.arange(count * tiles.queries, device=device) // group).view(count, -1)
    there, element = element < queries, element.clamp(max=queries - 1)
    start, end = start[:, element], end[:, element]  # [R, query tiles, tile]
    seen = there & (end > start)
    lowest, highest = torch.where(seen, start, far).amin(2), torch.where(seen, end, 0).amax(2)
    whole_from, whole_to = torch.where(there, start, far).amax(2), torch.where(there, end, 0).amin(2)

    key_low = torch.arange(0, keys, tiles.keys, device=device)[:, None]  # [key tiles, 1]
    key_high = (key_low + tiles.keys).clamp(max=keys)
    meets = (lowest[:, None] < key_high) & (highest[:, None] > key_low)  # [R, key tiles, query tiles]
    whole = meets & (whole_from[:, None] <= key_low) & (whole_to[:, None] >= key_high)
    tile = torch.arange(count, device=device)
    high = torch.where(meets, tile + 1, 0).amax(2)
    low = torch.where(meets, tile, high[..., None]).amin(2)
    first = torch.where(whole, tile, high[..., None]).amin(2)
    last = torch.where(~whole & (tile >= first[..., None]), tile, high[..., None]).amin(2)
    return torch.stack([low, first, last, high], dim=2).to(torch.int32)


class _BlockAttention(torch.autograd.Function):
    """The kernels; arguments as in `attention`, contiguous."""

    @staticmethod
    def forward(
        ctx: Any,
        visible: VisibleKeys,
        scale: float,
        query: Tensor,
        block_key: Tensor,
        block_value: Tensor,
        context_key: Tensor,
        context_value: Tensor,
    ) -> Tensor:
        output = torch.empty_like(query)
        log_sum = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)  # in the order [R, Hk, Q, Hq / Hk]
        inputs = (query, block_key, block_value, context_key, context_value)
        tiles = _tiles(query.shape[-1], query.device)[0]
        with torch.cuda.device_of(query):
            _forward_kernel[_grid(query, context_key, tiles)](
                *inputs,
                *_ranges(visible),
                output,
                log_sum,
                *_lengths(inputs),
                scale / math.log(2),
                **_constants(inputs, tiles),
                num_warps=tiles.warps,
                num_stages=tiles.stages,
            )
        ctx.save_for_backward(*inputs, output, log_sum)
        ctx.visible, ctx.scale = visible, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, output, log_sum = ctx.saved_tensors
        query, block_key, block_value, context_key, context_value = inputs
        visible, scale = ctx.visible, ctx.scale
        output_gradient = output_gradient.contiguous()
        query_gradient, delta = torch.empty_like(query), torch.empty_like(log_sum)
        _, query_tiles, key_tiles = _tiles(query.shape[-1], query.device)
        with torch.cuda.device_of(query):
            _query_gradient_kernel[_grid(query, context_key, query_tiles)](
                *inputs,
                *_ranges(visible),
                output,
                output_gradient,
                log_sum,
                delta,
                query_gradient,
                *_lengths(inputs),
                scale / math.log(2),
                scale,
                **_constants(inputs, query_tiles),
                num_warps=query_tiles.warps,
                num_stages=query_tiles.stages,
            )
            gradients: list[Tensor] = []
            for name, key, value in (("block", block_key, block_value), ("context", context_key, context_value)):
                starts, ends = getattr(visible, f"{name}_start"), getattr(visible, f"{name}_end")
                gradients += _key_gradients(
                    query, key, value, starts, ends, visible, name, output_gradient, log_sum, delta, scale, key_tiles
                )
        return None, None, query_gradient, *gradients


def _key_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    ends: Tensor,
    visible: VisibleKeys,
    name: str,
    output_gradient: Tensor,
    log_sum: Tensor,
    delta: Tensor,
    scale: float,
    tiles: Tiles,
) -> list[Tensor]:
    """Gradients of one set of keys and values."""
    key_gradient, value_gradient = torch.empty_like(key), torch.empty_like(value)
    rows, keys, key_heads, head_dim = key.shape
    if keys:
        group = query.shape[2] // key_heads
        schedule = visible.derived((name, keys, group, tiles), lambda: _key_schedule(starts, ends, keys, group, tiles))
        _key_gradient_kernel[(key_heads, rows, schedule.shape[1])](
            query,
            key,
            value,
            starts,
            ends,
            schedule,
            output_gradient,
            log_sum,
            delta,
            key_gradient,
            value_gradient,
            query.shape[1],
            keys,
            scale / math.log(2),
            scale,
            KEY_HEADS=key_heads,
            GROUP=group,
            HEAD_DIM=head_dim,
            BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
            BLOCK_M=tiles.queries,
            BLOCK_N=tiles.keys,
            STAGES=tiles.stages,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
    return [key_gradient, value_gradient]


def _ranges(visible: VisibleKeys) -> tuple[Tensor, ...]:
    return visible.context_start, visible.context_end, visible.block_start, visible.block_end


def _lengths(inputs: tuple[Tensor, ...] | list[Tensor]) -> tuple[int, int, int]:
    query, block_key, _, context_key, _ = inputs
    return query.shape[1], context_key.shape[1], block_key.shape[1]


def _grid(query: Tensor, context_key: Tensor, tiles: Tiles) -> tuple[int, int, int]:
    """Key heads, rows, query tiles."""
    rows, queries, heads, _ = query.shape
    key_heads = context_key.shape[2]
    return key_heads, rows, -(-queries * (heads // key_heads) // tiles.queries)


def _constants(inputs: tuple[Tensor, ...] | list[Tensor], tiles: Tiles) -> dict[str, Any]:
    query, block_key, _, context_key, _ = inputs
    key_heads, head_dim = context_key.shape[2:]
    return {
        "HAS_CONTEXT": context_key.shape[1] > 0,
        "HAS_BLOCK": block_key.shape[1] > 0,
        "KEY_HEADS": key_heads,
        "GROUP": query.shape[2] // key_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        "BLOCK_M": tiles.queries,
        "BLOCK_N": tiles.keys,
    }
