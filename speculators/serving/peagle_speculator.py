"""P-EAGLE in vLLM's V2 runner: one pass drafts all K tokens, in decode rounds as one CUDA graph.

vLLM has P-EAGLE in its V1 runner only, whose drafters have no full graphs. Its V2 runner has parallel drafting for DFlash: the
graph, the buffers and the sampling of that speculator serve here, with EAGLE-3's drafter model. The pass reads static
memory that `lay_out` fills with one launch, and the graph begins with the projection of the features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import replace
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata, build_slot_mappings_by_layer
from vllm.v1.worker.gpu.dp_utils import dispatch_cg_and_sync_dp
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.gpu.spec_decode.eagle.utils import load_eagle_model

from speculators.kernels.draft_layout import PAD, Rows, Verified, lay_out, rows_needed
from speculators.kernels.hidden_state_scatter import hidden_state_scatter


class PEagleSpeculator(DFlashSpeculator):  # type: ignore[misc]
    """vLLM's speculator for parallel drafts, whose slots enter with features and follow the verified tokens causally.

    In a decode round a request has verified at most K + 1 tokens, so 2K rows hold them and K - 1 MASK slots. Any other batch
    runs without a graph, in as many rows as it needs.
    """

    _speculator_name = "P-EAGLE"

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.requires_non_causal = False
        self.masks = self.num_speculative_steps - 1
        self.num_query_per_req = 2 * self.num_speculative_steps
        self.num_extra_query_per_req = self.masks  # vLLM 0.32 sizes its dummy batches by it
        self._uniform_starts = self.num_query_per_req * torch.arange(self.max_num_reqs + 1, dtype=torch.int32)
        self._uniform_starts_there = self._uniform_starts.to(device)
        buffers = self.input_buffers
        self._rows = Rows(
            token_ids=buffers.input_ids,
            positions=buffers.positions,
            features=torch.full((self.max_num_tokens,), PAD, dtype=torch.int64, device=device),
            starts=buffers.query_start_loc,
            lengths=buffers.seq_lens,
            sample_rows=self.sample_indices,
            sample_positions=self.sample_pos,
            sample_states=self.sample_idx_mapping,
            temperature=self.temperature,
            seeds=self.seeds,
        )
        self.hidden_states: Tensor | None = None  # what enters the pass, while it runs; DFlash's is its context

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        """The drafter, loaded as EAGLE-3's are, and the hidden state [hidden] that its MASK slots share."""
        config, backend = self.vllm_config, self.speculative_config.attention_backend
        if backend is not None:  # EAGLE-3's loader of vLLM 0.26 leaves it out
            config = replace(config, attention_config=replace(config.attention_config, backend=backend))
        model: Any = load_eagle_model(target_model, config)
        with torch.inference_mode():
            self._mask_hidden: Tensor = model.combine_hidden_states(model.mask_hidden.to(self.dtype))[0]
        return model  # type: ignore[no-any-return]

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Graphs for numbers of requests with 2K rows each, as far as vLLM's capture sizes reach, and the features they read.

        None where attention takes 2K rows for a prompt: it then plans on the CPU what a graph cannot replay.
        """
        builders = [group.get_metadata_builder() for groups in self.attn_groups for group in groups]
        if any((builder.reorder_batch_threshold or self.num_query_per_req) < self.num_query_per_req for builder in builders):
            cudagraph_mode = CUDAGraphMode.NONE
        super().init_cudagraph_manager(cudagraph_mode)
        largest = self.vllm_config.compilation_config.max_cudagraph_capture_size or 0
        requests = min(self.max_num_reqs, largest // self.num_query_per_req)
        shape = requests * (self.num_speculative_steps + 1), self.model.mask_hidden.shape[-1]
        self._features = torch.zeros(shape, dtype=self.dtype, device=self.device)

    def capture(self) -> None:
        """Capture the graphs. What dummy batches left must not name features that a small graph has not."""
        self._rows.features.fill_(PAD)
        super().capture()

    def _prepare_graph_forward(self, num_reqs: int, attn_metadata: dict[str, Any] | None) -> None:
        """What the graph of vLLM 0.32 begins with."""
        if attn_metadata is not None and self.supports_decode_metadata_update:
            self._update_draft_decode_metadata(attn_metadata, num_reqs)

    def _generate_draft(self, num_reqs: int, num_tokens_padded: int, *args: Any, features: Tensor | None = None, **kwargs: Any) -> None:
        """Project features [tokens, aux features] (a graph's own if None), spread them over the rows, run and sample."""
        if features is None:
            features = self._features[: num_reqs * (self.num_speculative_steps + 1)]
        fused = self.model.combine_hidden_states(features)
        self.hidden_states = hidden_state_scatter(fused, self._rows.features[:num_tokens_padded], self._mask_hidden)
        super()._generate_draft(num_reqs, num_tokens_padded, *args, **kwargs)
        self.hidden_states = None

    def _run_model(
        self,
        num_tokens: int,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, Tensor] | None,
        num_tokens_across_dp: Tensor | None,
        cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE,
    ) -> Tensor:
        with set_forward_context(
            attn_metadata,
            self.vllm_config,
            num_tokens=num_tokens,
            cudagraph_runtime_mode=cudagraph_runtime_mode,
            num_tokens_across_dp=num_tokens_across_dp,
            slot_mapping=slot_mappings,
            batch_descriptor=BatchDescriptor(num_tokens=num_tokens),
        ):
            normed: Tensor = self.model(
                input_ids=self.input_buffers.input_ids[:num_tokens],
                positions=self.input_buffers.positions[:num_tokens],
                hidden_states=self.hidden_states,
                inputs_embeds=None,
            )[0]
        return normed

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Tensor,
        aux_hidden_states: list[Tensor],
        num_sampled: Tensor,
        num_rejected: Tensor,
        last_sampled: Tensor,
        next_prefill_tokens: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        *,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        is_profile: bool = False,
        **_: Any,
    ) -> Tensor:
        """Draft tokens [R, K] of every request; see vLLM's `BaseSpeculator.propose`. Never waits for the GPU."""
        requests, tokens = input_batch.num_reqs, input_batch.num_tokens
        drafts: Tensor = self.draft_tokens[:requests]
        starts, most_rows_of_one, uniform = self._rows_of(input_batch)
        total = int(starts[-1])
        self._prepare_eplb_forward(total)
        taps = [states[:tokens] for states in aux_hidden_states]
        if dummy_run and skip_attn_for_dummy_run:  # memory is measured before there is a cache
            self._generate_draft(requests, total, None, None, None, features=torch.cat(taps, dim=-1))
            return drafts

        verified = Verified(
            token_ids=input_batch.input_ids,
            positions=input_batch.positions,
            starts=input_batch.query_start_loc,
            states=input_batch.idx_mapping,
            rejected=num_rejected,
            sampled=num_sampled,
            last_sampled=last_sampled.flatten(),
            next_prompt=next_prefill_tokens[0] if next_prefill_tokens.dim() == 2 else next_prefill_tokens,  # 0.32 looks further ahead
            temperature=temperature,
            seeds=seeds,
        )
        row_starts = self._uniform_starts_there[: requests + 1] if uniform else _to_gpu(starts, self.device)
        self._lay_out(verified, row_starts, most_rows_of_one, dummy_run=dummy_run)

        batch, across_dp = dispatch_cg_and_sync_dp(
            self.query_cudagraph_manager,
            requests,
            total,
            uniform_token_count=self.num_query_per_req if uniform else None,
            dp_size=self.dp_size,
            dp_rank=self.dp_rank,
            need_eager=is_profile,
        )
        replay = batch.cg_mode == CUDAGraphMode.FULL
        if not (replay and getattr(self, "supports_decode_metadata_update", False)):
            metadata = self._metadata(batch, starts, most_rows_of_one, input_batch.seq_lens_cpu_upper_bound)
        if replay:
            torch.cat(taps, dim=-1, out=self._features[:tokens])
            self.query_cudagraph_manager.run_fullgraph(batch)
        else:
            self._generate_draft(
                requests,
                batch.num_tokens,
                metadata,
                build_slot_mappings_by_layer(self.block_tables.slot_mappings[:, : batch.num_tokens], self.kv_cache_config),
                getattr(across_dp, "num_tokens_across_dp", across_dp),  # 0.32 wraps it
                features=torch.cat(taps, dim=-1),
            )
        return drafts

    def _rows_of(self, input_batch: Any) -> tuple[Tensor, int, bool]:
        """Where each request's rows begin [R + 1] int32, on the CPU; the most rows of one; whether they are those of a graph."""
        requests, common = input_batch.num_reqs, self.num_query_per_req
        verified = input_batch.num_scheduled_tokens[:requests]  # at least as many as there are
        fits = common <= self.max_model_len and common * requests <= self.max_num_tokens
        if fits and int(verified.max()) <= self.num_speculative_steps + 1:
            return self._uniform_starts[: requests + 1], common, True
        rows = rows_needed(torch.from_numpy(verified), self.masks, self.max_model_len)
        if int(rows.sum()) > self.max_num_tokens:  # vLLM's scheduler leaves room for MASK slots, its dummy batches may not
            rows = rows.clamp(max=self.max_num_tokens // requests)
        return torch.cat([rows.new_zeros(1), rows.cumsum(0, dtype=torch.int32)]), int(rows.max()), False

    def _lay_out(self, verified: Verified, row_starts: Tensor, most_rows_of_one: int, *, dummy_run: bool) -> None:
        """Fill the pass's inputs, and for every cache group of the drafter the slots it writes."""
        tables = self.block_tables
        sizes = getattr(tables, "kernel_block_sizes", tables.block_sizes)  # 0.32 has one size only
        for group in self.draft_kv_cache_group_ids:
            slots = tables.slot_mappings[group]
            lay_out(
                self._rows,
                slots,
                verified,
                row_starts,
                tables.input_block_tables[group],
                most_rows_of_one=most_rows_of_one,
                block_size=sizes[group],
                masks=self.masks,
                mask_token=self.parallel_drafting_token_id,
                longest=self.max_model_len,
            )
            if dummy_run:  # its requests are no requests: their pages are those of others
                slots.fill_(PAD)
        if dummy_run:
            self._rows.sample_states.fill_(PAD)

    def _metadata(self, batch: Any, starts: Tensor, most_rows_of_one: int, most_lengths: Tensor) -> Any:
        """Attention metadata of the rows, padded to a graph's requests.

        Args:
            batch: vLLM's descriptor of the graph, or of none.
            starts: [R + 1] int32 on the CPU.
            most_rows_of_one: the most rows of a request.
            most_lengths: [R or more] int32 on the CPU, upper bounds of the verified sequences' lengths.
        """
        requests, replay = len(starts) - 1, batch.cg_mode == CUDAGraphMode.FULL
        padded = batch.num_reqs or requests
        total = batch.num_tokens if replay else int(starts[-1])
        lengths = torch.zeros(padded, dtype=torch.int32)
        lengths[:requests] = (most_lengths[:requests] + self.masks).maximum(starts.diff()).clamp(max=self.max_model_len)
        self.draft_max_seq_len = int(lengths.max())
        return build_attn_metadata(
            attn_groups=self.attn_groups,
            num_reqs=padded,
            num_tokens=total,
            query_start_loc_gpu=self.input_buffers.query_start_loc[: padded + 1],
            query_start_loc_cpu=torch.cat([starts, starts[-1:].expand(padded - requests)]),
            max_query_len=most_rows_of_one,
            seq_lens=self.input_buffers.seq_lens[:padded],
            max_seq_len=self.draft_max_seq_len,
            block_tables=[table[:padded] for table in self.block_tables.input_block_tables],
            slot_mappings=self.block_tables.slot_mappings[:, :total],
            kv_cache_config=self.kv_cache_config,
            seq_lens_cpu_upper_bound=lengths,
            positions=self.input_buffers.positions[:total],
            is_prefilling=torch.zeros(padded, dtype=torch.bool),
            causal=True,
        )


def _to_gpu(numbers: Tensor, device: torch.device) -> Tensor:
    """A copy that the CPU does not wait for."""
    return (numbers.pin_memory() if device.type == "cuda" else numbers).to(device, non_blocking=True)
