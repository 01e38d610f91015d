"""What drafting costs: one round of every method with random weights, beside the bytes it must move.

    python benchmarks/draft.py --output benchmarks/results/draft_h200                          # all shapes, some minutes
    python benchmarks/draft.py --shapes qwen3-8b --batches 1 --output benchmarks/results/draft # the P-EAGLE / EAGLE-3 comparison
    python benchmarks/draft.py --shapes qwen3-8b --ks 7 --batches 1 --no-pdl --products cublas     # other choices than the library makes
    python benchmarks/draft.py --shapes tiny --contexts 40 --ks 1 3 --repetitions 2            # a dry run on any machine

A round is `observe` of K + 1 verified tokens, of which a third were kept, and `propose` of K, greedily; on CUDA as a graph.
The byte floor counts each pass: layers and head once, fc once a round, the context's keys and values, and W2 once a step of a
sequential head. Afterwards the script sets acceptance lengths that were published against these round times: the implied
speed-up of P-EAGLE over EAGLE-3, labelled `simulated`, beside the published one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness import Report, Timing, Work, measure, measured_ceilings
from kernel_choices import add_kernel_choices, choose_kernels
from torch import Tensor

from speculators.decoding.proposal import Observation
from speculators.decoding.sampling import RoundSampler, SamplingParams
from speculators.registry import get_algorithm
from speculators.speculator import Speculator, VerifierWeights


@dataclass(frozen=True)
class Shape:
    """A verifier's shape, its drafters' vocabulary, and what a forward of its own reads, for the simulation.

    Attributes:
        block_bytes: weights that the forward of one block reads.
        batch_bytes: weights that the forward of many blocks reads: of a mixture of experts, all of them.
    """

    vocabulary: int
    draft_vocabulary: int | None
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_heads: int
    head_dim: int
    block_bytes: float
    batch_bytes: float


SHAPES = {
    "tiny": Shape(300, 200, 64, 96, 8, 4, 2, 16, 1e6, 1e6),
    "smollm2": Shape(49152, None, 576, 1536, 30, 9, 3, 64, 2 * 134.5e6, 2 * 134.5e6),
    "qwen3-8b": Shape(151936, 32000, 4096, 12288, 36, 32, 8, 128, 2 * 7.57e9, 2 * 7.57e9),
    # 3.6e9 of 20.9e9 parameters are active for a token, most of them in 4 bits.
    "gpt-oss-20b": Shape(201088, 32000, 2880, 8640, 24, 64, 8, 64, 3.0e9, 12.8e9),
}
# Method, drafter layers: the two widths of the comparison, and the block drafters as published.
METHODS = (("eagle3", 1), ("eagle3", 4), ("peagle", 4), ("dflash", 5), ("dspark", 5))

# Published for gpt-oss-20b: K, acceptance lengths of EAGLE-3 and of P-EAGLE, where, and the speed-up published there by batch size.
PUBLISHED: tuple[tuple[int, float, float, str, dict[int, str]], ...] = (
    (5, 3.7, 3.8, "paper, HumanEval", {1: "1.26 (2 requests)"}),
    (5, 3.4, 3.4, "paper, MT-Bench", {1: "1.22 (2 requests)"}),
    (5, 3.9, 4.0, "paper, GSM8K", {1: "1.26 (2 requests)"}),
    (7, 3.03, 3.94, "release notes, HumanEval", {1: "1.55", 64: "1.05 to 1.25"}),
    (7, 2.59, 3.38, "release notes, SPEED-Bench", {1: "1.69", 64: "1.05 to 1.25"}),
)


def verifier_weights(shape: Shape, device: torch.device, dtype: torch.dtype) -> VerifierWeights:
    """Random embedding, head and norm."""
    table, head = (torch.randn(shape.vocabulary, shape.hidden, device=device, dtype=dtype) for _ in range(2))
    return VerifierWeights(
        embedding=table,
        head=head,
        final_norm=torch.nn.RMSNorm(shape.hidden, device=device, dtype=dtype),
        num_layers=shape.layers,
        stop_token_ids=(2,),
        name_or_path="random",
        architectures=("RandomForCausalLM",),
        config={
            "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.key_heads,
            "head_dim": shape.head_dim,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 40960,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    )


def random_drafter(method: str, layers: int, shape: Shape, weights: VerifierWeights, draft_tokens: int) -> Speculator:
    """A drafter with random weights, on the verifier's device."""
    options: dict[str, Any] = {"num_layers": layers, "num_draft_tokens": draft_tokens, "mask_token_id": 3}
    if method in ("eagle3", "peagle"):
        options["draft_vocab_size"] = shape.draft_vocabulary
    if method == "peagle":
        options["train_embedding"] = False
    elif shape.draft_vocabulary is not None:
        options["draft_vocab_size"] = shape.draft_vocabulary
    with torch.device(weights.embedding.device):
        speculator = get_algorithm(method).speculator_class.from_verifier(weights, **options)
    speculator = speculator.to(device=weights.embedding.device, dtype=weights.embedding.dtype)
    if speculator.has_reduced_vocabulary:
        spacing = shape.vocabulary // speculator.config.draft_vocab_size
        speculator.set_draft_vocabulary(torch.arange(speculator.config.draft_vocab_size) * spacing)
    return speculator.eval().requires_grad_(False)


def draft_round(speculator: Speculator, rows: int, context: int, draft_tokens: int) -> Callable[[], Tensor]:
    """A round that always starts from the same state: observe K + 1 verified tokens at `context`, then propose K."""
    embedding = speculator.verifier.embedding
    device, dtype, width = embedding.device, embedding.dtype, draft_tokens + 1
    state = speculator.new_state(rows, context + 2 * width + 8, device, dtype)
    for part in state.cache.keys + state.cache.values:
        part.normal_()
    lengths = torch.full((rows,), context, dtype=torch.int64, device=device)
    tokens = torch.randint(speculator.config.vocab_size, (rows, width + 1), device=device)
    features = torch.randn(rows, width, len(speculator.config.tapped_layers) * speculator.target_hidden_size, device=device, dtype=dtype)
    kept = torch.full((rows,), 1 + draft_tokens // 3, dtype=torch.int64, device=device)
    anchor, number, round_index = (
        tokens[:, 0].contiguous(),
        torch.arange(rows, device=device),
        torch.zeros((), dtype=torch.int64, device=device),
    )
    observation = Observation(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), features, lengths, kept, context + width)

    @torch.inference_mode()
    def run() -> Tensor:
        state.cache.lengths = lengths
        speculator.observe(state, observation)
        return speculator.propose(state, anchor, RoundSampler(SamplingParams(), number, round_index), draft_tokens).token_ids

    return run


def draft_work(speculator: Speculator, rows: int, context: int, draft_tokens: int) -> Work:
    """The fewest bytes of a round, and the operations of its matrix products."""
    layers, method = speculator.config.layers, speculator.method
    size = speculator.verifier.embedding.element_size()
    passes = draft_tokens if method == "eagle3" else 1
    slots = {"eagle3": 1, "peagle": draft_tokens, "dflash": draft_tokens + 1, "dspark": draft_tokens}[method]
    parameters = dict(speculator.named_parameters())
    layer_weights = sum(p.numel() for name, p in parameters.items() if name.startswith("layers."))
    head = speculator.config.draft_vocab_size * layers.hidden_size
    kv = 2 * layers.num_hidden_layers * layers.num_key_value_heads * layers.head_dim
    weights = passes * (layer_weights + head) + parameters["fc.weight"].numel()
    flops = 2.0 * rows * (passes * slots * layer_weights + draft_tokens * head + (draft_tokens + 1) * parameters["fc.weight"].numel())
    if method in ("dflash", "dspark"):  # the injected keys and values of new tokens
        injection = kv * layers.hidden_size
        weights, flops = weights + injection, flops + 2.0 * rows * (draft_tokens + 1) * injection
    markov = parameters.get("markov_head.markov_w2.weight")
    if markov is not None:
        weights, flops = weights + draft_tokens * markov.numel(), flops + 2.0 * rows * draft_tokens * markov.numel()
    return Work(flops, size * (weights + passes * rows * context * kv))


def measure_shape(name: str, options: argparse.Namespace, device: torch.device, report: Report) -> dict[tuple[str, int, int, int], float]:
    """All methods of one shape; returns milliseconds by (method, layers, K, batch) at the first context."""
    shape, dtype = SHAPES[name], torch.bfloat16 if device.type == "cuda" else torch.float32
    weights, times = verifier_weights(shape, device, dtype), {}
    for method, layers in METHODS:
        if method not in options.methods:
            continue
        speculator = random_drafter(method, layers, shape, weights, max(options.ks))
        for context in options.contexts:
            for batch in options.batches:
                for k in options.ks:
                    run = draft_round(speculator, batch, context, k)
                    timing = measure(run, device=device, repetitions=options.repetitions, graph=True)
                    work = draft_work(speculator, batch, context, k)
                    add_round(report, method, timing, work, shape=name, layers=layers, k=k, batch=batch, context=context)
                    if context == options.contexts[0]:
                        times[method, layers, k, batch] = timing.milliseconds
        if speculator.method == "dspark":
            measure_head(speculator, name, options, device, report, times)
    compare(name, times, options, report)
    return times


def add_round(report: Report, what: str, timing: Timing, work: Work, **facts: Any) -> None:
    """Add a round and how far it is from its floor."""
    row = report.add(what, timing, work=work, **facts)
    if "floor_milliseconds" in row:
        row["times_floor"] = timing.milliseconds / row["floor_milliseconds"]


def compare(name: str, times: dict[tuple[str, int, int, int], float], options: argparse.Namespace, report: Report) -> None:
    """What one parallel pass saves: rounds of other lengths and of EAGLE-3, as ratios."""
    for what, above, below in (
        ("P-EAGLE, K = 8 / K = 1", ("peagle", 4, 8), ("peagle", 4, 1)),
        ("EAGLE-3 of 1 layer / P-EAGLE, K = 7", ("eagle3", 1, 7), ("peagle", 4, 7)),
        ("EAGLE-3 of 4 layers / P-EAGLE, K = 7", ("eagle3", 4, 7), ("peagle", 4, 7)),
    ):
        for batch in options.batches:
            if (*above, batch) in times and (*below, batch) in times:
                ratio = times[*above, batch] / times[*below, batch]
                report.add(what, None, shape=name, batch=batch, context=options.contexts[0], ratio=ratio)


def measure_head(
    speculator: Speculator,
    name: str,
    options: argparse.Namespace,
    device: torch.device,
    report: Report,
    times: dict[tuple[str, int, int, int], float],
) -> None:
    """DSpark's round without its sequential head: how far the backbone is from its own floor, and the head's share of the round."""
    head = speculator.markov_head
    speculator.markov_head = None  # type: ignore[assignment]
    confidence, speculator.confidence_head = speculator.confidence_head, None  # type: ignore[assignment]
    for k in options.ks:
        timing = measure(draft_round(speculator, 1, options.contexts[0], k), device=device, repetitions=options.repetitions, graph=True)
        facts: dict[str, Any] = {"shape": name, "layers": 5, "k": k, "batch": 1, "context": options.contexts[0]}
        if whole := times.get(("dspark", 5, k, 1)):
            facts["head_share"] = 1 - timing.milliseconds / whole
        work = draft_work(speculator, 1, options.contexts[0], k)  # of the parameters that are left
        add_round(report, "dspark without sequential head", timing, work, **facts)
    speculator.markov_head, speculator.confidence_head = head, confidence


def simulate(name: str, times: dict[tuple[str, int, int, int], float], bytes_per_second: float, report: Report) -> None:
    """Implied P-EAGLE / EAGLE-3 speed-ups from published acceptance lengths and measured drafts.

    A round costs the draft and one forward of the verifier at its byte floor; tokens a second are acceptance length / round.
    """
    shape = SHAPES[name]
    for k, eagle_length, peagle_length, source, published in PUBLISHED:
        for batch, speedup in published.items():
            eagle, peagle = times.get(("eagle3", 1, k, batch)), times.get(("peagle", 4, k, batch))
            if name not in ("gpt-oss-20b", "tiny") or eagle is None or peagle is None:
                continue
            verify = 1e3 * (shape.block_bytes if batch == 1 else shape.batch_bytes) / bytes_per_second
            report.add(
                "P-EAGLE / EAGLE-3",
                None,
                kind="simulated",
                shape=name,
                source=source,
                k=k,
                batch=batch,
                eagle3_length=eagle_length,
                peagle_length=peagle_length,
                eagle3_draft_ms=eagle,
                peagle_draft_ms=peagle,
                verify_ms=verify,
                implied_speedup=(peagle_length / (peagle + verify)) / (eagle_length / (eagle + verify)),
                published_speedup=speedup,
            )


def main() -> None:
    """Parse arguments, measure, write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["qwen3-8b", "gpt-oss-20b", "smollm2"])
    parser.add_argument("--methods", nargs="+", default=["eagle3", "peagle", "dflash", "dspark"])
    parser.add_argument("--ks", nargs="+", type=int, default=[1, 5, 7, 8, 16])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--contexts", nargs="+", type=int, default=[2048])
    parser.add_argument("--repetitions", type=int, default=20)
    add_kernel_choices(parser)
    parser.add_argument("--output", type=Path, help="without ending; .json and .md are written")
    options = parser.parse_args()
    choose_kernels(options)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ceilings = measured_ceilings(device)
    report = Report("One draft round, random weights, greedy", device, ceilings)
    simulation = Report("P-EAGLE against EAGLE-3: published acceptance lengths at measured round times (simulated)", device)
    for name in options.shapes:
        times = measure_shape(name, options, device, report)
        simulate(name, times, ceilings.bytes, simulation)
        if options.output is not None:
            report.write(options.output)
            if simulation.rows:
                simulation.write(options.output.with_name(options.output.name + "_simulated"))


if __name__ == "__main__":
    main()
