"""The training step and its two operations, timed beside what others do at the same shapes.

    python benchmarks/training.py attention loss step --output build/training
    python benchmarks/training.py step --peer peagle="PYTHON peer_peagle.py ARGUMENTS" --output build/training
    python benchmarks/training.py long --lengths 8192 16384 32768 65536 --output build/training
    python benchmarks/training.py tiles

Shapes are those of Qwen3-8B (hidden 4096, feed-forward 12288, 32 query and 8 key heads of 128, vocabulary 151,936) on a GPU and
tiny ones on the CPU, where a run only shows that everything works.

`step` includes zeroing, clipping and AdamW, with bfloat16 products over float32 weights. Our step is timed as a CUDA graph, as the
trainer runs it, and its memory read off a step launched eagerly (`eager_milliseconds`). Memory above states is the peak minus 16
bytes a trainable parameter (weight, gradient, two moments) and 2 a frozen one. `--peer NAME=COMMAND` runs another library's script
in its own environment and reads the lines "... 368.0 ms peak 43.00 GiB" that it prints a step, the first three left out; its states
count by the same formula, from the "trainable=" line. `--peer-log NAME=FILE` reads such lines from a file: scripts that compile for
minutes can do so side by side before anything is timed.

`long` is P-EAGLE with 8 depths on one row. What 65,536 tokens take with four segments, from the shapes: states 23.5 GB for 1.47
billion trainable parameters; embedding and head 2.5; hidden states of the row 2.2; activations of depth 0, about 110 KB a token and
layer, 29; one segment's chains, 52,000 elements, 23; running sums of gradients 6.6 (parameters of the layers 3.4, keys, values and
hidden states of depth 0 3.2); chunks of logits, casts and temporaries 4. Sum: 91 GB of 139 GiB.
"""

from __future__ import annotations

import argparse
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from harness import Report, Work, measure, measured_ceilings
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity

from speculators.algorithms.anchors import Anchors
from speculators.algorithms.peagle import ChainLayout, depth_counts
from speculators.kernels import block_attention as block_attention_module
from speculators.kernels.block_attention import Tiles, attention
from speculators.kernels.distillation_loss import distillation_loss
from speculators.kernels.visible_keys import VisibleKeys, visible_blocks, visible_documents
from speculators.registry import get_algorithm
from speculators.speculator import Speculator, VerifierWeights
from speculators.training.batch import TrainingBatch


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


def benchmark_attention(shape: Shape, report: Report) -> None:
    """Forward, and forward with backward, on the same visible pairs."""
    device = report.device
    implementation = "triton" if device.type == "cuda" else "reference"
    for name, (visible, block_keys) in attention_cases(shape, device).items():
        inputs = attention_inputs(shape, visible, block_keys, device)
        upstream = torch.randn_like(inputs[0])

        def ours(inputs: list[Tensor] = inputs, visible: VisibleKeys = visible) -> Tensor:
            return attention(*inputs, replace(visible, _derived={}), implementation=implementation)  # type: ignore[arg-type]

        candidates: dict[str, Callable[[], Tensor]] = {"ours": ours}
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


def eager_loss(hidden: Tensor, head: Tensor, teacher: Tensor, labels: Tensor, coefficients: dict[str, float]) -> Tensor:
    """What one writes without a kernel: all logits at once."""
    log_p = F.log_softmax((hidden @ head.T).float(), dim=1)
    log_q = F.log_softmax((teacher @ head.T).float(), dim=1)
    terms = {
        "cross_entropy": lambda: F.nll_loss(log_p, labels, reduction="sum"),
        "l1": lambda: (log_p.exp() - log_q.exp()).abs().sum(),
        "kl": lambda: F.kl_div(log_p, log_q, reduction="sum", log_target=True),
    }
    return torch.stack([weight * terms[name]() for name, weight in coefficients.items() if weight]).sum()


def liger_loss(coefficients: dict[str, float]) -> Callable[..., Tensor] | None:
    """Liger's fused linear losses, where it has the combination."""
    if coefficients["cross_entropy"] and not coefficients["l1"] and not coefficients["kl"]:
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


def benchmark_loss(shape: Shape, report: Report) -> None:
    """Loss and gradient of the hidden states, every row supervised."""
    device = report.device
    rows = 7680 if device.type == "cuda" else 60
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device).to(shape.dtype)

    hidden, teacher = normal(rows, shape.hidden).requires_grad_(), normal(rows, shape.hidden)
    head = normal(shape.vocabulary, shape.hidden) * shape.hidden**-0.5
    labels = torch.randint(0, shape.vocabulary, (rows,), generator=generator, device=device)
    weights = torch.ones(rows, device=device)
    work = Work(flops=6 * rows * shape.vocabulary * shape.hidden, bytes=head.nbytes + 3 * hidden.nbytes)
    for name, coefficients in {
        "CE": {"cross_entropy": 1.0, "l1": 0.0, "kl": 0.0},
        "KL": {"cross_entropy": 0.0, "l1": 0.0, "kl": 1.0},
        "0.1 CE + 0.9 L1": {"cross_entropy": 0.1, "l1": 0.9, "kl": 0.0},
    }.items():
        candidates: dict[str, Callable[[], Tensor]] = {
            "ours": lambda coefficients=coefficients: distillation_loss(hidden, head, teacher, labels, weights, **coefficients).loss,
            "eager": lambda coefficients=coefficients: eager_loss(hidden, head, teacher, labels, coefficients),
        }
        try:
            liger = liger_loss(coefficients)
        except ImportError:
            liger = None
        if liger is not None and device.type == "cuda":
            candidates["Liger"] = lambda liger=liger: liger(hidden, head, teacher, labels)
        reference: float | None = None
        for candidate, forward in candidates.items():

            def both(forward: Callable[[], Tensor] = forward) -> Any:
                return torch.autograd.grad(forward(), hidden)

            try:
                value = float(forward().detach())
                timing = measure(both, device=device, repetitions=10)
            except torch.OutOfMemoryError:
                report.add(candidate, None, case=name, rows=rows, note="out of memory")
                continue
            reference = value if reference is None else reference
            report.add(candidate, timing, work=work, case=name, rows=rows, difference=abs(value - reference) / abs(reference))


# -- whole steps -------------------------------------------------------------------------------------------------

METHODS: dict[str, dict[str, Any]] = {
    "peagle": {"num_layers": 4, "num_draft_tokens": 8, "draft_vocab_size": True, "training": {"keep_rate": 0.69}},
    "dflash": {"num_layers": 5, "num_draft_tokens": 15, "training": {"position_weights": "dpace"}},
    "dspark": {"num_layers": 5, "num_draft_tokens": 7, "markov_rank": 256, "training": {}},
}


def random_verifier(shape: Shape, device: torch.device) -> VerifierWeights:
    """A verifier's embedding, head and norm with random values."""
    generator = torch.Generator(device).manual_seed(0)

    def table() -> Tensor:
        return (0.02 * torch.randn(shape.vocabulary, shape.hidden, generator=generator, device=device)).to(shape.dtype)

    config = {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131_072,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }
    return VerifierWeights(
        embedding=table(),
        head=table(),
        final_norm=torch.nn.RMSNorm(shape.hidden, device=device, dtype=shape.dtype),
        num_layers=36,
        stop_token_ids=(2,),
        name_or_path="random",
        architectures=("Qwen3ForCausalLM",),
        config=config,
    )


def build(method: str, shape: Shape, device: torch.device, **training: Any) -> Speculator:
    """A fresh float32 drafter."""
    options = {**METHODS[method], "aux_hidden_state_layer_ids": [2, 18, 33], "mask_token_id": shape.vocabulary - 1}
    anchors = shape.anchors
    if method == "peagle":  # every supervised position
        anchors = shape.tokens - shape.documents * (shape.tokens // shape.documents // 4) - 2 * shape.documents
    options["training"] = {"anchors": anchors, **options["training"], **training}
    reduced = options.pop("draft_vocab_size", False)
    if reduced:
        options["draft_vocab_size"] = shape.draft_vocabulary
    verifier = random_verifier(shape, device)
    with torch.device(device):
        speculator = get_algorithm(method).speculator_class.from_verifier(verifier, **options).to(device).float()
    if reduced:
        speculator.set_draft_vocabulary(torch.randperm(shape.vocabulary, device=device)[: shape.draft_vocabulary].sort().values)
    return speculator.train()


def step_work(speculator: Speculator, shape: Shape, batch: TrainingBatch, method: str) -> tuple[Work, int]:
    """FLOPs of the products that no implementation leaves out, and the rows of the loss.

    Linear layers 6 a parameter and token; attention 14 a pair, head and dimension; the loss 4 V H a draft row and 2 V H a teacher row.
    """
    options = speculator.config.training_options  # type: ignore[attr-defined]
    anchors = Anchors.sample(batch, options.anchors)
    layers = list(speculator.layers)  # type: ignore[arg-type]

    def size(module: Any) -> int:
        return sum(p.numel() for p in module.parameters() if p.ndim > 1)

    fc = 6 * size(speculator.fc) * shape.tokens
    draft_vocabulary = speculator.config.draft_vocab_size
    if method == "peagle":
        counts = depth_counts(anchors.index.shape[1], options.num_depths, options.keep_rate)
        layout = ChainLayout.of(anchors, counts)
        elements, rows = sum(counts[1:]), sum(counts)
        linear = 6 * sum(size(layer) for layer in layers) * (shape.tokens + elements)
        pairs = visible_pairs(layout.visible(None)) + visible_pairs(visible_documents(batch.position_ids))
        teacher_rows = anchors.index.shape[1]
    else:
        block = speculator.config.block_size  # type: ignore[attr-defined]
        tokens = anchors.index.shape[1] * block
        context = sum(size(layer.self_attn.k_proj) + size(layer.self_attn.v_proj) for layer in layers)
        linear = 6 * (sum(size(layer) for layer in layers) * tokens + context * shape.tokens)
        seen = visible_blocks(anchors.document_start, anchors.index, block_queries=block, block_keys=block, causal=False)
        pairs = visible_pairs(seen)
        rows = anchors.index.shape[1] * speculator.config.max_draft_tokens
        reached = anchors.index[..., None] + torch.arange(speculator.config.max_draft_tokens, device=anchors.index.device)
        teacher_rows = len(reached.unique())
    attention_flops = 14 * pairs * shape.heads * shape.head_dim * len(layers)
    loss = shape.hidden * (4 * draft_vocabulary * rows + 2 * shape.vocabulary * teacher_rows)
    return Work(flops=fc + linear + attention_flops + loss), rows


def benchmark_step(
    method: str, shape: Shape, report: Report, repetitions: int = 8, graph: bool = True, trace: Path | None = None, **training: Any
) -> None:
    """One optimizer step of one method on one packed row; `trace` is where the table of its kernels goes."""
    device = report.device
    if device.type == "cuda":
        torch.cuda.empty_cache()
    speculator = build(method, shape, device, **training)
    batch = random_batch(shape, 3, device)
    parameters = [p for p in speculator.parameters() if p.requires_grad]
    cuda = device.type == "cuda"
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True, capturable=cuda)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    trainable = sum(p.numel() for p in parameters)
    frozen = speculator.verifier.embedding.numel() + speculator.verifier.head.numel()

    def step() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=shape.dtype != torch.float32, cache_enabled=False):
            loss = speculator.training_loss(batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    work, rows = step_work(speculator, shape, batch, method)
    facts: dict[str, Any] = {"tokens": shape.tokens, "loss_rows": rows, "trainable_millions": trainable / 1e6, **training}
    try:
        timing = eager = measure(step, device=device, repetitions=repetitions if cuda else 2, cold_cache=False)
        if cuda and graph:
            # Leaves the pool in which the eager step kept its activations; a graph has one of its own.
            torch.cuda.empty_cache()
            timing = measure(step, device=device, repetitions=repetitions, cold_cache=False, graph=True)
    except torch.OutOfMemoryError:
        report.add(f"{method} (ours)", None, work=work, **facts, note="out of memory")
        return
    above = None if eager.peak_total_bytes is None else eager.peak_total_bytes - 16 * trainable - 2 * frozen
    memory = {"total_peak_bytes": eager.peak_total_bytes, "above_states_bytes": above, "eager_milliseconds": eager.milliseconds}
    report.add(f"{method} (ours)", replace(timing, peak_bytes=eager.peak_bytes), work=work, **facts, **memory)
    if trace is not None:
        with torch.profiler.profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiled:
            step()
        order = "self_cuda_time_total" if cuda else "self_cpu_time_total"
        trace.write_text(profiled.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=90))


def run_peer(name: str, command: str, shape: Shape, report: Report) -> None:
    """Run another library's script and report the steps that it prints."""
    print(f"running {name} (peer)", flush=True)
    found = subprocess.run(shlex.split(command), capture_output=True, text=True)
    errors = found.stderr.strip().splitlines()
    report_peer(name, found.stdout, shape, report, failure=(errors or ["it failed without a word"])[-1] if found.returncode else None)


def report_peer(name: str, output: str, shape: Shape, report: Report, failure: str | None = None) -> None:
    """One row from what another library's script printed, the first three steps left out; a failure becomes the row's note."""
    steps = [(float(ms), float(gib or 0)) for ms, gib in re.findall(r"([\d.]+) ms(?: peak ([\d.]+) GiB)?", output)][3:]
    if failure is not None or not steps:
        report.add(f"{name} (peer)", None, tokens=shape.tokens, note=failure or "it printed no steps after the third")
        return
    facts: dict[str, Any] = {"tokens": shape.tokens, "milliseconds": statistics.median(ms for ms, _ in steps)}
    counts = re.search(r"trainable=([\d,]+) of ([\d,]+)", output)
    if counts is not None and steps[-1][1]:
        trainable, total = (int(x.replace(",", "")) for x in counts.groups())
        facts["total_peak_bytes"] = int(steps[-1][1] * 2**30)
        facts["above_states_bytes"] = facts["total_peak_bytes"] - 16 * trainable - 2 * (total - trainable)
        facts["trainable_millions"] = trainable / 1e6
    report.add(f"{name} (peer)", None, **facts)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=["attention", "tiles", "loss", "step", "long"])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--lengths", nargs="+", type=int, default=None, help="tokens of the row of `long`")
    parser.add_argument("--segments", type=int, default=4, help="segments of `long`")
    parser.add_argument("--checkpointing", default="none", choices=["none", "feed_forward", "layers"], help="in `step` and `long`")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND", help="another library's step to run beside ours")
    parser.add_argument("--peer-log", action="append", default=[], metavar="NAME=FILE", help="what such a command printed earlier")
    parser.add_argument("--kernels", action="store_true", help="in `step`, also write a table of each step's kernels")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=Path("build/training"), help="path of the JSON and the table, without a suffix")
    args = parser.parse_args()
    device = torch.device(args.device)
    shape = Shape() if device.type == "cuda" else TINY
    torch.manual_seed(0)
    report = Report("Training", device, measured_ceilings(device, shape.dtype))
    for part in args.parts:
        if part == "attention":
            benchmark_attention(shape, report)
        elif part == "tiles":
            sweep_tiles(shape, report)
        elif part == "loss":
            benchmark_loss(shape, report)
        elif part == "step":
            for method in args.methods:
                trace = args.output.with_name(f"{args.output.name}_{method}_kernels.txt") if args.kernels else None
                benchmark_step(method, shape, report, trace=trace, activation_checkpointing=args.checkpointing)
            for name, _, command in (peer.partition("=") for peer in args.peer):
                run_peer(name, command, shape, report)
            for name, _, path in (peer.partition("=") for peer in args.peer_log):
                report_peer(name, Path(path).read_text(), shape, report)
        else:
            for length in args.lengths or ([8192, 16384, 32768, 65536] if device.type == "cuda" else [64, 128]):
                one = replace(shape, tokens=length, documents=1)
                benchmark_step("peagle", one, report, 3, False, segments=args.segments, activation_checkpointing=args.checkpointing)
                report.write(args.output)
        report.write(args.output)  # what is measured is kept, whatever happens next
    print(f"wrote {args.output}.json and {args.output}.md")


if __name__ == "__main__":
    main()
