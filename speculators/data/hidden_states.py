"""Hidden-state stores: what training reads of the verifier, computed once and kept on disk.

A store belongs to packed rows. Its shards hold whole rows one after the other, so a row is one contiguous read; only tokens
up to a row's last label are kept, for nothing behind it is learned from. All of a token's states lie together: the tapped
residual streams in ascending order of their layer ids, then the stream before the final norm.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm.auto import tqdm

from speculators.data.partial import HEADER_FILE, PartialFolder
from speculators.data.rows import PackedRows
from speculators.errors import ConfigError, DataError, SpeculatorsError
from speculators.verifier import Verifier

FORMAT = "speculators-hidden-states-1"
SHARD_BYTES = 1 << 30
# float8_e4m3fn has this largest value; a scale a plane of a token makes its largest element just that.
_LARGEST_FP8 = 448.0
STATE_DTYPES = {"bfloat16": torch.bfloat16, "float8": torch.float8_e4m3fn}

# States of packed rows: (input_ids, position_ids, document_ids), each [R, S] int64, -> [R, S, planes, hidden].
StateFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Layout:
    """How a token's states are kept.

    Attributes:
        taps: layer ids of the tapped planes, ascending; one more plane holds the stream before the final norm.
        hidden_size: elements of a plane.
        dtype: of the elements, a key of STATE_DTYPES.
    """

    taps: tuple[int, ...]
    hidden_size: int
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in STATE_DTYPES:
            raise ConfigError(f"hidden states are kept as {' or '.join(STATE_DTYPES)}, not as {self.dtype!r}")
        if list(self.taps) != sorted(set(self.taps)) or any(tap < 0 for tap in self.taps):
            raise ConfigError(f"taps {list(self.taps)} must be ascending, different layer ids from 0 on")

    @property
    def planes(self) -> int:
        """States of a token."""
        return len(self.taps) + 1

    @property
    def token_bytes(self) -> int:
        """Bytes of a token, scales included."""
        element = STATE_DTYPES[self.dtype].itemsize
        return self.planes * (self.hidden_size * element + (4 if element == 1 else 0))


def stored_lengths(rows: PackedRows) -> Tensor:
    """[n] int64: tokens of each row up to its last label; 0 for a row without one."""
    columns = torch.arange(1, rows.loss_mask.shape[1] + 1)
    return (rows.loss_mask.to(torch.int64) * columns).amax(dim=1)


def rows_digest(rows: PackedRows) -> str:
    """sha256 of everything that hidden states depend on, and of the labels."""
    digest = hashlib.sha256()
    for values in (rows.input_ids, rows.loss_mask, rows.position_ids, rows.document_ids):
        digest.update(str(tuple(values.shape)).encode())
        digest.update(values.to(torch.int32).contiguous().numpy().tobytes())
    return digest.hexdigest()


def quantise(states: Tensor) -> tuple[Tensor, Tensor]:
    """[..., hidden] to float8_e4m3fn and [...] float32 scales, one for every plane of every token.

    The streams of different layers differ in size by orders of magnitude, so a scale for all of them together would leave
    the early ones few of the format's exponents.
    """
    largest = states.abs().amax(dim=-1, keepdim=True).float()
    scales = torch.where((largest > 0) & largest.isfinite(), largest / _LARGEST_FP8, 1.0)
    return (states.float() / scales).to(torch.float8_e4m3fn), scales[..., 0]


def store_hidden_states(
    output: str | Path,
    splits: Mapping[str, PackedRows],
    states: StateFunction,
    layout: Layout,
    facts: Mapping[str, Any],
    *,
    device: torch.device | str = "cpu",
    rows_per_forward: int = 4,
    shard_bytes: int = SHARD_BYTES,
    progress: bool = True,
) -> dict[str, Any]:
    """Write a store. A killed run goes on behind its last whole shard.

    Args:
        output: a new folder, or this very store, finished or not.
        splits: name -> packed rows of one length.
        states: computes the states of some of them.
        layout: what is kept.
        facts: JSON values about the source (verifier, where the states come from); a part of the store's identity.
        device: where `states` wants its input.
        rows_per_forward: rows of one call of it.
        shard_bytes: about the size of a shard.
        progress: show a progress bar.

    Returns:
        The header.

    Raises:
        DataError: the disk is too small, the folder holds something else, or a state is not finite.
    """
    output = Path(output)
    run = {
        **facts,
        "command": "data store",
        "taps": list(layout.taps),
        "hidden_size": layout.hidden_size,
        "dtype": layout.dtype,
        "splits": {name: rows_digest(rows) for name, rows in splits.items()},
        "rows_per_forward": rows_per_forward,
        "shard_bytes": shard_bytes,
    }
    partial = PartialFolder(output, run)
    if partial.complete:
        return read_store_header(output)
    rows = _joined(list(splits.values()))
    lengths = stored_lengths(rows)
    shards = list(_shards(lengths, layout.token_bytes, shard_bytes))
    done: list[dict[str, Any]] = list(partial.state.get("shards", []))
    partial.remove_unsealed({shard["file"] for shard in done})
    needed = layout.token_bytes * int(sum(lengths[start:end].sum() for start, end in shards[len(done) :]))
    total, before = int(lengths.sum()), sum(shard["tokens"] for shard in done)
    try:
        check_disk(output, needed)
        with tqdm(total=total, initial=before, unit=" tokens", unit_scale=True, disable=not progress, desc="storing") as bar:
            for number, (start, end) in enumerate(shards[len(done) :], start=len(done) + 1):
                file = partial.folder / f"states-{number:05d}.safetensors"
                pieces = []
                for first in range(start, end, rows_per_forward):
                    some = slice(first, min(first + rows_per_forward, end))
                    pieces += _row_states(rows[some], lengths[some], states, device)
                    bar.update(int(lengths[some].sum()))
                _save_shard(file, pieces, layout, lengths[start:end])
                done.append({"file": file.name, "rows": end - start, "tokens": int(lengths[start:end].sum()), **checksum(file)})
                partial.seal({"shards": done})
    except SpeculatorsError:
        if not done:  # nothing is lost, and the corrected command would be another run
            partial.discard()
        raise
    starts = dict(zip(splits, [0, *torch.tensor([len(part) for part in splits.values()]).cumsum(0).tolist()], strict=False))
    partial.finish(
        {
            "format": FORMAT,
            **facts,
            "taps": list(layout.taps),
            "hidden_size": layout.hidden_size,
            "dtype": layout.dtype,
            "row_length": rows.input_ids.shape[1],
            "splits": {name: {"first_row": starts[name], "rows": len(part), "digest": rows_digest(part)} for name, part in splits.items()},
            "tokens": total,
            "bytes": sum(shard["bytes"] for shard in done),
            "shards": done,
        }
    )
    return read_store_header(output)


def verifier_states(verifier: Verifier, taps: Sequence[int]) -> StateFunction:
    """States from a verifier in this process."""

    def states(input_ids: Tensor, position_ids: Tensor, document_ids: Tensor) -> Tensor:
        output = verifier.encode(input_ids, position_ids, document_ids, taps)
        tapped = output.hidden_states.unflatten(-1, (len(taps), verifier.hidden_size))
        return torch.cat([tapped, output.last_hidden_state[:, :, None]], dim=2)

    return states


def check_disk(output: Path, needed: int) -> None:
    """Refuse before the first byte what will not fit.

    Raises:
        DataError: the file system has less free than is needed.
    """
    nearest = next(part for part in (output.absolute(), *output.absolute().parents) if part.exists())
    free = shutil.disk_usage(nearest).free
    if needed > free:
        raise DataError(
            f"the hidden states take {needed / 2**30:.1f} GiB, and {nearest} has {free / 2**30:.1f} GiB free: store fewer taps, float8 or"
            " fewer conversations, or train without a store, which needs no disk"
        )


def checksum(file: Path) -> dict[str, Any]:
    """Size and blake2b of a file."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16))
    return {"bytes": file.stat().st_size, "blake2b": digest.hexdigest()}


def read_store_header(path: str | Path) -> dict[str, Any]:
    """The header of a store.

    Raises:
        DataError: there is none, or a shard is missing or of another size.
    """
    path = Path(path)
    try:
        header: dict[str, Any] = json.loads((path / HEADER_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is no store of hidden states ({error}); `speculators data store` writes one") from None
    kind = header.get("format") if isinstance(header, dict) else None
    if kind != FORMAT or "shards" not in header:
        raise DataError(f"{path} is no store of hidden states but {kind!r}; `speculators data store` writes one")
    for shard in header["shards"]:
        file = path / shard["file"]
        size = file.stat().st_size if file.is_file() else None
        if size != shard["bytes"]:
            found = "is missing" if size is None else f"has {size} bytes instead of {shard['bytes']}"
            raise DataError(f"{file} {found}; remove {path} and store the hidden states again")
    return header


def verify_store(path: str | Path, progress: bool = True) -> int:
    """Read every shard and compare its checksum.

    Returns:
        Bytes that were read.

    Raises:
        DataError: a shard is damaged.
    """
    path, header = Path(path), read_store_header(path)
    for shard in tqdm(header["shards"], unit=" shards", disable=not progress, desc="verifying"):
        if checksum(path / shard["file"])["blake2b"] != shard["blake2b"]:
            raise DataError(f"{path / shard['file']} is damaged; remove {path} and store the hidden states again")
    return int(header["bytes"])


class StoreReader:
    """Reads rows of one split.

    Attributes:
        layout: what is kept of a token.
        row_length: S.

    Args:
        path: the store.
        digest: of the rows, see `rows_digest`.

    Raises:
        DataError: there is no such store, it holds other rows, or a shard is damaged.
    """

    def __init__(self, path: str | Path, digest: str) -> None:
        self._path, header = Path(path), read_store_header(path)
        split = next((split for split in header["splits"].values() if split["digest"] == digest), None)
        if split is None:
            given = {name: header[name] for name in ("data", "row_length", "held_out", "seed") if name in header}
            made = ", ".join(f"{name.replace('_', '-')} {value}" for name, value in given.items())
            raise DataError(f"the store {path} holds hidden states of other rows than these; it was made with {made}")
        self.layout = Layout(tuple(header["taps"]), int(header["hidden_size"]), header["dtype"])
        self.row_length, self.verifier = int(header["row_length"]), header.get("verifier")
        self._state_bytes = self.layout.planes * self.layout.hidden_size * STATE_DTYPES[self.layout.dtype].itemsize
        self._rows = int(split["rows"])
        self._places: list[tuple[int, int, int, int]] = []  # file descriptor, offset of states, offset of scales, tokens
        self._files: list[int] = []
        places = [place for shard in header["shards"] for place in self._open(self._path / shard["file"])]
        self._places = places[split["first_row"] : split["first_row"] + self._rows]

    def __del__(self) -> None:
        for file in getattr(self, "_files", ()):
            os.close(file)

    def __len__(self) -> int:
        return self._rows

    def tokens(self, row: int) -> int:
        """Tokens kept of a row."""
        return self._places[row][3]

    def expect(self, first: int, last: int) -> None:
        """Let the system read rows `first` .. `last` into its page cache in the order in which they lie, while others are used."""
        if not hasattr(os, "posix_fadvise"):
            return
        places = self._places[first:last]
        for file in dict.fromkeys(place[0] for place in places):
            here = [place for place in places if place[0] == file]
            end = here[-1][1] + here[-1][3] * self._state_bytes
            os.posix_fadvise(file, here[0][1], end - here[0][1], os.POSIX_FADV_WILLNEED)

    def read_into(self, row: int, states: Tensor, scales: Tensor | None = None) -> int:
        """Read a row where it is wanted.

        Args:
            row: its number in the split.
            states: [S, planes, hidden] on the CPU, contiguous, of the store's dtype; the row's tokens are written to its front.
            scales: [S, planes] float32, for float8.

        Returns:
            How many tokens were written.

        Raises:
            DataError: the file has become shorter.
        """
        file, states_at, scales_at, tokens = self._places[row]
        self._read(file, states_at, states[:tokens])
        if scales is not None:
            self._read(file, scales_at, scales[:tokens])
        return tokens

    # -- inside ------------------------------------------------------------------------------------------------

    def _open(self, path: Path) -> list[tuple[int, int, int, int]]:
        try:
            with safe_open(path, framework="pt") as shard:
                offsets = shard.get_tensor("offsets").tolist()
        except (SafetensorError, OSError) as error:
            raise DataError(f"{path} is damaged ({error}); store the hidden states again") from None
        file = os.open(path, os.O_RDONLY)
        self._files.append(file)
        length = int.from_bytes(os.pread(file, 8, 0), "little")
        entries = json.loads(os.pread(file, length, 8))
        begin = 8 + length
        states = begin + entries["states"]["data_offsets"][0]
        scales = begin + entries["scales"]["data_offsets"][0] if "scales" in entries else -1
        plane_bytes = self.layout.hidden_size * STATE_DTYPES[self.layout.dtype].itemsize
        token = self.layout.planes * plane_bytes
        return [(file, states + first * token, scales + first * self.layout.planes * 4, last - first) for first, last in pairwise(offsets)]

    def _read(self, file: int, offset: int, target: Tensor) -> None:
        view = memoryview(target.view(torch.uint8).reshape(-1).numpy().data)
        while view:
            count = os.preadv(file, [view], offset)
            if count == 0:
                raise DataError(f"a shard of {self._path} has become shorter while it was read; store the hidden states again")
            view, offset = view[count:], offset + count


def _joined(parts: Sequence[PackedRows]) -> PackedRows:
    if len({part.input_ids.shape[1] for part in parts}) != 1:
        raise DataError("all splits of a store need rows of one length")
    names = ("input_ids", "loss_mask", "position_ids", "document_ids")
    return PackedRows(*(torch.cat([getattr(part, name) for part in parts]) for name in names))


def _shards(lengths: Tensor, token_bytes: int, shard_bytes: int) -> Iterator[tuple[int, int]]:
    """First and last row of each shard."""
    start = size = 0
    for row, length in enumerate(lengths.tolist()):
        if size and size + length * token_bytes > shard_bytes:
            yield start, row
            start, size = row, 0
        size += length * token_bytes
    yield start, len(lengths)


def _row_states(rows: PackedRows, lengths: Tensor, states: StateFunction, device: torch.device | str) -> list[Tensor]:
    """[tokens, planes, hidden] of each row on the CPU, cut behind its last label."""
    inputs = (values.to(device=device, dtype=torch.int64) for values in (rows.input_ids, rows.position_ids, rows.document_ids))
    computed = states(*inputs)
    return [row[:length].cpu() for row, length in zip(computed, lengths.tolist(), strict=True)]


def _save_shard(file: Path, pieces: list[Tensor], layout: Layout, lengths: Tensor) -> None:
    states = torch.cat(pieces)
    if not bool(states.isfinite().all()):
        raise DataError("the verifier's hidden states are not finite; load it in another dtype, or check its weights")
    tensors = {"offsets": torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])}
    if layout.dtype == "float8":
        tensors["states"], tensors["scales"] = quantise(states)
    else:
        tensors["states"] = states.to(STATE_DTYPES[layout.dtype])
    save_file(tensors, file)
    file.chmod(0o644)
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
