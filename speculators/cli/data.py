"""`speculators data`: from conversations, or from the verifier alone, to what a drafter trains on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

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

SourcesArgument = Annotated[
    list[str], typer.Argument(help="Files, folders or hf://owner/name; path=0.3 gives one a share of 0.3 in the mixture.")
]
ThinkingOption = Annotated[
    bool | None, typer.Option("--thinking/--no-thinking", help="Mode the replies are written in. Default: as each reply looks.")
]
ReasoningOption = Annotated[bool, typer.Option("--reasoning/--no-reasoning", help="Whether reasoning text is supervised.")]

app = typer.Typer(help="Make training data: from conversations, or from the verifier alone.", no_args_is_help=True)


@app.callback()
def data() -> None:
    """Make training data: from conversations, or from the verifier alone."""


@app.command()
def synthesize(
    output: Annotated[Path, typer.Option(help="New folder for `train`, or a .jsonl file of chat rows.")],
    verifier: VerifierOption = DEFAULT_VERIFIER,
    conversations: Annotated[int | None, typer.Option(min=1, help="Stop at this many conversations.")] = None,
    seconds: Annotated[float | None, typer.Option(help="Stop after this time of generation.")] = None,
    prompts: Annotated[list[Path] | None, typer.Option(help="Answer these prompt files instead of writing questions.")] = None,
    topics: Annotated[list[Path] | None, typer.Option(help="JSONL files of topics (name, seeds) in place of the built-in ones.")] = None,
    language: Annotated[list[str] | None, typer.Option(help="Also ask in a language, code=share, as in de=0.2. Repeatable.")] = None,
    exclude: Annotated[list[Path] | None, typer.Option(help="Drop whatever shares 13 tokens or words with these prompt files.")] = None,
    max_question_tokens: Annotated[int, typer.Option(help="A longer question is dropped.")] = 96,
    max_reply_tokens: Annotated[int, typer.Option(help="A longer reply is cut.")] = 320,
    slots: Annotated[int | None, typer.Option(min=1, help="Sequences decoded at once.")] = None,
    seed: SeedOption = 0,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    json: JsonOption = None,
) -> None:
    """Let the verifier write questions, or take prompt files, and let it answer them. A killed run goes on where it was."""
    check_json_path(json)
    from dataclasses import asdict

    from speculators.data.languages import chosen_topics
    from speculators.data.prompts import read_prompts
    from speculators.data.questions import SynthesisSettings
    from speculators.data.synthesis import SynthesisOutput, answer_prompts
    from speculators.data.synthesis import synthesize as synthesize_questions

    if prompts and conversations is not None:
        raise DataError("--conversations counts written questions; with --prompts every prompt of the files is answered, leave it out")
    settings = SynthesisSettings(max_question_tokens=max_question_tokens, max_reply_tokens=max_reply_tokens, seed=seed)
    chosen = chosen_topics(topics or [], language or [])
    given = [prompt for path in prompts or [] for prompt in read_prompts(path)]
    run = {
        "command": "data synthesize",
        "verifier": verifier,
        "dtype": dtype,
        "conversations": conversations,
        "seconds": seconds,
        "settings": asdict(settings),
        "topics": [[topic.name, topic.weight, len(topic.seeds)] for topic in chosen],
        "prompts": [prompt.text for prompt in given],
        "exclude": [str(path) for path in exclude or []],
    }
    out = SynthesisOutput(output, run)
    if out.complete:
        typer.echo(f"{output} is complete already")
        return
    assert out.journal is not None
    with out.journal.discarded_if_empty():
        target = load_verifier(verifier, dtype, device)
        common: dict[str, Any] = {"seconds": seconds, "exclude": exclude or [], "slots": slots, "journal": out.journal}
        if given:
            result = answer_prompts(target, given, settings, **common)
        else:
            result = synthesize_questions(target, settings, conversations=conversations, topics=chosen, **common)
    files = out.write(result, target)
    tokens = sum(conversation.reply_tokens for conversation in result.conversations)
    typer.echo(f"{len(result.conversations)} conversations with {tokens} reply tokens in {output} ({len(files)} files)")
    for reason, count in sorted(result.counts.items()):
        if reason != "kept":
            typer.echo(f"dropped {count}: {reason}")
    write_json(json, {"command": "data synthesize", "output": output, "reply_tokens": tokens, **result.header, "counts": result.counts})


@app.command()
def generate(
    sources: SourcesArgument,
    output: Annotated[Path, typer.Option(help="New .jsonl file; its card says who answered and how.")],
    verifier: VerifierOption = DEFAULT_VERIFIER,
    endpoint: Annotated[str | None, typer.Option(help="Ask this OpenAI-compatible server instead, as http://localhost:8000/v1.")] = None,
    model: Annotated[str | None, typer.Option(help="The server's name for the model. Default: the only one it serves.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.7,
    top_p: Annotated[float, typer.Option(help="Of servers only.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Of servers only; 0 keeps all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Keep tokens of this share of the largest probability.")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(help="A longer reply is cut and flagged.")] = 1024,
    max_tokens: Annotated[int, typer.Option(help="Of a whole conversation.")] = 4096,
    thinking: ThinkingOption = None,
    keep_truncated: Annotated[bool, typer.Option(help="Keep cut replies, flagged.")] = True,
    limit: Annotated[int | None, typer.Option(min=1, help="Read at most this many rows, of each source its share.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests to the server at once.")] = 32,
    slots: Annotated[int | None, typer.Option(min=1, help="Sequences our engine decodes at once.")] = None,
    seed: SeedOption = 0,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    json: JsonOption = None,
) -> None:
    """Let the verifier write the replies of conversations anew, turn by turn. A killed run goes on where it was."""
    check_json_path(json)
    from speculators.data.answers import AnswerSettings, EngineWriter, Writer, answer_file
    from speculators.data.endpoint import EndpointWriter
    from speculators.data.journal import JournalledFile
    from speculators.data.sources import Source

    settings = AnswerSettings(temperature, top_p, top_k, min_p, max_new_tokens, max_tokens, thinking, keep_truncated, seed)
    JournalledFile.check(output, "data generate")
    found = [Source.open(source) for source in sources]
    writer: Writer
    if endpoint is not None:
        writer = EndpointWriter(endpoint, model, concurrency=concurrency)
    else:
        writer = EngineWriter(load_verifier(verifier, dtype, device), slots)
    card = answer_file(found, writer, output, settings, limit=limit)
    typer.echo(f"{card['counts']['answered']} of {card['counts']['conversations']} conversations answered by {card['model']} in {output}")
    for what, count in sorted(card["counts"].items()):
        if what not in ("answered", "conversations", "reply_tokens"):
            typer.echo(f"{what}: {count}")
    write_json(json, {"command": "data generate", "output": output, **card})


@app.command()
def statistics(
    data: Annotated[Path, typer.Argument(help="Folder that `prepare` or `synthesize` wrote.")],
    json: JsonOption = None,
) -> None:
    """Lengths, topics, and shares of supervised, truncated and looping text of prepared conversations."""
    check_json_path(json)
    from speculators.data.statistics import statistics as count
    from speculators.data.storage import read_blocks

    numbers = count(document for block in read_blocks(data) for document in block)
    for name, value in numbers.items():
        shown = ", ".join(f"{key or 'none'} {number}" for key, number in value.items()) if isinstance(value, dict) else value
        typer.echo(f"{name.replace('_', ' ')}: {shown}")
    write_json(json, {"command": "data statistics", "data": data, **numbers})


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
    from speculators.data.partial import PartialFolder
    from speculators.data.prepare import prepare as prepare_rows
    from speculators.data.sources import Source
    from speculators.loading import load_chat_facts

    PartialFolder.check(output, "data prepare")
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
    from collections import Counter
    from itertools import islice

    from rich.console import Console

    from speculators.data.forms import RowError, main_reasons
    from speculators.data.partial import HEADER_FILE
    from speculators.data.prepare import row_preparer
    from speculators.data.preview import show
    from speculators.data.sources import Source, mix
    from speculators.data.storage import read_blocks, read_header
    from speculators.loading import load_chat_facts

    prepared = all((Path(source) / HEADER_FILE).is_file() for source in sources)
    opened = [] if prepared else [Source.open(source) for source in sources]
    facts, console = load_chat_facts(verifier), Console(highlight=False)
    if facts.tokenizer is None:
        raise DataError(f"{verifier!r} has no tokenizer, so its tokens cannot be shown")
    if prepared:
        stored = (document for source in sources for block in read_blocks(source) for document in block)
        number = 0
        for number, document in enumerate(islice(stored, rows), start=1):
            show([document], facts.tokenizer, f"document {number}", console)
        if not number:
            refused = sum((Counter(read_header(source).get("rejected", {})) for source in sources), Counter[str]())
            raise DataError(f"{', '.join(sources)} holds no document: {main_reasons(refused) or 'nothing was prepared'}")
        return
    preparer = row_preparer(facts, thinking=thinking, supervise_reasoning=reasoning)
    found = list(mix(opened, rows))
    if not found:
        raise DataError(f"there is no row in {', '.join(sources)}")
    rejected: Counter[str] = Counter()
    for row in found:
        title = f"{Path(row.source).name}, row {row.number}"
        try:
            show(preparer.documents(row)[0], facts.tokenizer, title, console)
        except RowError as error:
            rejected[error.reason] += 1
            console.rule(f"{title}: rejected", style="red")
            console.print(f"{error.reason}: {error}" if str(error) != error.reason else error.reason, style="red")
    if rejected.total() == len(found):
        raise DataError(
            f"none of the {len(found)} rows shown of {', '.join(sources)} can be used: {main_reasons(rejected)};"
            " correct them, or look at more with --rows"
        )


@app.command()
def store(
    data: Annotated[Path, typer.Argument(help="Folder that `prepare` or `synthesize` wrote; or a store, with --verify.")],
    output: Annotated[Path | None, typer.Option(help="New folder for the hidden states.")] = None,
    verifier: VerifierOption = DEFAULT_VERIFIER,
    method: Annotated[str, typer.Option(help="Store what this method taps by default.")] = "dflash",
    taps: Annotated[str | None, typer.Option(help="Layer ids to store instead, as 2,15,27; a drafter may use some of them.")] = None,
    row_length: Annotated[int, typer.Option(min=2, help="As for `train`.")] = 1024,
    held_out: Annotated[float, typer.Option(help="As for `train`.")] = 0.02,
    seed: Annotated[int, typer.Option(min=0, help="As for `train`.")] = 0,
    states: Annotated[str, typer.Option(help="bfloat16, or float8 with a scale a token and layer: half the disk.")] = "bfloat16",
    extracted: Annotated[Path | None, typer.Option(help="Take the states from this folder of vLLM's extract_hidden_states.")] = None,
    layers: Annotated[str | None, typer.Option(help="Layer ids that were extracted, as 2,15,27,30.")] = None,
    rows_per_forward: Annotated[int, typer.Option(min=1, help="Rows of one verifier forward.")] = 4,
    shard_mib: Annotated[int, typer.Option(min=1, help="Size of a shard.")] = 1024,
    estimate: Annotated[bool, typer.Option("--estimate", help="Only say how much disk it takes.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Only compare an existing store with its checksums.")] = False,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    json: JsonOption = None,
) -> None:
    """Compute the verifier's hidden states once and keep them; `train --hidden-states` reads them. A killed run goes on where it was."""
    check_json_path(json)
    from speculators.data import hidden_states as stores
    from speculators.data.partial import PartialFolder
    from speculators.data.rows import pack, pack_held_out, split_held_out
    from speculators.data.storage import load_conversations
    from speculators.positions import check_documents
    from speculators.registry import get_algorithm

    if verify:
        size = stores.verify_store(data)
        typer.echo(f"{data} is sound: {size / 2**30:.2f} GiB")
        return
    if output is None and not estimate:
        raise DataError("name a folder with --output, or ask for --estimate")
    if output is not None and not estimate:
        PartialFolder.check(output, "data store")
    conversations, _ = load_conversations(data)
    target = load_verifier(verifier, dtype, device)
    train_side, other_side = split_held_out(conversations, held_out)
    splits = {"train": pack(train_side, row_length, seed)}
    if (held_out_rows := pack_held_out(other_side, row_length, seed)) is not None:
        splits["held_out"] = held_out_rows
    for rows in splits.values():
        check_documents(rows.position_ids, target.weights)
    chosen = get_algorithm(method).speculator_class.default_config(target.weights).tapped_layers if taps is None else _layer_ids(taps)
    layout = stores.Layout(tuple(chosen), target.hidden_size, states)
    tokens = sum(int(stores.stored_lengths(rows).sum()) for rows in splits.values())
    needed = tokens * layout.token_bytes
    typer.echo(
        f"{tokens} tokens of {layout.token_bytes} bytes: {needed / 2**30:.2f} GiB for the layers {list(layout.taps)} and the last state"
    )
    if estimate or output is None:
        write_json(json, {"command": "data store", "tokens": tokens, "bytes": needed})
        return
    if extracted is not None:
        from speculators.data.extracted import ExtractedStates

        planes = _layer_ids(layers) if layers else [*layout.taps, target.num_layers]
        compute: stores.StateFunction = ExtractedStates(extracted, planes, layout.taps, target.num_layers, target.hidden_size)
    else:
        compute = stores.verifier_states(target, layout.taps)
    facts = {
        "verifier": target.weights.name_or_path,
        "source": "verifier" if extracted is None else str(extracted),
        "data": str(data),
        "row_length": row_length,
        "held_out": held_out,
        "seed": seed,
    }
    header = stores.store_hidden_states(
        output,
        splits,
        compute,
        layout,
        facts,
        device=target.device if extracted is None else "cpu",
        rows_per_forward=rows_per_forward,
        shard_bytes=shard_mib << 20,
    )
    typer.echo(f"hidden states of {header['tokens']} tokens in {output}: {header['bytes'] / 2**30:.2f} GiB, {len(header['shards'])} shards")
    write_json(json, {"command": "data store", "output": output, **{key: value for key, value in header.items() if key != "shards"}})


@app.command()
def vocabulary(
    data: Annotated[Path, typer.Argument(help="Folder that `prepare` or `synthesize` wrote.")],
    verifier: VerifierOption = DEFAULT_VERIFIER,
    size: Annotated[list[int] | None, typer.Option(min=1, help="Size of a draft vocabulary; repeatable.")] = None,
    save: Annotated[bool, typer.Option("--save", help="Keep d2t and t2d of each size in the folder.")] = False,
    json: JsonOption = None,
) -> None:
    """How much of the verifier's replies a reduced draft vocabulary of some size could propose."""
    check_json_path(json)
    from speculators.data import vocabulary as vocabularies
    from speculators.data.partial import HEADER_FILE
    from speculators.data.storage import read_blocks, read_header
    from speculators.files import check_writable
    from speculators.loading import load_chat_facts

    header = read_header(data)
    if save:
        check_writable(data / HEADER_FILE)
    facts = load_chat_facts(verifier)
    counts = vocabularies.count_labels(read_blocks(data), facts.vocab_size)
    sizes = size or [2**power for power in range(8, 20) if 2**power < facts.vocab_size]
    if max(sizes, default=0) > facts.vocab_size:
        raise DataError(f"--size {max(sizes)} is above the {facts.vocab_size} tokens of {verifier!r}; name a smaller draft vocabulary")
    covered = vocabularies.coverage(counts, sizes)
    made = [vocabularies.draft_vocabulary(counts, number, facts.stop_token_ids) for number in sizes] if save else []
    typer.echo(f"{int(counts.sum())} supervised tokens, {int((counts > 0).sum())} different ones of {facts.vocab_size}")
    for number, share in covered.items():
        typer.echo(f"draft vocabulary {number}: covers {share:.2%}, never proposes the other {1 - share:.2%}")
    for number, chosen in zip(sizes, made, strict=False):
        key = vocabularies.vocabulary_key(header, number, facts.vocab_size, facts.stop_token_ids)
        typer.echo(f"saved {vocabularies.save_vocabulary(data, key, chosen)}")
    write_json(json, {"command": "data vocabulary", "data": data, "coverage": covered})


def _layer_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise DataError(f"layer ids {text!r} must be numbers with commas between, as 2,15,27") from None
