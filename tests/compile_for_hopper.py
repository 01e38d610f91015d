"""Compile the decoding kernels for compute capability 9.0 on any machine, as their functions launch them; prints JSON.

    python tests/compile_for_hopper.py float32
    [{"kernel": "_skinny_linear_kernel", "shared": 73728, "pdl": true, "ptx": "..."}, ...]

Launches compile and go no further: tensors lie on the CPU, and what Triton takes for the current device is made up.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton.runtime.jit
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from speculators.kernels import block_attention, launch
from speculators.kernels import markov_sampling as markov
from speculators.kernels.attention_heads import CacheSlots, attention_heads
from speculators.kernels.distillation_loss import distillation_loss
from speculators.kernels.draft_attention import draft_attention
from speculators.kernels.draft_layout import Rows, Verified, lay_out
from speculators.kernels.frozen_head import FrozenHead
from speculators.kernels.gated_halves import gated_halves
from speculators.kernels.greedy_verification import greedy_verification
from speculators.kernels.head_rotation import rotate_heads
from speculators.kernels.kv_injection import InjectionWeights, kv_injection
from speculators.kernels.likeliest_tokens import likeliest_tokens
from speculators.kernels.log_sums import log_sums
from speculators.kernels.markov_sampling import MarkovChain, TableFactors, markov_sampling
from speculators.kernels.rejection_sampling import Distributions, rejection_sampling
from speculators.kernels.residual_norm import add_rms_norm, joined_norms, rms_norm
from speculators.kernels.round_outcome import RowState, round_outcome
from speculators.kernels.running_sums import RunningSums
from speculators.kernels.skinny_linear import skinny_gated_linear, skinny_linear
from speculators.kernels.visible_keys import VisibleKeys

CHOICE: Any = {"implementation": "triton"}


class Hopper:
    """The part of a Triton driver that compiling takes."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def products(dtype: torch.dtype) -> None:
    """Of the kernels that keep tiles of matrices in shared memory: as large as they get."""
    x = torch.zeros(16, 1024, dtype=dtype)
    weight = torch.zeros(64, 1024, dtype=dtype)
    for function in (skinny_linear, skinny_gated_linear):
        function(x, weight, **CHOICE)
    skinny_linear(x, weight, onto=torch.zeros(16, 64, dtype=dtype), **CHOICE)
    query, block, context = (torch.zeros(shape, dtype=dtype) for shape in ((1, 16, 16, 256), (1, 16, 4, 256), (1, 4096, 4, 256)))
    ranges = [torch.zeros(1, 16, dtype=torch.int32)] * 4
    for keys in (context, context[:, :512]):
        draft_attention(query, block, block, keys, keys, VisibleKeys(*ranges, 0, None), scale=1.0, **CHOICE)
    logits, table = torch.zeros(1, 1, 32000, dtype=dtype), torch.zeros(32000, 256, dtype=dtype)
    ids, anchor = torch.arange(32000), torch.zeros(1, dtype=torch.int64)
    for factors in (TableFactors(table), lambda *_: table[:1]):
        markov_sampling(MarkovChain(logits, table, anchor, factors, ids), **CHOICE)
    table = torch.zeros(151936, 256, dtype=dtype)
    for memory in (232_448, 163_840, 101_376):  # of an H200, an A100, an L40S: several tiles a program, and many rows
        launch.shared_memory = markov.shared_memory = lambda device, memory=memory: memory
        logits, anchor = torch.zeros(64, 1, len(table), dtype=dtype), torch.zeros(64, dtype=torch.int64)
        markov_sampling(MarkovChain(logits, table, anchor, TableFactors(table)), **CHOICE)


def others() -> None:
    """Of the kernels without products, at the shape of a Qwen3-8B drafter."""
    dtype = torch.bfloat16
    x, weight, head = torch.zeros(1, 4096, dtype=dtype), torch.zeros(4096, dtype=dtype), torch.zeros(128, dtype=dtype)
    rms_norm(x, weight, 1e-6, **CHOICE)
    add_rms_norm(x, x, weight, 1e-6, **CHOICE)
    joined_norms(x, x, weight, weight, 1e-6, 1e-6, **CHOICE)
    gated_halves(torch.zeros(1, 24576, dtype=dtype), **CHOICE)
    cosine, cache = torch.zeros(1, 1, 1, 128), torch.zeros(2, 1, 64, 8, 128, dtype=dtype)
    number = torch.zeros(1, dtype=torch.int64)
    states = torch.zeros(1, 1, 48, 128, dtype=dtype)
    attention_heads(states, 8, cosine, cosine, head, head, 1e-6, CacheSlots(*cache, number), **CHOICE)
    rotate_heads(states, cosine, cosine, head, **CHOICE)
    table = torch.zeros(64, 64)
    weights = InjectionWeights(torch.zeros(2 * 8 * 128, 64, dtype=dtype), None, head[None], 1e-6, table, table)
    kv_injection(torch.zeros(1, 1, 64, dtype=dtype), weights, number, number, cache[None], **CHOICE)
    logits = torch.zeros(1, 2, 32000, dtype=dtype)
    likeliest_tokens(logits, torch.arange(32000), **CHOICE)
    greedy_verification(torch.zeros(1, 1, dtype=torch.int64), number, logits, **CHOICE)
    drafts, row_logits = torch.zeros(1, 7, dtype=torch.int64), torch.zeros(1, 8, 151936, dtype=dtype)
    for verification in ("standard", "block"):
        for k in (1, 7):  # Triton compiles a number that is 1 as a constant
            target, draft = Distributions(row_logits[:, : k + 1], 0.8), Distributions(row_logits[:, :k], 0.8)
            numbers: dict[str, Any] = {"seed": 1, "rows": number, "round_index": number[0], "verification": verification}
            # As the engine calls it: the verifier's logits in its own dtype, the drafts' probabilities in float32.
            for of_drafts in (draft, Distributions(row_logits[:, :k].float())):
                rejection_sampling(drafts[:, :k], number, target, of_drafts, **numbers, **CHOICE)
    state = RowState(number, number, number != 0, number)
    round_outcome(state, torch.zeros(1, 7, dtype=torch.int64), number, number, number, torch.arange(2), 9, **CHOICE)


def training() -> None:
    """Training attention, forward and backward, with the tiles of a GPU as large as this one; the losses at 151,936 columns."""
    block_attention._tiles = lambda head_dim, device: block_attention.LARGE_TILES[head_dim]
    for size in block_attention.LARGE_TILES:
        query, block, context = (
            torch.zeros(1, length, heads, size, dtype=torch.bfloat16) for length, heads in ((256, 8), (256, 2), (512, 2))
        )
        leaves = [x.requires_grad_() for x in (query, block, block.clone(), context, context.clone())]
        ranges = [torch.zeros(1, 256, dtype=torch.int32)] * 4
        with torch.enable_grad():
            out = block_attention.attention(*leaves, VisibleKeys(*ranges, 0, None), **CHOICE)
            torch.autograd.grad(out, leaves, torch.zeros_like(out))
    hidden, head = torch.zeros(2, 64, dtype=torch.bfloat16, requires_grad=True), torch.zeros(151936, 64, dtype=torch.bfloat16)
    labels, ones = torch.zeros(2, dtype=torch.int64), torch.ones(2)
    with torch.enable_grad():
        factors = {"bias_factors": hidden[:, :8], "bias_head": head[:, :8]}
        options: dict[str, Any]
        for kl, options in ((1.0, {}), (0.0, {}), (0.0, {"reweigh": lambda log_p, rows: ones})):
            distillation_loss(hidden, head, hidden, labels, ones, cross_entropy=0.1, l1=0.9 - 0.9 * kl, kl=kl, **options, **CHOICE)
        running = RunningSums.of(2, labels, labels.device)
        for start in (0, 8192):  # the second tile has fewer columns than a program has threads
            running.add(torch.zeros(2, 16, dtype=torch.bfloat16), start, FrozenHead(head, None, 1.0, None), torch.zeros(2, 64))
        log_sums(torch.zeros(2, 151936, dtype=torch.bfloat16), FrozenHead(head, None, 1.0, None), chosen=torch.arange(32000), **CHOICE)
        for options in ({}, factors):  # with a Markov bias every chunk holds whole rows of logits
            distillation_loss(hidden, head, None, labels, ones, cross_entropy=1.0, l1=0.0, kl=0.0, **options, **CHOICE)


def serving() -> None:
    """What lays out P-EAGLE's rows, with the two widths of integers that releases of vLLM number requests in."""
    numbers, ids, floats = torch.zeros(64, dtype=torch.int64), torch.zeros(64, dtype=torch.int32), torch.zeros(64)
    for states in (ids, numbers):
        rows = Rows(ids, numbers, numbers, ids, ids[:8], numbers, numbers, states, floats, numbers)
        verified = Verified(ids, numbers, ids, states, ids, ids, numbers, ids, floats, numbers)
        sizes: dict[str, int] = {"most_rows_of_one": 14, "block_size": 16, "masks": 6, "mask_token": 5, "longest": 4096}
        lay_out(rows, numbers, verified, ids[:3], torch.zeros(8, 256, dtype=torch.int32), **sizes, **CHOICE)


def main() -> None:
    """Compile the kernels of one dtype, with `others` those whose dtype costs no shared memory, or those of training or serving."""
    compiled: list[dict[str, Any]] = []
    run = triton.runtime.jit.JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        facts = {
            "shared": kernel.metadata.shared,
            "room": launch.shared_memory(torch.device("cpu")),
            "pdl": kernel.metadata.launch_pdl,
            "ptx": kernel.asm["ptx"],
        }
        compiled.append({"kernel": self.__name__} | facts)

    triton.runtime.jit.JITFunction.run = compile_only
    driver.set_active(Hopper())
    launch.enabled, launch._supported = True, lambda device: True
    launch.shared_memory = lambda device: 232_448  # CUDA C++ programming guide, compute capability 9.0: 227 KiB
    with torch.no_grad():
        {"others": others, "training": training, "serving": serving}.get(sys.argv[1], lambda: products(getattr(torch, sys.argv[1])))()
    print(json.dumps(compiled))


if __name__ == "__main__":
    main()
