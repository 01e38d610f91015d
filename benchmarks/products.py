"""The matrix products of a decoding step, a handful of tokens by large weights: our kernel against cuBLAS, beside the floor.

    python benchmarks/products.py --output benchmarks/results/products_h200
    python benchmarks/products.py --sweep --tokens 1 16         # which tiles suit the device, minutes
    python benchmarks/products.py --pdl                         # also launched early, see kernels/launch.py
    python benchmarks/products.py --tiny --repetitions 2        # a dry run: the reference alone on a machine without a GPU

Both in CUDA graphs, as in a step: products with one weight after another, more of them than the cache holds, and the time of one.
`kernels.skinny_linear.FASTER` and `Tiles.of` hold what follows from it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product as combinations
from pathlib import Path

import torch
from harness import Report, Timing, Work, measure, measured_ceilings
from torch import Tensor

from speculators.kernels import launch
from speculators.kernels.skinny_linear import Tiles, skinny_gated_linear, skinny_linear

# Name: rows, columns, gated. Of a Qwen3-8B drafter and of SmolLM2.
SHAPES = {
    "qwen3-8b qkv": (6144, 4096, False),
    "qwen3-8b qkv of a fused input": (6144, 8192, False),
    "qwen3-8b o": (4096, 4096, False),
    "qwen3-8b gate, up": (24576, 4096, True),
    "qwen3-8b down, fc": (4096, 12288, False),
    "qwen3-8b draft head": (32000, 4096, False),
    "smollm2 qkv": (960, 576, False),
    "smollm2 gate, up": (3072, 576, True),
    "smollm2 down": (576, 1536, False),
    "smollm2 head": (49152, 576, False),
}
TINY = {"tiny": (40, 24, False), "tiny gated": (40, 24, True)}
SWEEP = [Tiles(*sizes) for sizes in combinations((16, 32, 64), (128, 256, 512), (3, 4, 6), (4, 8))]
SWEEP_AHEAD = [Tiles(ahead=size) for size in (128, 512, 1024, 2048, 4096, 8192)]

_BYTES = 1 << 28  # five times the L2 cache
_SHARED_MEMORY = 220 << 10


class Products:
    """The product of some tokens with every one of a set of weights of one shape."""

    def __init__(self, rows: int, columns: int, gated: bool, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.gated = device, gated
        first = torch.randn(rows, columns, device=device, dtype=dtype) / columns**0.5
        count = max(2, -(-_BYTES // first.nbytes)) if device.type == "cuda" else 2
        self.weights = [first, *(first.clone() for _ in range(count - 1))]
        self.product: Callable[..., Tensor] = skinny_gated_linear if gated else skinny_linear

    def work(self, x: Tensor) -> Work:
        """Of one product."""
        weight, written = self.weights[0], len(x) * len(self.weights[0]) / (1 + self.gated)
        return Work(2.0 * len(x) * weight.numel(), weight.element_size() * (weight.numel() + x.numel() + written))

    def time(self, x: Tensor, side: str, repetitions: int, tiles: Tiles | None = None) -> Timing:
        """Of one product, after comparing it with the reference."""

        def run() -> None:
            for weight in self.weights:
                self.product(x, weight, implementation=side, tiles=tiles)

        one = partial(self.product, x, self.weights[0])
        torch.testing.assert_close(one(implementation=side, tiles=tiles), one(implementation="reference"), rtol=2e-2, atol=2e-2)
        timing = measure(run, device=self.device, repetitions=repetitions, graph=True)
        return replace(timing, **{name: getattr(timing, name) / len(self.weights) for name in ("milliseconds", "low", "high")})


@torch.inference_mode()
def main() -> None:
    """Parse arguments, measure, write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 2, 8, 16])
    parser.add_argument("--shapes", nargs="+", help="beginnings of names; all by default")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--sweep", action="store_true", help="try many tiles, and print the fastest of each shape")
    parser.add_argument("--pdl", action="store_true", help="measure our kernel also launched early, one product into the next")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--output", type=Path, help="without ending; .json and .md are written")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    report = Report("Matrix products of a decoding step", device, measured_ceilings(device))
    for name, shape in (TINY if options.tiny else SHAPES).items():
        if options.shapes and not name.startswith(tuple(options.shapes)):
            continue
        products = Products(*shape, device, dtype)
        for tokens in options.tokens:
            x = torch.randn(tokens, shape[1], device=device, dtype=dtype)
            facts = {"tokens": tokens, "rows": shape[0], "columns": shape[1]}
            launch.enabled = False
            reference = products.time(x, "reference", options.repetitions)
            row = report.add(name, reference, work=products.work(x), side="reference", **facts)
            add_ratios(row, reference)
            if device.type != "cuda":
                continue
            for early in (False, True) if options.pdl else (False,):
                launch.enabled = early
                timing, tiles = best_of(products, x, options.repetitions, options.sweep)
                facts |= {"side": "triton, early" if early else "triton", "tiles": "" if tiles is None else str(tiles)}
                row = report.add(name, timing, work=products.work(x), **facts)
                add_ratios(row, reference)
    if options.output is not None:
        report.write(options.output)


def add_ratios(row: dict[str, object], reference: Timing) -> None:
    """How far a measurement is from the floor, and from the reference."""
    milliseconds, floor = row["milliseconds"], row.get("floor_milliseconds")
    assert isinstance(milliseconds, float)
    if isinstance(floor, float):
        row["times_floor"] = milliseconds / floor
    row["times_faster"] = reference.milliseconds / milliseconds
    print(f"    times floor {row.get('times_floor', float('nan')):.3g}, times faster {row['times_faster']:.3g}", flush=True)


def best_of(products: Products, x: Tensor, repetitions: int, sweep: bool) -> tuple[Timing, Tiles | None]:
    """The kernel with its own tiles, or the fastest of many; where it launches early, of many distances to look ahead."""
    if not sweep:
        return products.time(x, "triton", repetitions), None
    size = products.weights[0].element_size() * (1 + products.gated)
    fitting = [
        tiles
        for tiles in (SWEEP_AHEAD if launch.enabled else SWEEP)
        if tiles.stages * tiles.columns * (tiles.rows * size + 32) <= _SHARED_MEMORY
    ]
    return min(((products.time(x, "triton", repetitions, tiles), tiles) for tiles in fitting), key=lambda pair: pair[0].milliseconds)


if __name__ == "__main__":
    main()
