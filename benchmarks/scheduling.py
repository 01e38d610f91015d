r"""Length scheduling in the engine: `auto` against fixed K and plain decoding at every batch size, and the simulator against both.

Writes one JSON file with the machine's name: tokens a second of every configuration (kind decode), the step times that were
measured, and what the simulator makes of those and of the measured acceptance (kind simulated).

    python benchmarks/scheduling.py --prompts benchmarks/prompts/*.jsonl --batches 1 2 4 8 16 32 64 128 256 \
        --output docs/results/scheduling.json --step-times docs/results/step-times.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from speculators.cli.common import load_drafter, load_verifier
from speculators.data.prompts import read_prompts
from speculators.decoding.engine import AUTO, generate
from speculators.decoding.profiler import RowLengths, measure, widths
from speculators.decoding.proposal import Drafter
from speculators.decoding.sampling import SamplingParams
from speculators.decoding.statistics import Round, conditional_acceptance_by_position
from speculators.decoding.step_times import StepTimes
from speculators.evaluation.evaluate import device_name
from speculators.files import check_writable, write_text_atomically
from speculators.serving.simulator import DrafterProfile, make_policy, simulate
from speculators.serving.workload import Workload
from speculators.verifier import Verifier

TARGETS = "auto at least 0.98 x the best fixed K and 1.00 x plain at every batch; 1.3 x fixed K_max at the largest; simulator within 10%"


@dataclass(frozen=True)
class Timed:
    """The fastest of some runs of one configuration: tokens a second after the first token, and its rounds."""

    tokens_per_second: float
    rounds: list[Round]
    runs: list[float]


def timed(
    verifier: Verifier,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    drafts: Any,
    repeats: int,
) -> Timed:
    """Run one configuration once to warm up (graphs, step times) and then `repeats` times."""
    generations = [generate(verifier, drafter, prompts, sampling, num_draft_tokens=drafts) for _ in range(repeats + 1)][1:]
    rates = [sum(r.emitted for row in g.rounds for r in row) / g.seconds for g in generations]
    best = generations[int(np.argmax(rates))]
    return Timed(max(rates), [r for row in best.rounds for r in row], rates)


def predicted(profile: DrafterProfile, policy: str, rows: int, tokens: int) -> float:
    """Tokens a second that the simulator expects of the engine: replies of `tokens` a row, finished rows kept, many batches."""
    batches = max(4, 400 // rows)
    workload = Workload.closed_loop(rows, tokens, batches)
    result = simulate(workload, profile, make_policy(policy, profile, rows), max_batch=rows, packed=False)
    return float(rows * tokens * batches / result.finish.max())


def measure_batch(
    verifier: Verifier, drafter: Drafter, prompts: Sequence[Sequence[int]], sampling: SamplingParams, ks: Sequence[int], repeats: int
) -> tuple[dict[str, Any], StepTimes]:
    """Every configuration at one batch size."""
    rows, most = len(prompts), max(ks)
    plain = timed(verifier, None, prompts, sampling, None, repeats)
    fixed = {k: timed(verifier, drafter, prompts, sampling, k, repeats) for k in ks}
    auto = timed(verifier, drafter, prompts, sampling, AUTO, repeats)
    lengths = RowLengths.of(prompts, sampling)
    times = measure(verifier, drafter, (rows,), widths(most), sampling, lengths)
    plain_times = measure(verifier, None, (rows,), (0,), sampling, lengths)
    acceptance = conditional_acceptance_by_position(fixed[most].rounds)[:most]
    profile = DrafterProfile("measured", np.array([acceptance]), times)
    expected = {f"fixed:{k}": predicted(profile, f"fixed:{k}", rows, sampling.max_new_tokens - 1) for k in ks}
    without = DrafterProfile("none", np.array([[0.0]]), plain_times)
    expected["none"] = predicted(without, "none", rows, sampling.max_new_tokens - 1)
    engine = {"none": plain, **{f"fixed:{k}": run for k, run in fixed.items()}, "auto": auto}
    best_fixed = max(run.tokens_per_second for run in fixed.values())
    result = {
        "rows": rows,
        "decode": {name: {"tokens_per_second": run.tokens_per_second, "runs": run.runs} for name, run in engine.items()},
        "auto_mean_drafts": float(np.mean([r.proposed for r in auto.rounds])),
        "conditional_acceptance": acceptance,
        "auto_over_best_fixed": auto.tokens_per_second / best_fixed,
        "auto_over_plain": auto.tokens_per_second / plain.tokens_per_second,
        "auto_over_largest_k": auto.tokens_per_second / fixed[most].tokens_per_second,
        "simulated": {
            name: {"tokens_per_second": rate, "over_engine": rate / engine[name].tokens_per_second} for name, rate in expected.items()
        },
    }
    return result, times


def joined(tables: Sequence[StepTimes]) -> StepTimes:
    """Tables of single batch sizes as one."""
    return StepTimes(
        tuple(table.rows[0] for table in tables),
        tables[0].drafts,
        tuple(table.draft_seconds[0] for table in tables),
        tuple(table.verify_seconds[0] for table in tables),
        machine=tables[0].machine,
    )


def main() -> None:
    """Measure batch after batch; the file is written anew after each, so an interrupted run keeps what it has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verifier", default="smollm2-135m-instruct")
    parser.add_argument("--drafter", default="checkpoints/smollm2-135m-instruct/dspark")
    parser.add_argument("--prompts", nargs="+", type=Path, required=True, help="prompt files; prompts repeat where a batch needs more")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--ks", nargs="+", type=int, help="fixed K to compare with; default 1 to the drafter's own")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device")
    parser.add_argument("--output", type=Path, required=True, help="JSON file of the results")
    parser.add_argument("--step-times", type=Path, help="JSON file of the step times, for `speculators simulate`")
    options = parser.parse_args()
    for path in filter(None, (options.output, options.step_times)):
        check_writable(path)
    verifier = load_verifier(options.verifier, options.dtype, options.device)
    drafter = load_drafter(options.drafter, verifier)
    ks = options.ks or list(range(1, drafter.default_draft_tokens + 1))
    prompts = [verifier.encode_chat(prompt.messages) for file in options.prompts for prompt in read_prompts(file)]
    # Rows of full length: what is compared is the speed of rounds, not where replies end.
    sampling = SamplingParams(temperature=options.temperature, max_new_tokens=options.max_new_tokens, ignore_eos=True)
    results, tables = [], []
    for rows in sorted(options.batches):
        batch = [prompts[i % len(prompts)] for i in range(rows)]
        result, times = measure_batch(verifier, drafter, batch, sampling, ks, options.repeats)
        results.append(result)
        tables.append(times)
        report = {
            "command": "benchmarks/scheduling.py",
            "machine": device_name(verifier.device),
            "verifier": options.verifier,
            "drafter": options.drafter,
            "dtype": str(verifier.dtype).removeprefix("torch."),
            "temperature": options.temperature,
            "max_new_tokens": options.max_new_tokens,
            "targets": TARGETS,
            "batches": results,
        }
        write_text_atomically(options.output, json.dumps(report, indent=2) + "\n")
        if options.step_times:
            joined(tables).save(options.step_times)
        print(summary(result, max(ks)), flush=True)


def summary(result: dict[str, Any], most: int) -> str:
    """One batch size in a line."""
    speeds = ", ".join(f"{name} {run['tokens_per_second']:.1f}" for name, run in result["decode"].items())
    ratios = ", ".join(f"{name} {value['over_engine']:.2f}" for name, value in result["simulated"].items())
    auto = (
        f"{result['auto_over_best_fixed']:.2f} x the best fixed K, {result['auto_over_plain']:.2f} x plain,"
        f" {result['auto_over_largest_k']:.2f} x K = {most}"
    )
    return f"batch {result['rows']}: tokens/s {speeds}; auto {auto}; simulated / engine {ratios}"


if __name__ == "__main__":
    main()
