"""What the decoding kernels ask of a Hopper GPU, read from their compiled code: no GPU takes part."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

_MEMORY_ACCESS = re.compile(r"\b(?:ld|st|red|atom)\.[\w.:]*global|cp\.async")


def compile_kernels(part: str) -> Any:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name("compile_for_hopper.py")), part]
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


def test_training_attention_and_losses_fit_in_shared_memory() -> None:
    compiled = compile_kernels("training")
    assert {kernel["kernel"] for kernel in compiled} == TRAINING
    assert all(kernel["shared"] <= kernel["room"] for kernel in compiled)


def test_threads_that_overwrite_what_others_read_wait_for_them() -> None:
    """A tile narrower than a program, too, whose reductions need no barrier."""
    names = {"_tile_kernel", "_distillation_kernel", "_cross_entropy_kernel"}
    overwriting = [kernel for kernel in compile_kernels("training") if kernel["kernel"] in names]
    assert {kernel["kernel"] for kernel in overwriting} == names
    for kernel in overwriting:
        reading, barrier, _ = kernel["ptx"].partition("bar.sync")
        assert barrier and "st.global" not in reading.replace("cvta.to.global", ""), kernel["kernel"]


def test_the_rows_of_a_served_drafter_compile() -> None:
    compiled = compile_kernels("serving")
    assert [kernel["kernel"] for kernel in compiled] == ["_lay_out_kernel"] * 2
    assert all(kernel["shared"] == 0 for kernel in compiled)


@pytest.mark.parametrize("part", ["float32", "bfloat16", "others"])
def test_kernels_fit_in_shared_memory_and_touch_nothing_before_they_wait(part: str) -> None:
    compiled = compile_kernels(part)
    assert {kernel["kernel"] for kernel in compiled} == (OTHERS if part == "others" else WITH_PRODUCTS)
    for kernel in compiled:
        assert kernel["shared"] <= kernel["room"], kernel["kernel"]
        before, wait, _ = kernel["ptx"].partition("griddepcontrol.wait")
        assert kernel["pdl"] and wait and not _MEMORY_ACCESS.search(before), kernel["kernel"]
        assert ("prefetch.global.L2" in before) == (kernel["kernel"] == "_skinny_linear_kernel")


TRAINING = {
    "_forward_kernel",
    "_query_gradient_kernel",
    "_key_gradient_kernel",
    "_log_sums_kernel",
    "_cross_entropy_kernel",
    "_tile_kernel",
    "_gradient_kernel",
    "_distillation_kernel",
}
WITH_PRODUCTS = {"_skinny_linear_kernel", "_chunk_kernel", "_sum_kernel", "_slot_kernel"}
OTHERS = {
    "_rms_norm_kernel",
    "_add_rms_norm_kernel",
    "_joined_norms_kernel",
    "_gated_halves_kernel",
    "_attention_heads_kernel",
    "_rotate_heads_kernel",
    "_kv_injection_kernel",
    "tile_argmax_kernel",
    "_best_tile_kernel",
    "_compare_kernel",
    "_tile_log_sum_exp_kernel",
    "_decide_kernel",
    "_tile_mass_kernel",
    "_draw_kernel",
    "_round_outcome_kernel",
}
