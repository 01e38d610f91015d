"""The list of foreign formats. A new format is one adapter and one line here."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from speculators.checkpoint.convert.adapter import FormatAdapter
from speculators.checkpoint.convert.aws_peagle import AwsPEagle
from speculators.checkpoint.convert.deepspec import DeepSpec
from speculators.checkpoint.convert.safeailab import SafeAILabEagle3
from speculators.checkpoint.convert.specforge import SpecForge
from speculators.checkpoint.convert.zlab import ZLabDFlash
from speculators.errors import CheckpointError, ConfigError

NATIVE = "speculators"
FORMATS: tuple[FormatAdapter, ...] = (ZLabDFlash(), DeepSpec(), SafeAILabEagle3(), AwsPEagle(), SpecForge())


def format_names() -> list[str]:
    """Every format by name, the speculators format first."""
    return [NATIVE, *(adapter.name for adapter in FORMATS)]


def get_format(name: str) -> FormatAdapter:
    """The adapter of a foreign format.

    Raises:
        ConfigError: there is none of this name; the message lists them.
    """
    for adapter in FORMATS:
        if adapter.name == name:
            return adapter
    raise ConfigError(f"there is no checkpoint format {name!r}; choose one of {', '.join(format_names())}")


def detect_format(config: Mapping[str, Any], tensor_names: Collection[str], where: Path | str) -> str:
    """The name of a checkpoint's format.

    Args:
        config: content of its `config.json`.
        tensor_names: of its weights.
        where: named in messages.

    Raises:
        CheckpointError: it is of no format known here, or of several.
    """
    if "speculators_model_type" in config:
        return NATIVE
    found = [adapter for adapter in FORMATS if adapter.detect(config, tensor_names)]
    if len(found) == 1:
        return found[0].name
    known = ", ".join(adapter.title for adapter in FORMATS)
    if not found:
        raise CheckpointError(f"{where} is no drafter checkpoint of a format known here (speculators, {known}); name another folder")
    several = " and ".join(adapter.title for adapter in found)
    raise CheckpointError(f"{where} reads as {several}: its keys contradict its tensors; correct its config.json")
