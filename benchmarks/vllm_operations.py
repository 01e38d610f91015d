"""vLLM's counterparts of the decoding kernels, on the inputs that `operations.py` gives to ours.

Written against vLLM 0.26.0, whose functions are called as its drafters call them; the lines between two of its kernels are
PyTorch operations there and here. Where a counterpart does other work than our kernel, `difference` says what.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import vllm_layers
from torch import Tensor
from torch.nn import functional as F
from vllm_counterparts import PAGE, Counterpart, close, equal

NO_DRAFT = 0.0  # temperature of greedy requests


def counterparts(operation: str, inputs: dict[str, Any]) -> list[Counterpart]:
    """Of one operation, a function's name here or in `vllm_layers`, on the inputs of a case; empty where vLLM has none."""
    make = _COUNTERPARTS.get(operation)
    return [] if make is None else make(**inputs)


def draft_inputs(
    token_ids: Tensor,
    row_starts: Tensor,
    kept: Tensor,
    next_token: Tensor,
    position: Tensor,
    page_table: Tensor,
    mask_slots: int,
    mask_token_id: int,
    page_size: int,
) -> list[Counterpart]:
    """P-EAGLE's batch expansion (V1 runner): one kernel, then the slot mapping in PyTorch operations."""
    from vllm.v1.spec_decode.utils import compute_new_slot_mapping, copy_and_expand_eagle_inputs_kernel, next_power_of_2

    rows, tokens, device = len(kept), len(token_ids), kept.device
    width, slots = tokens // rows, tokens + rows * mask_slots
    ids, bonus, starts = token_ids.int(), next_token.int(), row_starts.int()
    positions = (position[:, None] + torch.arange(width, device=device)).flatten()
    ends = starts[:-1] + kept.int() - 1
    new_ids = torch.zeros(slots, dtype=torch.int32, device=device)
    new_positions = torch.zeros(slots, dtype=torch.int64, device=device)
    rejected, masked = torch.zeros(2, slots, dtype=torch.bool, device=device)
    batch = SimpleNamespace(block_table_tensor=page_table.int(), query_start_loc=starts, naive_query_lens=lambda: starts[1:] - starts[:-1])
    block = min(256, next_power_of_2(width + mask_slots))

    def expand() -> Tensor:
        samples = torch.empty(rows * (mask_slots + 1), dtype=torch.int32, device=device)
        hidden_rows = torch.empty(tokens, dtype=torch.int32, device=device)
        copy_and_expand_eagle_inputs_kernel[(rows, -(-(width + mask_slots) // block))](
            target_token_ids_ptr=ids,
            target_positions_ptr=positions,
            next_token_ids_ptr=bonus,
            out_input_ids_ptr=new_ids,
            out_positions_ptr=new_positions,
            out_is_rejected_token_mask_ptr=rejected,
            out_is_masked_token_mask_ptr=masked,
            out_new_token_indices_ptr=samples,
            out_hidden_state_mapping_ptr=hidden_rows,
            query_start_loc_ptr=starts,
            query_end_loc_ptr=ends,
            padding_token_id=0,
            parallel_drafting_token_id=mask_token_id,
            total_input_tokens=tokens,
            num_padding_slots_per_request=mask_slots + 1,
            shift_input_ids=True,
            BLOCK_SIZE_TOKENS=block,
        )
        return samples

    def expand_and_map() -> Tensor:
        expand()
        mapped: Tensor = compute_new_slot_mapping(
            cad=batch,
            new_positions=new_positions,
            is_rejected_token_mask=rejected,
            block_size=page_size,
            num_new_tokens=mask_slots,
            max_model_len=page_size * page_table.shape[1],
        )
        return mapped

    def agrees(ours: Any) -> str:
        samples = expand()
        return equal(
            (new_ids, ours.input_ids),
            (new_positions, ours.positions),
            (rejected, ours.rejected),
            (masked, ours.masked),
            (samples, ours.sample_indices.flatten()),
        )

    return [
        Counterpart("vLLM copy_and_expand_eagle_inputs_kernel", expand, agrees, "without the slot mapping"),
        Counterpart(
            "vLLM copy_and_expand_eagle_inputs_kernel, compute_new_slot_mapping",
            expand_and_map,
            lambda ours: equal((expand_and_map(), ours.slot_mapping)),
        ),
    ]


def hidden_state_scatter(hidden: Tensor, rows: Tensor, placeholder: Tensor) -> list[Counterpart]:
    """P-EAGLE's features (V1 runner): an indexed copy, then `torch.where` over all slots."""
    slots, tokens = len(rows), len(hidden)
    masked = rows < 0
    target = torch.empty(tokens, dtype=torch.int32, device=hidden.device)
    target[rows[~masked]] = (~masked).nonzero().flatten().int()
    # Tokens that were not kept go to slots of their own, as vLLM's rejected tokens do.
    absent = torch.ones(tokens, dtype=torch.bool, device=hidden.device)
    absent[rows[~masked]] = False
    target[absent] = masked.nonzero().flatten()[: int(absent.sum())].int()
    buffer = torch.zeros(slots, hidden.shape[1], dtype=hidden.dtype, device=hidden.device)
    mask, shared = masked[:, None], placeholder[None]

    def run() -> Tensor:
        buffer[target] = hidden
        return torch.where(mask, shared, buffer, out=buffer)

    return [Counterpart("vLLM's two operations for it", run, lambda ours: equal((run(), ours)))]


def kv_injection(features: Tensor, weights: Any, start: Tensor, counts: Tensor, memory: Tensor) -> list[Counterpart]:
    """DFlash's and DSpark's context keys and values, as `precompute_and_store_context_kv` makes them."""
    from vllm import _custom_ops as ops

    layers, _, rows, slots, heads, size = memory.shape
    width, tokens = features.shape[1], features.shape[0] * features.shape[1]
    pages = -(-rows * slots // PAGE)
    caches = torch.zeros(layers, 2, pages, PAGE, heads, size, dtype=memory.dtype, device=memory.device)
    positions = (start[:, None] + torch.arange(width, device=start.device)).flatten()
    mapping = positions + torch.arange(rows, device=start.device).repeat_interleave(width) * slots
    rotations = torch.cat([weights.cosine, weights.sine], dim=-1).to(memory.dtype)
    states, scale = features.reshape(tokens, -1), torch.ones((), device=memory.device)

    def run() -> None:
        flat = F.linear(states, weights.projection, weights.bias)
        key, value = flat.view(tokens, layers, 2, heads, size).permute(2, 1, 0, 3, 4).contiguous()
        normed = torch.empty_like(key)
        ops.rms_norm(normed, key, weights.key_norm, weights.epsilon)
        rotated = normed.view(layers * tokens, heads * size)
        ops.rotary_embedding(positions.repeat(layers), rotated, None, size, rotations, True)
        for layer in range(layers):
            ops.reshape_and_cache_flash(
                normed[layer], value[layer], caches[layer, 0], caches[layer, 1], mapping, "auto", scale, scale
            )  # fmt: skip

    def agrees(_: Any) -> str:
        run()
        theirs = caches.flatten(2, 3)[:, :, mapping]
        return close((theirs, memory.flatten(2, 3)[:, :, mapping])) + " (rotations in 16 bits)"

    return [Counterpart("vLLM precompute_and_store_context_kv", run, agrees)]


def block_attention(
    query: Tensor, key: Tensor, value: Tensor, context_key: Tensor, context_value: Tensor, start: Tensor, end: Tensor
) -> list[Counterpart]:
    """A block over its context: FlashAttention 3 over a paged cache that holds the block's keys already."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    rows, _, block, heads, size = query.shape
    context, key_heads = context_key.shape[1:3]
    pages = -(-(context + block) // PAGE)

    def paged(before: Tensor, after: Tensor) -> Tensor:
        whole = torch.cat([before, after[:, 0]], dim=1)
        return F.pad(whole, (0, 0, 0, 0, 0, pages * PAGE - context - block)).reshape(rows * pages, PAGE, key_heads, size)

    keys, values = paged(context_key, key), paged(context_value, value)
    queries = query.reshape(rows * block, heads, size)
    table = torch.arange(rows * pages, dtype=torch.int32, device=query.device).view(rows, pages)
    starts = torch.arange(rows + 1, dtype=torch.int32, device=query.device) * block
    lengths = torch.full((rows,), context + block, dtype=torch.int32, device=query.device)
    out = torch.empty_like(queries)

    def run() -> Tensor:
        flash_attn_varlen_func(
            q=queries,
            k=keys,
            v=values,
            out=out,
            cu_seqlens_q=starts,
            max_seqlen_q=block,
            seqused_k=lengths,
            max_seqlen_k=context + block,
            softmax_scale=size**-0.5,
            causal=False,
            block_table=table,
            fa_version=3,
        )
        return out

    return [
        Counterpart(
            "vLLM flash_attn_varlen_func (FlashAttention 3)",
            run,
            lambda ours: close((run(), ours.reshape(out.shape))),
            "without the block's own keys, which vLLM writes to its cache first",
        )
    ]


@dataclass(frozen=True)
class _Verified:
    """What the V2 runner's `rejection_sample` takes, from K drafts a row."""

    draft_sampled: Tensor
    cu_num_logits: Tensor
    pos: Tensor
    idx_mapping: Tensor
    expanded_idx_mapping: Tensor
    expanded_local_pos: Tensor
    temperature: Tensor
    seed: Tensor

    @classmethod
    def of(cls, drafts: Tensor, temperature: float) -> _Verified:
        """Of drafts [rows, K]."""
        (rows, count), device = drafts.shape, drafts.device
        row = torch.arange(rows, dtype=torch.int32, device=device)
        slot = torch.arange(count + 1, dtype=torch.int32, device=device)
        return cls(
            F.pad(drafts, (1, 0)).flatten(),  # the anchor first
            torch.arange(rows + 1, dtype=torch.int32, device=device) * (count + 1),
            torch.arange(rows * (count + 1), device=device) + 100,
            row,
            row.repeat_interleave(count + 1),
            slot.repeat(rows),
            torch.full((rows,), temperature, device=device),
            torch.arange(rows, device=device),
        )

    def sample(self, target: Tensor, draft: Tensor | None, drafts: int, *, block: bool) -> tuple[Tensor, Tensor]:
        """Tokens [rows, K + 1], and how many of a row count."""
        from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

        sampled: tuple[Tensor, Tensor] = rejection_sample(
            target,
            draft,
            self.draft_sampled,
            self.cu_num_logits,
            self.pos,
            self.idx_mapping,
            self.expanded_idx_mapping,
            self.expanded_local_pos,
            self.temperature,
            self.seed,
            drafts,
            use_block_verification=block,
        )
        return sampled


def greedy_verification(token_ids: Tensor, lengths: Tensor, logits: Tensor) -> list[Counterpart]:
    """Greedy verification in both runners, on logits that neither has to gather or to convert to float32 first."""
    from vllm.v1.sample.rejection_sampler import rejection_greedy_sample_kernel

    (rows, count), device = token_ids.shape, token_ids.device
    flat, requests = logits.flatten(0, 1), _Verified.of(token_ids, NO_DRAFT)
    drafts = token_ids.int().flatten()
    ends = lengths.int().cumsum(0, dtype=torch.int32)

    def first_runner() -> Tensor:
        likely = logits.argmax(dim=-1)
        tokens = torch.full((rows, count + 1), -1, dtype=torch.int32, device=device)
        target, bonus = likely[:, :-1].flatten(), likely[:, -1].int()
        rejection_greedy_sample_kernel[(rows,)](tokens, ends, drafts, target, bonus, None, count, None, None, SYNTHETIC_MODE=False)
        return tokens

    def agrees(ours: Any, tokens: Tensor, kept: Tensor) -> str:
        last = tokens.long().gather(1, ours.accepted[:, None])[:, 0]
        return equal((kept - 1, ours.accepted), (last, ours.next_token))

    def second_runner() -> tuple[Tensor, Tensor]:
        return requests.sample(flat, None, count, block=False)

    return [
        Counterpart(
            "vLLM argmax, rejection_greedy_sample_kernel (V1)",
            first_runner,
            lambda ours: agrees(ours, tokens := first_runner(), (tokens >= 0).sum(1)),
        ),
        Counterpart("vLLM rejection_sample (V2)", second_runner, lambda ours: agrees(ours, *second_runner())),
    ]


def rejection_sampling(
    token_ids: Tensor, lengths: Tensor, target: Any, draft: Any, verification: str, **_randomness: Any
) -> list[Counterpart]:
    """Verification of sampled drafts in the V2 runner."""
    count = token_ids.shape[1]
    requests = _Verified.of(token_ids, target.temperature)
    # vLLM divides by the temperature in kernels before this one.
    logits = (target.values / target.temperature).flatten(0, 1)
    draft_logits = draft.values / draft.temperature

    def run() -> tuple[Tensor, Tensor]:
        return requests.sample(logits, draft_logits, count, block=verification == "block")

    def agrees(ours: Any) -> str:
        theirs = (run()[1] - 1).float().mean().item()
        return f"other random numbers: {theirs:.2f} drafts accepted a row, ours {ours.accepted.float().mean().item():.2f}"

    return [Counterpart("vLLM rejection_sample (V2)", run, agrees, "without the division by the temperature, made before it")]


def markov_sampling(chain: Any, table: Tensor, draw: Any) -> list[Counterpart]:
    """DSpark's sequential head (V2 runner): the steps of `DSparkSpeculator._sample_sequential`."""
    rows, steps, vocabulary = chain.logits.shape
    device = chain.logits.device
    tokens = torch.zeros(rows, steps, dtype=torch.int64, device=device)

    def corrected(step: int, previous: Tensor) -> Tensor:
        parallel: Tensor = chain.logits[:, step]
        return parallel + F.linear(F.embedding(previous, table), chain.bias_head)

    def greedy() -> Tensor:
        previous = chain.anchor
        for step in range(steps):
            previous = corrected(step, previous).argmax(dim=-1)
            tokens[:, step] = previous
        return tokens

    def agrees(ours: Any) -> str:
        return f"{(greedy() == ours.token_ids).float().mean().item():.0%} of tokens equal (bias in 16 bits)"

    if draw is None:
        return [Counterpart("vLLM DSparkSpeculator._sample_sequential", greedy, agrees)]

    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    requests = torch.arange(rows, dtype=torch.int32, device=device)
    temperature = torch.full((rows,), draw.temperature, device=device)
    seeds, positions = torch.arange(rows, device=device), torch.full((rows,), 100, device=device)
    kept = torch.zeros(rows, steps, vocabulary, dtype=torch.float32, device=device)
    columns = torch.arange(steps, dtype=torch.int32, device=device)

    def sampled() -> Tensor:
        previous = chain.anchor
        for step in range(steps):
            previous = gumbel_sample(
                corrected(step, previous),
                requests,
                temperature,
                seeds,
                positions + step,
                apply_temperature=True,
                output_processed_logits=kept,
                output_processed_logits_col=columns[step],
            )
            tokens[:, step] = previous
        return tokens

    more = "also writes all corrected logits, which its verification reads"
    return [Counterpart("vLLM DSparkSpeculator._sample_sequential", sampled, lambda _: "other random numbers", more)]


_COUNTERPARTS: dict[str, Callable[..., list[Counterpart]]] = {
    make.__name__: make
    for make in (
        draft_inputs,
        hidden_state_scatter,
        kv_injection,
        block_attention,
        greedy_verification,
        rejection_sampling,
        markov_sampling,
        vllm_layers.rms_norm,
        vllm_layers.add_rms_norm,
        vllm_layers.attention_heads,
        vllm_layers.gated_halves,
    )
}
