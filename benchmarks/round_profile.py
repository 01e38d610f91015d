"""Where the time of a round goes: every kernel of one decoding round, with its launches and microseconds.

    python benchmarks/round_profile.py --output benchmarks/results/round_profile_h200
    python benchmarks/round_profile.py --rounds 1 --methods dspark      # a dry run: operations instead of kernels without a GPU

Rounds are those of the engine, on CUDA as graphs. `busy` is the sum of the kernels, `round` the wall time of a round; the rest is the
device waiting between kernels. "plain" is decoding without a drafter: what a method has on top of it is what drafting costs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from harness import Report
from kernel_choices import add_kernel_choices, choose_kernels
from torch.profiler import ProfilerActivity, profile

from speculators.cli.common import load_drafter, load_verifier
from speculators.data.prompts import read_prompts
from speculators.decoding.batch import Batch, prepare
from speculators.decoding.length_schedules import FixedLength
from speculators.decoding.proposal import Drafter
from speculators.decoding.sampling import SamplingParams
from speculators.verifier import Verifier

ROOT = Path(__file__).parent.parent
PROMPTS = ROOT / "benchmarks" / "prompts" / "gsm8k.jsonl"
CHECKPOINTS = ROOT / "checkpoints" / "smollm2-135m-instruct"
PLAIN = "plain"
WARM_UP = 4  # rounds before the first that counts: kernels, then graphs


def running_batch(verifier: Verifier, drafter: Drafter | None, rows: int, draft_tokens: int, rounds: int) -> Batch:
    """A batch whose next rounds are like any others of a long reply."""
    prompts = [verifier.encode_chat(prompt.messages) for prompt in read_prompts(PROMPTS, rows)]
    budget = 2 + (draft_tokens + 1) * (WARM_UP + 2 * rounds)
    sampling = SamplingParams(max_new_tokens=budget, ignore_eos=True)
    batch = prepare(verifier, drafter, prompts, sampling, draft_tokens, FixedLength())
    batch.prefill(prompts)
    batch.longest = longest = max(map(len, prompts)) + budget
    for _ in range(WARM_UP):
        batch.next_round()
        batch.longest = longest
    return batch


def kernels(batch: Batch, rounds: int) -> tuple[Counter[str], Counter[str], float]:
    """Launches and microseconds of `rounds` rounds by kernel, and the milliseconds of one round without the profiler."""
    cuda, longest = batch.verifier.device.type == "cuda", batch.longest

    def run() -> float:
        _synchronise(batch.verifier.device)
        started = time.perf_counter()
        for _ in range(rounds):
            batch.longest = longest
            batch.next_round()
        _synchronise(batch.verifier.device)
        return 1e3 * (time.perf_counter() - started) / rounds

    milliseconds = run()
    with profile(activities=[ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU]) as trace:
        run()
    launches: Counter[str] = Counter()
    microseconds: Counter[str] = Counter()
    for event in trace.key_averages():
        time_of = event.self_device_time_total if cuda else event.self_cpu_time_total
        launches[event.key] += event.count
        microseconds[event.key] += time_of
    return launches, microseconds, milliseconds


def main() -> None:
    """Parse arguments, profile, write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verifier", default="smollm2-135m-instruct")
    parser.add_argument("--checkpoints", type=Path, default=CHECKPOINTS, help="holds one folder a method")
    parser.add_argument("--methods", nargs="+", default=[PLAIN, "dspark", "dflash", "peagle", "eagle3"])
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--k", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=10)
    add_kernel_choices(parser)
    parser.add_argument("--most", type=int, default=40, help="kernels shown of each method")
    parser.add_argument("--output", type=Path, help="without ending; .json and .md are written")
    options = parser.parse_args()
    choose_kernels(options)
    verifier = load_verifier(options.verifier, "auto", None)
    report = Report(f"Kernels of one round, {options.rows} rows, K = {options.k}, greedy, {options.verifier}", verifier.device)
    for method in options.methods:
        # Loaded like any drafter: what is made in inference mode cannot be laid out for decoding.
        drafter = None if method == PLAIN else load_drafter(str(options.checkpoints / method), verifier)
        with torch.inference_mode():
            batch = running_batch(verifier, drafter, options.rows, 0 if drafter is None else options.k, options.rounds)
            launches, microseconds, milliseconds = kernels(batch, options.rounds)
        facts: dict[str, Any] = {"method": method, "launches": sum(launches.values()) / options.rounds}
        report.add("round", None, **facts, microseconds=1e3 * milliseconds)
        report.add("busy", None, **facts, microseconds=sum(microseconds.values()) / options.rounds)
        for kernel, total in microseconds.most_common(options.most):
            count = launches[kernel] / options.rounds
            report.add(kernel[:100], None, method=method, launches=count, microseconds=total / options.rounds)
        if options.output is not None:
            report.write(options.output)
    print(json.dumps({"methods": options.methods, "rows": options.rows}))


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
