"""A run's settings as a YAML file, with the names of the flags."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from speculators.errors import ConfigError
from speculators.files import write_text_atomically

SETTINGS_FILE = "training.yaml"


def read_settings(path: Path, known: list[str]) -> dict[str, Any]:
    """Read a settings file. Names may be written with dashes, like the flags.

    Args:
        path: of the file.
        known: names that may occur.

    Raises:
        ConfigError: the file is missing, is no YAML mapping, or holds an unknown name.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the settings {path}: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"the settings {path} are no valid YAML: {' '.join(str(error).split())}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"the settings {path} must be a mapping of names to values, not a {type(data).__name__}")
    settings = {str(name).replace("-", "_"): value for name, value in data.items()}
    for name in settings:
        if name not in known:
            raise ConfigError(f"{path}: there is no setting {name!r}; known are {', '.join(known)}")
    return settings


def write_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Write a settings file that `read_settings` takes; plain data only."""
    write_text_atomically(path, yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True))
