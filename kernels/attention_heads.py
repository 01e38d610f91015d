"""Attention heads of one product: norm and rotate queries and keys, and write keys and values to the cache, in one launch.

A decoding step computes queries, keys and values of its tokens with one product over [W_q ; W_k ; W_v]. Of what that yields

    query, key heads    normed (with weights, Qwen3) and rotated where they lie; see `head_rotation` for the formula
    value heads         as they are

and keys and values also go to slot start + column of their row's cache, none where the cache has no such slot.
"""

# Triton's kernels are typed by what they are launched with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from speculators.kernels.head_rotation import rotate_heads
from speculators.kernels.launch import dependent_launch

try:
    import triton
    import triton.language as tl

    from speculators.kernels.launch import let_next_start, wait_for_inputs
except ImportError:  # no build for this platform: the reference serves it
    triton = None

__all__ = ["CacheSlots", "attention_heads", "write_slots"]


@dataclass(frozen=True)
class CacheSlots:
    """Where a block's keys and values go.

    Attributes:
        keys, values: [R, slots, Hk, D], the cache of one layer; each row contiguous.
        start: [R] int32 or int64, the slot of each row's first token.
    """

    keys: Tensor
    values: Tensor
    start: Tensor


# -- the definition ----------------------------------------------------------------------------------------------


def write_slots(cache: CacheSlots, key: Tensor, value: Tensor) -> None:
    """Write [R, W, Hk, D] to the slots of each row, without host synchronisation."""
    rows, width, slots = key.shape[0], key.shape[1], cache.keys.shape[1]
    column = torch.arange(width, device=key.device)
    # What has no slot writes back what is there. Taken modulo, no two columns of a row share a slot.
    place = cache.start[:, None].long() + column
    index = torch.arange(rows, device=key.device)[:, None], place % slots
    fits = (place < slots)[..., None, None]
    for memory, new in ((cache.keys, key), (cache.values, value)):
        memory[index] = torch.where(fits, new.to(memory.dtype), memory[index])


def _reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cosine: Tensor,
    sine: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    epsilon: float,
    cache: CacheSlots | None,
) -> tuple[Tensor, Tensor, Tensor]:
    query = rotate_heads(query, cosine, sine, query_norm, epsilon, implementation="reference")
    key = rotate_heads(key, cosine, sine, key_norm, epsilon, implementation="reference")
    if cache is not None:
        shape = (len(cache.start), -1, *key.shape[-2:])
        write_slots(cache, key.reshape(shape), value.reshape(shape))
    return query, key, value


# -- the kernel --------------------------------------------------------------------------------------------------

if triton is not None:

    @triton.jit
    def _attention_heads_kernel(
        states,  # [N, Hq + 2 Hk, D], rotated in place
        cosine,  # [N, D] float32; its halves are equal
        sine,
        query_norm,  # [D]
        key_norm,
        keys,  # [R, slots, Hk, D]
        values,
        start,  # [R]
        width,
        slots,
        keys_row,
        values_row,
        epsilon,
        QUERY_HEADS: tl.constexpr,
        KEY_HEADS: tl.constexpr,
        HALF: tl.constexpr,
        HEADS_BLOCK: tl.constexpr,
        HALF_BLOCK: tl.constexpr,
        NORMALISE: tl.constexpr,
        WRITE: tl.constexpr,
        PDL: tl.constexpr,
    ):
        """One program a token and block of heads, in two halves."""
        wait_for_inputs(PDL)
        token = tl.program_id(0).to(tl.int64)
        head = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)[:, None]
        half = tl.arange(0, HALF_BLOCK)[None, :]
        inside = (head < QUERY_HEADS + 2 * KEY_HEADS) & (half < HALF)
        turned = inside & (head < QUERY_HEADS + KEY_HEADS)
        source = states + (token * (QUERY_HEADS + 2 * KEY_HEADS) + head) * (2 * HALF) + half
        raw_first = tl.load(source, mask=inside, other=0.0)
        raw_second = tl.load(source + HALF, mask=inside, other=0.0)
        first = raw_first.to(tl.float32)
        second = raw_second.to(tl.float32)
        if NORMALISE:
            scale = 1.0 / tl.sqrt(tl.sum(first * first + second * second, 1)[:, None] / (2 * HALF) + epsilon)
            of_query = head < QUERY_HEADS
            there = half < HALF
            first_norm = tl.where(
                of_query,
                tl.load(query_norm + half, mask=there, other=0.0).to(tl.float32),
                tl.load(key_norm + half, mask=there, other=0.0).to(tl.float32),
            )
            second_norm = tl.where(
                of_query,
                tl.load(query_norm + HALF + half, mask=there, other=0.0).to(tl.float32),
                tl.load(key_norm + HALF + half, mask=there, other=0.0).to(tl.float32),
            )
            first = (first * scale * first_norm).to(states.dtype.element_ty).to(tl.float32)
            second = (second * scale * second_norm).to(states.dtype.element_ty).to(tl.float32)
        cos = tl.load(cosine + token * (2 * HALF) + half, mask=half < HALF, other=0.0)
        sin = tl.load(sine + token * (2 * HALF) + half, mask=half < HALF, other=0.0)
        new_first = (first * cos - second * sin).to(states.dtype.element_ty)
        new_second = (second * cos + first * sin).to(states.dtype.element_ty)
        let_next_start(PDL)
        tl.store(source, new_first, mask=turned)
        tl.store(source + HALF, new_second, mask=turned)
        if WRITE:
            row = token // width
            place = tl.load(start + row).to(tl.int64) + token % width
            end = tl.where(place < slots, QUERY_HEADS + 2 * KEY_HEADS, 0)  # no heads where there is no slot
            is_key = (half < HALF) & (head >= QUERY_HEADS) & (head < tl.minimum(end, QUERY_HEADS + KEY_HEADS))
            is_value = (half < HALF) & (head >= QUERY_HEADS + KEY_HEADS) & (head < end)
            key_target = keys + row * keys_row + (place * KEY_HEADS + head - QUERY_HEADS) * (2 * HALF) + half
            tl.store(key_target, new_first.to(keys.dtype.element_ty), mask=is_key)
            tl.store(key_target + HALF, new_second.to(keys.dtype.element_ty), mask=is_key)
            value_target = values + row * values_row + (place * KEY_HEADS + head - QUERY_HEADS - KEY_HEADS) * (2 * HALF) + half
            tl.store(value_target, raw_first.to(values.dtype.element_ty), mask=is_value)
            tl.store(value_target + HALF, raw_second.to(values.dtype.element_ty), mask=is_value)


def _kernel(
    states: Tensor,
    key_heads: int,
    cosine: Tensor,
    sine: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    epsilon: float,
    cache: CacheSlots | None,
) -> None:
    heads, size = states.shape[-2:]
    shape = (*states.shape[:-2], 1, size)
    cosine, sine = (table.expand(shape).reshape(-1, size).contiguous() for table in (cosine, sine))
    tokens = states.numel() // (heads * size)
    block = min(8, triton.next_power_of_2(heads))
    memory = (states, states, states) if cache is None else (cache.keys, cache.values, cache.start)
    rows = 1 if cache is None else len(cache.start)
    with torch.cuda.device_of(states):
        _attention_heads_kernel[(tokens, triton.cdiv(heads, block))](
            states, cosine, sine, query_norm, key_norm, *memory, tokens // rows, 0 if cache is None else cache.keys.shape[1],
            memory[0].stride(0), memory[1].stride(0), epsilon,
            QUERY_HEADS=heads - 2 * key_heads, KEY_HEADS=key_heads, HALF=size // 2, HEADS_BLOCK=block,
            HALF_BLOCK=triton.next_power_of_2(size // 2), NORMALISE=query_norm is not None, WRITE=cache is not None, num_warps=4,
            **dependent_launch(states),
        )  # fmt: skip


# -- the public function -----------------------------------------------------------------------------------------


def attention_heads(
    states: Tensor,
    key_heads: int,
    cosine: Tensor,
    sine: Tensor,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    epsilon: float = 1e-6,
    cache: CacheSlots | None = None,
    *,
    implementation: Literal["auto", "reference", "triton"] = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of the heads of one product. No gradient; no host synchronisation.

    Args:
        states: [..., Hq + 2 Hk, D] contiguous: query, key and value heads as they were projected. The kernel rotates them in place.
        key_heads: Hk.
        cosine, sine: [..., 1, D] float32 of the tokens' positions, in both halves the same; broadcast against the states.
        query_norm, key_norm: [D] of the heads' norms, or None twice.
        epsilon: of both norms.
        cache: where keys and values are also written: the tokens are R rows of equally many. None: nowhere.
        implementation: "auto" takes the kernel on CUDA below float64.

    Returns:
        [..., Hq, D], [..., Hk, D] and [..., Hk, D]; from the kernel views of the states.
    """
    parts = (states.shape[-2] - 2 * key_heads, key_heads, key_heads)
    query, key, value = states.split(parts, dim=-2)
    use_kernel = implementation == "triton" or (
        implementation == "auto" and states.is_cuda and states.dtype != torch.float64 and triton is not None
    )
    if not use_kernel:
        return _reference(query, key, value, cosine, sine, query_norm, key_norm, epsilon, cache)
    _kernel(states, key_heads, cosine, sine, query_norm, key_norm, epsilon, cache)
    return query, key, value
