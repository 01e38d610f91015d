"""Writing files that are either whole or absent."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from speculators.errors import DataError


def check_writable(path: Path) -> None:
    """Refuse an output path before any work is done for it.

    Raises:
        DataError: its folder does not exist or must not be written to, or the path is a folder.
    """
    if not path.absolute().parent.is_dir():
        raise DataError(f"cannot write {path}: the folder {path.absolute().parent} does not exist; create it first")
    if path.is_dir():
        raise DataError(f"cannot write {path}: it is a folder; name a file")
    if not os.access(path.absolute().parent, os.W_OK | os.X_OK):
        raise DataError(f"cannot write {path}: no permission to write in {path.absolute().parent}; name another file")


def check_output_folder(path: Path) -> None:
    """Refuse an output folder before any work is done for it. It may exist, and missing folders above it are no obstacle.

    Raises:
        DataError: what exists of the path ends in a file, or in a folder that must not be written to.
    """
    nearest = next(part for part in (path.absolute(), *path.absolute().parents) if part.exists())
    if not nearest.is_dir():
        raise DataError(f"cannot use the output folder {path}: {nearest} is a file; name another folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise DataError(f"cannot use the output folder {path}: no permission to write in {nearest}; name another folder")


def make_folder(path: Path) -> None:
    """Make a folder and those above it, where they are missing.

    Raises:
        DataError: the file system refuses.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"cannot make the folder {path} ({error.strerror}); name another folder") from None


def write_text_atomically(path: Path, text: str) -> None:
    """`write_bytes_atomically` for text in UTF-8."""
    write_bytes_atomically(path, text.encode())


def write_bytes_atomically(path: Path, content: bytes) -> None:
    """Write beside the target, then rename: a reader sees the old file or the new one, never half of it.

    Raises:
        DataError: as `check_writable`, or the file system refuses.
    """
    check_writable(path)
    try:
        handle, temporary = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")
    except OSError as error:
        raise DataError(f"cannot write {path} ({error.strerror}); name another file") from None
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise DataError(f"cannot write {path} ({error.strerror}); make room, or name another file") from None
        raise


@contextmanager
def saving_tensors() -> Iterator[None]:
    """Around a `save_file` of safetensors, which wraps what the file system refuses: raise it as the OSError that it is.

    Raises:
        OSError: with its number.
    """
    try:
        yield
    except SafetensorError as error:
        refused = re.search(r"\(os error (\d+)\)", str(error))
        if refused is None:
            raise
        raise OSError(int(refused[1]), os.strerror(int(refused[1]))) from error
