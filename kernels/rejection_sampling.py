"""Rejection sampling of ragged draft blocks, straight from logits: standard and block verification.

The definition is `speculators.decoding.rejection`, on probability tensors; the reference here makes these tensors and calls it.
The kernels never write one. With p = softmax(target / T) and q likewise they run four launches:

    1. log-sum-exps of target and draft logits, a tile of the vocabulary each (nothing to do for probabilities)
    2. a row's p(x_k) and q(x_k): how far standard verification accepts, or the weights w_k of block verification
    3. sum_x max(w_k p_k(x) - q_k(x), 0), a tile each, at the slots that may need it: one of standard verification, all of block's
    4. the accepted length, and the token after it by inverting the cumulative sum: tiles first, then inside one tile

Traffic: each logit is read once, those of the slots of step 3 twice. Random numbers are those of
`speculators.decoding.randomness`, computed where they are used.
"""

# Triton's kernels are typed by what they are launched with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from speculators.decoding.randomness import Purpose, uniform
from speculators.decoding.rejection import Acceptance, accept_block, accept_sampled
from speculators.kernels.counter_random import absorb, as_uniform, seed_argument
from speculators.kernels.likeliest_tokens import Implementation, tiles_of, use_kernel, with_unit_stride

try:
    import triton
    import triton.language as tl
except ImportError:  # no build for this platform: the reference serves it
    triton = None

__all__ = ["Distributions", "rejection_sampling"]

Verification = Literal["standard", "block"]


@dataclass(frozen=True)
class Distributions:
    """Distributions over the vocabulary, as logits or as probabilities.

    Attributes:
        values: [R, n, V], any float dtype.
        temperature: the distribution is softmax(values / temperature) in float32; None where the values are probabilities.
    """

    values: Tensor
    temperature: float | None = None

    def probabilities(self) -> Tensor:
        """[R, n, V] float32."""
        return self.values if self.temperature is None else (self.values.float() / self.temperature).softmax(-1)


# -- the definition ----------------------------------------------------------------------------------------------


def _reference(
    token_ids: Tensor,
    lengths: Tensor,
    target: Distributions,
    draft: Distributions | None,
    seed: int,
    rows: Tensor,
    round_index: Tensor,
    verification: Verification,
) -> Acceptance:
    slots = torch.arange(token_ids.shape[1], device=rows.device)
    accept_uniforms = uniform(seed, Purpose.ACCEPT, rows[:, None], round_index, slots)
    correct_uniforms = uniform(seed, Purpose.CORRECT, rows, round_index, torch.zeros_like(rows))
    accept = accept_sampled if verification == "standard" else accept_block
    q = None if draft is None else draft.probabilities()
    return accept(token_ids, lengths, q, target.probabilities(), accept_uniforms, correct_uniforms)


# -- the kernels -------------------------------------------------------------------------------------------------

if triton is not None:

    @triton.jit
    def _tile_log_sum_exp_kernel(
        values, out, slots, row_stride, slot_stride, vocabulary, temperature, TILES: tl.constexpr, TILE: tl.constexpr
    ):
        """One program a slot and tile: max and sum of exponentials, [slots of all rows, 2, TILES]."""
        slot = tl.program_id(0).to(tl.int64)
        tile = tl.program_id(1)
        columns = tile * TILE + tl.arange(0, TILE)
        source = values + slot // slots * row_stride + slot % slots * slot_stride
        x = tl.load(source + columns, mask=columns < vocabulary, other=float("-inf")).to(tl.float32) / temperature
        largest = tl.maximum(tl.max(x, 0), -1.0e30)  # finite, so that exp(-inf - max) is 0 and never NaN
        tl.store(out + (slot * 2) * TILES + tile, largest)
        tl.store(out + (slot * 2 + 1) * TILES + tile, tl.sum(tl.exp(x - largest), 0))

    @triton.jit
    def _log_sum_exp(tiles, slot, TILES: tl.constexpr, TILES_BLOCK: tl.constexpr):
        """Of one slot, from its tiles."""
        tile = tl.arange(0, TILES_BLOCK)
        largest = tl.load(tiles + (slot * 2) * TILES + tile, mask=tile < TILES, other=-1.0e30)
        sums = tl.load(tiles + (slot * 2 + 1) * TILES + tile, mask=tile < TILES, other=0.0)
        top = tl.max(largest, 0)
        return top + tl.log(tl.sum(sums * tl.exp(largest - top), 0))

    @triton.jit
    def _decide_kernel(
        token_ids,  # [R, K]
        lengths,  # [R]
        target,  # [R, K + 1, V]
        draft,  # [R, K, V]
        target_tiles,  # [R * (K + 1), 2, TILES]
        draft_tiles,  # [R * K, 2, TILES]
        target_normaliser,  # [R, K + 1] float32: log-sum-exp
        draft_normaliser,  # [R, K] float32
        weights,  # [R, K + 1] float64: w of every slot that may be the last accepted one, -1 elsewhere
        rows,  # [R]
        round_index,  # []
        seed,
        purpose,
        drafts,
        token_stride,
        target_row_stride,
        target_slot_stride,
        draft_row_stride,
        draft_slot_stride,
        target_temperature,
        draft_temperature,
        TARGET_LOGITS: tl.constexpr,
        DRAFT_LOGITS: tl.constexpr,
        POINT_MASS: tl.constexpr,
        BLOCK_VERIFICATION: tl.constexpr,
        TILES: tl.constexpr,
        TILES_BLOCK: tl.constexpr,
    ):
        """One program a row; it walks the row's drafts."""
        row = tl.program_id(0).to(tl.int64)
        length = tl.load(lengths + row)
        counter = absorb(absorb(absorb(seed, purpose), tl.load(rows + row)), tl.load(round_index))
        weight = tl.full((), 1.0, tl.float64)
        accepted = tl.zeros((), tl.int64)
        walking = length >= 0
        for k in range(drafts + 1):
            if TARGET_LOGITS:
                slot = row * (drafts + 1) + k
                normaliser = _log_sum_exp(target_tiles, slot, TILES, TILES_BLOCK)
                tl.store(target_normaliser + slot, normaliser)
            if BLOCK_VERIFICATION:
                tl.store(weights + row * (drafts + 1) + k, tl.where(k <= length, weight, -1.0))
            if k < drafts:
                token = tl.load(token_ids + row * token_stride + k)
                p = tl.load(target + row * target_row_stride + k * target_slot_stride + token).to(tl.float32)
                if TARGET_LOGITS:
                    p = tl.exp(p / target_temperature - normaliser)
                ratio = p.to(tl.float64)
                if POINT_MASS == 0:
                    q = tl.load(draft + row * draft_row_stride + k * draft_slot_stride + token).to(tl.float32)
                    if DRAFT_LOGITS:
                        draft_norm = _log_sum_exp(draft_tiles, row * drafts + k, TILES, TILES_BLOCK)
                        tl.store(draft_normaliser + row * drafts + k, draft_norm)
                        q = tl.exp(q / draft_temperature - draft_norm)
                    ratio = ratio / q.to(tl.float64)
                if BLOCK_VERIFICATION:
                    weight = tl.minimum(weight * ratio, 1.0)
                else:
                    keeps = as_uniform(absorb(counter, tl.zeros((), tl.int64) + k)) < tl.minimum(ratio, 1.0)
                    walking = walking & (k < length) & keeps
                    accepted += tl.where(walking, 1, 0)
        if BLOCK_VERIFICATION == 0:
            for k in range(drafts + 1):
                tl.store(weights + row * (drafts + 1) + k, tl.where(k == accepted, 1.0, -1.0).to(tl.float64))

    @triton.jit
    def _remainder(
        target,  # of the slot
        draft,  # of the slot
        columns,
        vocabulary,
        weight,
        token,
        is_draft,
        target_normaliser,
        draft_normaliser,
        target_temperature,
        draft_temperature,
        TARGET_LOGITS: tl.constexpr,
        DRAFT_LOGITS: tl.constexpr,
        POINT_MASS: tl.constexpr,
    ):
        """max(w p - q, 0) of some columns in float64; w p where the slot has no draft."""
        inside = columns < vocabulary
        if TARGET_LOGITS:
            x = tl.load(target + columns, mask=inside, other=float("-inf")).to(tl.float32)
            p = tl.exp(x / target_temperature - target_normaliser)
        else:
            p = tl.load(target + columns, mask=inside, other=0.0).to(tl.float32)
        left = p.to(tl.float64) * weight
        if POINT_MASS:
            return tl.where(columns == token, 0.0, left)  # a slot without draft has token -1
        if DRAFT_LOGITS:
            y = tl.load(draft + columns, mask=inside, other=float("-inf")).to(tl.float32)
            q = tl.exp(y / draft_temperature - draft_normaliser)
        else:
            q = tl.load(draft + columns, mask=inside, other=0.0).to(tl.float32)
        return tl.where(is_draft, tl.maximum(left - q.to(tl.float64), 0.0), left)

    @triton.jit
    def _tile_mass_kernel(
        token_ids, lengths, target, draft, target_normaliser, draft_normaliser, weights,
        masses,  # [R, K + 1, TILES] float64
        drafts, token_stride, target_row_stride, target_slot_stride, draft_row_stride, draft_slot_stride,
        vocabulary, target_temperature, draft_temperature,
        TARGET_LOGITS: tl.constexpr, DRAFT_LOGITS: tl.constexpr, POINT_MASS: tl.constexpr,
        TILES: tl.constexpr, TILE: tl.constexpr,
    ):  # fmt: skip
        """One program a slot and tile; slots that cannot be the last accepted one have nothing to do."""
        slot = tl.program_id(0).to(tl.int64)
        tile = tl.program_id(1)
        weight = tl.load(weights + slot)
        if weight < 0:
            return
        row = slot // (drafts + 1)
        k = slot % (drafts + 1)
        is_draft = k < tl.load(lengths + row)
        at = tl.minimum(k, tl.maximum(drafts - 1, 0))  # a slot without draft reads another's, for nothing
        columns = tile * TILE + tl.arange(0, TILE)
        left = _remainder(
            target + row * target_row_stride + k * target_slot_stride, draft + row * draft_row_stride + at * draft_slot_stride,
            columns, vocabulary, weight, tl.load(token_ids + row * token_stride + at, mask=is_draft, other=-1), is_draft,
            tl.load(target_normaliser + slot), tl.load(draft_normaliser + row * drafts + at, mask=is_draft, other=0.0),
            target_temperature, draft_temperature, TARGET_LOGITS, DRAFT_LOGITS, POINT_MASS,
        )  # fmt: skip
        tl.store(masses + slot * TILES + tile, tl.sum(left, 0))

    @triton.jit
    def _draw_kernel(
        token_ids, lengths, target, draft, target_normaliser, draft_normaliser, weights, masses,
        accepted_out,  # [R]
        next_token,  # [R]
        rows, round_index, seed, accept_purpose, correct_purpose,
        drafts, token_stride, target_row_stride, target_slot_stride, draft_row_stride, draft_slot_stride,
        vocabulary, target_temperature, draft_temperature,
        TARGET_LOGITS: tl.constexpr, DRAFT_LOGITS: tl.constexpr, POINT_MASS: tl.constexpr, BLOCK_VERIFICATION: tl.constexpr,
        TILES: tl.constexpr, TILES_BLOCK: tl.constexpr, TILE: tl.constexpr,
    ):  # fmt: skip
        """One program a row: choose the accepted length, then the token after it."""
        row = tl.program_id(0).to(tl.int64)
        length = tl.load(lengths + row)
        this_row = tl.load(rows + row)
        this_round = tl.load(round_index)
        counter = absorb(absorb(absorb(seed, accept_purpose), this_row), this_round)
        tile = tl.arange(0, TILES_BLOCK)
        accepted = tl.zeros((), tl.int64)
        for k in range(drafts + 1):
            slot = row * (drafts + 1) + k
            weight = tl.load(weights + slot)
            if BLOCK_VERIFICATION:
                if k > 0:
                    mass = tl.sum(tl.load(masses + slot * TILES + tile, mask=tile < TILES, other=0.0), 0)
                    mass = tl.where(weight >= 0, mass, 0.0)  # of other slots it was never written
                    stay = tl.where(k == length, weight, mass / tl.maximum(mass + 1.0 - weight, 1.0e-300))
                    keeps = (k <= length) & (as_uniform(absorb(counter, tl.zeros((), tl.int64) + k - 1)) < stay)
                    accepted = tl.where(keeps, k, accepted)
            else:
                accepted = tl.where(weight >= 0, k, accepted)

        # Invert the cumulative sum: the first token whose sum exceeds the number's share of the total.
        slot = row * (drafts + 1) + accepted
        of_tiles = tl.load(masses + slot * TILES + tile, mask=tile < TILES, other=0.0)
        total = tl.sum(of_tiles, 0)
        share = as_uniform(absorb(absorb(absorb(absorb(seed, correct_purpose), this_row), this_round), tl.zeros((), tl.int64))) * total
        up_to = tl.cumsum(of_tiles, 0)
        chosen = tl.min(tl.where((up_to > share) & (of_tiles > 0.0), tile, TILES_BLOCK), 0)
        # Sums in another order may leave the share just above the last sum: then the last tile with any mass.
        last = tl.max(tl.where(of_tiles > 0.0, tile, 0), 0)
        chosen = tl.where(chosen == TILES_BLOCK, last, chosen)
        before = tl.sum(tl.where(tile < chosen, of_tiles, 0.0), 0)

        is_draft = accepted < length
        at = tl.minimum(accepted, tl.maximum(drafts - 1, 0))
        token = tl.load(token_ids + row * token_stride + at, mask=is_draft, other=-1)
        columns = chosen * TILE + tl.arange(0, TILE)
        left = _remainder(
            target + row * target_row_stride + accepted * target_slot_stride,
            draft + row * draft_row_stride + at * draft_slot_stride,
            columns, vocabulary, tl.load(weights + slot), token, is_draft,
            tl.load(target_normaliser + slot), tl.load(draft_normaliser + row * drafts + at, mask=is_draft, other=0.0),
            target_temperature, draft_temperature, TARGET_LOGITS, DRAFT_LOGITS, POINT_MASS,
        )  # fmt: skip
        exceeds = (before + tl.cumsum(left, 0) > share) & (left > 0.0)
        drawn = tl.min(tl.where(exceeds, columns, vocabulary), 0)
        drawn = tl.where(drawn == vocabulary, tl.max(tl.where(left > 0.0, columns, 0), 0), drawn)
        # p and q are equal up to rounding, and yet the draft was rejected, which has probability 0 up to rounding.
        tl.store(next_token + row, tl.where(total > 0.0, drawn.to(tl.int64), token))
        tl.store(accepted_out + row, accepted)


def _kernel(
    token_ids: Tensor,
    lengths: Tensor,
    target: Distributions,
    draft: Distributions | None,
    seed: int,
    rows: Tensor,
    round_index: Tensor,
    verification: Verification,
) -> Acceptance:
    device, (batch, drafts) = token_ids.device, token_ids.shape
    draft = draft if drafts else None
    p = with_unit_stride(target.values)
    q = p if draft is None else with_unit_stride(draft.values)
    token_ids = token_ids if token_ids.stride(-1) == 1 else token_ids.contiguous()
    vocabulary = p.shape[-1]
    tile, tiles = tiles_of(vocabulary)
    normalisers = torch.empty(2, batch, drafts + 1, dtype=torch.float32, device=device)
    weights = torch.empty(batch, drafts + 1, dtype=torch.float64, device=device)
    masses = torch.empty(batch, drafts + 1, tiles, dtype=torch.float64, device=device)
    accepted, next_token = torch.empty_like(lengths), torch.empty_like(lengths)
    target_temperature = 1.0 if target.temperature is None else target.temperature
    draft_temperature = 1.0 if draft is None or draft.temperature is None else draft.temperature
    kinds = {
        "TARGET_LOGITS": target.temperature is not None,
        "DRAFT_LOGITS": draft is not None and draft.temperature is not None,
        "POINT_MASS": draft is None,
    }
    strides = (token_ids.stride(0), p.stride(0), p.stride(1), q.stride(0), q.stride(1))
    tile_block, seed = triton.next_power_of_2(tiles), seed_argument(seed)
    block = verification == "block"
    with torch.cuda.device_of(token_ids):
        target_tiles = _tile_log_sum_exp(p, target_temperature, tile, tiles) if kinds["TARGET_LOGITS"] else masses
        draft_tiles = _tile_log_sum_exp(q, draft_temperature, tile, tiles) if kinds["DRAFT_LOGITS"] else masses
        _decide_kernel[(batch,)](
            token_ids, lengths, p, q, target_tiles, draft_tiles, normalisers[0], normalisers[1], weights, rows, round_index, seed,
            int(Purpose.ACCEPT), drafts, *strides, target_temperature, draft_temperature,
            **kinds, BLOCK_VERIFICATION=block, TILES=tiles, TILES_BLOCK=tile_block, num_warps=1,
        )  # fmt: skip
        _tile_mass_kernel[(batch * (drafts + 1), tiles)](
            token_ids, lengths, p, q, normalisers[0], normalisers[1], weights, masses, drafts, *strides,
            vocabulary, target_temperature, draft_temperature, **kinds, TILES=tiles, TILE=tile, num_warps=8,
        )  # fmt: skip
        _draw_kernel[(batch,)](
            token_ids, lengths, p, q, normalisers[0], normalisers[1], weights, masses, accepted, next_token, rows, round_index, seed,
            int(Purpose.ACCEPT), int(Purpose.CORRECT), drafts, *strides, vocabulary, target_temperature, draft_temperature,
            **kinds, BLOCK_VERIFICATION=block, TILES=tiles, TILES_BLOCK=tile_block, TILE=tile, num_warps=8,
        )  # fmt: skip
    return Acceptance(accepted, next_token)


def _tile_log_sum_exp(values: Tensor, temperature: float, tile: int, tiles: int) -> Tensor:
    """[R, n, V] -> [R * n, 2, tiles] float32: each tile's largest value / temperature and sum of exponentials around it."""
    rows, slots, vocabulary = values.shape
    out = torch.empty(rows * slots, 2, tiles, dtype=torch.float32, device=values.device)
    if rows * slots:
        _tile_log_sum_exp_kernel[(rows * slots, tiles)](
            values, out, slots, values.stride(0), values.stride(1), vocabulary, temperature, TILES=tiles, TILE=tile, num_warps=8
        )
    return out


# -- the public function ----------------------------------------------------------------------------------------


def rejection_sampling(
    token_ids: Tensor,
    lengths: Tensor,
    target: Distributions,
    draft: Distributions | None,
    *,
    seed: int,
    rows: Tensor,
    round_index: Tensor,
    verification: Verification = "standard",
    implementation: Implementation = "auto",
) -> Acceptance:
    """Accept drafts and draw the token after them, so that every token is distributed as the verifier's.

    No host synchronisation, and no shape that depends on data.

    Args:
        token_ids: [R, K] int64 drafts, K >= 0.
        lengths: [R] int64, drafts of each row that count.
        target: [R, K + 1, V], the verifier's distributions after the anchor and after each draft.
        draft: [R, K, V], the distributions the drafts were drawn from; None for point masses.
        seed: any integer.
        rows: [R] int64, each row's number in the request, for the random numbers.
        round_index: scalar int64 tensor, for the random numbers.
        verification: "standard" decides token by token, "block" about the whole block; see `speculators.decoding.rejection`.
        implementation: "auto" takes the kernels on CUDA below float64. They sum in another order than the reference: a draw
            differs from the reference's where its number falls within rounding of a token's border.
    """
    run = _kernel if use_kernel(implementation, target.values) else _reference
    return run(token_ids, lengths, target, draft, seed, rows, round_index, verification)
