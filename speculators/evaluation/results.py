"""Rebuild `docs/results.md` from the committed runs: `python -m speculators.evaluation.results`.

The runs hold every round of every row, so the document's numbers follow from the definitions in `metrics` alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from speculators.errors import DataError
from speculators.evaluation import metrics
from speculators.evaluation.report import below_prompt_lookup, markdown_table, number, parameters_text
from speculators.evaluation.rows import Row, rows_of
from speculators.evaluation.runs import Run, load_runs
from speculators.files import write_text_atomically

RAW_FOLDER = Path("docs/results/raw")
DOCUMENT = Path("docs/results.md")
NOTES = Path("docs/results/notes.md")  # written by hand, appended as it is
METHODS = ("dspark", "dflash", "peagle", "eagle3", "prompt_lookup")
COMPARISONS = (("dspark", "dflash"), ("peagle", "eagle3"))

DEFINITIONS = """\
# Results

Rebuilt by `make results` from the runs in [`results/raw`](results/raw), which keep the accepted drafts of every round.
Every number here is of kind **decode**: real decoding in this library's engine, nothing teacher-forced or simulated.

- **acceptance length**: tokens emitted after the first / rounds, over all prompts of a set; the bonus token is included,
  nothing after a stop token or beyond the budget counts. Plain decoding has 1.00.
- **mean**: the unweighted mean of the sets.
- **K**: draft tokens a round. **T**: temperature, 0 is greedy. At T = 1 drafts are sampled and verified by rejection sampling.
- **looping prompts**: where plain greedy output repeats more than 20% of its 8-grams, a prompt flatters any drafter. Tables
  leave these prompts out unless they say "all prompts".
- **prompt_lookup** copies what followed the latest n-gram earlier in the text. It has no weights and no training. A drafter marked
  `*` does not beat it on that set: it fails there.
- **identical**: greedy output equals plain decoding token by token. A near tie, where plain decoding's two largest logits differ by
  less than 2e-4 at the first divergence, counts as identical and is counted.
"""


def document(runs: Sequence[Run], notes: str = "") -> str:
    """The whole of `docs/results.md`; `notes` stand at its end.

    Raises:
        DataError: there are no runs.
    """
    if not runs:
        raise DataError("there are no runs to build a table from; write some with benchmarks/evaluate_drafters.py")
    acceptance = [run for run in runs if run.batch_seconds is None]
    timed = [run for run in runs if run.batch_seconds is not None]
    acceptance = acceptance or timed
    parts = [DEFINITIONS, _contract(acceptance), _parameters(runs)]
    for temperature in sorted({run.temperature for run in acceptance}):
        title = "Greedy" if temperature == 0 else f"Sampled, T = {temperature:g}"
        at_temperature = [run for run in acceptance if run.temperature == temperature]
        parts.append(f"## {title}: acceptance length\n\n{_lengths(at_temperature, exclude_degenerate=True)}")
        parts.append(f"### {title}, all prompts\n\n{_lengths(at_temperature, exclude_degenerate=False)}")
        parts.append(_positions(at_temperature, title))
    comparisons = _comparisons(acceptance)
    if comparisons:
        parts.append(comparisons)
    if any(run.identical is not None for run in acceptance):
        parts.append(_identity(acceptance))
    if timed:
        parts.append(_speed(timed))
    return "\n\n".join(part.strip() for part in [*parts, notes] if part.strip()) + "\n"


def _sets(runs: Iterable[Run]) -> list[str]:
    return list(dict.fromkeys(run.prompts for run in runs))


def _methods(runs: Iterable[Run]) -> list[str]:
    present = {run.method for run in runs} - {"plain"}
    return [name for name in METHODS if name in present] + sorted(present - set(METHODS))


def _find(runs: Iterable[Run], **wanted: object) -> Run | None:
    return next((run for run in runs if all(getattr(run, key) == value for key, value in wanted.items())), None)


def _length(run: Run | None, *, exclude_degenerate: bool = True) -> float | None:
    return None if run is None else metrics.acceptance_length([run.rounds[i] for i in run.select(exclude_degenerate=exclude_degenerate)])


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _mean_length(runs: Sequence[Run], method: str, k: int, temperature: float) -> float | None:
    return _mean([_length(_find(runs, method=method, k=k, temperature=temperature, prompts=name)) for name in _sets(runs)])


def _contract(runs: Sequence[Run]) -> str:
    first = runs[0]
    budgets = ", ".join(str(budget) for budget in sorted({run.max_new_tokens for run in runs}))
    precisions = ", ".join(sorted({run.dtype for run in runs}))
    rows = []
    for name in _sets(runs):
        run = next(run for run in runs if run.prompts == name)
        rows.append([name, str(len(run.rounds)), str(sum(run.degenerate))])
    machines = ", ".join(sorted({run.device for run in runs}))
    text = (
        f"Verifier {first.verifier}, the same prompts for every method, first turn, default chat template, {budgets} new tokens,"
        f" {precisions}, seed {first.seed}. Decoded on {machines}."
    )
    return f"## Contract\n\n{text}\n\n" + markdown_table(["prompt set", "prompts", "looping prompts"], rows)


def _parameters(runs: Sequence[Run]) -> str:
    rows = []
    for method in _methods(runs):
        run = next(run for run in runs if run.method == method)
        rows.append([method, parameters_text(run.parameters), run.checkpoint or "-"])
    note = "Weights the drafter owns. Embedding and head are the verifier's, shared, and not counted."
    return f"## Parameters\n\n{note}\n\n" + markdown_table(["method", "parameters", "checkpoint"], rows)


def _lengths(runs: Sequence[Run], *, exclude_degenerate: bool) -> str:
    sets = _sets(runs)
    rows: list[list[str]] = []
    for k in sorted({run.k for run in runs} - {0}):
        for method in _methods(runs):
            of_sets = [_find(runs, method=method, k=k, prompts=name) for name in sets]
            if not any(of_sets):
                continue
            lengths = [_length(run, exclude_degenerate=exclude_degenerate) for run in of_sets]
            untrained = [
                _length(_find(runs, method="prompt_lookup", k=k, prompts=name), exclude_degenerate=exclude_degenerate) for name in sets
            ]
            cells = [_marked(method, ours, theirs) for ours, theirs in zip(lengths, untrained, strict=True)]
            rows.append([method, str(k), *cells, number(_mean(lengths))])
    return markdown_table(["method", "K", *sets, "mean"], rows)


def _marked(method: str, length: float | None, untrained: float | None) -> str:
    fails = method != "prompt_lookup" and length is not None and untrained is not None and length <= untrained
    return number(length) + (" *" if fails else "")


def _positions(runs: Sequence[Run], title: str) -> str:
    """Survival and conditional acceptance at the largest K, all sets pooled, looping prompts left out."""
    k = max(run.k for run in runs)
    tables = []
    for name, measure in (
        ("acceptance", metrics.acceptance_by_position),
        ("conditional acceptance", metrics.conditional_acceptance_by_position),
    ):
        rows = []
        for method in _methods(runs):
            chosen = [run for run in runs if run.method == method and run.k == k]
            rounds = [run.rounds[i] for run in chosen for i in run.select(exclude_degenerate=True)]
            if rounds:
                rows.append([method, *(number(value, 3) for value in measure(rounds, k))])
        tables.append(markdown_table([name, *(f"{position}" for position in range(1, k + 1))], rows))
    note = "Draft k and all before it accepted; below it, draft k accepted given that all before it were."
    return f"### {title}: acceptance by position, K = {k}, all sets together\n\n{note}\n\n" + "\n\n".join(tables)


def _comparisons(runs: Sequence[Run]) -> str:
    rows = []
    for ours, theirs in COMPARISONS:
        for temperature in sorted({run.temperature for run in runs}):
            for k in sorted({run.k for run in runs} - {0}):
                a, b = (_mean_length(runs, method, k, temperature) for method in (ours, theirs))
                if a is not None and b is not None:
                    rows.append(
                        [f"{ours} against {theirs}", f"{temperature:g}", str(k), number(a), number(b), f"{(a / b - 1) * 100:+.1f}%"]
                    )
    if not rows:
        return ""
    return "## Comparisons\n\nMean acceptance length of the sets.\n\n" + markdown_table(
        ["", "T", "K", "first", "second", "difference"], rows
    )


def _identity(runs: Sequence[Run]) -> str:
    rows = []
    for method in _methods(runs):
        chosen = [run for run in runs if run.method == method and run.identical is not None]
        total = sum(len(run.rounds) for run in chosen)
        same = sum(sum(run.identical or ()) for run in chosen)
        ties = sum(sum(run.near_tie or ()) for run in chosen)
        ks = ", ".join(str(k) for k in sorted({run.k for run in chosen}))
        rows.append([method, ks, str(total), str(same), str(ties)])
    return "## Identity to plain greedy decoding\n\nAll prompts, all K.\n\n" + markdown_table(
        ["method", "K", "outputs", "identical", "near ties among them"], rows
    )


def _speed(runs: Sequence[Run]) -> str:
    rows_ = [row for row in rows_of([run for run in runs if run.method != "plain"], baselines=runs) if "all prompts" not in row["prompts"]]
    failing = below_prompt_lookup(rows_)
    cells = [[*_speed_cells(row), "*" if row in failing else ""] for row in rows_]
    run = runs[0]
    note = (
        f"Decode seconds, prefill excluded, against plain decoding in the same engine: {run.dtype}, batch {run.batch_size},"
        f" {run.device}, {len(run.rounds)} prompts a set."
    )
    return f"## Speed\n\n{note}\n\n" + markdown_table(
        ["method", "prompts", "K", "T", "acceptance length", "tokens/s", "plain tokens/s", "speed-up", ""], cells
    )


def _speed_cells(row: Row) -> list[str]:
    speedup = "-" if row["speedup"] is None else f"{row['speedup']:.2f}x"
    lengths = [number(row["acceptance_length"]), number(row["tokens_per_second"], 1), number(row["baseline_tokens_per_second"], 1)]
    return [row["method"], row["prompts"], str(row["k"]), f"{row['temperature']:g}", *lengths, speedup]


def load_folder(folder: Path) -> list[Run]:
    """Every run of every file in a folder and the folders below it.

    Raises:
        DataError: the folder is missing or holds no runs.
    """
    files = sorted(folder.rglob("*.json"))
    if not files:
        raise DataError(f"no runs in {folder}: expected JSON files written by benchmarks/evaluate_drafters.py")
    return [run for file in files for run in load_runs(file)]


def main() -> None:
    """Command line: `--raw FOLDER --notes FILE --output FILE`."""
    parser = argparse.ArgumentParser(description="Rebuild the result tables from committed runs.")
    parser.add_argument("--raw", type=Path, default=RAW_FOLDER)
    parser.add_argument("--notes", type=Path, default=NOTES)
    parser.add_argument("--output", type=Path, default=DOCUMENT)
    arguments = parser.parse_args()
    try:
        notes = arguments.notes.read_text(encoding="utf-8") if arguments.notes.is_file() else ""
        write_text_atomically(arguments.output, document(load_folder(arguments.raw), notes))
    except DataError as error:
        parser.error(str(error))
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    main()
