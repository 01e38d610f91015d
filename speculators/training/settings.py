"""A run's settings as a YAML file, with the names of the flags."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from speculators.errors import ConfigError
from speculators.files import write_text_atomically

SETTINGS_FILE = "training.yaml"


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML whose mappings hold every key once; the language says so, the package takes the last. `name` is the file's."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        _refuse_repeated([str(key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode)], self.name)
        return node


def _refuse_repeated(keys: list[str], where: str) -> None:
    for key, count in Counter(keys).items():
        if count > 1:
            raise ConfigError(f"{where}: {key!r} is set {count} times; leave it there once")


def read_settings(path: Path, known: list[str]) -> dict[str, Any]:
    """Read a settings file. Names may be written with dashes, like the flags.

    Args:
        path: of the file.
        known: names that may occur.

    Raises:
        ConfigError: the file is missing, is no YAML mapping, or holds an unknown name, or one twice.
    """
    try:
        loader = _Loader(path.read_text(encoding="utf-8"))
        loader.name = str(path)
        data = loader.get_single_data()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the settings {path}: {error}") from None
    except RecursionError:
        raise ConfigError(f"the settings {path} are nested too deeply to be settings") from None
    except (yaml.YAMLError, ValueError) as error:  # a date or a number that Python has no value for is a ValueError
        raise ConfigError(f"the settings {path} are no valid YAML: {' '.join(str(error).split())}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"the settings {path} must be a mapping of names to values, not a {type(data).__name__}")
    names = [str(name).replace("-", "_") for name in data]
    _refuse_repeated(names, str(path))
    settings = dict(zip(names, data.values(), strict=True))
    for name in settings:
        if name not in known:
            raise ConfigError(f"{path}: there is no setting {name!r}; known are {', '.join(known)}")
    return settings


def write_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Write a settings file that `read_settings` takes; plain data only."""
    write_text_atomically(path, yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True))
