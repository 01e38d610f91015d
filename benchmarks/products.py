"""The matrix products of a decoding step, a handful of tokens by large weights: our kernel against cuBLAS, beside the floor.

    python benchmarks/products.py --output benchmarks/results/products_h200
    python benchmarks/products.py --tiny --repetitions 2        # a dry run: the reference alone on a machine without a GPU

Both in CUDA graphs, as in a step: products with one weight after another, more of them than the cache holds, and the time of one.
`kernels.skinny_linear.FASTER` holds what follows from it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from harness import Report, Timing, Work, measure, measured_ceilings
from torch import Tensor

from speculators.kernels.skinny_linear import skinny_gated_linear, skinny_linear

# Name: rows, columns, gated. Of a Qwen3-8B drafter and of SmolLM2.
SHAPES = {
    "qwen3-8b qkv": (6144, 4096, False),
    "qwen3-8b fused qkv": (6144, 8192, False),
    "qwen3-8b o": (4096, 4096, False),
    "qwen3-8b gate, up": (24576, 4096, True),
    "qwen3-8b down": (4096, 12288, False),
    "qwen3-8b draft head": (32000, 4096, False),
    "qwen3-8b fc": (4096, 12288, False),
    "smollm2 qkv": (960, 576, False),
    "smollm2 gate, up": (3072, 576, True),
    "smollm2 down": (576, 1536, False),
    "smollm2 head": (49152, 576, False),
}
TINY = {"tiny": (40, 24, False), "tiny gated": (40, 24, True)}


_BYTES = 1 << 28  # five times the L2 cache


def all_products(product: Callable[..., Tensor], x: Tensor, weights: list[Tensor], side: str) -> None:
    """The product with each weight."""
    for weight in weights:
        product(x, weight, implementation=side)


def one_of(run: Callable[[], None], count: int, device: torch.device, repetitions: int) -> Timing:
    """The time of one of `count` products."""
    timing = measure(run, device=device, repetitions=repetitions, graph=True)
    return replace(timing, **{name: getattr(timing, name) / count for name in ("milliseconds", "low", "high")})


def main() -> None:
    """Parse arguments, measure, write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 2, 8, 16])
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--output", type=Path, help="without ending; .json and .md are written")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    report = Report("Matrix products of a decoding step", device, measured_ceilings(device))
    for name, (rows, columns, gated) in (TINY if options.tiny else SHAPES).items():
        weights = [torch.randn(rows, columns, device=device, dtype=dtype) / columns**0.5]
        weight, wanted = weights[0], max(2, -(-_BYTES // weights[0].nbytes)) if device.type == "cuda" else 2
        weights += [weight.clone() for _ in range(wanted - 1)]
        for tokens in options.tokens:
            x = torch.randn(tokens, columns, device=device, dtype=dtype)
            product = skinny_gated_linear if gated else skinny_linear
            work = Work(2.0 * tokens * weight.numel(), weight.element_size() * (weight.numel() + x.numel() + tokens * rows / (1 + gated)))
            timing = {}
            with torch.inference_mode():
                for side in ("reference", "triton") if device.type == "cuda" else ("reference",):
                    timing[side] = one_of(partial(all_products, product, x, weights, side), len(weights), device, options.repetitions)
                    facts = {"side": side, "tokens": tokens, "rows": rows, "columns": columns}
                    row = report.add(name, timing[side], work=work, **facts)
                    if "floor_milliseconds" in row:
                        row["times_floor"] = timing[side].milliseconds / row["floor_milliseconds"]
                    if side == "triton":
                        row["times_faster"] = timing["reference"].milliseconds / timing["triton"].milliseconds
                        expected = product(x, weight, implementation="reference")
                        torch.testing.assert_close(product(x, weight, implementation=side), expected, rtol=2e-2, atol=2e-2)
    if options.output is not None:
        report.write(options.output)


if __name__ == "__main__":
    main()
