"""`speculators parity`: one prompt set through our engine and through vLLM, drafts compared a round at a time."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from speculators.cli.common import DeviceOption, DtypeOption, JsonOption, check_json_path, load_verifier, write_json

if TYPE_CHECKING:
    from speculators.serving.parity import Parity

_DEMO_PROMPTS = Path(__file__).parents[1] / "data" / "demo_prompts.jsonl"


def parity(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="The drafter: a folder or a Hub name.")],
    verifier: Annotated[str | None, typer.Option(help="Verifier: folder or Hub name. Default: the one the checkpoint names.")] = None,
    prompts: Annotated[
        list[Path] | None, typer.Option(help="Prompt file (JSON lines with id and turns); repeat for several. Default: four questions.")
    ] = None,
    max_prompts: Annotated[int | None, typer.Option(min=1, help="Only the first prompts of each file.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Token budget a prompt.")] = 64,
    k: Annotated[int | None, typer.Option("--k", help="Draft tokens a round. Default: the checkpoint's.")] = None,
    attention_backend: Annotated[str | None, typer.Option(help="Attention backend of vLLM's drafter.")] = None,
    dtype: DtypeOption = "float32",
    device: DeviceOption = None,
    json: JsonOption = None,
) -> None:
    """Compare our engine with vLLM on the same prompts, greedily. Exit code 1 if a round drafts differently by more than rounding."""
    check_json_path(json)
    from rich.console import Console

    from speculators.data.prompts import read_prompts
    from speculators.evaluation.evaluate import PromptSet
    from speculators.serving.parity import compare
    from speculators.serving.plan import plan
    from speculators.serving.versions import NEWEST, installed
    from speculators.speculator import Speculator

    checked = plan(
        checkpoint,
        verifier=verifier,
        num_draft_tokens=k,
        attention_backend=attention_backend,
        version=installed() or NEWEST,
    )
    target = load_verifier(checked.verifier, dtype, device)
    speculator = Speculator.from_pretrained(checkpoint, target.weights)
    files = prompts or [_DEMO_PROMPTS]
    token_ids = [ids for file in files for ids in PromptSet.from_prompts(target, file.stem, read_prompts(file, max_prompts)).token_ids]
    progress = Console(stderr=True)
    found = compare(checked, target, speculator, token_ids, max_new_tokens, on_progress=lambda text: progress.print(text, style="dim"))
    for line in described(found):
        typer.echo(line)
    write_json(
        json,
        {
            "command": "parity",
            "checkpoint": Path(checkpoint).name,
            "method": checked.method,
            "prompts": [file.name for file in files],
            "max_new_tokens": max_new_tokens,
            "num_draft_tokens": checked.num_draft_tokens,
            "dtype": dtype,
            "vllm": installed(),
            "parity": asdict(found),
        },
    )
    if found.difference is not None:
        raise typer.Exit(1)


def described(found: Parity) -> list[str]:
    """The lines that are printed."""
    ties = f" ({found.near_ties} more up to a near tie)" if found.near_ties else ""
    replies = f"{found.identical_replies} of {found.prompts} replies identical"
    lines = [
        f"{found.equal_rounds} of {found.rounds} rounds drafted alike{ties}; {replies}",
        f"{'accepted (decode)':<20}{'our engine':>12}{'vLLM':>12}",
    ]
    ours, theirs = found.accepted
    for position in range(max(len(ours), len(theirs))):
        cells = [f"{part[position]:.3f}" if position < len(part) else "-" for part in (ours, theirs)]
        lines.append(f"{f'draft token {position + 1}':<20}{cells[0]:>12}{cells[1]:>12}")
    lengths = found.acceptance_length
    lines.append(f"{'acceptance length':<20}{lengths[0]:>12.3f}{lengths[1]:>12.3f}")
    if (where := found.difference) is not None:
        lines.append(f"prompt {where.prompt}, after {where.length} tokens: our engine drafts {list(where.ours)}, vLLM {list(where.theirs)}")
        lines.append(f"first differing tensor: {where.tensor}")
    return lines
