"""`speculators data`: training data from the verifier alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from speculators.cli.common import (
    DEFAULT_VERIFIER,
    DeviceOption,
    DtypeOption,
    JsonOption,
    SeedOption,
    VerifierOption,
    check_json_path,
    load_verifier,
    write_json,
)
from speculators.errors import DataError
from speculators.files import check_output_folder

app = typer.Typer(help="Make training data from the verifier alone.", no_args_is_help=True)


@app.callback()
def data() -> None:
    """Make training data from the verifier alone."""


@app.command()
def synthesize(
    output: Annotated[Path, typer.Option(help="New folder for the conversations.")],
    verifier: VerifierOption = DEFAULT_VERIFIER,
    conversations: Annotated[int | None, typer.Option(min=1, help="Stop at this many conversations.")] = None,
    seconds: Annotated[float | None, typer.Option(help="Stop after this time of generation.")] = None,
    prompts: Annotated[list[Path] | None, typer.Option(help="Answer these prompt files instead of writing questions.")] = None,
    exclude: Annotated[list[Path] | None, typer.Option(help="Drop whatever shares 13 tokens or words with these prompt files.")] = None,
    max_question_tokens: Annotated[int, typer.Option(help="A longer question is dropped.")] = 96,
    max_reply_tokens: Annotated[int, typer.Option(help="A longer reply is cut.")] = 320,
    slots: Annotated[int | None, typer.Option(min=1, help="Sequences decoded at once.")] = None,
    seed: SeedOption = 0,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    json: JsonOption = None,
) -> None:
    """Let the verifier write questions, or take prompt files, and let it answer them."""
    check_json_path(json)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise DataError(f"{output} exists already; name a new folder, or remove that one first")
    check_output_folder(output)
    from speculators.data.prompts import read_prompts
    from speculators.data.questions import SynthesisSettings
    from speculators.data.synthesis import answer_prompts
    from speculators.data.synthesis import synthesize as synthesize_questions

    if prompts and conversations is not None:
        raise DataError("--conversations counts written questions; with --prompts every prompt of the files is answered, leave it out")
    settings = SynthesisSettings(max_question_tokens=max_question_tokens, max_reply_tokens=max_reply_tokens, seed=seed)
    given = [prompt for path in prompts or [] for prompt in read_prompts(path)]
    target = load_verifier(verifier, dtype, device)
    if given:
        result = answer_prompts(target, given, settings, seconds=seconds, exclude=exclude or [], slots=slots)
    else:
        result = synthesize_questions(target, settings, conversations=conversations, seconds=seconds, exclude=exclude or [], slots=slots)
    files = result.save(output)
    tokens = sum(conversation.reply_tokens for conversation in result.conversations)
    typer.echo(f"{len(result.conversations)} conversations with {tokens} reply tokens in {output} ({len(files)} files)")
    for reason, count in sorted(result.counts.items()):
        if reason != "kept":
            typer.echo(f"dropped {count}: {reason}")
    write_json(json, {"command": "data synthesize", "output": output, "reply_tokens": tokens, **result.header, "counts": result.counts})
