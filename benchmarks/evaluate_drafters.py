"""Write the runs behind docs/results.md: every drafter on every prompt set, at several K and temperatures.

All prompts of all sets decode in ONE batch: on a GPU a round of this small verifier is bound by kernel launches, so
500 rows take about as long as one. Runs are written after every configuration; what a time budget leaves out is
named at the end. `python -m speculators.evaluation.results` makes the tables.

    python benchmarks/evaluate_drafters.py --prompts prompts/*.jsonl --output docs/results/raw --time-budget 500
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import torch

from speculators.cli.common import load_drafter
from speculators.data.prompts import read_prompts
from speculators.decoding.proposal import Drafter
from speculators.evaluation.evaluate import (
    PLAIN,
    PROMPT_LOOKUP,
    Decoded,
    EvaluationSettings,
    PromptSet,
    compare,
    decode,
    device_name,
    evaluate,
    parameter_count,
)
from speculators.evaluation.metrics import acceptance_length, is_degenerate
from speculators.evaluation.runs import Run, save_runs
from speculators.verifier import Verifier

METHODS = ("dspark", "dflash", "peagle", "eagle3", PROMPT_LOOKUP)


def main() -> None:
    """Parse arguments, then evaluate in order of importance: large K first, greedy before sampled."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verifier", default="smollm2-135m-instruct")
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints/smollm2-135m-instruct"), help="holds one folder a method")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--prompts", nargs="+", type=Path, required=True, help="one prompt set a file")
    parser.add_argument("--max-prompts", type=int, help="only the first prompts of each set")
    parser.add_argument("--ks", nargs="+", type=int, default=[7, 5, 3])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="float32", help="identity is claimed in float32")
    parser.add_argument("--speed-prompts", type=int, default=0, help="prompts a set to time at batch 1 in the fast dtype")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--time-budget", type=float, default=float("inf"), help="seconds; no configuration starts after it")
    parser.add_argument("--output", type=Path, required=True, help="folder for one file a temperature, and speed.json")
    options = parser.parse_args()
    deadline = time.monotonic() + options.time_budget
    options.output.mkdir(parents=True, exist_ok=True)

    verifier = Verifier.from_pretrained(options.verifier, dtype=options.dtype)
    sets = [PromptSet.from_prompts(verifier, path.stem, read_prompts(path, options.max_prompts)) for path in options.prompts]
    folders = {name: name if name == PROMPT_LOOKUP else str(options.checkpoints / name) for name in options.methods}
    drafters = {name: load_drafter(folder, verifier) for name, folder in folders.items()}
    print(f"{sum(len(s.ids) for s in sets)} prompts in {len(sets)} sets on {device_name(verifier.device)}", flush=True)

    left_out = evaluate_together(verifier, drafters, sets, options, deadline)
    if options.speed_prompts and time.monotonic() < deadline:
        measure_speed(verifier, drafters, sets, options)
    for configuration in left_out:
        print(f"left out, the time budget is spent: {configuration}")


def evaluate_together(
    verifier: Verifier, drafters: dict[str, Drafter], sets: list[PromptSet], options: argparse.Namespace, deadline: float
) -> list[str]:
    """Decode all sets in one batch for every configuration. Returns the configurations that no time was left for."""
    together = PromptSet("all", tuple(i for s in sets for i in s.ids), tuple(t for s in sets for t in s.token_ids))
    settings = EvaluationSettings(options.max_new_tokens, batch_size=len(together.ids), seed=options.seed)
    started = time.monotonic()
    reference = decode(verifier, None, together, settings, 0)
    degenerate = [is_degenerate(token_ids) for token_ids in reference.token_ids]
    print(f"plain greedy: {time.monotonic() - started:.1f} s, {sum(degenerate)} prompts loop", flush=True)
    saved: dict[float, list[Run]] = {temperature: [] for temperature in options.temperatures}
    left_out = []
    configurations = [(k, temperature, name) for k in options.ks for temperature in options.temperatures for name in drafters]
    for k, temperature, name in configurations:
        if time.monotonic() > deadline:
            left_out.append(f"{name}, K = {k}, T = {temperature:g}")
            continue
        started = time.monotonic()
        at_temperature = replace(settings, temperature=temperature)
        decoded = decode(verifier, drafters[name], together, at_temperature, k)
        same = compare(verifier, together, decoded.token_ids, reference.token_ids) if temperature == 0 else None
        template = Run(
            verifier=options.verifier,
            method=name,
            checkpoint=None if name == PROMPT_LOOKUP else str(options.checkpoints / name),
            parameters=parameter_count(drafters[name]),
            prompts=together.name,
            prompt_ids=together.ids,
            k=k,
            temperature=temperature,
            confidence_threshold=0.0,
            seed=options.seed,
            max_new_tokens=options.max_new_tokens,
            batch_size=len(together.ids),
            dtype=options.dtype,
            device=device_name(verifier.device),
            rounds=tuple(tuple(row) for row in decoded.rounds),
            degenerate=tuple(degenerate),
            identical=None if same is None else tuple(equal for equal, _ in same),
            near_tie=None if same is None else tuple(tie for _, tie in same),
            batch_seconds=None,
        )
        runs = split(template, sets)
        saved[temperature] += runs
        save_runs(saved[temperature], options.output / f"t{temperature:g}.json")
        print(f"{summary(runs)}  ({time.monotonic() - started:.1f} s, decoding {seconds_of(decoded):.1f} s)", flush=True)
    return left_out


def split(run: Run, sets: list[PromptSet]) -> list[Run]:
    """One run a prompt set, from the run over all of them together."""
    runs, start = [], 0
    for prompt_set in sets:
        rows = slice(start, start + len(prompt_set.ids))
        runs.append(
            replace(
                run,
                prompts=prompt_set.name,
                prompt_ids=prompt_set.ids,
                rounds=run.rounds[rows],
                degenerate=run.degenerate[rows],
                identical=None if run.identical is None else run.identical[rows],
                near_tie=None if run.near_tie is None else run.near_tie[rows],
            )
        )
        start = rows.stop
    return runs


def summary(runs: list[Run]) -> str:
    """One line: acceptance length a set without looping prompts, and how many outputs differ from plain decoding."""
    lengths = [acceptance_length([run.rounds[i] for i in run.select(exclude_degenerate=True)]) for run in runs]
    text = " ".join(f"{run.prompts} {length:.3f}" for run, length in zip(runs, lengths, strict=True) if length is not None)
    different = "" if runs[0].identical is None else f", {sum(not same for run in runs for same in run.identical or ())} different"
    return f"{runs[0].method} K={runs[0].k} T={runs[0].temperature:g}: {text}{different}"


def seconds_of(decoded: Decoded) -> float:
    """Decode wall time, prefill excluded."""
    return sum(decoded.batch_seconds)


def measure_speed(verifier: Verifier, drafters: dict[str, Drafter], sets: list[PromptSet], options: argparse.Namespace) -> None:
    """Time every drafter against plain decoding at batch 1, greedily, in the fast dtype; prompts are the first of each set."""
    fast = Verifier.from_pretrained(options.verifier, dtype="auto")
    for drafter in drafters.values():
        if isinstance(drafter, torch.nn.Module):
            drafter.to(dtype=fast.dtype)
            drafter.attach(fast.weights)
    some = [replace(s, ids=s.ids[: options.speed_prompts], token_ids=s.token_ids[: options.speed_prompts]) for s in sets]
    settings = EvaluationSettings(options.max_new_tokens, num_draft_tokens=options.ks[0], seed=options.seed)
    decode(fast, None, replace(some[0], ids=some[0].ids[:1], token_ids=some[0].token_ids[:1]), settings, 0)  # warm up
    evaluation = evaluate(
        fast,
        drafters,
        some,
        settings,
        checkpoints={name: options.checkpoints / name for name in drafters if name != PROMPT_LOOKUP},
        on_progress=lambda text: print(text, flush=True),
    )
    save_runs(evaluation.runs, options.output / "speed.json")
    for run in evaluation.runs:
        speed = run.tokens_per_second(range(len(run.rounds)))
        print(f"{run.method if run.method != PLAIN else 'plain decoding'} on {run.prompts}: {speed or 0:.1f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
