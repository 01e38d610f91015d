"""Markov sampling: draw a block's tokens one after the other, each slot's logits corrected by the token before it.

For slot k with parallel logits U_k and the sequential head's factors f_k, which depend on x_{k-1} (DSpark, arXiv 2607.05147,
section 3.2; see `speculators.algorithms.heads`):

    z_k(v) = U_k(v) + W2[v] . f_k,    x_k ~ softmax(z_k / T)

drawn as argmax_v z_k(v) / T + g_k(v) with Gumbel noise g; greedy without noise and at T = 1. What is divided by T is a distance to
the largest z_k: at a low temperature the rounding error of z_k / T would show beside the noise. A step reads W2 and U_k once. It writes
a few numbers a program and never [R, V]: z_k, its softmax and the noise live in registers. A step is one launch: each program goes over
some tiles of the vocabulary, and the one that ends last picks among them all. Where f_k is a row of a table, W1 of the vanilla head,
programs look it up themselves.

Shortlisted, only the S likeliest tokens of U_k take part, and x_k is drawn from the softmax over these alone. That is another
distribution, a little worse a proposal, and its own probabilities are what verification must use: then it is as lossless.
"""

# Triton's kernels are typed by what they are launched with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from speculators.decoding.randomness import Purpose, gumbel
from speculators.kernels.counter_random import absorb, as_gumbel, seed_argument
from speculators.kernels.dot import dot
from speculators.kernels.launch import dependent_launch, shared_memory

try:
    import triton
    import triton.language as tl

    from speculators.kernels.launch import let_next_start, wait_for_inputs
except ImportError:  # no build for this platform: the reference serves it
    triton = None

__all__ = ["MarkovChain", "MarkovDrafts", "Randomness", "TableFactors", "markov_sampling"]

_ROWS = 16, 64  # rows that go together: the fewest of a matrix product on tensor cores, and the most: W2 is read once for them
_SINGLE_ROWS = 2  # at most, that go through one by one: the second reads W2 from the cache
_PART = 16  # rows among whose programs' results the last program chooses at once
_COLUMNS = 128  # at most, of a tile
_WARPS = {1: 4, 16: 4, 32: 8, 64: 8}  # by the rows that go together
_PROGRAMS = 256  # at most, of a slot and block of rows: the last one looks at what all of them found

# (slot k, tokens before it [R] int64) -> factors f_k [R, rank]; called once a slot, in order.
Factors = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True)
class TableFactors:
    """Factors that depend on the token before alone: f_k = table[x_{k-1}].

    Attributes:
        table: [verifier vocabulary, rank], contiguous.
    """

    table: Tensor

    def __call__(self, k: int, previous: Tensor) -> Tensor:
        """[...] tokens -> [..., rank]."""
        return F.embedding(previous, self.table)


@dataclass(frozen=True)
class MarkovChain:
    """A block to draw, slot after slot.

    Attributes:
        logits: [R, K, V], U_k, any float dtype.
        bias_head: [V, rank], W2, contiguous.
        anchor: [R] int64, the token before slot 0, a verifier id.
        factors: the head up to W2.
        ids: [V] int64, the verifier id of each column of a reduced draft vocabulary; None where they are the same.
    """

    logits: Tensor
    bias_head: Tensor
    anchor: Tensor
    factors: Factors
    ids: Tensor | None = None

    def slot_by_slot(self, draw: Callable[[Tensor], Tensor]) -> Tensor:
        """Draw by any rule: `draw` turns a slot's corrected logits [R, V] into verifier ids [R]. Returns [R, K]."""
        previous, drawn = self.anchor, []
        for k in range(self.logits.shape[1]):
            previous = draw(self.logits[:, k] + F.linear(self.factors(k, previous), self.bias_head))
            drawn.append(previous)
        return torch.stack(drawn, dim=1)


@dataclass(frozen=True)
class Randomness:
    """How to draw: the temperature, above 0, and the counter's parts but slot and token (see `randomness.gumbel`).

    Attributes:
        temperature: divides the logits.
        seed: any integer.
        rows: [R] int64.
        round_index: scalar int64 tensor.
    """

    temperature: float
    seed: int
    rows: Tensor
    round_index: Tensor


@dataclass(frozen=True)
class MarkovDrafts:
    """What was drawn, and what it takes to rebuild any probability of it.

    Attributes:
        token_ids: [R, K] int64, columns of the logits.
        largest: [R, K] float32, max_v z_k(v), over the shortlist where there is one.
        log_normaliser: [R, K] float32, log sum_v exp((z_k(v) - largest) / T), likewise.
        log_probability: [R, K] float32, log q_k(x_k).
        shortlist: [R, K, S] int64, the columns that took part; None for all.
        slot_factors: makes `factors`.
    """

    token_ids: Tensor
    largest: Tensor
    log_normaliser: Tensor
    log_probability: Tensor
    shortlist: Tensor | None
    slot_factors: Callable[[], Tensor]

    @cached_property
    def factors(self) -> Tensor:
        """[R, K, rank], f_k. q_k(v) = exp((z_k(v) - largest) / T - log_normaliser) follows from them row by row."""
        return self.slot_factors()


# -- the definition ----------------------------------------------------------------------------------------------


def _reference(chain: MarkovChain, draw: Randomness | None, shortlist: Tensor | None) -> MarkovDrafts:
    logits, bias_head = chain.logits, chain.bias_head
    temperature = 1.0 if draw is None else draw.temperature
    previous, steps = chain.anchor, []
    for k in range(logits.shape[1]):
        factor = chain.factors(k, previous)
        if shortlist is None:
            column = torch.arange(logits.shape[2], device=logits.device)
            scores = logits[:, k].float() + F.linear(factor, bias_head).float()
        else:
            column = shortlist[:, k]
            scores = logits[:, k].gather(1, column).float() + (bias_head[column].float() @ factor.float()[..., None])[..., 0]
        largest = scores.amax(1, keepdim=True)
        scores = (scores - largest) / temperature
        noisy = scores
        if draw is not None:
            slot = torch.full_like(draw.rows, k)[:, None]
            noisy = scores.double() + gumbel(draw.seed, Purpose.DRAFT, draw.rows[:, None], draw.round_index, slot, column)
        choice = noisy.argmax(1, keepdim=True)
        normaliser = scores.logsumexp(1)
        chosen = choice[:, 0] if shortlist is None else column.gather(1, choice)[:, 0]
        steps.append((chosen, factor, largest[:, 0], normaliser, scores.gather(1, choice)[:, 0] - normaliser))
        previous = chosen if chain.ids is None else chain.ids[chosen]
    token_ids, kept, tops, normalisers, log_probabilities = (torch.stack(parts, dim=1) for parts in zip(*steps, strict=True))
    return MarkovDrafts(token_ids, tops, normalisers, log_probabilities, shortlist, lambda: kept)


# -- the kernels -------------------------------------------------------------------------------------------------

if triton is not None:

    @triton.jit(do_not_specialize=["slot"])  # or slots 0, 1 and all others would each be compiled
    def _slot_kernel(
        logits,  # [R, K, V]
        bias_head,  # [V, rank]
        factors,  # [R, rank], this slot's; with TABLE [verifier vocabulary, rank], of all tokens
        columns_of,  # [R, K, S] the shortlist
        ids,  # [V] verifier id of each column
        previous,  # [R], verifier ids: the tokens before this slot,
        following,  # [R] and before the next one
        token_ids,  # [R, K]
        largest,  # [R, K]
        log_normaliser,  # [R, K]
        log_probability,  # [R, K]
        tops,  # [R, PROGRAMS_BLOCK] float32: each program's largest z,
        sums,  # [R, PROGRAMS_BLOCK] float32: the sum of its exp((z - top) / T),
        scores,  # [R, PROGRAMS_BLOCK] float32: its best (z - top) / T with noise,
        chosen,  # [R, PROGRAMS_BLOCK] float32: that without noise,
        choice,  # [R, PROGRAMS_BLOCK] int32: and its column (of the shortlist)
        arrived,  # [K, row blocks] int32: programs that have written theirs
        row_numbers,  # [R]
        round_index,
        seed,
        purpose,
        rows,
        slot,
        slots,
        columns,  # V, or S
        row_stride,
        slot_stride,
        rank,
        inverse_temperature,
        SAMPLED: tl.constexpr,
        SHORTLIST: tl.constexpr,
        SINGLE: tl.constexpr,
        REDUCED: tl.constexpr,
        TABLE: tl.constexpr,
        PROGRAMS: tl.constexpr,
        PROGRAMS_BLOCK: tl.constexpr,
        TILES: tl.constexpr,
        ROWS: tl.constexpr,
        PART: tl.constexpr,
        COLUMNS: tl.constexpr,
        RANK: tl.constexpr,
        PDL: tl.constexpr,
    ):
        """One program some tiles of columns and block of rows; with SINGLE one row, as a shortlist takes, whose columns differ by row."""
        wait_for_inputs(PDL)
        program = tl.program_id(0)
        row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        this_row = tl.program_id(1).to(tl.int64)  # with a shortlist
        r = tl.arange(0, RANK)
        here = row < rows
        source = row
        if TABLE:
            source = tl.load(previous + row, mask=here, other=0)
        factor = tl.load(factors + source[:, None] * rank + r[None, :], mask=here[:, None] & (r < rank)[None, :], other=0.0)
        if SAMPLED:
            number = tl.load(row_numbers + row, mask=here, other=0)
            counter = absorb(absorb(absorb(seed, purpose), number), tl.load(round_index))
            counter = absorb(counter, tl.zeros((ROWS,), tl.int64) + slot)[:, None]
        best = tl.full((ROWS,), float("-inf"), tl.float32)
        pick = tl.zeros((ROWS,), tl.int32)
        z_best = tl.full((ROWS,), float("-inf"), tl.float32)
        top = tl.full((ROWS,), -1.0e30, tl.float32)  # finite, so that exp(-inf - top) is 0 and never NaN
        total = tl.zeros((ROWS,), tl.float32)
        for tile in range(TILES):
            column = (program * TILES + tile) * COLUMNS + tl.arange(0, COLUMNS)
            inside = column < columns
            at = column.to(tl.int64)
            if SHORTLIST:
                at = tl.load(columns_of + (this_row * slots + slot) * columns + column, mask=inside, other=0)
            weights = tl.load(bias_head + at[:, None] * rank + r[None, :], mask=inside[:, None] & (r < rank)[None, :], other=0.0)
            if SINGLE:
                bias = tl.sum(weights.to(tl.float32) * factor.to(tl.float32), 1)[None, :]
            else:
                bias = dot(factor, tl.trans(weights))
            usable = here[:, None] & inside[None, :]
            place = logits + row.to(tl.int64)[:, None] * row_stride + slot * slot_stride + at[None, :]
            z = tl.load(place, mask=usable, other=float("-inf")).to(tl.float32)
            z = tl.where(usable, z + bias, float("-inf"))
            tile_top = tl.max(z, 1)
            higher = tl.maximum(top, tile_top)
            fall = (top - higher) * inverse_temperature  # of what was measured from the top so far
            z = (z - higher[:, None]) * inverse_temperature
            noisy = z + as_gumbel(absorb(counter, at[None, :])) if SAMPLED else z
            tile_best = tl.max(noisy, 1) if SAMPLED else (tile_top - higher) * inverse_temperature
            tile_pick = tl.min(tl.where(noisy == tile_best[:, None], column[None, :], columns - 1), 1)
            better = tile_best > best + fall  # of equal ones the first
            z_pick = tl.max(tl.where(column[None, :] == tile_pick[:, None], z, float("-inf")), 1) if SAMPLED else tile_best
            z_best = tl.where(better, z_pick, z_best + fall)
            pick = tl.where(better, tile_pick, pick)
            best = tl.where(better, tile_best, best + fall)
            total = total * tl.exp(fall) + tl.sum(tl.exp(z), 1)
            top = higher
        let_next_start(PDL)
        out = row * PROGRAMS_BLOCK + program
        tl.store(tops + out, top, mask=here)
        tl.store(sums + out, total, mask=here)
        tl.store(scores + out, best, mask=here)
        tl.store(chosen + out, z_best, mask=here)
        tl.store(choice + out, pick, mask=here)
        tl.debug_barrier()  # what all threads of the program wrote comes before its arrival
        ticket = tl.atomic_add(arrived + slot * tl.num_programs(1) + tl.program_id(1), 1, sem="acq_rel")
        if ticket == PROGRAMS - 1:
            for part in range(ROWS // PART):
                some = tl.program_id(1) * ROWS + part * PART + tl.arange(0, PART)
                present = some < rows
                p = tl.arange(0, PROGRAMS_BLOCK)[None, :]
                there = present[:, None] & (p < PROGRAMS)
                found = some[:, None] * PROGRAMS_BLOCK + p
                found_top = tl.load(tops + found, mask=there, other=-1.0e30, cache_modifier=".cg")
                highest = tl.max(found_top, 1)
                below = (found_top - highest[:, None]) * inverse_temperature
                share = tl.load(sums + found, mask=there, other=0.0, cache_modifier=".cg") * tl.exp(below)
                score = tl.load(scores + found, mask=there, other=float("-inf"), cache_modifier=".cg") + below
                winner = tl.min(tl.where(score == tl.max(score, 1)[:, None], p, PROGRAMS - 1), 1)
                normaliser = tl.log(tl.where(present, tl.sum(share, 1), 1.0))
                won = some * PROGRAMS_BLOCK + winner
                token = tl.load(choice + won, mask=present, other=0, cache_modifier=".cg").to(tl.int64)
                if SHORTLIST:
                    token = tl.load(columns_of + (this_row * slots + slot) * columns + token, mask=present, other=0)
                target = some.to(tl.int64) * slots + slot
                tl.store(token_ids + target, token, mask=present)
                tl.store(largest + target, highest, mask=present)
                tl.store(log_normaliser + target, normaliser, mask=present)
                z = tl.load(chosen + won, mask=present, other=0.0, cache_modifier=".cg")
                z += (tl.load(tops + won, mask=present, other=0.0, cache_modifier=".cg") - highest) * inverse_temperature
                tl.store(log_probability + target, z - normaliser, mask=present)
                if REDUCED:
                    token = tl.load(ids + token, mask=present, other=0)
                tl.store(following + some, token, mask=present)


def _stages(rows: int, columns: int, rank: int, logits: Tensor, bias_head: Tensor) -> int:
    """Tiles of `rows` logits by `columns`, and of W2 by `rank`, whose loads may be under way at once: so many fit in shared memory."""
    # Beside them lie the rows' factors, or float32 numbers where the product's layout is changed.
    room = shared_memory(logits.device) - max(rows * rank * bias_head.element_size(), 4 * rows * columns)
    tile = columns * (rank * bias_head.element_size() + rows * logits.element_size())
    # From 64 rows on tensor cores read a tile from shared memory while the next ones arrive; below, it is in registers by then.
    held = 0 if rows >= 64 else 1
    return max(1, min(3, room // tile + held))


def _kernel(chain: MarkovChain, draw: Randomness | None, shortlist: Tensor | None) -> MarkovDrafts:
    logits, bias_head, anchor, ids = chain.logits, chain.bias_head, chain.anchor.contiguous(), chain.ids
    device, (rows, slots, vocabulary), rank = logits.device, logits.shape, bias_head.shape[1]
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    columns = vocabulary if shortlist is None else shortlist.shape[2]
    # A tile of W2 fills at most 64 KiB of shared memory, 32 on GPUs with little of it.
    rank_block = max(16, triton.next_power_of_2(rank))
    room = 1 << (16 if shared_memory(device) >= 163_840 else 15)
    block = max(16, min(_COLUMNS, room // (rank_block * bias_head.element_size()), triton.next_power_of_2(columns)))
    # By the vocabulary alone. The number of rows, though, decides about the instructions that sum, and so about roundings.
    tiles = triton.cdiv(triton.cdiv(columns, block), _PROGRAMS)
    programs = triton.cdiv(columns, block * tiles)
    # Few rows one by one: a matrix product would compute sixteen of them, and what follows it too.
    single = shortlist is not None or rows <= _SINGLE_ROWS
    row_block = 1 if single else min(max(_ROWS[0], triton.next_power_of_2(rows)), _ROWS[1])
    row_blocks = triton.cdiv(rows, row_block)
    programs_block = triton.next_power_of_2(programs)
    stages = _stages(row_block, block, rank_block, logits, bias_head)
    choice = torch.empty(rows, programs_block, dtype=torch.int32, device=device)
    tops, sums, scores, chosen = torch.empty(4, rows, programs_block, dtype=torch.float32, device=device)
    arrived = torch.zeros(slots, row_blocks, dtype=torch.int32, device=device)
    token_ids = torch.empty(rows, slots, dtype=torch.int64, device=device)
    largest, log_normaliser, log_probability = torch.empty(3, rows, slots, dtype=torch.float32, device=device)
    row_numbers, round_index, seed, inverse_temperature = anchor, anchor, 0, 1.0
    if draw is not None:
        row_numbers, round_index, seed = draw.rows.contiguous(), draw.round_index, seed_argument(draw.seed)
        inverse_temperature = max(1.0 / draw.temperature, torch.finfo(torch.float32).tiny)  # not 0, since -inf times 0 is NaN
    table = chain.factors.table if isinstance(chain.factors, TableFactors) else None
    before, kept = [anchor], []
    with torch.cuda.device_of(logits):
        for k in range(slots):
            factors = chain.factors(k, before[-1]).contiguous() if table is None else table
            kept.append(factors)
            before.append(torch.empty_like(anchor))
            _slot_kernel[(programs, row_blocks)](
                logits, bias_head, factors, shortlist, ids, before[-2], before[-1], token_ids, largest, log_normaliser,
                log_probability, tops, sums, scores, chosen, choice, arrived, row_numbers, round_index, seed, int(Purpose.DRAFT),
                rows, k, slots, columns, logits.stride(0), logits.stride(1), rank, inverse_temperature,
                SAMPLED=draw is not None, SHORTLIST=shortlist is not None, SINGLE=single, REDUCED=ids is not None, TABLE=table is not None,
                PROGRAMS=programs, PROGRAMS_BLOCK=programs_block, TILES=tiles, ROWS=row_block,
                PART=min(_PART, row_block), COLUMNS=block, RANK=rank_block, num_warps=_WARPS[row_block], num_stages=stages,
                **dependent_launch(logits),
            )  # fmt: skip

    def slot_factors() -> Tensor:
        return torch.stack(kept if table is None else [chain.factors(k, token) for k, token in enumerate(before[:-1])], dim=1)

    return MarkovDrafts(token_ids, largest, log_normaliser, log_probability, shortlist, slot_factors)


# -- the public function -----------------------------------------------------------------------------------------


def markov_sampling(
    chain: MarkovChain,
    *,
    draw: Randomness | None = None,
    top_k: int = 0,
    implementation: Literal["auto", "reference", "triton"] = "auto",
) -> MarkovDrafts:
    """Draw a block through a sequential head. See the module's text.

    No host synchronisation, and no shape that depends on data.

    Args:
        chain: what to draw from.
        draw: how to sample; None takes the largest logit, of equal ones the first.
        top_k: S, take only the S largest logits of each U_k into account; 0 for all.
        implementation: "auto" takes the kernels on CUDA below float64. They add the bias in float32, the reference rounds it to
            the dtype of W2 first: in 16 bits close logits may fall either way.
    """
    logits = chain.logits
    shortlist = logits.topk(top_k, dim=-1).indices if 0 < top_k < logits.shape[-1] else None
    use_kernel = implementation == "triton" or (
        implementation == "auto" and logits.is_cuda and logits.dtype != torch.float64 and triton is not None
    )
    return (_kernel if use_kernel else _reference)(chain, draw, shortlist)
