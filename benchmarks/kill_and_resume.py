"""Kill a training run at random instants and resume it: the weights must end bit for bit as those of a run left alone.

    python benchmarks/kill_and_resume.py --kills 50 --steps 200 --output benchmarks/results/kill_and_resume.json

Every trial is a process of its own that a SIGKILL hits at an instant drawn uniformly from the wall time of the uninterrupted run;
then the same command resumes it to its end. A kill is proved to have landed inside a save when a half-written checkpoint is left.
Runs on the CPU with a tiny random verifier and a small DSpark drafter, Muon, accumulation, averaged weights and evaluations, so
that all of the run's state matters.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import platform
import random
import tempfile
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from speculators import Verifier
from speculators.data.rows import Conversation, PackedRows, pack
from speculators.training.config import TrainingConfig
from speculators.training.run_folder import CHECKPOINTS, LATEST, STATE_FILE
from speculators.training.trainer import train

VOCABULARY, ROW_LENGTH = 64, 24


def verifier() -> Verifier:
    """A random Llama of two layers."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=VOCABULARY - 1,
    )
    return Verifier(LlamaForCausalLM(config).eval(), name_or_path="tiny-llama")


def random_rows(count: int, seed: int) -> PackedRows:
    """Rows of one random conversation each."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY - 1, (count, ROW_LENGTH), generator=generator).tolist()
    return pack([Conversation(row, [place >= 3 for place in range(ROW_LENGTH)]) for row in tokens], ROW_LENGTH)


def run(output: Path, steps: int, save_every: int) -> None:
    """Start the run, or resume it where it stopped."""
    torch.set_num_threads(1)
    config = TrainingConfig(
        method="dspark",
        options={
            "num_layers": 1,
            "num_draft_tokens": 3,
            "aux_hidden_state_layer_ids": [1],
            "mask_token_id": 3,
            "markov_rank": 4,
            "training": {"anchors": 4},
        },
        output=output,
        steps=steps,
        rows_per_step=4,
        accumulation=2,
        optimizer="muon",
        ema_decay=0.95,
        weight_decay=0.1,
        evaluate_every=10,
        save_every=save_every,
        log_every=5,
        progress=False,
    )
    train(verifier(), random_rows(30, 0), config, held_out=random_rows(3, 1), resume=True)


def server() -> ForkServerContext:
    """Processes forked from one that has imported the library: the instants then lie in training, not in importing torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["speculators.training.trainer", "transformers.models.llama.modeling_llama"])
    return context


def digest(output: Path) -> str:
    """sha256 of the run's last state: weights, optimizer, averages, log sums; and of its losses and evaluations."""
    from safetensors import safe_open

    total = hashlib.sha256()
    with safe_open(output / LATEST / STATE_FILE, framework="pt") as stream:
        for name in sorted(stream.keys()):
            total.update(name.encode() + stream.get_tensor(name).numpy().tobytes())
    for line in (output / "log.jsonl").read_text().splitlines():
        record = json.loads(line)
        total.update(json.dumps([record["kind"], record["step"], record["loss"]]).encode())
    return total.hexdigest()


def in_process(arguments: tuple[Any, ...], kill_after: float | None = None) -> tuple[float, bool]:
    """Run in a process of its own. Returns its seconds, and whether it was killed before it ended."""
    process = server().Process(target=run, args=arguments)
    started = time.monotonic()
    process.start()
    process.join(kill_after)
    killed = process.exitcode is None
    if killed:
        process.kill()  # SIGKILL
        process.join()
    elif process.exitcode:
        raise SystemExit(f"the run ended with exit code {process.exitcode}")
    return time.monotonic() - started, killed


def trials(folder: Path, *, kills: int, steps: int, save_every: int, seed: int, report: Callable[[str], None] = print) -> dict[str, Any]:
    """Run the experiment.

    Args:
        folder: empty, for the runs.
        kills: how many runs are killed, once each.
        steps: of every run.
        save_every: steps between checkpoints.
        seed: of the instants.
        report: takes a line for each trial.
    """
    alone = (folder / "alone", steps, save_every)
    in_process((folder / "first", 2, 1))  # the server's start is not the run's time
    seconds, _ = in_process(alone)
    expected = digest(folder / "alone")
    draw = random.Random(seed)
    results = []
    while len(results) < kills:
        output = folder / f"trial-{len(results):03d}"
        instant = draw.uniform(0.0, seconds)
        _, killed = in_process((output, steps, save_every), kill_after=instant)
        if not killed:  # this run was faster than the measured one, and nothing was killed
            output.rename(folder / f"finished-{time.monotonic_ns()}")
            continue
        checkpoints = output / CHECKPOINTS
        left = [path.name for path in checkpoints.glob(".*step-*.partial")] if checkpoints.exists() else []
        finished = sorted(path.name for path in checkpoints.glob("step-*")) if checkpoints.exists() else []
        in_process((output, steps, save_every))
        result = {
            "instant": round(instant, 3),
            "resumed_from": finished[-1] if finished else None,
            "inside_a_save": bool(left),
            "identical": digest(output) == expected,
            "left_behind": [path.name for path in checkpoints.glob(".*")],
        }
        results.append(result)
        report(json.dumps(result))
    return {
        "steps": steps,
        "save_every": save_every,
        "uninterrupted_seconds": round(seconds, 3),
        "kills": len(results),
        "inside_a_save": sum(result["inside_a_save"] for result in results),
        "identical": sum(result["identical"] for result in results),
        "left_behind": sum(len(result["left_behind"]) for result in results),
        "trials": results,
    }


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = trials(Path(folder), kills=args.kills, steps=args.steps, save_every=args.save_every, seed=args.seed)
    machine = {"python": platform.python_version(), "torch": torch.__version__, "cpus": os.cpu_count(), "platform": platform.platform()}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps({"machine": machine, **result}, indent=1) + "\n")
    summary = f"{result['identical']} of {result['kills']} runs identical; {result['inside_a_save']} kills landed inside a save"
    print(summary)
    if result["identical"] < result["kills"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
