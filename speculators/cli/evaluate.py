"""`speculators evaluate`: acceptance, speed and identity of drafters on prompt files, beside prompt lookup."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from speculators.cli.common import (
    DEFAULT_VERIFIER,
    DeviceOption,
    DraftTokensOption,
    DtypeOption,
    JsonOption,
    SeedOption,
    VerifierOption,
    check_json_path,
    load_drafter,
    load_verifier,
    parse_draft_tokens,
    write_json,
)
from speculators.errors import DataError


def evaluate(
    prompts: Annotated[list[Path], typer.Option(help="Prompt file (JSON lines with id and turns); repeat for several.")],
    verifier: VerifierOption = DEFAULT_VERIFIER,
    speculator: Annotated[list[str] | None, typer.Option(help="Drafter checkpoint; repeat for several.")] = None,
    k: DraftTokensOption = None,
    max_new_tokens: Annotated[int, typer.Option(help="Token budget a prompt.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy; only then is identity checked.")] = 0.0,
    batch_size: Annotated[int, typer.Option(help="Prompts decoded together.")] = 1,
    max_prompts: Annotated[int | None, typer.Option(min=1, help="Only the first prompts of each file.")] = None,
    confidence_threshold: Annotated[float, typer.Option(help="Drop drafts from the first whose confidence is below it.")] = 0.0,
    seed: SeedOption = 0,
    dtype: DtypeOption = "float32",
    device: DeviceOption = None,
    runs: Annotated[Path | None, typer.Option(help="Also write every round of every prompt to this JSON file.")] = None,
    json: JsonOption = None,
) -> None:
    """Evaluate drafters: one row a method and prompt set without looping prompts, one with all of them."""
    check_json_path(json)
    check_json_path(runs)
    if json is not None and runs is not None and json.resolve() == runs.resolve():
        raise DataError(f"--json and --runs both name {json}, and one would overwrite the other; name two files")
    from rich.console import Console

    from speculators.data.prompts import read_prompts
    from speculators.evaluation.evaluate import EvaluationSettings, PromptSet
    from speculators.evaluation.evaluate import evaluate as run_evaluation
    from speculators.evaluation.report import remarks, terminal_tables
    from speculators.evaluation.runs import save_runs

    draft_tokens = parse_draft_tokens(k)
    settings = EvaluationSettings(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        num_draft_tokens=None if isinstance(draft_tokens, str) else draft_tokens,
        auto_length=draft_tokens == "auto",
        batch_size=batch_size,
        confidence_threshold=confidence_threshold,
        seed=seed,
    )
    named: dict[str, Path] = {}
    for path in prompts:
        if path.stem in named:
            raise DataError(f"{named[path.stem]} and {path} would both be called {path.stem!r} in the result; rename one of the files")
        named[path.stem] = path
    files = {name: read_prompts(path, max_prompts) for name, path in named.items()}
    target = load_verifier(verifier, dtype, device)
    drafters = {name: load_drafter(name, target) for name in speculator or []}
    sets = [PromptSet.from_prompts(target, name, of_file) for name, of_file in files.items()]
    progress = Console(stderr=True)
    evaluation = run_evaluation(
        target,
        drafters,
        sets,
        settings,
        checkpoints={name: name for name in drafters},
        on_progress=lambda text: progress.print(text, style="dim"),
    )
    console = Console()
    title = f"{verifier}, T = {temperature:g}, {dtype}, batch {batch_size}" + (", K auto" if settings.auto_length else "")
    console.print(*terminal_tables(evaluation.rows, title), sep="\n")
    for sentence in remarks(evaluation.rows):
        console.print(sentence)
    if runs is not None:
        save_runs(evaluation.runs, runs)
    write_json(
        json,
        {
            "command": "evaluate",
            "verifier": verifier,
            "dtype": evaluation.runs[0].dtype,
            "device": evaluation.runs[0].device,
            "max_new_tokens": max_new_tokens,
            "batch_size": batch_size,
            "seed": seed,
            "auto_length": settings.auto_length,
            "rows": evaluation.rows,
        },
    )
