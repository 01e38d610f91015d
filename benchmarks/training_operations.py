"""The two operations of a training step, timed beside what others do on the same inputs; called by `training.py`.

Block attention beside torch's FlexAttention on the same visible pairs, the distillation loss beside eager PyTorch and Liger's fused
linear losses.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import Report, Timing, Work, measure
from torch import Tensor
from torch.nn import functional as F

from speculators.algorithms.anchors import Anchors
from speculators.algorithms.peagle import ChainLayout, depth_counts
from speculators.kernels import block_attention as block_attention_module
from speculators.kernels.block_attention import Tiles, attention
from speculators.kernels.distillation_loss import distillation_loss
from speculators.kernels.visible_keys import VisibleKeys, visible_blocks, visible_documents
from speculators.training.batch import TrainingBatch

_LOSS_REPETITIONS = 30  # after a pause the first few take a quarter longer: clocks settle under the power limit


@dataclass(frozen=True)
class Shape:
    """Sizes of the verifier, its drafters and one packed row of two equal documents."""

    hidden: int = 4096
    intermediate: int = 12288
    heads: int = 32
    key_heads: int = 8
    head_dim: int = 128
    vocabulary: int = 151_936
    draft_vocabulary: int = 32_000
    tokens: int = 8192
    documents: int = 2
    anchors: int = 512
    dtype: torch.dtype = torch.bfloat16


TINY = Shape(64, 128, 4, 2, 16, 512, 256, 128, 2, 8, torch.float32)


def random_batch(shape: Shape, taps: int, device: torch.device) -> TrainingBatch:
    """One row of random documents, a quarter of each a prompt."""
    generator = torch.Generator(device).manual_seed(0)
    length = shape.tokens // shape.documents
    position = torch.arange(length, device=device).repeat(shape.documents)[None]
    document = torch.arange(shape.documents, device=device).repeat_interleave(length)[None]

    def normal(size: int) -> Tensor:
        return torch.randn(1, shape.tokens, size, generator=generator, device=device).to(shape.dtype)

    tokens = torch.randint(0, shape.vocabulary, (1, shape.tokens), generator=generator, device=device)
    return TrainingBatch(tokens, normal(taps * shape.hidden), normal(shape.hidden), position >= length // 4, position, document)


def visible_pairs(visible: VisibleKeys) -> int:
    """Query and key pairs that attention has to look at."""
    context, block = visible.context_end - visible.context_start, visible.block_end - visible.block_start
    return int(context.sum(dtype=torch.int64) + block.sum(dtype=torch.int64))


def attention_work(shape: Shape, pairs: int, backward: bool) -> Work:
    """Two products a pair forward, five more backward."""
    return Work(flops=(14 if backward else 4) * pairs * shape.heads * shape.head_dim)


# -- attention ---------------------------------------------------------------------------------------------------


def attention_cases(shape: Shape, device: torch.device) -> dict[str, tuple[VisibleKeys, int]]:
    """What sees what, and how many block keys there are, for the three patterns of training."""
    batch = random_batch(replace(shape, hidden=16), 1, device)
    torch.manual_seed(0)
    blocks = Anchors.sample(batch, shape.anchors)
    size = 16
    dense = visible_blocks(blocks.document_start, blocks.index, block_queries=size, block_keys=size, causal=False)
    every = Anchors.sample(batch, int(batch.loss_mask.sum()) - 2 * shape.documents)
    layout = ChainLayout.of(every, depth_counts(every.index.shape[1], 8, 0.69))
    return {
        f"blocks, {blocks.index.shape[1]} x {size}": (dense, dense.context_end.shape[1]),
        f"chains, {layout.chain.shape[1]} elements": (layout.visible(None), layout.chain.shape[1]),
        f"causal, {shape.tokens} tokens": (visible_documents(batch.position_ids), 0),
    }


def attention_inputs(shape: Shape, visible: VisibleKeys, block_keys: int, device: torch.device) -> list[Tensor]:
    """Query, block key and value, context key and value: leaves."""
    generator = torch.Generator(device).manual_seed(1)
    queries = visible.context_end.shape[1]
    sizes = [(queries, shape.heads), *((n, shape.key_heads) for n in (block_keys, block_keys, shape.tokens, shape.tokens))]
    return [
        torch.randn(1, n, heads, shape.head_dim, generator=generator, device=device).to(shape.dtype).requires_grad_() for n, heads in sizes
    ]


def flex_attention(visible: VisibleKeys, inputs: list[Tensor]) -> tuple[Callable[[], Any], Callable[[], Tensor]]:
    """torch's FlexAttention over the same pairs: what makes its block mask, and what attends, both compiled."""
    from torch.nn.attention.flex_attention import create_block_mask
    from torch.nn.attention.flex_attention import flex_attention as flex

    query, block_key, block_value, context_key, context_value = inputs
    context, keys = context_key.shape[1], context_key.shape[1] + block_key.shape[1]
    context_start, context_end, block_start, block_end = (
        x[0] for x in (visible.context_start, visible.context_end, visible.block_start, visible.block_end)
    )

    def sees(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        block = k - context
        return ((k >= context_start[q]) & (k < context_end[q]) & (k < context)) | (
            (block >= block_start[q]) & (block < block_end[q]) & (k >= context)
        )

    compiled = torch.compile(flex, dynamic=False)
    make = torch.compile(create_block_mask, dynamic=False)

    def mask() -> Any:
        return make(sees, None, None, query.shape[1], keys, device=query.device)

    made = mask()

    def attend() -> Tensor:
        key, value = torch.cat([context_key, block_key], dim=1), torch.cat([context_value, block_value], dim=1)
        out: Tensor = compiled(*(x.transpose(1, 2) for x in (query, key, value)), block_mask=made, enable_gqa=True)
        return out.transpose(1, 2)

    return mask, attend


def key_schedules(visible: VisibleKeys, inputs: list[Tensor]) -> list[Tensor]:
    """What our backward pass works out once for all layers of a step: which query tiles every key tile meets."""
    query, block_key, _, context_key, _ = inputs
    group, tiles = query.shape[2] // context_key.shape[2], block_attention_module._tiles(query.shape[3], query.device)[2]
    sides = ((visible.block_start, visible.block_end, block_key), (visible.context_start, visible.context_end, context_key))
    return [block_attention_module._key_schedule(start, end, key.shape[1], group, tiles) for start, end, key in sides if key.shape[1]]


def benchmark_attention(shape: Shape, report: Report, keep: Callable[[], None]) -> None:
    """Forward, and forward with backward, on the same visible pairs; `keep` is called after each pattern."""
    device = report.device
    implementation = "triton" if device.type == "cuda" else "reference"
    for name, (visible, block_keys) in attention_cases(shape, device).items():
        inputs = attention_inputs(shape, visible, block_keys, device)
        upstream = torch.randn_like(inputs[0])

        def ours(inputs: list[Tensor] = inputs, visible: VisibleKeys = visible) -> Tensor:
            return attention(*inputs, visible, implementation=implementation)  # type: ignore[arg-type]

        candidates: dict[str, Callable[[], Tensor]] = {"ours": ours}
        report.add("ours", measure(partial(key_schedules, visible, inputs), device=device), case=name, part="its key schedules")
        if device.type == "cuda":
            mask, candidates["FlexAttention"] = flex_attention(visible, inputs)
            report.add("FlexAttention", measure(mask, device=device), case=name, part="its block mask")
        results = {}
        for candidate, forward in candidates.items():

            def both(forward: Callable[[], Tensor] = forward, inputs: list[Tensor] = inputs, upstream: Tensor = upstream) -> Any:
                return torch.autograd.grad(forward(), inputs, upstream, allow_unused=True)

            results[candidate] = forward().detach()
            pairs = visible_pairs(visible)
            for part, function, backward in (("forward", forward, False), ("forward and backward", both, True)):
                timing = measure(function, device=device)
                report.add(candidate, timing, work=attention_work(shape, pairs, backward), case=name, part=part)
        for candidate, result in results.items():
            error = float((result - results["ours"]).norm() / results["ours"].norm())
            assert error < 0.02, f"{candidate} differs from ours by {error:.3g}"
        keep()


def sweep_tiles(shape: Shape, report: Report) -> None:
    """Times of the tile shapes that fit; the table in kernels/block_attention.py is read off them."""
    original = block_attention_module._tiles(shape.head_dim, report.device)
    choices = [Tiles(m, n, warps, stages) for m in (64, 128) for n in (32, 64, 128) for warps in (4, 8) for stages in (2, 3)]
    for name, (visible, block_keys) in attention_cases(shape, report.device).items():
        inputs = attention_inputs(shape, visible, block_keys, report.device)
        upstream = torch.randn_like(inputs[0])
        for kernel, part in enumerate(("forward", "query gradient", "key gradient")):
            for tiles in choices:
                chosen = tuple(tiles if number == kernel else kept for number, kept in enumerate(original))
                block_attention_module._tiles = lambda *_, chosen=chosen: chosen  # type: ignore[assignment]
                fresh = replace(visible, _derived={})

                def both(inputs: list[Tensor] = inputs, fresh: VisibleKeys = fresh, upstream: Tensor = upstream) -> Any:
                    return torch.autograd.grad(attention(*inputs, fresh, implementation="triton"), inputs, upstream)  # type: ignore[arg-type]

                try:
                    timing = measure(both, device=report.device, repetitions=7)
                except Exception as error:  # does not fit the chip
                    print(f"{part} {tiles}: {type(error).__name__}", file=sys.stderr)
                    continue
                report.add(str(tiles), timing, case=name, part=f"{part} varied, all three timed")


# -- loss --------------------------------------------------------------------------------------------------------


def needs_teacher(coefficients: dict[str, float]) -> bool:
    """Cross-entropy against labels alone needs none."""
    return bool(coefficients["l1"] or coefficients["kl"])


def eager_loss(hidden: Tensor, head: Tensor, teacher: Tensor, labels: Tensor, coefficients: dict[str, float]) -> Tensor:
    """What one writes without a kernel: all logits at once, the teacher's where a term needs them."""

    def log_probabilities(states: Tensor) -> Tensor:
        return F.log_softmax((states @ head.T).float(), dim=1)

    log_p = log_probabilities(hidden)
    terms = {
        "cross_entropy": lambda: F.nll_loss(log_p, labels, reduction="sum"),
        "l1": lambda: (log_p.exp() - log_probabilities(teacher).exp()).abs().sum(),
        "kl": lambda: F.kl_div(log_p, log_probabilities(teacher), reduction="sum", log_target=True),
    }
    return torch.stack([weight * terms[name]() for name, weight in coefficients.items() if weight]).sum()


def liger_loss(coefficients: dict[str, float]) -> Callable[..., Tensor] | None:
    """Liger's fused linear losses, where it has the combination."""
    if not needs_teacher(coefficients):
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

        def cross_entropy(hidden: Tensor, head: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
            result: Any = LigerFusedLinearCrossEntropyFunction.apply(hidden, head, labels, None, None, -100, 0.0, 0.0, "sum", None, False)
            loss: Tensor = result[0] if isinstance(result, tuple) else result
            return loss

        return cross_entropy
    if coefficients["kl"] and not coefficients["l1"] and not coefficients["cross_entropy"]:
        from liger_kernel.ops.fused_linear_jsd import LigerFusedLinearJSDFunction

        def divergence(hidden: Tensor, head: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
            # beta 0 is the forward KL; it divides by the number of rows
            loss: Tensor = LigerFusedLinearJSDFunction.apply(hidden, head, teacher, head, None, 0.0, -100, 1.0) * len(hidden)
            return loss

        return divergence
    return None


def benchmark_loss(shape: Shape, report: Report, peer: Path | None = None, chunk_rows: int | None = None) -> None:
    """Loss and gradient of the hidden states, every row supervised: memory of an eager call, time in a CUDA graph where that can be.

    Cross-entropy alone needs no teacher, and nobody computes one for it but speculators 0.9.0, whose label is the teacher's likeliest
    token; ours is timed once more with it, for the acceptance.

    Args:
        shape: sizes.
        report: where the measurements go.
        peer: what `peer_losses.py` printed.
        chunk_rows: of ours; its own choice when None.
    """
    device = report.device
    rows = 7680 if device.type == "cuda" else 60
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device).to(shape.dtype)

    hidden, teacher = normal(rows, shape.hidden).requires_grad_(), normal(rows, shape.hidden)
    head = normal(shape.vocabulary, shape.hidden) * shape.hidden**-0.5
    labels = torch.randint(0, shape.vocabulary, (rows,), generator=generator, device=device)
    weights = torch.ones(rows, device=device)
    for name, coefficients in {
        "CE": {"cross_entropy": 1.0, "l1": 0.0, "kl": 0.0},
        "KL": {"cross_entropy": 0.0, "l1": 0.0, "kl": 1.0},
        "0.1 CE + 0.9 L1": {"cross_entropy": 0.1, "l1": 0.9, "kl": 0.0},
    }.items():

        def ours(states: Tensor | None, coefficients: dict[str, float] = coefficients) -> Tensor:
            return distillation_loss(hidden, head, states, labels, weights, chunk_rows=chunk_rows, **coefficients).loss

        measured = "ours, with acceptance"
        candidates: dict[str, Callable[[], Tensor]] = {"ours": partial(ours, teacher)}
        if not needs_teacher(coefficients):
            candidates = {"ours": partial(ours, None), measured: partial(ours, teacher)}
        candidates["eager"] = partial(eager_loss, hidden, head, teacher, labels, coefficients)
        try:
            liger = liger_loss(coefficients)
        except ImportError:
            liger = None
        if liger is not None and device.type == "cuda":
            candidates["Liger"] = lambda liger=liger: liger(hidden, head, teacher, labels)
        reference: float | None = None
        for candidate, forward in candidates.items():
            # Logits of the drafter and the gradient of its states, and where there is a teacher its logits.
            products = 3 if needs_teacher(coefficients) or candidate == measured else 2
            work = Work(flops=2 * products * rows * shape.vocabulary * shape.hidden, bytes=head.nbytes + products * hidden.nbytes)

            def both(forward: Callable[[], Tensor] = forward) -> Any:
                return torch.autograd.grad(forward(), hidden)

            try:
                value = float(forward().detach())
                timing = measure(both, device=device, repetitions=_LOSS_REPETITIONS)
                if device.type == "cuda" and candidate != "Liger":  # which asks the device for a number, as a graph cannot
                    timing = replace(measure(both, device=device, repetitions=_LOSS_REPETITIONS, graph=True), peak_bytes=timing.peak_bytes)
            except torch.OutOfMemoryError:
                report.add(candidate, None, case=name, rows=rows, note="out of memory")
                continue
            reference = value if reference is None else reference
            report.add(candidate, timing, work=work, case=name, rows=rows, difference=abs(value - reference) / abs(reference))
        for line in [] if peer is None else map(json.loads, peer.read_text().splitlines()):
            if line.pop("case") == name:
                value = line.pop("loss")
                # Where there is cross-entropy the labels differ, and so do the values.
                difference = abs(value - reference) / abs(reference) if reference and not coefficients["cross_entropy"] else None
                work = Work(flops=6 * rows * shape.vocabulary * shape.hidden, bytes=head.nbytes + 3 * hidden.nbytes)
                report.add("speculators 0.9.0", Timing(**line), work=work, case=name, rows=rows, difference=difference)
