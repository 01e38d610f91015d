"""Options of benchmarks that compare what the library would choose by itself: early launches, and whose matrix products."""

from __future__ import annotations

import argparse
import sys

from speculators.kernels import launch
from speculators.kernels.skinny_linear import FASTER, MAX_TOKENS, Range


def add_kernel_choices(parser: argparse.ArgumentParser) -> None:
    """`--no-pdl` and `--products`."""
    parser.add_argument("--no-pdl", action="store_true", help="launch kernels the ordinary way, see kernels/launch.py")
    parser.add_argument("--products", choices=["measured", "ours", "cublas"], default="measured", help="of few tokens by weights")


def choose_kernels(options: argparse.Namespace) -> None:
    """Make the library follow the options."""
    launch.enabled = launch.enabled and not options.no_pdl
    if options.products != "measured":
        every = Range(1, MAX_TOKENS, 1, 1, sys.maxsize)
        FASTER.update({device: (every,) if options.products == "ours" else () for device in FASTER})
