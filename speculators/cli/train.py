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


def with_config_fields(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option for every field of `TrainingConfig`; it receives them as keyword arguments.

    A field that is a dict becomes a repeatable `key=value` option.
    """
    help_texts = _attribute_texts(TrainingConfig.__doc__ or "")
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
    options = []
    for name, field in TrainingConfig.model_fields.items():
        required = field.default is PydanticUndefined and field.default_factory is None
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
    return {name: " ".join(text.split()) for name, text in entries}


@with_config_fields
def train(
    data: Annotated[Path, typer.Option(help="Training data written by `speculators data synthesize`.")],
    verifier: VerifierOption = DEFAULT_VERIFIER,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    json: JsonOption = None,
    **fields: Any,
) -> None:
    """Train a drafter for a verifier on the verifier's own replies."""
    check_json_path(json)
    for name in ("options", "learning_rate_scale"):
        fields[name] = parse_settings(fields[name] or [], OPTION_NAMES.get(name, f"--{name.replace('_', '-')}"))
    config = TrainingConfig(**fields)
    target = load_verifier(verifier, dtype, device)
    del target, config
    write_json(json, {"command": "train"})
