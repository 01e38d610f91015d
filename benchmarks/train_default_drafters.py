"""How the drafters under checkpoints/smollm2-135m-instruct were made: generate, tune, train. Needs a CUDA GPU.

    python benchmarks/train_default_drafters.py generate --seconds 240 --seed 1 --output build/data/seed1
    python benchmarks/train_default_drafters.py tune --data build/data --methods dspark --steps 250 --output build/tune
    python benchmarks/train_default_drafters.py train --data build/data --methods dspark --steps 5400 --output build/drafters
    python benchmarks/train_default_drafters.py train --data build/data --init-from checkpoints/smollm2-135m-instruct \
        --seconds 240 --methods dspark --output build/drafters         # go on from trained weights, widened where OPTIONS are wider

One contract for all four: the same conversations, taps [2, 15, 27], seven draft tokens. Every command is limited by wall
time and finishes its whole schedule within it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from speculators import Speculator, Verifier
from speculators.checkpoint import save
from speculators.data.questions import SynthesisSettings
from speculators.data.rows import Conversation, PackedRows, pack, split_held_out
from speculators.data.storage import load_conversations
from speculators.data.synthesis import synthesize
from speculators.registry import get_algorithm
from speculators.training.config import TrainingConfig
from speculators.training.trainer import train

CONTRACT: dict[str, Any] = {"aux_hidden_state_layer_ids": [2, 15, 27], "num_draft_tokens": 7}
MASK_TOKEN = {"mask_token_id": 16}  # <empty_output>: its embedding row was never trained
# Sizes fill 92 MB in bfloat16 together, and the number of anchors about 28,000 supervised slots a step.
OPTIONS: dict[str, dict[str, Any]] = {
    "eagle3": {"num_layers": 1, "training": {"anchors": 128}},
    "peagle": {
        **MASK_TOKEN,
        "num_layers": 5,
        "intermediate_size": 1152,
        "train_embedding": False,
        # The paper leaves the objective open: DSpark's, which is the acceptance itself, the earlier depths weighing more.
        "training": {"anchors": 192, "cross_entropy": 0.1, "kl": 0.0, "l1": 0.9, "position_weights": "decay"},
    },
    "dflash": {**MASK_TOKEN, "num_layers": 4, "intermediate_size": 768, "training": {"anchors": 128}},
    "dspark": {**MASK_TOKEN, "num_layers": 4, "intermediate_size": 576, "markov_rank": 64, "training": {"anchors": 128}},
}
LEARNING_RATES = {"eagle3": 4e-3, "peagle": 4e-3, "dflash": 4e-3, "dspark": 4e-3}
ROW_LENGTH = 512
REPLY_TEMPERATURES = ((0.35, 0.0), (0.45, 0.7), (0.2, 1.0))  # share, temperature
MAX_SHARD_BYTES = 15_000_000


def load_data(folder: Path, limit: int | None = None) -> tuple[list[Conversation], list[Conversation]]:
    """Training and held-out conversations of every data folder under `folder`."""
    conversations: list[Conversation] = []
    for manifest in sorted(folder.glob("**/*.json")):
        conversations += load_conversations(manifest.parent)[0]
    kept, held_out = split_held_out(conversations, 0.01)
    return kept[:limit], held_out[:2000]


def configuration(
    method: str, args: argparse.Namespace, learning_rate: float, seconds: float | None, output: Path | None
) -> TrainingConfig:
    """The run of one method."""
    return TrainingConfig(
        method=method,
        options={**CONTRACT, **OPTIONS[method], **json.loads(args.options)},
        output=output,
        steps=args.steps,
        time_budget_seconds=seconds,
        rows_per_step=args.rows_per_step,
        row_length=ROW_LENGTH,
        learning_rate=learning_rate,
        optimizer=args.optimizer,
        checkpoint_form="compact",
        cache_memory_fraction=0.8,
        log_every=100,
        seed=args.seed,
        progress=False,
    )


def tuned_rate(folder: Path, method: str) -> float:
    """The learning rate whose short run reached the longest teacher-forced acceptance length."""
    runs = [json.loads(line) for line in (folder / f"tune-{method}.jsonl").read_text().splitlines()]
    best = max(runs, key=lambda one: one["teacher_forced"]["acceptance_length"] + one["teacher_forced"]["greedy_acceptance_length"])
    return float(best["learning_rate"])


def widened(given: Speculator, options: dict[str, Any], verifier: Verifier) -> Speculator:
    """A drafter of the sizes in `options` that computes what the smaller `given` one does (Net2Net, arXiv 1511.05641).

    New rows are initialised as ever; what reads them starts with zeros.
    """
    wide = get_algorithm(given.method).speculator_class.from_verifier(verifier.weights, **options)
    weights = given.state_dict()
    with torch.no_grad():
        for name, parameter in wide.named_parameters():
            kept = weights[name]
            if parameter.ndim == 2 and parameter.shape[1] > kept.shape[1] and not name.endswith("markov_w1.weight"):
                parameter[:, kept.shape[1] :] = 0
            parameter[tuple(slice(size) for size in kept.shape)] = kept
    return wide


def run(
    method: str,
    args: argparse.Namespace,
    learning_rate: float,
    seconds: float | None,
    output: Path | None,
    rows: PackedRows,
    held_out: PackedRows,
    verifier: Verifier,
) -> dict[str, Any]:
    """Train once; returns the last held-out record with the run's figures."""
    started = time.monotonic()
    records: list[dict[str, Any]] = []
    config = configuration(method, args, learning_rate, seconds, output)
    start = None
    if args.init_from is not None:
        given = Speculator.from_pretrained(args.init_from / method, verifier.weights, dtype=torch.float32)
        torch.manual_seed(args.seed)
        start, config = widened(given, config.options, verifier), config.model_copy(update={"options": {}})
    speculator = train(verifier, rows, config, held_out=held_out, init_from=start, on_record=records.append)
    if output is not None:
        save(speculator, output / "release", form="compact", max_shard_bytes=MAX_SHARD_BYTES)
    held = [r for r in records if r["kind"] == "teacher-forced"][-1]
    trained = [r for r in records if r["kind"] == "train"]
    return {
        "method": method,
        "learning_rate": learning_rate,
        "options": args.options,
        "init_from": None if args.init_from is None else args.init_from.name,
        "rows": len(rows),
        "reply_tokens": rows.reply_tokens,
        "tokens_seen": sum(r["tokens"] for r in trained),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "seed": args.seed,
        "optimizer": args.optimizer,
        "steps": held["step"],
        "seconds": round(time.monotonic() - started, 1),
        "tokens_per_second": round(trained[-1]["tokens_per_second"]) if trained else None,
        "parameters": sum(p.numel() for p in speculator.parameters()),
        "skipped_steps": sum(r.get("skipped_steps") or 0 for r in trained),
        "curve": [(r["step"], r.get("greedy_acceptance_length")) for r in trained][:: max(1, len(trained) // 12)],
        "teacher_forced": {k: v for k, v in held.items() if "acceptance" in k},
    }


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["generate", "tune", "train"])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, nargs="+", help="of generation, or the most of training, one for each method")
    parser.add_argument("--tuned", type=Path, help="folder of `tune`: train with each method's best learning rate there")
    parser.add_argument("--steps", type=int, help="optimizer steps of each method")
    parser.add_argument("--options", default="{}", help="JSON of algorithm options that replace the contract's, for tuning")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slots", type=int, default=2048)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--methods", nargs="+", default=list(OPTIONS))
    parser.add_argument("--learning-rates", nargs="+", type=float, default=[1e-3, 2e-3, 4e-3])
    parser.add_argument("--rows-per-step", type=int, default=32)
    parser.add_argument("--init-from", type=Path, help="folder with one trained drafter a method to go on from")
    parser.add_argument("--limit", type=int, help="use only so many conversations")
    parser.add_argument("--optimizer", default="muon")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    verifier = Verifier.from_pretrained(
        "smollm2-135m-instruct", dtype=torch.bfloat16 if args.device == "cuda" else torch.float32, device=args.device
    )
    if args.command == "generate":
        prompts = sorted((Path(__file__).parent / "prompts").glob("*.jsonl"))
        made = synthesize(
            verifier,
            SynthesisSettings(seed=args.seed, max_reply_tokens=224, max_tokens=384, reply_temperatures=REPLY_TEMPERATURES),
            seconds=args.seconds[0],
            exclude=prompts,
            slots=args.slots,
            progress=False,
        )
        made.save(args.output)
        print(json.dumps({**made.header, "reply_tokens": sum(c.reply_tokens for c in made.conversations)}, indent=1))
        return
    started = time.monotonic()
    kept, held_out_conversations = load_data(args.data, args.limit)
    rows, held_out = pack(kept, ROW_LENGTH, seed=0), pack(held_out_conversations, ROW_LENGTH, seed=0)
    print(f"{len(kept)} conversations, {len(rows)} rows, {rows.reply_tokens} reply tokens, {time.monotonic() - started:.1f} s", flush=True)
    args.output.mkdir(parents=True, exist_ok=True)
    for method, seconds in zip(args.methods, args.seconds or [None] * len(args.methods), strict=True):
        if args.command == "tune":
            rates, output = args.learning_rates, None
        else:
            rates = [tuned_rate(args.tuned, method) if args.tuned else LEARNING_RATES[method]]
            output = args.output / method
        for rate in rates:
            result = run(method, args, rate, seconds, output, rows, held_out, verifier)
            with (args.output / f"{args.command}-{method}.jsonl").open("a") as stream:
                stream.write(json.dumps(result) + "\n")
            print(json.dumps(result), flush=True)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
