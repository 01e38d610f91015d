"""`speculators train`: the fields of `TrainingConfig` as options, with its names, defaults and descriptions."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_origin

import typer
from pydantic_core import PydanticUndefined

from speculators.cli.common import (
    DEFAULT_VERIFIER,
    DeviceOption,
    DtypeOption,
    JsonOption,
    VerifierOption,
    check_json_path,
    load_verifier,
    parse_settings,
    write_json,
)
from speculators.training.config import TrainingConfig

OPTION_NAMES = {"options": "--option"}  # given once a setting: --option num_layers=3 --option markov_rank=32
HELP_TEXTS = {"output": "Folder of the run: checkpoint, log.jsonl, resumable state."}


def with_config_fields(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option for every field of `TrainingConfig`; it receives them as keyword arguments.

    A field that is a dict becomes a repeatable `key=value` option.
    """
    help_texts = _attribute_texts(TrainingConfig.__doc__ or "") | HELP_TEXTS
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
    options = []
    for name, field in TrainingConfig.model_fields.items():
        # A field without a default; and the output, since a command that keeps nothing is of no use.
        required = name == "output" or (field.default is PydanticUndefined and field.default_factory is None)
        text = help_texts.get(name, "")
        declared = OPTION_NAMES.get(name, f"--{name.replace('_', '-')}")
        annotation: Any = field.annotation
        default: Any = inspect.Parameter.empty if required else field.default
        if get_origin(annotation) is dict:
            annotation, default, text = list[str] | None, None, f"{text} key=value, repeatable."
        if annotation is bool:
            declared = f"{declared}/--no-{name.replace('_', '-')}"
        options.append(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[annotation, typer.Option(declared, help=text)]
            )
        )
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
    signature = inspect.Signature(sorted([*options, *parameters], key=lambda p: p.default is not p.empty))

    def wrapper(**arguments: Any) -> None:
        command(**arguments)

    wrapper.__doc__ = command.__doc__
    wrapper.__signature__ = signature  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    return wrapper


def _attribute_texts(docstring: str) -> dict[str, str]:
    """Field -> description, from the `Attributes:` section."""
    section = docstring.partition("Attributes:")[2].partition("Raises:")[0]
    entries = re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", section, re.MULTILINE)
    return {name: text[0].upper() + " ".join(text[1:].split()) for name, text in entries}


@with_config_fields
def train(
    data: Annotated[Path, typer.Option(help="Folder written by `speculators data synthesize`.")],
    verifier: VerifierOption = DEFAULT_VERIFIER,
    held_out: Annotated[float, typer.Option(help="Share of the conversations kept for evaluation.")] = 0.02,
    init_from: Annotated[str | None, typer.Option(help="Checkpoint to start from: same method, or one it can grow out of.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --output.")] = False,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    json: JsonOption = None,
    **fields: Any,
) -> None:
    """Train a drafter for a verifier on the verifier's own replies."""
    check_json_path(json)
    from speculators.data.rows import pack, split_held_out
    from speculators.data.storage import load_conversations
    from speculators.errors import DataError
    from speculators.training.trainer import train as run_training

    for name in ("options", "learning_rate_scale"):
        fields[name] = parse_settings(fields[name] or [], OPTION_NAMES.get(name, f"--{name.replace('_', '-')}"))
    config = TrainingConfig(**fields)
    conversations, header = load_conversations(data)
    target = load_verifier(verifier, dtype, device)
    source = header["verifier"]
    largest = max(max(conversation.input_ids) for conversation in conversations)
    if largest >= target.vocab_size:
        raise DataError(f"{data} holds token id {largest}, but {verifier!r} has {target.vocab_size} tokens: the data is that of {source!r}")
    if source != target.weights.name_or_path:
        typer.echo(f"warning: the replies in {data} are those of {source!r}, not of {verifier!r}: acceptance will suffer", err=True)
    training, evaluation = split_held_out(conversations, held_out)
    records: list[dict[str, Any]] = []
    speculator = run_training(
        target,
        pack(training, config.row_length, config.seed),
        config,
        held_out=pack(evaluation, config.row_length, config.seed) if evaluation else None,
        init_from=init_from,
        resume=resume,
        on_record=records.append,
    )
    parameters = sum(parameter.numel() for parameter in speculator.parameters())
    last = {kind: next((record for record in reversed(records) if record["kind"] == kind), None) for kind in ("train", "teacher-forced")}
    typer.echo(f"{config.method} drafter of {parameters / 1e6:.2f} M parameters in {config.output}")
    for kind, record in last.items():
        if record is not None and "acceptance_length" in record:
            typer.echo(f"acceptance length {record['acceptance_length']:.2f} ({kind}; `speculators evaluate` measures the decoded one)")
    write_json(
        json,
        {
            "command": "train",
            "method": config.method,
            "output": config.output,
            "data": data,
            "conversations": len(training),
            "held_out_conversations": len(evaluation),
            "reply_tokens": sum(conversation.reply_tokens for conversation in training),
            "parameters": parameters,
            "records": [record for record in last.values() if record is not None],
        },
    )
