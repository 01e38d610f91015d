"""Write the model cards of the drafters under checkpoints/, from their training logs and the committed evaluation runs.

python benchmarks/write_cards.py
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from speculators import Speculator, Verifier
from speculators.checkpoint import Acceptance, ModelCard, save
from speculators.evaluation import metrics
from speculators.evaluation.results import RAW_FOLDER, load_folder
from speculators.evaluation.runs import Run

FOLDER = Path("checkpoints/smollm2-135m-instruct")
COMMAND = (
    "python benchmarks/train_default_drafters.py train --methods {method} --data checkpoints/smollm2-135m-instruct/data"
    " --init-from build/first --seconds {seconds:.0f} --output build/drafters"
)
DATA = (
    "Self-synthesised: the verifier wrote every question (mathematics, code, chat; a few seed words open each) and every answer, "
    "at temperature 0 (35%), 0.7 (45%) and 1 (20%), with its default system prompt; no data set. Looping answers, near duplicates and "
    "whatever shares 13 tokens or words with a benchmark prompt were dropped. The conversations are in `../data`."
)


def acceptance(runs: list[Run], method: str) -> tuple[Acceptance, ...]:
    """What the committed runs say of one method, looping prompts left out."""
    rows = []
    for run in runs:
        if run.method != method:
            continue
        rounds = [run.rounds[i] for i in run.select(exclude_degenerate=True)]
        length = metrics.acceptance_length(rounds)
        if length is not None:
            by_position = tuple(value or 0.0 for value in metrics.acceptance_by_position(rounds, run.k))
            prompts = f"{run.prompts}, {len(rounds)} prompts"
            rows.append(Acceptance(prompts, run.k, length, "decode", run.temperature, by_position))
    return tuple(sorted(rows, key=lambda row: (row.temperature, -row.num_draft_tokens, row.prompts)))


def main() -> None:
    """See the module's text."""
    verifier = Verifier.from_pretrained(FOLDER.name, dtype=torch.bfloat16, device="cpu")
    runs = load_folder(RAW_FOLDER)
    for path in sorted((FOLDER / "training").glob("train-*.jsonl")):
        first, run = (json.loads(line) for line in path.read_text().splitlines())
        method = run["method"]
        lengths = run["teacher_forced"]
        card = ModelCard(
            summary="Trained to show the library's methods on one contract: same data, taps, reply tokens and K. For a verifier this small"
            " it is a demonstration, not a product.",
            repository=str(FOLDER / method),
            license="apache-2.0",
            training_command=COMMAND.format(method=method, seconds=run["seconds"]),
            data=DATA,
            tokens=run["reply_tokens"],
            steps=first["steps"] + run["steps"],
            seconds=first["seconds"] + run["seconds"],
            hardware=f"one {run['device']}",
            seed=run["seed"],
            acceptance=acceptance(runs, method),
            notes=f"Two runs (`../training`): the first over {first['reply_tokens']:,} reply tokens, the second, from its weights,"
            f" over all. {first['tokens_seen'] + run['tokens_seen']:,} packed tokens were seen. Optimizer {run['optimizer']}, learning rate"
            f" {run['learning_rate']:g}, the best of three (`../training/tune-*.jsonl`, 150 steps each). On held-out conversations the"
            f" acceptance length is {lengths['acceptance_length']:.2f} sampled and {lengths['greedy_acceptance_length']:.2f} greedy"
            " (teacher-forced).",
        )
        speculator = Speculator.from_pretrained(FOLDER / method, verifier.weights, dtype=torch.bfloat16)
        save(speculator, FOLDER / method, form="compact", card=card, max_shard_bytes=15_000_000)
        print(f"{FOLDER / method / 'README.md'}: {len(card.acceptance)} rows")


if __name__ == "__main__":
    main()
