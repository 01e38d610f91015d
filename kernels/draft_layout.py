"""Draft layout: the rows of P-EAGLE's pass over vLLM's paged cache, of every request, in one launch. Needs no vLLM.

What `draft_inputs` makes in memory of its own, from inputs that are gathered, this writes where vLLM's graphs read it, from what vLLM's
step left, and in an order that vLLM's attention can take.

A request verified n tokens from position s on and c of them were kept; K - 1 MASK slots follow them. Its rows stand for
consecutive positions of its sequence, and the last row for the last position of all that attention sees:

    before s                      rows of no use: nothing is written, nothing is read from them
    s .. s + c - 2                the next verified token     with the features of its own position
    s + c - 1                     the token that follows      predicts the first draft token
    s + c .. s + c + K - 2        MASK                        predict the other draft tokens

The kernel takes n and c from the GPU, so the number of rows cannot depend on c: rows that rejected tokens leave over come
first. There they attend to keys that are in the cache already, where behind the others they would make attention read slots
that nobody wrote. A sequence that is too short for that has them at the end.
"""

# Triton's kernels are typed by what they are launched with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # no build for this platform: the reference serves it
    triton = None

__all__ = ["PAD", "Rows", "Verified", "lay_out", "rows_needed"]

PAD = -1  # no slot is written, no verified token's features belong there, no sample is drawn
_BLOCK = 128


class Verified(NamedTuple):
    """What the verifier's step left on the GPU; R requests of T tokens, S request states.

    Attributes:
        token_ids: [T] int32, one request after another.
        positions: [T] int64.
        starts: [R + 1] int32, where each request begins and the last one ends.
        states: [R] integers, the state of each request.
        rejected: [R] int32, trailing tokens that were not kept.
        sampled: [R] int32; 0 where a prompt goes on, whose next token is then the following one.
        last_sampled: [S] int64, the token after those that were kept, by state.
        next_prompt: [S] int32, the token that follows in the prompt, by state.
        temperature: [S] float32.
        seeds: [S] int64.
    """

    token_ids: Tensor
    positions: Tensor
    starts: Tensor
    states: Tensor
    rejected: Tensor
    sampled: Tensor
    last_sampled: Tensor
    next_prompt: Tensor
    temperature: Tensor
    seeds: Tensor


@dataclass(frozen=True)
class Rows:
    """Where the rows are written; a CUDA graph reads the same memory. N rows, R requests, S states, all at most.

    Attributes:
        token_ids: [N] int32.
        positions: [N] int64.
        features: [N] int64, the verified token whose features belong in the row; PAD for those that MASK slots share.
        starts: [R + 1] int32.
        lengths: [R] int32, what attention sees of each sequence; 0 past the last request.
        sample_rows: [R * K] int64, rows whose outputs predict the draft tokens.
        sample_positions: [R * K] int64, positions of those tokens.
        sample_states: [R * K] integers; PAD past the last request.
        temperature: [S] float32, copied.
        seeds: [S] int64, copied.
    """

    token_ids: Tensor
    positions: Tensor
    features: Tensor
    starts: Tensor
    lengths: Tensor
    sample_rows: Tensor
    sample_positions: Tensor
    sample_states: Tensor
    temperature: Tensor
    seeds: Tensor


# -- the definition ----------------------------------------------------------------------------------------------


def _reference(
    out: Rows,
    out_slots: Tensor,
    verified: Verified,
    row_starts: Tensor,
    block_table: Tensor,
    block_size: int,
    masks: int,
    mask_token: int,
    longest: int,
) -> None:
    requests, first_row = len(row_starts) - 1, 0
    for r, end in enumerate(row_starts[1:].tolist()):
        state, first = int(verified.states[r]), int(verified.starts[r])
        kept, position = int(verified.starts[r + 1] - verified.rejected[r]) - first, int(verified.positions[first])
        following = (verified.last_sampled if verified.sampled[r] > 0 else verified.next_prompt)[state]
        length = min(max(position + kept + masks, end - first_row), longest)
        at = torch.arange(length - (end - first_row), length, device=row_starts.device)
        index = at - position
        real = (index >= 0) & (index < kept)
        used = (index >= 0) & (index < kept + masks)
        entered = torch.where(index == kept - 1, following, mask_token)
        shifted = real & (index < kept - 1)
        entered[shifted] = verified.token_ids[first + 1 + index[shifted]].to(entered.dtype)
        page = torch.where(used, block_table[r, at // block_size], 0).long()
        rows = slice(first_row, end)
        out.token_ids[rows], out.positions[rows] = entered.to(out.token_ids.dtype), at
        out.features[rows] = torch.where(real, first + index, PAD)
        out_slots[rows] = torch.where(page != 0, page * block_size + at % block_size, PAD)  # vLLM's page 0 is nobody's
        out.starts[r], out.lengths[r] = first_row, length

        predicting = position + kept - 1 + torch.arange(masks + 1, device=row_starts.device)
        samples = slice(r * (masks + 1), (r + 1) * (masks + 1))
        # Beyond the longest sequence there is no row, and no use for a draft token either.
        out.sample_rows[samples] = first_row + (predicting - at[0]).clamp(0, end - first_row - 1)
        out.sample_positions[samples], out.sample_states[samples] = predicting + 1, state
        out.temperature[state], out.seeds[state] = verified.temperature[state], verified.seeds[state]
        first_row = end
    out.starts[requests:], out.lengths[requests:] = first_row, 0
    out.features[first_row:], out_slots[first_row:] = PAD, PAD
    drawn = requests * (masks + 1)
    out.sample_rows[drawn:], out.sample_positions[drawn:], out.sample_states[drawn:] = 0, 0, PAD


# -- the kernel --------------------------------------------------------------------------------------------------

if triton is not None:

    @triton.jit(do_not_specialize=["requests", "most_requests", "most_rows"])
    def _lay_out_kernel(
        out_token_ids,
        out_positions,
        out_features,
        out_starts,
        out_lengths,
        out_sample_rows,
        out_sample_positions,
        out_sample_states,
        out_temperature,
        out_seeds,
        out_slots,  # [most_rows]
        token_ids,
        positions,
        starts,
        states,
        rejected,
        sampled,
        last_sampled,
        next_prompt,
        temperature,
        seeds,
        row_starts,  # [requests + 1]
        block_table,  # [requests, blocks], rows `block_table_stride` apart
        block_table_stride,
        requests,
        most_requests,
        most_rows,
        block_size,
        mask_token,
        longest,
        MASKS: tl.constexpr,
        STEPS: tl.constexpr,  # the power of two from K = MASKS + 1 on
        PAD: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """One program a request and block of its rows; the programs of one request more fill up what a larger graph reads."""
        request = tl.program_id(0)
        block = tl.program_id(1)
        lane = tl.arange(0, BLOCK)
        if request == requests:
            stride = tl.num_programs(1) * BLOCK
            last = tl.load(row_starts + requests)
            for i in range(requests + block * BLOCK, most_requests + 1, stride):
                tl.store(out_starts + i + lane, last, mask=i + lane <= most_requests)
                tl.store(out_lengths + i + lane, 0, mask=i + lane < most_requests)
            for i in range(requests * (MASKS + 1) + block * BLOCK, most_requests * (MASKS + 1), stride):
                inside = i + lane < most_requests * (MASKS + 1)
                tl.store(out_sample_rows + i + lane, 0, mask=inside)
                tl.store(out_sample_positions + i + lane, 0, mask=inside)
                tl.store(out_sample_states + i + lane, PAD, mask=inside)
            for i in range(last + block * BLOCK, most_rows, stride):
                tl.store(out_slots + i + lane, PAD, mask=i + lane < most_rows)
                tl.store(out_features + i + lane, PAD, mask=i + lane < most_rows)
            return

        state = tl.load(states + request)
        first = tl.load(starts + request)
        kept = tl.load(starts + request + 1) - first - tl.load(rejected + request)
        position = tl.load(positions + first)
        if tl.load(sampled + request) > 0:
            following = tl.load(last_sampled + state).to(tl.int32)
        else:
            following = tl.load(next_prompt + state).to(tl.int32)
        row_start = tl.load(row_starts + request)
        rows = tl.load(row_starts + request + 1) - row_start
        length = tl.minimum(tl.maximum(position + kept + MASKS, rows), longest)
        before = length - rows  # the position of the first row

        row = block * BLOCK + lane
        inside = row < rows
        at = before + row
        index = at - position
        used = inside & (index >= 0) & (index < kept + MASKS)
        real = used & (index < kept)
        token = tl.load(token_ids + first + index + 1, mask=real & (index < kept - 1), other=mask_token)
        page = tl.load(block_table + request * block_table_stride + at // block_size, mask=used, other=0).to(tl.int64)
        written = used & (page != 0)  # vLLM's page 0 is nobody's
        tl.store(out_token_ids + row_start + row, tl.where(index == kept - 1, following, token), mask=inside)
        tl.store(out_positions + row_start + row, at, mask=inside)
        tl.store(out_features + row_start + row, tl.where(real, first + index, PAD), mask=inside)
        tl.store(out_slots + row_start + row, tl.where(written, page * block_size + at % block_size, PAD), mask=inside)

        if block == 0:
            step = tl.arange(0, STEPS)
            drawn = step <= MASKS
            # Beyond the longest sequence there is no row, and no use for a draft token either.
            sample = tl.minimum(tl.maximum(position + kept - 1 + step - before, 0), rows - 1)
            place = request * (MASKS + 1) + step
            tl.store(out_sample_rows + place, row_start + sample, mask=drawn)
            tl.store(out_sample_positions + place, position + kept + step, mask=drawn)
            tl.store(out_sample_states + place, state, mask=drawn)
            tl.store(out_starts + request, row_start)
            tl.store(out_lengths + request, length)
            tl.store(out_temperature + state, tl.load(temperature + state))
            tl.store(out_seeds + state, tl.load(seeds + state))


# -- the public functions ----------------------------------------------------------------------------------------


def lay_out(
    out: Rows,
    out_slots: Tensor,
    verified: Verified,
    row_starts: Tensor,
    block_table: Tensor,
    *,
    most_rows_of_one: int,
    block_size: int,
    masks: int,
    mask_token: int,
    longest: int,
    implementation: Literal["auto", "reference", "triton"] = "auto",
) -> None:
    """Write the rows of a batch, and neutral values behind them as far as `out` reaches.

    Args:
        out: see `Rows`.
        out_slots: [N] int64, where in the cache each row's key and value go; PAD for nowhere.
        verified: see `Verified`.
        row_starts: [R + 1] int32, where the rows of each request begin. A request of n verified tokens needs n + K - 1 rows,
            or `longest` if that is less; it may have more.
        block_table: [R or more, blocks] int32, the cache's pages of each request.
        most_rows_of_one: no request has more rows; known on the CPU.
        block_size: positions a page.
        masks: K - 1.
        mask_token: id of MASK slots.
        longest: positions a sequence may have.
        implementation: "auto" takes the kernel on CUDA, which never waits for the GPU.
    """
    if implementation == "reference" or (implementation == "auto" and not out_slots.is_cuda):
        _reference(out, out_slots, verified, row_starts, block_table, block_size, masks, mask_token, longest)
        return
    requests = len(row_starts) - 1
    with torch.cuda.device_of(out_slots):
        _lay_out_kernel[(requests + 1, triton.cdiv(most_rows_of_one, _BLOCK))](
            out.token_ids,
            out.positions,
            out.features,
            out.starts,
            out.lengths,
            out.sample_rows,
            out.sample_positions,
            out.sample_states,
            out.temperature,
            out.seeds,
            out_slots,
            *verified,
            row_starts,
            block_table,
            block_table.stride(0),
            requests,
            len(out.lengths),
            len(out_slots),
            block_size,
            mask_token,
            longest,
            MASKS=masks,
            STEPS=triton.next_power_of_2(masks + 1),
            PAD=PAD,
            BLOCK=_BLOCK,
            num_warps=4,
        )


def rows_needed(verified: Tensor, masks: int, longest: int) -> Tensor:
    """Rows of each request, from its verified tokens (an upper bound is enough): int32 of the same shape.

    Args:
        verified: [R] integers.
        masks: K - 1.
        longest: positions a sequence may have.
    """
    return (verified + masks).clamp(max=longest).to(torch.int32)
