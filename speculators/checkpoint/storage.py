"""Checkpoint folders as files: find them, read and write their tensors, replace them all or not at all.

Knows safetensors, JSON and the Hub; knows nothing of speculators.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import constants, snapshot_download, split_torch_state_dict_into_shards
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from speculators.errors import CheckpointError
from speculators.files import saving_tensors

CONFIG_FILE = "config.json"
CARD_FILE = "README.md"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DEFAULT_SHARD_BYTES = 5_000_000_000
_WEIGHTS_NAME = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
_PICKLE_NAMES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "pytorch_model.pt")


def problem(file: Path | str, key: str, value: object, rule: str, remedy: str) -> CheckpointError:
    """The one form of every complaint about a checkpoint: `file: key = value: rule; remedy`."""
    return CheckpointError(f"{file}: {key} = {value}: {rule}; {remedy}")


# -- finding ---------------------------------------------------------------------------------------------------


def resolve(path_or_repo: str | Path, revision: str | None = None) -> Path:
    """The local folder of a checkpoint; a Hub repository `owner/name` is downloaded (JSON, safetensors, Markdown only).

    Raises:
        CheckpointError: no such folder, no such repository or revision, or the Hub cannot be reached.
    """
    path = Path(path_or_repo).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{path} is a file: a checkpoint is a folder that holds {CONFIG_FILE}; name the folder")
    if not _looks_like_repository(path_or_repo):
        raise CheckpointError(f"{path_or_repo} does not exist: name a checkpoint folder or a Hub repository (owner/name)")
    repository = str(path_or_repo)
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=["*.json", "*.safetensors", "*.md"]))
    except RevisionNotFoundError:
        reason = f"the Hub repository has no revision {revision!r}"
    except GatedRepoError:
        reason = "the Hub repository is gated: accept its terms and log in first"
    except RepositoryNotFoundError:
        reason = "the Hub has no such repository, or it is private"
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError):
        reason = "the Hub cannot be reached and its cache holds no copy"
        if constants.HF_HUB_OFFLINE:
            reason = "HF_HUB_OFFLINE is set and the Hub's cache holds no copy of this revision: unset it once to download"
    except HFValidationError:
        reason = "it is not a valid Hub repository name either"
    raise CheckpointError(
        f"{repository} is no folder here and cannot be downloaded: {reason}; name a checkpoint folder or a Hub repository"
    )


def _looks_like_repository(name: str | Path) -> bool:
    """`owner/name`, and not a path below a folder that exists here (`checkpoints/typo` is a missing folder)."""
    if isinstance(name, Path) or re.fullmatch(r"[\w][\w.-]*/[\w][\w.-]*", name) is None:
        return False
    return not Path(name.split("/")[0]).is_dir()


# -- reading ---------------------------------------------------------------------------------------------------


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CheckpointError: the file is missing, is no valid JSON, or holds something else than an object.
    """
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file.parent} holds no {file.name}: it is not a checkpoint folder; name the folder that holds it") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror}); check the file and its permissions") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON ({error}): the file is damaged; copy or download it again") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{file} holds a JSON {type(data).__name__}, not an object: the file is damaged; copy or download it again")
    return data


@dataclass(frozen=True)
class StoredTensors:
    """Tensors as they lie on disk, on the CPU, in their stored dtype.

    Attributes:
        tensors: by name.
        files: the file each came from.
        main_file: the file to name when a tensor is missing (the single weights file, or the index).
    """

    tensors: dict[str, Tensor]
    files: dict[str, Path]
    main_file: Path

    def file_of(self, name: str) -> Path:
        """The file that holds, or should hold, this tensor."""
        return self.files.get(name, self.main_file)


def read_tensors(folder: Path) -> StoredTensors:
    """Read `model.safetensors`, or the shards that `model.safetensors.index.json` names.

    Raises:
        CheckpointError: there are no weights, only pickled ones, or a file is damaged, missing or not what the index says.
    """
    single, index = folder / WEIGHTS_FILE, folder / INDEX_FILE
    if single.is_file():
        tensors = _read_file(single)
        return StoredTensors(tensors, dict.fromkeys(tensors, single), single)
    if not index.is_file():
        pickled = [name for name in _PICKLE_NAMES if (folder / name).exists()]
        if pickled:
            raise CheckpointError(
                f"{folder} holds only pickled weights ({pickled[0]}), which can run code and are never read; convert them to safetensors"
            )
        raise CheckpointError(
            f"{folder} holds neither {WEIGHTS_FILE} nor {INDEX_FILE}: the weights are missing; copy or download them again"
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise problem(
            index, "weight_map", weight_map, "an index maps every tensor's name to its shard", "copy or download the checkpoint again"
        )
    tensors, files = {}, {}
    for shard in sorted({str(name) for name in weight_map.values()}):
        if Path(shard).name != shard:
            raise problem(
                index, "weight_map", repr(shard), "a shard is a file of this folder", "use an index whose entries are plain file names"
            )
        file = folder / shard
        if not file.is_file():
            raise problem(index, "weight_map", repr(shard), "this shard is missing from the folder", "copy or download it again")
        for name, tensor in _read_file(file).items():
            if weight_map.get(name) != shard:
                raise problem(
                    file, name, f"in {shard}", f"the index puts it in {weight_map.get(name)}", "copy or download the checkpoint again"
                )
            tensors[name], files[name] = tensor, file
    lost = sorted(set(weight_map) - set(tensors))
    if lost:
        raise problem(
            index, lost[0], repr(weight_map[lost[0]]), "that shard does not hold this tensor", "copy or download the checkpoint again"
        )
    return StoredTensors(tensors, files, index)


def tensor_names(folder: Path) -> list[str]:
    """Names of the stored tensors, of which only headers are read.

    Raises:
        CheckpointError: there are no weights, or their header or index is damaged.
    """
    single, index = folder / WEIGHTS_FILE, folder / INDEX_FILE
    if single.is_file() or not index.is_file():
        with _opened(single) as content:
            return list(content.keys())
    weight_map = read_json(index).get("weight_map")
    return list(weight_map) if isinstance(weight_map, dict) else []


def _read_file(file: Path) -> dict[str, Tensor]:
    with _opened(file) as content:
        return {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118 (not a mapping)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """A safetensors file.

    Raises:
        CheckpointError: it is missing or damaged, or what reads it finds it so.
    """
    try:
        with safe_open(file, framework="pt", device="cpu") as content:
            yield content
    except (SafetensorError, OSError) as error:
        if _is_lfs_pointer(file):
            raise CheckpointError(f"{file} is a Git LFS pointer, not the weights themselves; fetch them with `git lfs pull`") from None
        raise CheckpointError(
            f"{file} is no complete safetensors file ({error}): it is cut short or damaged; copy or download it again"
        ) from None


def _is_lfs_pointer(file: Path) -> bool:
    try:
        with file.open("rb") as stream:
            return stream.read(64).startswith(b"version https://git-lfs")
    except OSError:
        return False


def weight_files(folder: str | Path) -> list[Path]:
    """Files of a folder that hold weights, the index of shards included, by name."""
    return sorted(file for file in Path(folder).iterdir() if _WEIGHTS_NAME.fullmatch(file.name))


def model_files(folder: str | Path) -> list[Path]:
    """What of a model lies in a folder: its config.json and its weights. Empty where there is no folder."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    return [*([folder / CONFIG_FILE] if (folder / CONFIG_FILE).exists() else []), *weight_files(folder)]


def weights_sha256(folder: str | Path) -> dict[str, str]:
    """File name -> sha256 (hexadecimal) of every safetensors file of a checkpoint folder."""
    digests = {}
    for file in weight_files(folder):
        if file.suffix == ".safetensors":
            with file.open("rb") as stream:
                digests[file.name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return digests


# -- writing ---------------------------------------------------------------------------------------------------


def write_json(file: Path, data: Mapping[str, Any]) -> None:
    """Write a JSON object with sorted keys and two spaces of indentation, as transformers does."""
    file.write_text(json.dumps(data, indent=2, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], max_shard_bytes: int) -> None:
    """Write tensors into one safetensors file, or into shards with an index where one file would be too large.

    Args:
        folder: an existing folder.
        tensors: contiguous CPU tensors that share no memory.
        max_shard_bytes: the most bytes one weights file may have, its header included.

    Raises:
        CheckpointError: one tensor alone is larger than a shard may be.
        OSError: the file system refuses.
    """
    # A tensor's entry in a safetensors header takes its name and fewer than 120 bytes of dtype, shape and offsets.
    header = 64 + sum(len(name.encode()) + 120 for name in tensors)
    room = max_shard_bytes - header
    largest = max(tensors, key=lambda name: tensors[name].nbytes, default=None)
    if largest is not None and tensors[largest].nbytes > room:
        raise CheckpointError(
            f"{largest} takes {tensors[largest].nbytes} bytes and no shard may exceed max_shard_bytes = {max_shard_bytes}"
            f" ({header} of them kept for the header); raise max_shard_bytes"
        )
    split = split_torch_state_dict_into_shards(dict(tensors), max_shard_size=room)
    for name, members in split.filename_to_tensors.items():
        with saving_tensors():
            save_file({member: tensors[member] for member in members}, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(0o644)  # safetensors makes it readable by its owner alone; config.json beside it is not
    if split.is_sharded:
        write_json(folder / INDEX_FILE, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})


@contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """Write a checkpoint whole or not at all.

    Yields an empty folder beside `target`. When the block ends well, its files take their places in `target`;
    when it raises, or when that step fails, `target` is as it was. Weights that the new checkpoint does not have
    (shards of an earlier, larger one) are removed; every other file of the user's stays.

    Raises:
        CheckpointError: `target` is a file.
    """
    target = target.expanduser().resolve()  # behind a link lies the folder whose file system the stage must share
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"cannot save to {target}: it is a file; name a folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = target.parent / f".{target.name}.{uuid.uuid4().hex[:12]}.partial"
    staged.mkdir()
    try:
        yield staged
        _flush(staged)
        if target.exists():
            _replace_files(staged, target)
        else:
            staged.rename(target)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _flush(folder: Path) -> None:
    """Make the files durable, so that no crash leaves a renamed but empty file."""
    for file in folder.iterdir():
        with file.open("rb+") as stream:
            os.fsync(stream.fileno())


def _replace_files(staged: Path, target: Path) -> None:
    """Move every staged file over its namesake; undo everything when a step fails."""
    # config.json goes last: a reader that finds the new one finds everything it speaks of.
    names = sorted((file.name for file in staged.iterdir()), key=lambda name: (name == CONFIG_FILE, name))
    obsolete = [file.name for file in weight_files(target) if file.name not in names]
    previous = staged / "previous"
    previous.mkdir()
    for name in [*names, *obsolete]:
        if (target / name).exists():
            _link_or_copy(target / name, previous / name)
    try:
        for name in names:
            os.replace(staged / name, target / name)
        for name in obsolete:
            (target / name).unlink()
    except BaseException:
        for name in [*names, *obsolete]:
            if (previous / name).exists():
                os.replace(previous / name, target / name)
            elif name in names:
                (target / name).unlink(missing_ok=True)
        raise


def _link_or_copy(source: Path, copy: Path) -> None:
    try:
        os.link(source, copy)
    except OSError:  # file systems without hard links
        shutil.copy2(source, copy)
