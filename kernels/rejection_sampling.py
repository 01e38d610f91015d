"""Rejection sampling of ragged draft blocks, straight from logits: standard and block verification.

The definition is `speculators.decoding.rejection`, on probability tensors; the reference here makes these tensors and calls it.
The kernels never write one. With p = softmax(target / T) and q likewise they run four launches:

    1. log-sum-exps of target and draft logits, a tile of the vocabulary each (nothing to do for probabilities)
    2. a row's p(x_k) and q(x_k): how far standard verification accepts, or the weights w_k of block verification
    3. sum_x max(w_k p_k(x) - q_k(x), 0), a tile each, at the slots that may need it: one of standard verification, all of block's
    4. block verification's accepted length, and the token after it by inverting the cumulative sum: tiles first, then inside one

Exponents are to base 2, as the hardware has them, and the temperature a factor. It multiplies a logit's distance to its slot's largest,
never the logit: at a low temperature the product of a logit has rounding errors larger than 1, which are exponents here.

Traffic: each logit is read once, those of the slots of step 3 twice. Random numbers are those of
`speculators.decoding.randomness`, computed where they are used.
"""

# Triton's kernels are typed by what they are launched with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from speculators.decoding.randomness import Purpose, uniform
from speculators.decoding.rejection import Acceptance, accept_block, accept_sampled
from speculators.decoding.sampling import tempered
from speculators.kernels.counter_random import absorb, as_uniform, seed_argument
from speculators.kernels.launch import dependent_launch
from speculators.kernels.likeliest_tokens import Implementation, tiles_of, use_kernel, with_unit_stride

try:
    import triton
    import triton.language as tl

    from speculators.kernels.launch import let_next_start, wait_for_inputs
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
        """[R, n, V]; float32 where they come from logits."""
        return self.values if self.temperature is None else tempered(self.values.float(), self.temperature).softmax(-1)


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
    _LOWEST = tl.constexpr(-3.0e38)  # where a largest logit is -inf: finite, so that 2^(-inf - largest) is 0 and never NaN

    @triton.jit
    def _tile_log_sum_exp_kernel(
        target,  # [R, K + 1, V]
        draft,  # [R, K, V]
        out,  # [R, slots, 2, TILES] float32: a row's target slots, then its draft slots, as far as they are logits
        target_slots, slots, target_row_stride, target_slot_stride, draft_row_stride, draft_slot_stride,
        vocabulary, target_scale, draft_scale,
        TILES: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        """One program a slot and tile: the largest value, and the sum of 2^((value - largest) * scale)."""
        wait_for_inputs(PDL)
        slot = tl.program_id(0)
        tile = tl.program_id(1)
        row = (slot // slots).to(tl.int64)
        k = (slot % slots).to(tl.int64)
        columns = tile * TILE + tl.arange(0, TILE)
        inside = columns < vocabulary
        if k < target_slots:  # no common name for where they lie: the two may be of different dtypes
            at = row * target_row_stride + k * target_slot_stride + columns
            x = tl.load(target + at, mask=inside, other=float("-inf")).to(tl.float32)
            scale = target_scale
        else:
            at = row * draft_row_stride + (k - target_slots) * draft_slot_stride + columns
            x = tl.load(draft + at, mask=inside, other=float("-inf")).to(tl.float32)
            scale = draft_scale
        let_next_start(PDL)
        largest = tl.maximum(tl.max(x, 0), _LOWEST)
        tl.store(out + (slot * 2) * TILES + tile, largest)
        tl.store(out + (slot * 2 + 1) * TILES + tile, tl.sum(tl.exp2((x - largest) * scale), 0))

    @triton.jit
    def _normalisers(tiles, out, slot, place, there, scale, TILES: tl.constexpr, TILES_BLOCK: tl.constexpr):
        """Of some slots at once, from their tiles: the largest logit, and log2 of the sum of 2^((logit - largest) * scale).

        Both are stored side by side at `place`, where there is a slot.
        """
        tile = tl.arange(0, TILES_BLOCK)[None, :]
        inside = there[:, None] & (tile < TILES)
        largest = tl.load(tiles + (slot[:, None] * 2) * TILES + tile, mask=inside, other=_LOWEST)
        sums = tl.load(tiles + (slot[:, None] * 2 + 1) * TILES + tile, mask=inside, other=0.0)
        top = tl.max(largest, 1)
        total = tl.log2(tl.sum(sums * tl.exp2((largest - top[:, None]) * scale), 1))
        tl.store(out + 2 * place, top, mask=there)
        tl.store(out + 2 * place + 1, total, mask=there)
        return top, total

    @triton.jit
    def _decide_kernel(
        token_ids,  # [R, K]
        lengths,  # [R]
        target,  # [R, K + 1, V]
        draft,  # [R, K, V]
        tiles,  # [R, slots, 2, TILES], see above
        target_normaliser,  # [R, K + 1, 2] float32, see `_normalisers`
        draft_normaliser,  # [R, K + 1, 2] float32
        weights,  # [R, K + 1] float64: w of block verification, -1 behind the row's drafts
        accepted_out,  # [R]: of standard verification
        rows,  # [R]
        round_index,  # []
        seed, purpose, drafts, token_stride, target_row_stride, target_slot_stride, draft_row_stride, draft_slot_stride,
        target_slots, slots, target_scale, draft_scale,
        TARGET_LOGITS: tl.constexpr, DRAFT_LOGITS: tl.constexpr, POINT_MASS: tl.constexpr, BLOCK_VERIFICATION: tl.constexpr,
        SLOTS_BLOCK: tl.constexpr, TILES: tl.constexpr, TILES_BLOCK: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        """One program a row, all of its slots at once: one after the other each would wait for memory."""
        wait_for_inputs(PDL)
        row = tl.program_id(0).to(tl.int64)
        k = tl.arange(0, SLOTS_BLOCK).to(tl.int64)
        is_slot = k <= drafts
        is_draft = k < drafts
        place = row * (drafts + 1) + k
        length = tl.load(lengths + row)
        counter = absorb(absorb(absorb(seed, purpose), tl.load(rows + row)), tl.load(round_index))
        token = tl.load(token_ids + row * token_stride + k, mask=is_draft, other=0)
        p = tl.load(target + row * target_row_stride + k * target_slot_stride + token, mask=is_draft, other=0.0).to(tl.float32)
        if POINT_MASS == 0:
            q = tl.load(draft + row * draft_row_stride + k * draft_slot_stride + token, mask=is_draft, other=1.0).to(tl.float32)
        if TARGET_LOGITS:
            top, total = _normalisers(tiles, target_normaliser, row * slots + k, place, is_slot, target_scale, TILES, TILES_BLOCK)
            p = tl.exp2((p - top) * target_scale - total)
        ratio = p.to(tl.float64)
        if POINT_MASS == 0:
            if DRAFT_LOGITS:
                slot = row * slots + target_slots + k
                top, total = _normalisers(tiles, draft_normaliser, slot, place, is_draft, draft_scale, TILES, TILES_BLOCK)
                q = tl.exp2((q - top) * draft_scale - total)
            ratio = ratio / q.to(tl.float64)
        let_next_start(PDL)
        if BLOCK_VERIFICATION:
            weight = tl.full((), 1.0, tl.float64)
            of_slot = tl.full((SLOTS_BLOCK,), 1.0, tl.float64)
            for i in range(drafts):
                weight = tl.minimum(weight * tl.sum(tl.where(k == i, ratio, 0.0), 0), 1.0)
                of_slot = tl.where(k == i + 1, weight, of_slot)
            tl.store(weights + place, tl.where(k <= length, of_slot, -1.0), mask=is_slot)
        else:
            keeps = is_draft & (k < length) & (as_uniform(absorb(counter, k)) < tl.minimum(ratio, 1.0))
            tl.store(accepted_out + row, tl.min(tl.where(keeps, drafts, k), 0))

    @triton.jit
    def _probabilities(values, normaliser, columns, vocabulary, scale, LOGITS: tl.constexpr):
        """Of some columns of a slot in float32; 0 outside the vocabulary."""
        inside = columns < vocabulary
        if LOGITS:
            x = tl.load(values + columns, mask=inside, other=float("-inf")).to(tl.float32)
            return tl.exp2((x - tl.load(normaliser)) * scale - tl.load(normaliser + 1))
        return tl.load(values + columns, mask=inside, other=0.0).to(tl.float32)

    @triton.jit
    def _remainder(
        target,  # of the slot
        draft,  # of the slot
        target_normaliser,  # of the slot
        draft_normaliser,  # of the slot
        columns,
        vocabulary,
        weight,
        token,
        is_draft,
        target_scale,
        draft_scale,
        TARGET_LOGITS: tl.constexpr,
        DRAFT_LOGITS: tl.constexpr,
        POINT_MASS: tl.constexpr,
    ):
        """max(w p - q, 0) of some columns in float32; p where the slot has no draft.

        p and q are no more exact than float32; float64 here took as long as reading the logits.
        """
        p = _probabilities(target, target_normaliser, columns, vocabulary, target_scale, TARGET_LOGITS)
        if POINT_MASS:
            left = tl.where(columns == token, 0.0, p * weight.to(tl.float32))
        else:
            q = _probabilities(draft, draft_normaliser, columns, vocabulary, draft_scale, DRAFT_LOGITS)
            left = tl.maximum(p * weight.to(tl.float32) - q, 0.0)
        return tl.where(is_draft, left, p)

    @triton.jit
    def _tile_mass_kernel(
        token_ids, lengths, target, draft, target_normaliser, draft_normaliser, weights, accepted,
        masses,  # [R, K + 1, TILES] float32, or [R, 1, TILES]
        drafts, token_stride, target_row_stride, target_slot_stride, draft_row_stride, draft_slot_stride,
        vocabulary, target_scale, draft_scale,
        TARGET_LOGITS: tl.constexpr, DRAFT_LOGITS: tl.constexpr, POINT_MASS: tl.constexpr, BLOCK_VERIFICATION: tl.constexpr,
        TILES: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        """One program a tile and a slot that may be the last accepted one: in block verification any of the row's, else one."""
        wait_for_inputs(PDL)
        program = tl.program_id(0)
        tile = tl.program_id(1)
        if BLOCK_VERIFICATION:
            row = (program // (drafts + 1)).to(tl.int64)
            k = (program % (drafts + 1)).to(tl.int64)
            weight = tl.load(weights + program)
            if weight < 0:
                return
        else:
            row = program.to(tl.int64)
            k = tl.load(accepted + row)
            weight = tl.full((), 1.0, tl.float64)
        is_draft = k < tl.load(lengths + row)
        at = tl.minimum(k, tl.maximum(drafts - 1, 0))  # a slot without draft reads another's, for nothing
        first = row * (drafts + 1)
        columns = tile * TILE + tl.arange(0, TILE)
        left = _remainder(
            target + row * target_row_stride + k * target_slot_stride, draft + row * draft_row_stride + at * draft_slot_stride,
            target_normaliser + 2 * (first + k), draft_normaliser + 2 * (first + at), columns, vocabulary, weight,
            tl.load(token_ids + row * token_stride + at, mask=is_draft, other=-1), is_draft, target_scale, draft_scale,
            TARGET_LOGITS, DRAFT_LOGITS, POINT_MASS,
        )  # fmt: skip
        let_next_start(PDL)
        tl.store(masses + program * TILES + tile, tl.sum(left, 0))

    @triton.jit
    def _draw_kernel(
        token_ids, lengths, target, draft, target_normaliser, draft_normaliser, weights, masses,
        accepted_out,  # [R]; read in standard verification, written in block verification
        next_token,  # [R]
        rows, round_index, seed, accept_purpose, correct_purpose,
        drafts, token_stride, target_row_stride, target_slot_stride, draft_row_stride, draft_slot_stride,
        vocabulary, target_scale, draft_scale,
        TARGET_LOGITS: tl.constexpr, DRAFT_LOGITS: tl.constexpr, POINT_MASS: tl.constexpr, BLOCK_VERIFICATION: tl.constexpr,
        SLOTS_BLOCK: tl.constexpr, TILES: tl.constexpr, TILES_BLOCK: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        """One program a row: choose the accepted length, then the token after it."""
        wait_for_inputs(PDL)
        row = tl.program_id(0).to(tl.int64)
        length = tl.load(lengths + row)
        this_row = tl.load(rows + row)
        this_round = tl.load(round_index)
        tile = tl.arange(0, TILES_BLOCK)
        if BLOCK_VERIFICATION:
            counter = absorb(absorb(absorb(seed, accept_purpose), this_row), this_round)
            k = tl.arange(0, SLOTS_BLOCK).to(tl.int64)
            slots = row * (drafts + 1) + k
            ends_here = tl.load(weights + slots, mask=k <= drafts, other=-1.0)
            written = (ends_here[:, None] >= 0) & (tile < TILES)[None, :]
            mass = tl.sum(tl.load(masses + slots[:, None] * TILES + tile[None, :], mask=written, other=0.0).to(tl.float64), 1)
            stay = tl.where(k == length, ends_here, mass / tl.maximum(mass + 1.0 - ends_here, 1.0e-300))
            keeps = (k > 0) & (k <= length) & (as_uniform(absorb(counter, k - 1)) < stay)
            accepted = tl.max(tl.where(keeps, k, 0), 0)
            weight = tl.load(weights + row * (drafts + 1) + accepted)
            massed = row * (drafts + 1) + accepted
            tl.store(accepted_out + row, accepted)
        else:
            accepted = tl.load(accepted_out + row)
            weight = tl.full((), 1.0, tl.float64)
            massed = row

        # Invert the cumulative sum: the first token whose sum exceeds the number's share of the total.
        of_tiles = tl.load(masses + massed * TILES + tile, mask=tile < TILES, other=0.0).to(tl.float64)
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
        first = row * (drafts + 1)
        token = tl.load(token_ids + row * token_stride + at, mask=is_draft, other=-1)
        columns = chosen * TILE + tl.arange(0, TILE)
        left = _remainder(
            target + row * target_row_stride + accepted * target_slot_stride,
            draft + row * draft_row_stride + at * draft_slot_stride,
            target_normaliser + 2 * (first + accepted), draft_normaliser + 2 * (first + at),
            columns, vocabulary, weight, token, is_draft, target_scale, draft_scale, TARGET_LOGITS, DRAFT_LOGITS, POINT_MASS,
        )  # fmt: skip
        let_next_start(PDL)
        exceeds = (before + tl.cumsum(left.to(tl.float64), 0) > share) & (left > 0.0)
        drawn = tl.min(tl.where(exceeds, columns, vocabulary), 0)
        drawn = tl.where(drawn == vocabulary, tl.max(tl.where(left > 0.0, columns, 0), 0), drawn)
        # p and q are equal up to rounding, and yet the draft was rejected, which has probability 0 up to rounding.
        # Where the verifier's distribution is NaN there may be no draft either: some id, and no index before the first.
        tl.store(next_token + row, tl.where(total > 0.0, drawn.to(tl.int64), tl.maximum(token, 0)))


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
    lengths, rows = lengths.contiguous(), rows.contiguous()
    vocabulary, block = p.shape[-1], verification == "block"
    tile, tiles = tiles_of(vocabulary)
    kinds = {
        "TARGET_LOGITS": target.temperature is not None,
        "DRAFT_LOGITS": draft is not None and draft.temperature is not None,
        "POINT_MASS": draft is None,
    }
    target_slots = drafts + 1 if kinds["TARGET_LOGITS"] else 0
    slots = target_slots + (drafts if kinds["DRAFT_LOGITS"] else 0)
    tile_sums = torch.empty(batch, slots, 2, tiles, dtype=torch.float32, device=device)
    normalisers = torch.empty(2, batch, drafts + 1, 2, dtype=torch.float32, device=device)
    weights = torch.empty(batch, drafts + 1 if block else 0, dtype=torch.float64, device=device)
    massed = drafts + 1 if block else 1
    masses = torch.empty(batch, massed, tiles, dtype=torch.float32, device=device)
    accepted, next_token = torch.empty_like(lengths), torch.empty_like(lengths)
    scales = _scale(target), _scale(draft)
    strides = (p.stride(0), p.stride(1), q.stride(0), q.stride(1))
    blocks = {"SLOTS_BLOCK": triton.next_power_of_2(drafts + 1), "TILES": tiles, "TILES_BLOCK": triton.next_power_of_2(tiles)}
    seed, early = seed_argument(seed), dependent_launch(token_ids)
    with torch.cuda.device_of(token_ids):
        if batch * slots:
            _tile_log_sum_exp_kernel[(batch * slots, tiles)](
                p, q, tile_sums, target_slots, slots, *strides, vocabulary, *scales, TILES=tiles, TILE=tile, num_warps=4, **early
            )
        _decide_kernel[(batch,)](
            token_ids, lengths, p, q, tile_sums, normalisers[0], normalisers[1], weights, accepted, rows, round_index, seed,
            int(Purpose.ACCEPT), drafts, token_ids.stride(0), *strides, target_slots, slots, *scales,
            **kinds, BLOCK_VERIFICATION=block, **blocks, num_warps=4, **early,
        )  # fmt: skip
        _tile_mass_kernel[(batch * massed, tiles)](
            token_ids, lengths, p, q, normalisers[0], normalisers[1], weights, accepted, masses, drafts, token_ids.stride(0), *strides,
            vocabulary, *scales, **kinds, BLOCK_VERIFICATION=block, TILES=tiles, TILE=tile, num_warps=4, **early,
        )  # fmt: skip
        _draw_kernel[(batch,)](
            token_ids, lengths, p, q, normalisers[0], normalisers[1], weights, masses, accepted, next_token, rows, round_index, seed,
            int(Purpose.ACCEPT), int(Purpose.CORRECT), drafts, token_ids.stride(0), *strides, vocabulary, *scales,
            **kinds, BLOCK_VERIFICATION=block, **blocks, TILE=tile, num_warps=8, **early,
        )  # fmt: skip
    return Acceptance(accepted, next_token)


def _scale(distributions: Distributions | None) -> float:
    """Distances of logits times this are exponents to base 2, at their temperature; never 0, since -inf times 0 is NaN."""
    temperature = None if distributions is None else distributions.temperature
    return 1.0 if temperature is None else max(math.log2(math.e) / temperature, torch.finfo(torch.float32).tiny)


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
