"""`speculators train`: the fields of `TrainingConfig` as options, with its names, defaults and descriptions."""

from __future__ import annotations

import inspect
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_origin

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
from speculators.errors import ConfigError
from speculators.training.config import TrainingConfig

if TYPE_CHECKING:
    from speculators.data.rows import Conversation
    from speculators.verifier import Verifier

OPTION_NAMES = {"options": "--option"}  # given once a value: --option num_layers=3 --option markov_rank=32
HELP_TEXTS = {"output": "Folder of the run: settings, log, checkpoints, the trained drafter."}
REQUIRED = ("method", "data", "output")  # on the command line or in the settings file


def flag(name: str) -> str:
    """The option of a setting."""
    return OPTION_NAMES.get(name, f"--{name.replace('_', '-')}")


def with_config_fields(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option for every field of `TrainingConfig`; it receives them as keyword arguments.

    A field that is a dict becomes a repeatable `key=value` option, a list a repeatable one.
    """
    help_texts = _attribute_texts(TrainingConfig.__doc__ or "") | HELP_TEXTS
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
    options = []
    for name, field in TrainingConfig.model_fields.items():
        text, declared = help_texts.get(name, ""), flag(name)
        annotation: Any = field.annotation
        default: Any = None if field.default is PydanticUndefined else field.default
        if get_origin(annotation) is dict:
            annotation, text = list[str] | None, f"{text} key=value, repeatable."
        elif get_origin(annotation) is list:
            annotation, text = list[str] | None, f"{text} Repeatable."
        elif annotation is bool:
            declared = f"{declared}/--no-{name.replace('_', '-')}"
        elif default is None:
            annotation = annotation | None
        options.append(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[annotation, typer.Option(declared, help=text)]
            )
        )
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
    signature = inspect.Signature(sorted([*parameters, *options], key=lambda p: p.default is not p.empty))

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
    context: typer.Context,
    config: Annotated[Path | None, typer.Option(help="YAML file of settings, named like the options; options override it.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder written by `speculators data synthesize`.")] = None,
    verifier: VerifierOption = DEFAULT_VERIFIER,
    held_out: Annotated[float, typer.Option(help="Share of the conversations kept for evaluation.")] = 0.02,
    init_from: Annotated[str | None, typer.Option(help="Checkpoint to start from: same method, or one it can grow out of.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --output at its last checkpoint.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print sizes, memory and disk need; train and write nothing.")
    ] = False,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    json: JsonOption = None,
    **fields: Any,
) -> None:
    """Train a drafter for a verifier on the verifier's own replies. Runs on several GPUs under torchrun."""
    check_json_path(json)
    given = {"data": data, "verifier": verifier, "held_out": held_out, "init_from": init_from, "dtype": dtype, "device": device, **fields}
    settings = resolve_settings(config, given, {name for name in given if _was_given(context, name)})
    from speculators.training.world import process_group

    with process_group():
        run(settings, resume=resume, dry_run=dry_run, json=json)


def _was_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name not in ("DEFAULT", "DEFAULT_MAP")


def resolve_settings(path: Path | None, given: dict[str, Any], on_command_line: set[str]) -> dict[str, Any]:
    """Every setting of the run: from the command line, else from the file, else its default.

    Args:
        path: of a settings file.
        given: name -> value on the command line, or default.
        on_command_line: names that were really given there.

    Raises:
        ConfigError: the file cannot be used, or a setting without default is given nowhere.
    """
    from speculators.training.settings import read_settings

    written = {} if path is None else read_settings(path, list(given))
    settings = {}
    for name, value in given.items():
        field = TrainingConfig.model_fields.get(name)
        origin = get_origin(field.annotation) if field is not None else None
        if origin is dict:
            value = parse_settings(value or [], flag(name))  # key by key over those of the file
            value = {**_mapping(path, name, written.get(name)), **value}
        elif name in written and name not in on_command_line:
            value = written[name] if field is not None else _own_setting(path, name, written[name], default=value)
        settings[name] = [] if origin is list and value is None else value
    for name in REQUIRED:
        if settings[name] is None:
            raise ConfigError(f"missing {flag(name)}: give it on the command line or as {name} in the file of --config")
    return settings


def _own_setting(path: Path | None, name: str, value: Any, default: Any) -> Any:
    """A setting of this command in a file. `TrainingConfig` checks its own."""
    kinds, called = ((int, float), "a number") if isinstance(default, float) else (str, "text")
    if (isinstance(value, kinds) and not isinstance(value, bool)) or (value is None and default is None):
        return value
    raise ConfigError(f"{path}: {name} = {value!r} must be {called}")


def _mapping(path: Path | None, name: str, value: Any) -> dict[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise ConfigError(f"{path}: {name} = {value!r} must be a mapping of names to values")
    return value or {}


def run(settings: dict[str, Any], *, resume: bool, dry_run: bool, json: Path | None) -> None:
    """Train with resolved settings, or only say what that would take."""
    import torch

    from speculators.checkpoint.card import ModelCard
    from speculators.data.rows import pack, pack_held_out, split_held_out
    from speculators.data.storage import load_conversations
    from speculators.training.memory import clear_when_memory_runs_out
    from speculators.training.trainer import Provenance
    from speculators.training.trainer import train as run_training
    from speculators.training.world import World, local_device

    world = World.current()
    config = TrainingConfig(**{name: value for name, value in settings.items() if name in TrainingConfig.model_fields})
    data, held_out = Path(settings["data"]), float(settings["held_out"])
    conversations, header = load_conversations(data)
    training, evaluation = split_held_out(conversations, held_out)
    device = settings["device"] or local_device()
    verifier = load_verifier(settings["verifier"], settings["dtype"], None if device is None else str(device))
    check_pairing(data, conversations, str(header.get("verifier")), verifier, warn=world.is_main)
    with clear_when_memory_runs_out(config, torch.device("cpu")):
        rows = pack(training, config.row_length, config.seed)
        held_out_rows = pack_held_out(evaluation, config.row_length, config.seed)
    if dry_run:
        from speculators.training.checks import check_run
        from speculators.training.estimate import estimate

        with clear_when_memory_runs_out(config, verifier.device, world.size):
            checked = check_run(verifier, rows, config, held_out=held_out_rows, init_from=settings["init_from"], resume=resume)
            result = estimate(verifier, checked.speculator, rows, config, world.size)
        if world.is_main:
            for line in result.lines():
                typer.echo(line)
            write_json(json, {"command": "train", "dry_run": True, **vars(result)})
        return
    records: list[dict[str, Any]] = []
    others = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in settings.items()
        if name not in TrainingConfig.model_fields
    }
    card = ModelCard(
        training_command=shlex.join(["speculators", *sys.argv[1:]]),
        data=f"{len(training)} conversations of {data.name}, replies by {header.get('verifier')}",
    )
    speculator = run_training(
        verifier,
        rows,
        config,
        held_out=held_out_rows,
        init_from=settings["init_from"],
        resume=resume,
        provenance=Provenance(others, card),
        on_record=records.append,
    )
    if not world.is_main:
        return
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


def check_pairing(data: Path, conversations: list[Conversation], source: str, verifier: Verifier, *, warn: bool) -> None:
    """Refuse data that the verifier cannot read; warn of replies that are not its own.

    Raises:
        DataError: a token id is outside the verifier's vocabulary.
    """
    from speculators.errors import DataError

    name = verifier.weights.name_or_path
    largest = max(max(conversation.input_ids) for conversation in conversations)
    if largest >= verifier.vocab_size:
        raise DataError(f"{data} holds token id {largest}, but {name!r} has {verifier.vocab_size} tokens: the data is that of {source!r}")
    if source != name and warn:
        typer.echo(f"warning: the replies in {data} are those of {source!r}, not of {name!r}: acceptance will suffer", err=True)
