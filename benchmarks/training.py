"""The training step and its two operations, timed beside what others do at the same shapes.

    python benchmarks/training.py attention loss step --output build/training
    python benchmarks/training.py step --peer peagle="PYTHON peer_peagle.py ARGUMENTS" --output build/training
    python benchmarks/training.py long --lengths 8192 16384 32768 65536 --output build/training
    python benchmarks/training.py tiles

Shapes are those of Qwen3-8B (hidden 4096, feed-forward 12288, 32 query and 8 key heads of 128, vocabulary 151,936) on a GPU and
tiny ones on the CPU, where a run only shows that everything works.

`step` is the trainer's own, from hidden states to updated weights: it includes clipping and AdamW, with bfloat16 products over
float32 weights. It is timed launched eagerly, where its memory is read, and as a CUDA graph; what the trainer would run counts
(`graph.is_large`). Memory above states is the peak minus 16 bytes a trainable parameter (weight, gradient, two moments) and 2 a frozen
one. `--peer NAME=COMMAND` runs another library's script in its own environment and reads the lines "... 368.0 ms peak 43.00 GiB" that
it prints a step, the first three left out; its states count by the same formula, from the "trainable=" line. `--peer-log NAME=FILE`
reads such lines from a file: scripts that compile for minutes can do so side by side before anything is timed.

`long` is P-EAGLE with 8 depths on one row. What 65,536 tokens take with four segments, from the shapes: states 23.5 GB for 1.47
billion trainable parameters; embedding and head 2.5; hidden states of the row 2.2; activations of depth 0, about 110 KB a token and
layer, 29; one segment's chains, 52,000 elements, 23; running sums of gradients 6.6 (parameters of the layers 3.4, keys, values and
hidden states of depth 0 3.2); chunks of logits, casts and temporaries 4. Sum: 91 GB of 139 GiB.
"""

from __future__ import annotations

import argparse
import gc
import re
import shlex
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from harness import Report, Timing, Work, measure, measured_ceilings
from torch import Tensor
from torch.profiler import ProfilerActivity
from training_operations import (
    TINY,
    Shape,
    benchmark_attention,
    benchmark_loss,
    random_batch,
    sweep_tiles,
    visible_pairs,
)

from speculators.algorithms.anchors import Anchors
from speculators.algorithms.peagle import ChainLayout, depth_counts
from speculators.kernels.visible_keys import visible_blocks, visible_documents
from speculators.registry import get_algorithm
from speculators.speculator import Speculator, VerifierWeights
from speculators.training.batch import TrainingBatch
from speculators.training.config import TrainingConfig
from speculators.training.graph import Capture, is_large
from speculators.training.optimizer import DrafterOptimizer
from speculators.training.parallel import parallelise
from speculators.training.step import TrainingStep
from speculators.training.world import World

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
        alike = layers[0].self_attn  # mask slots enter the first layer alike
        linear -= 6 * (size(alike.q_proj) + size(alike.k_proj) + size(alike.v_proj)) * elements
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


class StaticRow:
    """The one packed row that every step trains on."""

    num_rows = 1

    def __init__(self, batch: TrainingBatch) -> None:
        self._batch = batch

    def batch(self, index: Tensor) -> TrainingBatch:
        """See `HiddenStateSource.batch`."""
        return self._batch


def training_step(method: str, speculator: Speculator, batch: TrainingBatch, dtype: torch.dtype, capture: Capture) -> TrainingStep:
    """The trainer's step on one row."""
    precision = "float32" if dtype == torch.float32 else "bfloat16"
    config = TrainingConfig(method=method, steps=1000, rows_per_step=1, learning_rate=1e-4, precision=precision, progress=False)
    world = World()
    parallel = parallelise(speculator, world, config.parallel, dtype)
    optimizer = DrafterOptimizer(speculator, config, parallel.sharding, world)
    return TrainingStep(parallel, StaticRow(batch), None, optimizer, config, dtype, capture)


def benchmark_step(
    method: str, shape: Shape, report: Report, repetitions: int = 8, graph: bool = True, trace: Path | None = None, **training: Any
) -> None:
    """One optimizer step of one method on one packed row; `trace` is where the table of its kernels goes."""
    device = report.device
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    speculator = build(method, shape, device, **training)
    batch = random_batch(shape, 3, device)
    cuda = device.type == "cuda"
    trainable = sum(p.numel() for p in speculator.parameters() if p.requires_grad)
    frozen = speculator.verifier.embedding.numel() + speculator.verifier.head.numel()

    def timed(capture: Capture, count: int) -> tuple[Timing, Callable[[], None]]:
        whole = training_step(method, speculator, batch, shape.dtype, capture)

        def step() -> None:
            whole.run(0, torch.zeros(1, dtype=torch.int64), 1e-4)

        return measure(step, device=device, repetitions=count, cold_cache=False), step

    work, rows = step_work(speculator, shape, batch, method)
    facts: dict[str, Any] = {"tokens": shape.tokens, "loss_rows": rows, "trainable_millions": trainable / 1e6, **training}
    try:
        eager, step = timed(Capture(device, enabled=False), repetitions if cuda else 2)
        timing = eager
        if trace is not None:
            with torch.profiler.profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiled:
                step()
            order = "self_cuda_time_total" if cuda else "self_cpu_time_total"
            trace.write_text(profiled.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=90))
        if cuda and graph:
            # The eager step's moments and the pool in which it kept its activations go: a graph has a pool of its own.
            del step
            gc.collect()
            torch.cuda.empty_cache()
            captured, _ = timed(Capture(device), repetitions)
            facts["graph_milliseconds"] = captured.milliseconds
            timing = eager if is_large(trainable, shape.tokens) else captured
    except torch.OutOfMemoryError:
        report.add(f"{method} (ours)", None, work=work, **facts, note="out of memory")
        return
    above = None if eager.peak_total_bytes is None else eager.peak_total_bytes - 16 * trainable - 2 * frozen
    memory = {"total_peak_bytes": eager.peak_total_bytes, "above_states_bytes": above, "eager_milliseconds": eager.milliseconds}
    report.add(f"{method} (ours)", replace(timing, peak_bytes=eager.peak_bytes), work=work, **facts, **memory)


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
    parser.add_argument("--peer-losses", type=Path, metavar="FILE", help="in `loss`, what peer_losses.py printed")
    parser.add_argument("--chunk-rows", type=int, help="in `loss`, rows that ours takes at a time")
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
            benchmark_attention(shape, report, lambda: report.write(args.output))
        elif part == "tiles":
            sweep_tiles(shape, report)
        elif part == "loss":
            benchmark_loss(shape, report, args.peer_losses, args.chunk_rows)
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
