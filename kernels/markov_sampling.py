"""Markov sampling: draw a block's tokens one after the other, each slot's logits corrected by the token before it.

For slot k with parallel logits U_k and the sequential head's factors f_k, which depend on x_{k-1} (DSpark, arXiv 2607.05147,
section 3.2; see `speculators.algorithms.heads`):

    z_k(v) = U_k(v) + W2[v] . f_k,    x_k ~ softmax(z_k / T)

drawn as argmax_v z_k(v) / T + g_k(v) with Gumbel noise g; greedy without noise and at T = 1. A step reads W2 and U_k once. It
writes a few numbers a tile of the vocabulary and never [R, V]: z_k, its softmax and the noise live in registers. Two launches a
step, one over the tiles and one that picks among them.

Shortlisted, only the S likeliest tokens of U_k take part, and x_k is drawn from the softmax over these alone. That is another
distribution, a little worse a proposal, and its own probabilities are what verification must use: then it is as lossless.
"""

# Triton's kernels are typed by what they are launched with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from speculators.decoding.randomness import Purpose, gumbel
from speculators.kernels.counter_random import absorb, as_uniform, seed_argument
from speculators.kernels.dot import dot
from speculators.kernels.launch import dependent_launch

try:
    import triton
    import triton.language as tl

    from speculators.kernels.launch import wait_for_inputs
except ImportError:  # no build for this platform: the reference serves it
    triton = None

__all__ = ["MarkovChain", "MarkovDrafts", "Randomness", "markov_sampling"]

_ROWS = 16  # the fewest rows of a matrix product on tensor cores

# (slot k, tokens before it [R] int64) -> factors f_k [R, rank]; called once a slot, in order.
Factors = Callable[[int, Tensor], Tensor]


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
        factors: [R, K, rank], f_k. q_k(v) = exp(z_k(v) / T - log_normaliser) follows from them row by row.
        log_normaliser: [R, K] float32, log sum_v exp(z_k(v) / T), over the shortlist where there is one.
        log_probability: [R, K] float32, log q_k(x_k).
        shortlist: [R, K, S] int64, the columns that took part; None for all.
    """

    token_ids: Tensor
    factors: Tensor
    log_normaliser: Tensor
    log_probability: Tensor
    shortlist: Tensor | None


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
        scores = scores if draw is None else scores / temperature
        noisy = scores
        if draw is not None:
            slot = torch.full_like(draw.rows, k)[:, None]
            noisy = scores.double() + gumbel(draw.seed, Purpose.DRAFT, draw.rows[:, None], draw.round_index, slot, column)
        choice = noisy.argmax(1, keepdim=True)
        normaliser = scores.logsumexp(1)
        chosen = choice[:, 0] if shortlist is None else column.gather(1, choice)[:, 0]
        steps.append((chosen, factor, normaliser, scores.gather(1, choice)[:, 0] - normaliser))
        previous = chosen if chain.ids is None else chain.ids[chosen]
    token_ids, kept, normalisers, log_probabilities = (torch.stack(parts, dim=1) for parts in zip(*steps, strict=True))
    return MarkovDrafts(token_ids, kept, normalisers, log_probabilities, shortlist)


# -- the kernels -------------------------------------------------------------------------------------------------

if triton is not None:

    @triton.jit
    def _tile_kernel(
        logits,  # [R, K, V]
        bias_head,  # [V, rank]
        factors,  # [R, rank], this slot's
        columns_of,  # [R, K, S] the shortlist
        scores,  # [R, TILES] float64: each tile's best, with noise,
        choice,  # [R, TILES] int32: its column (of the shortlist),
        chosen,  # [R, TILES] float32: its z / T without noise,
        largest,  # [R, TILES] float32: the tile's largest z / T
        sums,  # [R, TILES] float32: and its sum of exponentials around that
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
        temperature,
        SAMPLED: tl.constexpr,
        SHORTLIST: tl.constexpr,
        TILES: tl.constexpr,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
        RANK: tl.constexpr,
        PDL: tl.constexpr,
    ):
        """One program a tile of columns and block of rows; with a shortlist, whose columns differ by row, one row a program."""
        wait_for_inputs(PDL)
        tile = tl.program_id(0)
        row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        column = tile * COLUMNS + tl.arange(0, COLUMNS)
        r = tl.arange(0, RANK)
        inside = column < columns
        here = row < rows
        at = column.to(tl.int64)
        if SHORTLIST:
            this_row = tl.program_id(1).to(tl.int64)
            at = tl.load(columns_of + (this_row * slots + slot) * columns + column, mask=inside, other=0)
        weights = tl.load(bias_head + at[:, None] * rank + r[None, :], mask=inside[:, None] & (r < rank)[None, :], other=0.0)
        factor = tl.load(factors + row[:, None] * rank + r[None, :], mask=here[:, None] & (r < rank)[None, :], other=0.0)
        if SHORTLIST:
            bias = tl.sum(weights.to(tl.float32) * factor.to(tl.float32), 1)[None, :]
        else:
            bias = dot(factor, tl.trans(weights))
        usable = here[:, None] & inside[None, :]
        source = logits + row.to(tl.int64)[:, None] * row_stride + slot * slot_stride + at[None, :]
        z = tl.load(source, mask=usable, other=float("-inf")).to(tl.float32)
        z = tl.where(usable, (z + bias) / temperature, float("-inf"))
        top = tl.max(z, 1)
        finite = tl.maximum(top, -1.0e30)
        noisy = z.to(tl.float64)
        if SAMPLED:
            number = tl.load(row_numbers + row, mask=here, other=0)
            counter = absorb(absorb(absorb(seed, purpose), number), tl.load(round_index))
            counter = absorb(absorb(counter, tl.zeros((ROWS,), tl.int64) + slot)[:, None], at[None, :])
            noisy -= tl.log(-tl.log(as_uniform(counter) + 5.551115123125783e-17))
        best = tl.max(noisy, 1)
        pick = tl.min(tl.where(noisy == best[:, None], column[None, :], columns - 1), 1)
        out = row * TILES + tile
        tl.store(scores + out, best, mask=here)
        tl.store(choice + out, pick, mask=here)
        tl.store(chosen + out, tl.max(tl.where(column[None, :] == pick[:, None], z, float("-inf")), 1), mask=here)
        tl.store(largest + out, finite, mask=here)
        tl.store(sums + out, tl.sum(tl.exp(z - finite[:, None]), 1), mask=here)

    @triton.jit
    def _pick_kernel(
        scores,
        choice,
        chosen,
        largest,
        sums,
        columns_of,
        ids,  # [V] verifier id of each column
        token_ids,  # [R, K]
        previous,  # [R], verifier ids: the tokens before the next slot
        log_normaliser,  # [R, K]
        log_probability,  # [R, K]
        slot,
        slots,
        columns,
        SHORTLIST: tl.constexpr,
        REDUCED: tl.constexpr,
        TILES: tl.constexpr,
        TILES_BLOCK: tl.constexpr,
        PDL: tl.constexpr,
    ):
        """One program a row: the best of the tiles, the first of equal ones."""
        wait_for_inputs(PDL)
        row = tl.program_id(0).to(tl.int64)
        tile = tl.arange(0, TILES_BLOCK)
        inside = tile < TILES
        source = row * TILES + tile
        score = tl.load(scores + source, mask=inside, other=float("-inf"))
        best = tl.minimum(tl.min(tl.where(score == tl.max(score, 0), tile, TILES), 0), TILES - 1)
        column = tl.load(choice + row * TILES + best).to(tl.int64)
        if SHORTLIST:
            column = tl.load(columns_of + (row * slots + slot) * columns + column)
        tops = tl.load(largest + source, mask=inside, other=-1.0e30)
        top = tl.max(tops, 0)
        total = tl.sum(tl.load(sums + source, mask=inside, other=0.0) * tl.exp(tops - top), 0)
        normaliser = top + tl.log(total)
        tl.store(token_ids + row * slots + slot, column)
        tl.store(log_normaliser + row * slots + slot, normaliser)
        tl.store(log_probability + row * slots + slot, tl.load(chosen + row * TILES + best) - normaliser)
        if REDUCED:
            column = tl.load(ids + column)
        tl.store(previous + row, column)


def _kernel(chain: MarkovChain, draw: Randomness | None, shortlist: Tensor | None) -> MarkovDrafts:
    logits, bias_head, anchor, ids = chain.logits, chain.bias_head, chain.anchor, chain.ids
    device, (rows, slots, vocabulary), rank = logits.device, logits.shape, bias_head.shape[1]
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    columns = vocabulary if shortlist is None else shortlist.shape[2]
    # A tile of W2 fills at most 64 KiB of shared memory.
    rank_block = max(16, triton.next_power_of_2(rank))
    block = max(16, min(128, (1 << 16) // (rank_block * bias_head.element_size()), triton.next_power_of_2(columns)))
    tiles = triton.cdiv(columns, block)
    scores = torch.empty(rows, tiles, dtype=torch.float64, device=device)
    choice = torch.empty(rows, tiles, dtype=torch.int32, device=device)
    chosen, largest, sums = torch.empty(3, rows, tiles, dtype=torch.float32, device=device)
    token_ids = torch.empty(rows, slots, dtype=torch.int64, device=device)
    log_normaliser, log_probability = torch.empty(2, rows, slots, dtype=torch.float32, device=device)
    row_block = _ROWS if shortlist is None else 1
    row_numbers, round_index, seed = (anchor, anchor, 0) if draw is None else (draw.rows, draw.round_index, seed_argument(draw.seed))
    previous, kept = anchor, []
    with torch.cuda.device_of(logits):
        for k in range(slots):
            kept.append(chain.factors(k, previous).contiguous())
            following = torch.empty_like(anchor)  # `factors` may have kept the tokens it was given
            _tile_kernel[(tiles, triton.cdiv(rows, row_block))](
                logits, bias_head, kept[-1], shortlist, scores, choice, chosen, largest, sums, row_numbers, round_index, seed,
                int(Purpose.DRAFT), rows, k, slots, columns, logits.stride(0), logits.stride(1), rank,
                1.0 if draw is None else draw.temperature,
                SAMPLED=draw is not None, SHORTLIST=shortlist is not None, TILES=tiles, ROWS=row_block, COLUMNS=block, RANK=rank_block,
                num_warps=4, **dependent_launch(logits),
            )  # fmt: skip
            _pick_kernel[(rows,)](
                scores, choice, chosen, largest, sums, shortlist, ids, token_ids, following, log_normaliser, log_probability, k, slots,
                columns, SHORTLIST=shortlist is not None, REDUCED=ids is not None, TILES=tiles, TILES_BLOCK=triton.next_power_of_2(tiles),
                num_warps=4, **dependent_launch(logits),
            )  # fmt: skip
            previous = following
    return MarkovDrafts(token_ids, torch.stack(kept, dim=1), log_normaliser, log_probability, shortlist)


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
