"""Draft attention: few queries a row over a long context, split so that every multiprocessor reads a part of it.

What `block_attention` computes, where a row has a handful of queries (a drafted block, a step of EAGLE-3) and the time goes into
reading the context once. A program takes the queries of all heads that share a key head, and one chunk of the context or the
row's block keys; with m and l the running maximum and sum of its scores s = scale q.k,

    partial[c] = sum_j exp(s_j - m_c) v_j,    l_c = sum_j exp(s_j - m_c)

and a second launch adds the chunks up: out = sum_c exp(m_c - M) partial[c] / sum_c exp(m_c - M) l_c, M = max m_c. Chunks beyond a
row's length are not read, so a cache may be handed over whole. Where rows and heads alone fill the device, a short context is one
chunk, which goes on over the block keys and is all there is.
"""

# Triton's kernels are typed by what they are launched with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Literal

import torch
from torch import Tensor

from speculators.kernels.dot import dot
from speculators.kernels.launch import dependent_launch
from speculators.kernels.visible_keys import VisibleKeys

try:
    import triton
    import triton.language as tl

    from speculators.kernels.launch import let_next_start, wait_for_inputs
except ImportError:  # no build for this platform: the reference serves it
    triton = None

__all__ = ["draft_attention"]

_CHUNK = 64  # the fewest context keys of a program
_CHUNKS = 64  # at most; a longer context has longer chunks
_PROGRAMS = 264  # that chunks are made for: two a multiprocessor, more of shorter chunks took longer
_WHOLE = 1024  # a context of at most so many keys is not split
_FULL = 128  # where there are so many programs without: one a multiprocessor;
_LONGEST = 4096  # and one of so many keys where there are `_PROGRAMS`
_KEYS = 64  # of one step of it, at most,
_STEP_BYTES = 1 << 14  # whose keys fill at most so much: shared memory holds some steps of keys and values, whatever their size
_STAGES = 3  # steps on their way
_QUERIES = 64  # queries of a program, those of all heads of a key head together


# -- the definition ----------------------------------------------------------------------------------------------


def _reference(
    query: Tensor, block_key: Tensor, block_value: Tensor, context_key: Tensor, context_value: Tensor, visible: VisibleKeys, scale: float
) -> Tensor:
    """Plain PyTorch on any device, in float32 or float64."""
    accurate = torch.promote_types(query.dtype, torch.float32)
    key, value = (torch.cat(pair, dim=1).to(accurate) for pair in ((context_key, block_key), (context_value, block_value)))
    groups = query.shape[2] // key.shape[2]
    key, value = (x.repeat_interleave(groups, dim=2) for x in (key, value))
    table = visible.table(context_key.shape[1], block_key.shape[1])
    scores = torch.einsum("rqhd,rkhd->rhqk", query.to(accurate), key) * scale
    weights = scores.masked_fill(~table[:, None], float("-inf")).softmax(-1).nan_to_num(0.0)
    return torch.einsum("rhqk,rkhd->rqhd", weights, value).to(query.dtype)


# -- the kernels -------------------------------------------------------------------------------------------------

if triton is not None:

    @triton.jit
    def _attend(
        q, key, value, key_stride, value_stride, first, last, start, end, scale, largest, total, acc,
        size, KEYS: tl.constexpr, SIZE: tl.constexpr,
    ):  # fmt: skip
        """Go on over keys `first` to `last`, of which a query sees those from `start` to `end`."""
        d = tl.arange(0, SIZE)
        for at in range(first, last, KEYS):
            j = at + tl.arange(0, KEYS)
            inside = (j < last)[:, None] & (d < size)[None, :]
            k = tl.load(key + j.to(tl.int64)[:, None] * key_stride + d[None, :], mask=inside, other=0.0)
            v = tl.load(value + j.to(tl.int64)[:, None] * value_stride + d[None, :], mask=inside, other=0.0)
            seen = (j[None, :] >= start[:, None]) & (j[None, :] < end[:, None]) & (j < last)[None, :]
            scores = tl.where(seen, dot(q, tl.trans(k)) * scale, float("-inf"))
            top = tl.maximum(largest, tl.max(scores, 1))
            weights = tl.exp(scores - top[:, None])
            shrink = tl.exp(largest - top)
            total = total * shrink + tl.sum(weights, 1)
            acc = acc * shrink[:, None] + dot(weights.to(v.dtype), v)
            largest = top
        return largest, total, acc

    @triton.jit
    def _chunk_kernel(
        query, block_key, block_value, context_key, context_value,
        context_start, context_end, block_start, block_end,  # [R, Q] int32
        out,  # [R, Q, Hk * G, D]
        partial,  # [R, Hk, splits, G * Q, D] float32
        largest_out,  # [R, Hk, splits, G * Q] float32
        total_out,
        queries, groups, context_keys, block_keys, size, scale, splits,
        query_row, query_stride, query_head, block_key_row, block_key_stride, block_key_head, block_value_row, block_value_stride,
        block_value_head, context_key_row, context_key_stride, context_key_head, context_value_row, context_value_stride,
        context_value_head,
        CHUNK: tl.constexpr, KEYS: tl.constexpr, QUERIES: tl.constexpr, SIZE: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        """One program a row, key head, chunk and block of queries; the last chunk is the row's block keys, or with the only one."""
        wait_for_inputs(PDL)
        row = (tl.program_id(0) // splits).to(tl.int64)
        split = tl.program_id(0) % splits
        head = tl.program_id(1)
        heads = tl.num_programs(1)
        index = tl.program_id(2) * QUERIES + tl.arange(0, QUERIES)
        here = index < groups * queries
        q_at = index % queries
        d = tl.arange(0, SIZE)
        source = query + row * query_row + q_at[:, None] * query_stride + (head * groups + index // queries)[:, None] * query_head
        q = tl.load(source + d[None, :], mask=here[:, None] & (d < size)[None, :], other=0.0)
        largest = tl.full((QUERIES,), -1.0e30, tl.float32)  # finite, so that exp(-inf - largest) is 0 and never NaN
        total = tl.zeros((QUERIES,), tl.float32)
        acc = tl.zeros((QUERIES, SIZE), tl.float32)
        if not SPLIT or split < splits - 1:
            start = tl.load(context_start + row * queries + q_at, mask=here, other=0)
            end = tl.load(context_end + row * queries + q_at, mask=here, other=0)
            first = tl.maximum(split * CHUNK, tl.min(tl.where(here & (end > start), start, context_keys), 0) // KEYS * KEYS)
            last = tl.minimum(tl.minimum(split * CHUNK + CHUNK, context_keys), tl.max(tl.where(here & (end > start), end, 0), 0))
            largest, total, acc = _attend(
                q, context_key + row * context_key_row + head * context_key_head,
                context_value + row * context_value_row + head * context_value_head,
                context_key_stride, context_value_stride, first, last, start, end, scale, largest, total, acc, size, KEYS, SIZE,
            )  # fmt: skip
        if not SPLIT or split == splits - 1:
            start = tl.load(block_start + row * queries + q_at, mask=here, other=0)
            end = tl.load(block_end + row * queries + q_at, mask=here, other=0)
            largest, total, acc = _attend(
                q, block_key + row * block_key_row + head * block_key_head, block_value + row * block_value_row + head * block_value_head,
                block_key_stride, block_value_stride, 0, block_keys, start, end, scale, largest, total, acc, size, KEYS, SIZE,
            )  # fmt: skip
        let_next_start(PDL)
        if SPLIT:
            place = ((row * heads + head) * splits + split) * (groups * queries) + index
            tl.store(largest_out + place, largest, mask=here)
            tl.store(total_out + place, total, mask=here)
            # A chunk of which a query saw nothing leaves no sum: most chunks of short rows in a long cache.
            tl.store(partial + place[:, None] * size + d[None, :], acc, mask=(here & (total > 0))[:, None] & (d < size)[None, :])
        else:
            place = (row * queries + q_at) * (heads * groups) + head * groups + index // queries
            result = (acc / tl.maximum(total, 1.0e-30)[:, None]).to(out.dtype.element_ty)
            tl.store(out + place[:, None] * size + d[None, :], result, mask=here[:, None] & (d < size)[None, :])

    @triton.jit
    def _sum_kernel(
        partial, largest, total, out, queries, groups, heads, size, splits,
        SPLITS: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        """One program a row, query and query head: the chunks' sum, zero where a query sees nothing."""
        wait_for_inputs(PDL)
        at = tl.program_id(0).to(tl.int64)  # of [R, Q, Hk * G]
        query_head = at % (heads * groups)
        query = at // (heads * groups) % queries
        row = at // (heads * groups) // queries
        split = tl.arange(0, SPLITS)
        d = tl.arange(0, SIZE)
        index = ((row * heads + query_head // groups) * splits + split) * (groups * queries) + query_head % groups * queries + query
        inside = split < splits
        m = tl.load(largest + index, mask=inside, other=-1.0e30)
        amount = tl.load(total + index, mask=inside, other=0.0)
        weight = tl.where(inside, tl.exp(m - tl.max(m, 0)), 0.0)
        sums = tl.sum(weight * amount, 0)
        parts = tl.load(partial + index[:, None] * size + d[None, :], mask=(amount > 0)[:, None] & (d < size)[None, :], other=0.0)
        result = tl.sum(parts * weight[:, None], 0) / tl.maximum(sums, 1.0e-30)
        let_next_start(PDL)
        tl.store(out + at * size + d, result.to(out.dtype.element_ty), mask=d < size)


def _division(context_keys: int, programs: int) -> tuple[int, int]:
    """Keys of a chunk, and chunks with that of the block keys; 1 where the context is not split.

    Args:
        context_keys: of every row.
        programs: of rows, key heads and blocks of queries.
    """
    most = _WHOLE if programs < _PROGRAMS else _LONGEST
    if context_keys <= most and programs >= _FULL:
        return max(1, triton.next_power_of_2(context_keys)), 1
    wanted = min(_CHUNKS, triton.cdiv(_PROGRAMS, programs))
    chunk = min(_LONGEST, max(_CHUNK, triton.next_power_of_2(triton.cdiv(context_keys, wanted))))
    return chunk, triton.cdiv(context_keys, chunk) + 1


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _kernel(
    query: Tensor, block_key: Tensor, block_value: Tensor, context_key: Tensor, context_value: Tensor, visible: VisibleKeys, scale: float
) -> Tensor:
    query, block_key, block_value, context_key, context_value = map(
        _unit_stride, (query, block_key, block_value, context_key, context_value)
    )
    rows, queries, query_heads, size = query.shape
    heads, context_keys = context_key.shape[2], context_key.shape[1]
    groups = query_heads // heads
    size_block = max(16, triton.next_power_of_2(size))
    keys = max(16, min(_KEYS, _STEP_BYTES // (size_block * query.element_size())))
    block = min(_QUERIES, max(16, triton.next_power_of_2(groups * queries)))
    chunk, splits = _division(context_keys, rows * heads * triton.cdiv(groups * queries, block))
    split = splits > 1
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    partial = largest = total = out
    if split:
        partial = torch.empty(rows, heads, splits, groups * queries, size, dtype=torch.float32, device=query.device)
        largest, total = torch.empty(2, rows, heads, splits, groups * queries, dtype=torch.float32, device=query.device)
    strides = [x.stride(axis) for x in (query, block_key, block_value, context_key, context_value) for axis in (0, 1, 2)]
    with torch.cuda.device_of(query):
        _chunk_kernel[(rows * splits, heads, triton.cdiv(groups * queries, block))](
            query, block_key, block_value, context_key, context_value,
            visible.context_start, visible.context_end, visible.block_start, visible.block_end, out, partial, largest, total,
            queries, groups, context_keys, block_key.shape[1], size, scale, splits, *strides,
            CHUNK=chunk, KEYS=keys, QUERIES=block, SIZE=size_block, SPLIT=split, num_warps=4, num_stages=_STAGES,
            **dependent_launch(query),
        )  # fmt: skip
        if not split:
            return out
        _sum_kernel[(rows * queries * query_heads,)](
            partial, largest, total, out, queries, groups, heads, size, splits,
            SPLITS=triton.next_power_of_2(splits), SIZE=size_block, num_warps=2, **dependent_launch(query),
        )  # fmt: skip
    return out


# -- the public function -----------------------------------------------------------------------------------------


def draft_attention(
    query: Tensor,
    block_key: Tensor,
    block_value: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    visible: VisibleKeys,
    *,
    scale: float,
    implementation: Literal["reference", "triton"] = "triton",
) -> Tensor:
    """Attention of few queries over their ranges of context and block keys; forward only. `block_attention` picks it.

    Sums are float32 (float64 in float64); no host synchronisation, and no shape that depends on data.

    Args:
        query: [R, Q, Hq, D]; query head h reads key head h // (Hq / Hk).
        block_key, block_value: [R, U, Hk, D].
        context_key, context_value: [R, S, Hk, D], any strides but that of the last axis.
        visible: the keys of each query.
        scale: factor on the scores.
        implementation: the kernels or their definition.

    Returns:
        [R, Q, Hq, D] in the query's dtype; zero where a query sees nothing.
    """
    run = _kernel if implementation == "triton" else _reference
    return run(query, block_key, block_value, context_key, context_value, visible, scale)
