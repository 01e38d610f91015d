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

SourcesArgument = Annotated[
    list[str], typer.Argument(help="Files, folders or hf://owner/name; path=0.3 gives one a share of 0.3 in the mixture.")
]
ThinkingOption = Annotated[
    bool | None, typer.Option("--thinking/--no-thinking", help="Mode the replies are written in. Default: as each reply looks.")
]
ReasoningOption = Annotated[bool, typer.Option("--reasoning/--no-reasoning", help="Whether reasoning text is supervised.")]

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


@app.command()
def prepare(
    sources: SourcesArgument,
    output: Annotated[Path, typer.Option(help="New folder for token ids and loss masks; the input of `train`.")],
    verifier: VerifierOption = DEFAULT_VERIFIER,
    limit: Annotated[int | None, typer.Option(min=1, help="Read at most this many rows, of each source its share.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=2, help="Cut longer conversations.")] = None,
    thinking: ThinkingOption = None,
    reasoning: ReasoningOption = True,
    workers: Annotated[int | None, typer.Option(min=0, help="Worker processes. Default: one a core.")] = None,
    json: JsonOption = None,
) -> None:
    """Turn conversations into token ids with loss masks. Rows that cannot be used go to rejected.jsonl."""
    check_json_path(json)
    from speculators.data.prepare import prepare as prepare_rows
    from speculators.data.sources import Source
    from speculators.loading import load_chat_facts

    found = [Source.open(source) for source in sources]
    result = prepare_rows(
        load_chat_facts(verifier),
        found,
        output,
        limit=limit,
        max_tokens=max_tokens,
        thinking=thinking,
        supervise_reasoning=reasoning,
        workers=workers,
    )
    header = result.header
    typer.echo(
        f"{header['kept']} of {header['rows']} rows: {header['conversations']} documents, {header['tokens']} tokens,"
        f" {header['reply_tokens']} of them supervised, in {output}"
    )
    for reason, count in result.rejected.items():
        typer.echo(f"rejected {count}: {reason}")
    for warning in result.warnings:
        typer.echo(f"warning: {warning}", err=True)
    write_json(json, {"command": "data prepare", "output": output, **header})


@app.command()
def preview(
    sources: SourcesArgument,
    verifier: VerifierOption = DEFAULT_VERIFIER,
    rows: Annotated[int, typer.Option(min=1, help="Rows to show.")] = 2,
    thinking: ThinkingOption = None,
    reasoning: ReasoningOption = True,
) -> None:
    """Show conversations as the verifier sees them, supervised tokens coloured. Takes files, or a prepared folder."""
    from itertools import islice

    from rich.console import Console

    from speculators.data.forms import RowError
    from speculators.data.partial import HEADER_FILE
    from speculators.data.prepare import row_preparer
    from speculators.data.preview import show
    from speculators.data.sources import Source, mix
    from speculators.data.storage import read_blocks
    from speculators.loading import load_chat_facts

    facts, console = load_chat_facts(verifier), Console(highlight=False)
    if facts.tokenizer is None:
        raise DataError(f"{verifier!r} has no tokenizer, so its tokens cannot be shown")
    if all((Path(source) / HEADER_FILE).is_file() for source in sources):
        stored = (document for source in sources for block in read_blocks(source) for document in block)
        for number, document in enumerate(islice(stored, rows), start=1):
            show([document], facts.tokenizer, f"document {number}", console)
        return
    preparer = row_preparer(facts, thinking=thinking, supervise_reasoning=reasoning)
    for row in mix([Source.open(source) for source in sources], rows):
        title = f"{Path(row.source).name}, row {row.number}"
        try:
            show(preparer.documents(row)[0], facts.tokenizer, title, console)
        except RowError as error:
            console.rule(f"{title}: rejected", style="red")
            console.print(f"{error.reason}: {error}" if str(error) != error.reason else error.reason, style="red")
