"""`speculators convert`: a checkpoint from one format to another."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from speculators.cli.common import JsonOption, check_json_path, write_json


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Checkpoint: a folder or a Hub name. Its format is detected.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Folder to write.")],
    to: Annotated[
        str, typer.Option(metavar="FORMAT", help="speculators, z-lab, deepspec, safeailab, aws-peagle or specforge.")
    ] = "speculators",
    verifier: Annotated[
        str | None,
        typer.Option(help="The drafter's verifier: compares its copies in the file, and supplies what SRC leaves out. Default: none."),
    ] = None,
    include_shared: Annotated[
        bool, typer.Option("--include-shared", help="Expand a compact checkpoint to the full form; needs --verifier.")
    ] = False,
    json: JsonOption = None,
) -> None:
    """Convert a drafter between the speculators format and those of other projects, or say why that cannot be done."""
    check_json_path(json)
    from speculators.checkpoint.convert import convert as convert_checkpoint
    from speculators.checkpoint.verifier_files import read_verifier_weights

    weights = None if verifier is None else read_verifier_weights(verifier)
    done = convert_checkpoint(source, destination, to=to, verifier=weights, include_shared=include_shared)
    typer.echo(
        f"{destination}: {done.method} drafter for {done.verifier}, from {done.source_format} to {done.target_format},"
        f" {done.num_draft_tokens} draft tokens, {done.tensors} tensors"
    )
    for title, names in (("left to the verifier", done.dropped), ("taken from the verifier", done.added)):
        if names:
            typer.echo(f"{title}: {', '.join(names)}")
    write_json(json, {"command": "convert", "source": source, "destination": destination, **asdict(done)})
