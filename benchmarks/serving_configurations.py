"""Which engines `serving.py` measures: plain decoding and every drafter, by default and with each variant of the settings."""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Self

from speculators.errors import SpeculatorsError
from speculators.serving import plan
from speculators.serving.plan import PLUGIN_NAME, PLUGINS_VARIABLE
from speculators.serving.versions import installed

PLAIN = "none"
PLUGIN_GROUP = "vllm.general_plugins"


@dataclass(frozen=True)
class Variant:
    """Settings beyond the default ones; `serving.py` says how they are written.

    Attributes:
        name: empty for the default.
        k: draft tokens; None for the checkpoint's.
        speculative: keys of the speculative config.
        arguments: of `vllm serve`.
        environment: variables.
    """

    name: str = ""
    k: int | None = None
    speculative: dict[str, Any] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Self:
        """From "NAME:SETTING,SETTING"."""
        name, _, settings = text.partition(":")
        if not name or not settings:
            raise argparse.ArgumentTypeError(f"{text!r} is no NAME:SETTING,SETTING")
        k, speculative, arguments, environment = None, {}, [], {}
        for setting in settings.split(","):
            key, equals, value = setting.partition("=")
            if key == "k":
                k = int(value)
            elif key.startswith("draft."):
                speculative[key.removeprefix("draft.")] = as_value(value)
            elif key.isupper():
                environment[key] = value
            else:
                arguments += [f"--{key.replace('_', '-')}", *([value] if equals else [])]
        return cls(name, k, speculative, tuple(arguments), environment)


@dataclass(frozen=True)
class Configuration:
    """One engine.

    Attributes:
        name: of the drafter, `PLAIN` for none.
        variant: its name.
        k: draft tokens; None without a drafter.
        settings: of `vllm.LLM`, beyond those that all share.
        environment: variables of its process.
    """

    name: str
    variant: str = ""
    k: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return titled(self.name, self.k, self.variant)


def planned(options: argparse.Namespace, arguments: Sequence[str]) -> tuple[list[Configuration], dict[str, str]]:
    """Every configuration asked for, and those that `speculators serve` refuses with its sentence."""
    made: list[Configuration] = []
    refused: dict[str, str] = {}
    drafters: list[tuple[str, Path | None]] = [(method, None) for method in options.methods]
    drafters += [(method, Path(folder)) for method, _, folder in (layout.partition("=") for layout in options.layouts)]
    for variant in (Variant(), *options.variants):
        given = [*arguments, *variant.arguments]
        vllms = {name: value for name, value in variant.environment.items() if not name.startswith("SPECULATORS_")}
        plain = Configuration(PLAIN, variant.name, settings=as_settings(given), environment=vllms)
        if all((one.settings, one.environment) != (plain.settings, plain.environment) for one in made):
            made.append(plain)  # the variant concerns it
        if options.only_variants and variant == Variant():
            continue
        for (method, layout), k in itertools.product(drafters, [variant.k] if variant.k else options.ks or [None]):
            name = method if layout is None else f"{method} from {layout.name}"
            try:
                checked = plan(
                    options.checkpoints / method,
                    verifier=options.verifier,
                    num_draft_tokens=k,
                    version=str(installed()),
                    arguments=given,
                    environment={**os.environ, **variant.environment},
                )
            except SpeculatorsError as error:
                refused[titled(name, k, variant.name)] = str(error)
                continue
            if checked.plugin and layout is None and not entry_points(group=PLUGIN_GROUP, name=PLUGIN_NAME):
                refused[titled(name, checked.num_draft_tokens, variant.name)] = (
                    "vLLM will not find the plugin: the library is not installed here (pip install -e .)"
                )
                continue
            speculative, environment = {**checked.speculative_config, **variant.speculative}, {**variant.environment, **checked.environment}
            if layout is not None:
                speculative, environment = {**speculative, "model": str(layout)}, {**environment, PLUGINS_VARIABLE: ""}
            settings = {**as_settings(checked.arguments), "speculative_config": speculative}
            made.append(Configuration(name, variant.name, checked.num_draft_tokens, settings, environment))
    return made, refused


def titled(name: str, k: int | None, variant: str) -> str:
    """What a configuration is called: "dflash K = 7 short"."""
    return " ".join([name, *([] if k is None else [f"K = {k}"]), *([variant] if variant else [])])


def as_settings(arguments: Sequence[str]) -> dict[str, Any]:
    """Arguments of `vllm serve` as those of `vllm.LLM`: ["--max-num-seqs", "64", "--enforce-eager"] -> numbers, flags and text."""
    settings: dict[str, Any] = {}
    for position, argument in enumerate(arguments):
        if not argument.startswith("--"):
            continue
        following = arguments[position + 1] if position + 1 < len(arguments) else "--"
        settings[argument.removeprefix("--").replace("-", "_")] = True if following.startswith("--") else as_value(following)
    return settings


def as_value(text: str) -> Any:
    """JSON where it is that (numbers, objects, true), else the text itself."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
