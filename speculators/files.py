"""Writing files that are either whole or absent."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from speculators.errors import DataError


def check_writable(path: Path) -> None:
    """Refuse an output path before any work is done for it.

    Raises:
        DataError: its folder does not exist, or the path is a folder.
    """
    if not path.absolute().parent.is_dir():
        raise DataError(f"cannot write {path}: the folder {path.absolute().parent} does not exist; create it first")
    if path.is_dir():
        raise DataError(f"cannot write {path}: it is a folder; name a file")


def write_text_atomically(path: Path, text: str) -> None:
    """Write beside the target, then rename: a reader sees the old file or the new one, never half of it.

    Raises:
        DataError: as `check_writable`.
    """
    check_writable(path)
    handle, temporary = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
