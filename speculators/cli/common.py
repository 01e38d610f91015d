"""What the subcommands share: option types, loading of models, JSON output."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from speculators.errors import ConfigError
from speculators.files import check_writable, write_text_atomically

if TYPE_CHECKING:
    from speculators.decoding.proposal import Drafter
    from speculators.verifier import Verifier

DEFAULT_VERIFIER = "smollm2-135m-instruct"
PROMPT_LOOKUP = "prompt_lookup"

VerifierOption = Annotated[str, typer.Option(help="Verifier: a folder, a Hub name, or the embedded default.")]
DeviceOption = Annotated[str | None, typer.Option(help="Device, e.g. cpu or cuda:0. Default: CUDA where there is one.")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Also write the result to this JSON file.")]
SeedOption = Annotated[int, typer.Option(min=0, help="Seed of everything random.")]
DraftTokensOption = Annotated[
    str | None, typer.Option("--k", help="Draft tokens a round; auto chooses each round's from measured times. Default: the drafter's own.")
]
DtypeOption = Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto (the device's fastest).")]


def check_json_path(path: Path | None) -> None:
    """Refuse an unusable `--json` path before any work is done for it."""
    if path is not None:
        check_writable(path)


def write_json(path: Path | None, result: Mapping[str, Any]) -> None:
    """Write a command's result, if a path was given. Numbers that are not finite become null."""
    if path is not None:
        write_text_atomically(path, json.dumps(_finite(result), indent=2, allow_nan=False) + "\n")


def load_verifier(name: str, dtype: str, device: str | None) -> Verifier:
    """Load the verifier that `--verifier` names.

    Raises:
        CheckpointError, ConfigError: nothing usable lies there, or the dtype or device is unknown.
    """
    import torch

    from speculators.verifier import Verifier

    try:
        chosen = None if device is None else torch.device(device)
        if chosen is not None:
            torch.zeros(1, device=chosen).item()  # a device that holds no values, such as meta, cannot decode either
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {device!r} cannot be used here: {str(error).splitlines()[0]}") from None
    return Verifier.from_pretrained(name, dtype=dtype, device=chosen)


def load_drafter(name: str, verifier: Verifier) -> Drafter:
    """Load a checkpoint for a verifier, on its device and in its dtype; `prompt_lookup` names the drafter without weights.

    Raises:
        CheckpointError, PairingError: the checkpoint is unusable or made for another verifier.
    """
    from speculators.decoding.prompt_lookup import PromptLookup
    from speculators.speculator import Speculator

    if name == PROMPT_LOOKUP:
        return PromptLookup()
    return Speculator.from_pretrained(name, verifier.weights).to(device=verifier.device, dtype=verifier.dtype).eval()


def parse_draft_tokens(k: str | None) -> int | Literal["auto"] | None:
    """`--k`: a number, or auto.

    Raises:
        ConfigError: it is neither.
    """
    if k is None or k == "auto":
        return None if k is None else "auto"
    try:
        return int(k)
    except ValueError:
        raise ConfigError(f"--k {k!r} must be a number or 'auto'") from None


def parse_settings(pairs: Sequence[str], option: str) -> dict[str, Any]:
    """`key=value` pairs; values are JSON where they parse as JSON (7, 0.5, true, [2, 15, 27]), else text.

    Raises:
        ConfigError: a pair has no "=", a key comes twice, or a value that begins as a JSON list or object is none.
    """
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigError(f"{option} {pair!r} must have the form key=value")
        if key in settings:
            raise ConfigError(f"{option} {pair!r}: {key} was given before, as {settings[key]!r}; keep one of them")
        try:
            settings[key] = json.loads(value)
        except (ValueError, RecursionError):
            if value.strip().startswith(("{", "[")):
                raise ConfigError(f'{option} {pair!r} is no JSON; names and texts inside need double quotes: {{"name": 1}}') from None
            settings[key] = value
    return settings


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
