r"""Length scheduling in the engine: `auto` against fixed K and plain decoding at every batch size, and the simulator against both.

Writes one JSON file with the machine's name: tokens a second of every configuration (kind decode), the step times that were
measured, and what the simulator makes of those and of the measured acceptance (kind simulated).

Every batch size is measured on several batches of different prompts, each a mixture of all files: in 16 bits replies differ with K
by rounding, and a batch waits for its slowest row, so that one batch of any size says little about which K is best.

    python benchmarks/scheduling.py --prompts benchmarks/prompts/*.jsonl --batches 1 2 4 8 16 32 64 128 256 \
        --output docs/results/scheduling.json --step-times docs/results/step-times.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from speculators.capture import without_collection
from speculators.cli.common import load_drafter, load_verifier
from speculators.data.prompts import Prompt, read_prompts
from speculators.decoding.batch import longest_row
from speculators.decoding.engine import AUTO, Generation, generate
from speculators.decoding.graph import LENGTH_MULTIPLE
from speculators.decoding.profiler import RowLengths, measure, step_times
from speculators.decoding.proposal import Drafter
from speculators.decoding.sampling import SamplingParams
from speculators.decoding.statistics import Round, conditional_acceptance_by_position, mean_proposed
from speculators.decoding.step_times import StepTimes
from speculators.evaluation.evaluate import device_name
from speculators.files import check_writable, write_text_atomically
from speculators.serving.drafter_profile import DrafterProfile
from speculators.serving.simulator import make_policy, simulate
from speculators.serving.workload import Workload
from speculators.verifier import Verifier

TARGETS = "auto at least 0.98 x the best fixed K and 1.00 x plain at every batch; 1.3 x fixed K_max at the largest; simulator within 10%"


@dataclass(frozen=True)
class Timed:
    """The fastest of some runs of one configuration over all batches.

    Attributes:
        generations: of each batch in that run.
        runs: tokens a second of every run.
    """

    generations: list[Generation]
    runs: list[float]

    @property
    def tokens_per_second(self) -> float:
        """All tokens after each row's first, over all seconds after it."""
        return rate(self.generations)

    @property
    def rounds(self) -> list[list[Round]]:
        """Of each row of each batch."""
        return [row for generation in self.generations for row in generation.rounds]

    def to_json(self) -> dict[str, Any]:
        """The run in numbers."""
        rounds = [a_round for row in self.rounds for a_round in row]
        return {
            "tokens_per_second": self.tokens_per_second,
            "runs": self.runs,
            "seconds": sum(generation.seconds for generation in self.generations),
            "verify_forwards": sum(generation.verify_forwards for generation in self.generations),
            "rounds": len(rounds),
            "mean_drafts": mean_proposed(rounds),
        }


def mixed(files: Sequence[Sequence[Prompt]]) -> list[Prompt]:
    """The prompts of all files in an order of which every stretch has about the same share of each file."""
    places = [((index + 0.5) / len(file), prompt) for file in files for index, prompt in enumerate(file)]
    return [prompt for _, prompt in sorted(places, key=lambda placed: placed[0])]


def batches_of(prompts: Sequence[list[int]], rows: int, least_batches: int, least_prompts: int) -> list[list[list[int]]]:
    """The first batches of `rows` prompts: at least so many, of at least so many prompts, which repeat only after the last of all."""
    count = max(least_batches, -(-least_prompts // rows))
    return [[prompts[index % len(prompts)] for index in range(first, first + rows)] for first in range(0, count * rows, rows)]


def rate(generations: Sequence[Generation]) -> float:
    """Tokens a second of batches that were decoded one after the other."""
    return sum(r.emitted for g in generations for row in g.rounds for r in row) / sum(g.seconds for g in generations)


def span(batch: Sequence[Sequence[int]], sampling: SamplingParams, drafts: int) -> tuple[int, int]:
    """Multiples of `LENGTH_MULTIPLE` that the longest row needs in its first round and in its last one."""
    last = longest_row(batch, sampling, drafts)
    return -(-(last - sampling.max_new_tokens) // LENGTH_MULTIPLE), -(-last // LENGTH_MULTIPLE)


def timed(
    verifier: Verifier,
    drafter: Drafter | None,
    batches: Sequence[Sequence[Sequence[int]]],
    sampling: SamplingParams,
    drafts: Any,
    repeats: int,
) -> Timed:
    """Run one configuration once for each shape of batches to warm up (graphs, step times), and then all of it `repeats` times."""
    # Batches share their graphs where their longest rows begin and end in the same multiples of the length that attention reads.
    spans = {span(batch, sampling, 0 if drafts in (None, AUTO) else drafts): batch for batch in batches}
    for batch in batches if drafts == AUTO else spans.values():  # auto meets more shapes, a graph each
        generate(verifier, drafter, batch, sampling, num_draft_tokens=drafts)
    # Everything ever generated is kept here, and one collection that walks through it is as long as 150 rounds.
    with without_collection():
        runs = [[generate(verifier, drafter, batch, sampling, num_draft_tokens=drafts) for batch in batches] for _ in range(repeats)]
    return Timed(max(runs, key=rate), [rate(run) for run in runs])


def predicted(profile: DrafterProfile, policy: str, rows: int, requests: int, tokens: int) -> float:
    """Tokens a second that the simulator expects of the engine: replies of `tokens` a row, finished rows kept.

    Args:
        profile: of the drafter.
        policy: how long blocks are.
        rows: of a batch.
        requests: that were measured; each is simulated some times.
        tokens: of a reply.
    """
    batches = requests // rows * max(4, 400 // requests)
    workload = Workload.closed_loop(rows, tokens, batches)
    result = simulate(workload, profile, make_policy(policy, profile, rows), max_batch=rows, packed=False)
    return float(rows * tokens * batches / result.finish.max())


def measure_batch(
    verifier: Verifier,
    drafter: Drafter,
    batches: Sequence[Sequence[Sequence[int]]],
    sampling: SamplingParams,
    ks: Sequence[int],
    repeats: int,
) -> tuple[dict[str, Any], StepTimes]:
    """Every configuration at one batch size."""
    rows, most, tokens = len(batches[0]), max(ks), sampling.max_new_tokens - 1
    # Batches differ in length, and what is predicted is all of them: `auto` needs the times of each anyway.
    times = mean([step_times(verifier, drafter, most, batch, sampling) for batch in batches])
    lengths = [RowLengths.of(batch, sampling) for batch in batches]
    plain = {some: measure(verifier, None, (rows,), (0,), sampling, some) for some in set(lengths)}
    plain_times = mean([plain[some] for some in lengths])
    engine = {"none": timed(verifier, None, batches, sampling, None, repeats)}
    engine |= {f"fixed:{k}": timed(verifier, drafter, batches, sampling, k, repeats) for k in ks}
    engine["auto"] = timed(verifier, drafter, batches, sampling, AUTO, repeats)
    # All is predicted from the rounds with the longest blocks, row by row: rows are unlike, and a batch waits for its slowest.
    longest = engine[f"fixed:{most}"]
    profile = DrafterProfile.from_rounds("measured", longest.rounds, most, times)
    profiles = {"none": DrafterProfile("none", np.array([[0.0]]), plain_times), **{f"fixed:{k}": profile for k in ks}}
    expected = {name: predicted(of, name, rows, rows * len(batches), tokens) for name, of in profiles.items()}
    speed = {name: run.tokens_per_second for name, run in engine.items()}
    result = {
        "rows": rows,
        "batches": len(batches),
        "prompts": len({tuple(prompt) for batch in batches for prompt in batch}),
        "decode": {name: run.to_json() for name, run in engine.items()},
        "conditional_acceptance": conditional_acceptance_by_position([r for row in longest.rounds for r in row])[:most],
        "auto_over_best_fixed": speed["auto"] / max(speed[f"fixed:{k}"] for k in ks),
        "auto_over_plain": speed["auto"] / speed["none"],
        "auto_over_largest_k": speed["auto"] / speed[f"fixed:{most}"],
        "simulated": {name: {"tokens_per_second": value, "over_engine": value / speed[name]} for name, value in expected.items()},
    }
    return result, times


def mean(tables: Sequence[StepTimes]) -> StepTimes:
    """The mean times of tables of the same sizes."""
    draft, verify = (np.mean([getattr(table, name) for table in tables], axis=0) for name in ("draft_seconds", "verify_seconds"))
    return replace(tables[0], draft_seconds=tuple(map(tuple, draft.tolist())), verify_seconds=tuple(map(tuple, verify.tolist())))


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
    parser.add_argument("--prompts", nargs="+", type=Path, required=True, help="prompt files, mixed in every batch")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--ks", nargs="+", type=int, help="fixed K to compare with; default 1 to the drafter's own")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--least-batches", type=int, default=4, help="of each size: the slowest row alone decides how fast one batch is")
    parser.add_argument("--least-prompts", type=int, default=16, help="of each size, in as many batches as that takes")
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
    prompts = [verifier.encode_chat(prompt.messages) for prompt in mixed([read_prompts(file) for file in options.prompts])]
    # Rows of full length: what is compared is the speed of rounds, not where replies end.
    sampling = SamplingParams(temperature=options.temperature, max_new_tokens=options.max_new_tokens, ignore_eos=True)
    results, tables = [], []
    for rows in sorted(options.batches):
        batches = batches_of(prompts, rows, options.least_batches, options.least_prompts)
        result, times = measure_batch(verifier, drafter, batches, sampling, ks, options.repeats)
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
            "prompts": [file.name for file in options.prompts],
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
    return f"batch {result['rows']} x {result['batches']}: tokens/s {speeds}; auto {auto}; simulated / engine {ratios}"


if __name__ == "__main__":
    main()
