"""Where rows come from: files, folders, Hugging Face datasets, and weighted mixtures of them, one row at a time."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Self

from speculators.data.forms import RowError, read_record
from speculators.errors import DataError

HUB_PREFIX = "hf://"
SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class RawRow(NamedTuple):
    """A row as it stands in its file.

    Attributes:
        source: the file.
        number: of the line or entry in it, from 1.
        content: a line in bytes, or an object already parsed.
        size: bytes of the file that it takes; 0 where only the whole file's size is known.
    """

    source: str
    number: int
    content: bytes | Any
    size: int


@dataclass(frozen=True)
class Source:
    """One file, folder or dataset of a mixture.

    Attributes:
        location: as the user names it.
        weight: its share of the rows, relative to the other sources'.
        files: its files in the order in which they are read.
    """

    location: str
    weight: float
    files: tuple[Path, ...]

    @classmethod
    def open(cls, location: str) -> Self:
        """Find a source's files; a dataset of the Hub is downloaded.

        Args:
            location: a file, a folder (all its files, those of folders in it too), or
                `hf://owner/name[@revision][/folder or file]`; `=0.3` behind it is its weight.

        Raises:
            DataError: there is no such file or dataset, nothing in it can be read, or it is Parquet and pyarrow is not installed.
        """
        place, equals, share = location.rpartition("=")
        try:
            weight = float(share) if equals else 1.0
        except ValueError:
            place, weight = "", 1.0  # the "=" belongs to the name
        place = place or location
        if not 0 < weight < float("inf"):
            raise DataError(f"the weight of {place} is {share}; it must be a positive number")
        path = _download(place) if place.startswith(HUB_PREFIX) else Path(place).expanduser()
        if path.is_file():
            if not path.name.endswith(SUFFIXES):
                raise DataError(f"{path} is none of {', '.join(SUFFIXES)}; convert it to JSON lines")
            _check_parquet([path])
            return cls(place, weight, (path,))
        if not path.is_dir():
            raise DataError(f"there is no file or folder {place}; pass one that exists, or {HUB_PREFIX}owner/name for a dataset of the Hub")
        found = (file for file in path.rglob("*") if file.name.endswith(SUFFIXES) and file.is_file())
        files = sorted(file for file in found if not any(part.startswith(".") for part in file.relative_to(path).parts))
        if not files:
            raise DataError(f"{place} holds no {' or '.join(SUFFIXES)} file")
        _check_parquet(files)
        return cls(place, weight, tuple(files))

    @property
    def size(self) -> int | None:
        """Bytes of all files, if rows tell theirs; else None."""
        if not all(file.name.endswith(".jsonl") for file in self.files):
            return None
        return sum(file.stat().st_size for file in self.files)

    def identity(self) -> dict[str, Any]:
        """JSON values that change when the rows do: names, sizes, and a digest of the files' ends.

        Raises:
            DataError: a file cannot be read.
        """
        return {
            "location": self.location,
            "weight": self.weight,
            "files": [[file.name, file.stat().st_size, _digest_of_ends(file)] for file in self.files],
        }

    def rows(self) -> Iterator[RawRow]:
        """All rows, in order.

        Raises:
            DataError: a file cannot be read as what its name says.
        """
        for file in self.files:
            yield from _read_file(file)


def _check_parquet(files: Sequence[Path]) -> None:
    """Refuse Parquet files that cannot be read here, before any work is done for the sources."""
    found = next((file for file in files if file.name.endswith(".parquet")), None)
    if found is None:
        return
    try:
        import_module("pyarrow.parquet")
    except ImportError:
        raise DataError(f"{found} is a Parquet file, which needs pyarrow: pip install 'unified-speculators[data]'") from None


def mix(sources: Sequence[Source], limit: int | None = None) -> Iterator[RawRow]:
    """Rows of all sources, as many of each as its weight asks for at any point; a source that ends leaves the others to go on.

    Args:
        sources: at least one.
        limit: at most so many rows.
    """
    streams = [source.rows() for source in sources]
    taken = [0] * len(sources)
    count = 0
    left = list(range(len(sources)))
    while left and (limit is None or count < limit):
        # The source furthest behind its share; the first of them where several are.
        chosen = min(left, key=lambda index: (taken[index] + 1) / sources[index].weight)
        row = next(streams[chosen], None)
        if row is None:
            left.remove(chosen)
            continue
        taken[chosen] += 1
        count += 1
        yield row


def _read_file(file: Path) -> Iterator[RawRow]:
    name = str(file)
    try:
        if name.endswith(".parquet"):
            yield from _read_parquet(file)
        elif name.endswith(".json"):
            yield from _read_json(file)
        else:
            compressed = name.endswith(".gz")
            with gzip.open(file) if compressed else file.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    content = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
                    if content.strip():
                        yield RawRow(name, number, content, 0 if compressed else len(line))
    except (OSError, EOFError) as error:
        raise DataError(f"cannot read {file}: {error}; repair or remove it") from None


def _read_json(file: Path) -> Iterator[RawRow]:
    """A list of rows, or an object that holds one; lines of JSON under this name are read as such."""
    content = file.read_bytes().removeprefix(_BYTE_ORDER_MARK)
    try:
        whole = json.loads(content)
    except (ValueError, RecursionError):
        for number, line in enumerate(content.splitlines(), start=1):
            if line.strip():
                yield RawRow(str(file), number, line, 0)
        return
    if isinstance(whole, dict) and not _is_row(whole):
        whole = next((value for value in whole.values() if isinstance(value, list) and value and isinstance(value[0], dict)), [whole])
    for number, entry in enumerate(whole if isinstance(whole, list) else [whole], start=1):
        yield RawRow(str(file), number, entry, 0)


def _is_row(record: dict[str, Any]) -> bool:
    try:
        read_record(record)
    except RowError:
        return False
    return True


def _read_parquet(file: Path) -> Iterator[RawRow]:
    arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    number = 0
    try:
        for batch in parquet.ParquetFile(file).iter_batches(batch_size=256):
            for entry in batch.to_pylist():
                number += 1
                yield RawRow(str(file), number, {key: value for key, value in entry.items() if value is not None}, 0)
    except arrow.ArrowException as error:
        raise DataError(f"cannot read {file}: {error}; fetch it again") from None


def _download(location: str) -> Path:
    """Folder or file of a Hub dataset, in the Hub's cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    parts = location.removeprefix(HUB_PREFIX).removeprefix("datasets/").split("/", 2)
    if len(parts) < 2 or not all(parts[:2]):
        raise DataError(f"{location} names no dataset; write {HUB_PREFIX}owner/name, with @revision and /folder behind it where needed")
    name, _, revision = parts[1].partition("@")
    inside = parts[2].strip("/") if len(parts) > 2 else ""
    wanted = [f"{inside}*"] if inside else [f"*{suffix}" for suffix in SUFFIXES]
    try:
        folder = snapshot_download(f"{parts[0]}/{name}", repo_type="dataset", revision=revision or None, allow_patterns=wanted)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DataError(f"cannot fetch the dataset {location}: {reason}") from None
    return Path(folder) / inside


def _digest_of_ends(file: Path, size: int = 1 << 16) -> str:
    digest = hashlib.blake2b(digest_size=8)
    try:
        with file.open("rb") as stream:
            digest.update(stream.read(size))
            stream.seek(max(0, file.stat().st_size - size))
            digest.update(stream.read(size))
    except OSError as error:
        raise DataError(f"cannot read {file}: {error}; repair or remove it") from None
    return digest.hexdigest()
