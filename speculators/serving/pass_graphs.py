"""All later passes of an autoregressive drafter as one CUDA graph a batch size, for vLLM before it captured that itself.

EAGLE-3 drafts with K passes. vLLM 0.26 captures each of the K - 1 that follow the first by itself, and between two of them prepares
slots and attention metadata kernel by kernel; 0.32 has all of it in one graph. Where launching is what a round costs, those are half
of it. `SPECULATORS_PASS_GRAPHS=0` leaves vLLM as it is.
"""

from __future__ import annotations

import functools
import inspect
import os
from typing import Any

from torch import Tensor

VARIABLE = "SPECULATORS_PASS_GRAPHS"
DONE = "_speculators_pass_graphs"
# Whose metadata come from kernels alone. Others plan on the CPU what a graph would not repeat; AMD's, and those that change one of
# these, have a builder of their own under the same backend's name.
BUILDERS = {"FlashAttentionMetadataBuilder", "TritonAttentionMetadataBuilder"}
# What the kernel for slots reads of vLLM's block tables, which makes these anew when it wakes up.
LAYOUT = ("block_table_ptrs", "block_table_strides", "block_sizes_tensor")


def replay_passes() -> None:
    """Let vLLM's autoregressive drafters capture their later passes together, where vLLM does not itself."""
    if os.environ.get(VARIABLE) == "0":
        return
    try:
        from vllm.v1.worker.gpu.spec_decode.autoregressive.speculator import AutoRegressiveSpeculator
    except ImportError:  # 0.32, which fuses them, keeps the class elsewhere
        return
    if is_known(AutoRegressiveSpeculator) and not hasattr(AutoRegressiveSpeculator.capture, DONE):
        extend(AutoRegressiveSpeculator)


def is_known(drafter: Any) -> bool:
    """Whether vLLM's class takes what is given to it here, and does not fuse its passes itself: releases between 0.26 and 0.32 differ."""
    try:
        inspect.signature(drafter._multi_step_decode).bind("self", "num_reqs", "skip_attn", "batch_desc", "num_tokens_across_dp")
        inspect.signature(drafter._build_draft_attn_metadata).bind("self", num_reqs=1, num_reqs_padded=1, num_tokens_padded=1)
    except TypeError:
        return False
    return not hasattr(drafter, "_generate_fused_drafts")


def extend(drafter: Any) -> None:
    """Replace what captures and what runs the later passes in vLLM's class `AutoRegressiveSpeculator`.

    Subclasses that go their own way between passes stay as they are.
    """
    capture, decode = drafter.capture, drafter._multi_step_decode

    @functools.wraps(capture)
    def capture_together(self: Any) -> None:
        fused = type(self)._multi_step_decode is decode_together and can_fuse(self)
        if fused:
            self.idx_mapping.zero_()  # dummy batches leave -1 in it, which names no request's pages
            self.draft_max_seq_len = self.max_model_len  # a graph serves every length
            self._generate_draft = functools.partial(later_passes, self)  # what `capture` records, in place of one pass
        try:
            capture(self)
        finally:
            vars(self).pop("_generate_draft", None)
        setattr(self, DONE, {name: getattr(self.block_tables, name) for name in LAYOUT} if fused else None)

    @functools.wraps(decode)
    def decode_together(self: Any, num_reqs: int, skip_attn: bool, batch_desc: Any, num_tokens_across_dp: Tensor | None) -> None:
        layout = getattr(self, DONE, None)
        if layout is not None and not skip_attn and batch_desc.cg_mode.name == "FULL":
            keep_layout(self.block_tables, layout)
            self.decode_cudagraph_manager.run_fullgraph(batch_desc)
        else:
            decode(self, num_reqs, skip_attn, batch_desc, num_tokens_across_dp)

    setattr(capture_together, DONE, True)
    drafter.capture, drafter._multi_step_decode = capture_together, decode_together


def can_fuse(speculator: Any) -> bool:
    """Whether a graph can repeat what vLLM's speculator does between two passes."""
    builders = {group.backend.get_builder_cls().__name__ for groups in speculator.attn_groups for group in groups}
    config = speculator.vllm_config
    from_kernels = config.parallel_config.decode_context_parallel_size == 1 and config.model_config.rswa_window is None
    return bool(speculator.advance_draft_positions) and from_kernels and builders <= BUILDERS


def keep_layout(block_tables: Any, recorded: dict[str, Tensor]) -> None:
    """Let vLLM's block tables keep the memory that the graphs read, with what vLLM has put into other memory since."""
    for name, tensor in recorded.items():
        if (latest := getattr(block_tables, name)) is not tensor:
            tensor.copy_(latest)
            setattr(block_tables, name, tensor)


def later_passes(
    speculator: Any,
    num_reqs: int,
    num_tokens_padded: int,
    attn_metadata: Any,
    slot_mappings: Any,
    num_tokens_across_dp: Tensor | None,
    cudagraph_runtime_mode: Any = None,
) -> None:
    """The passes 1 .. K - 1 with what lies between them, on the static memory of vLLM's speculator.

    Args:
        speculator: vLLM's `AutoRegressiveSpeculator` after its first pass.
        num_reqs: those of the graph; the ones past the batch have no token, by `query_start_loc`.
        num_tokens_padded: as many.
        attn_metadata: unused, each pass makes its own.
        slot_mappings: unused likewise.
        num_tokens_across_dp: [ranks], passed on.
        cudagraph_runtime_mode: vLLM's `CUDAGraphMode`, passed on.
    """
    from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer

    one_pass = type(speculator)._generate_draft
    buffers = speculator.input_buffers
    for number in range(1, speculator.num_speculative_steps):
        slots = speculator.block_tables.compute_slot_mappings(
            speculator.idx_mapping[:num_reqs], buffers.query_start_loc[: num_reqs + 1], buffers.positions[:num_reqs], num_tokens_padded
        )
        metadata = speculator._build_draft_attn_metadata(num_reqs=num_reqs, num_reqs_padded=num_reqs, num_tokens_padded=num_tokens_padded)
        speculator.current_draft_step.fill_(number)
        one_pass(
            speculator,
            num_reqs,
            num_tokens_padded,
            metadata,
            build_slot_mappings_by_layer(slots, speculator.kv_cache_config),
            num_tokens_across_dp,
            cudagraph_runtime_mode,
        )
