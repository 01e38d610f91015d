"""Conversations on disk: a folder of safetensors shards with token ids as small as the vocabulary allows."""

from __future__ import annotations

import json
import lzma
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save_file

from speculators.data.partial import HEADER_FILE, PartialFolder
from speculators.data.rows import Conversation
from speculators.errors import DataError
from speculators.files import make_folder

REJECTED_FILE = "rejected.jsonl"
MAX_SHARD_BYTES = 15_000_000
MAX_TOPICS = 2**16


@dataclass(frozen=True)
class ConversationBlock:
    """Conversations one after the other in arrays: a few bytes a token, where Python lists take forty.

    Attributes:
        tokens: [T] unsigned integers.
        mask: [T] bool.
        lengths: [n] int64, tokens of each conversation.
        topics: [n] strings.
        truncated: [n] bool.
    """

    tokens: NDArray[Any]
    mask: NDArray[np.bool_]
    lengths: NDArray[np.int64]
    topics: list[str]
    truncated: NDArray[np.bool_]

    @classmethod
    def of(cls, conversations: Sequence[Conversation]) -> Self:
        """Pack conversations into arrays."""
        lengths = [len(conversation.input_ids) for conversation in conversations]
        tokens, mask = np.empty(sum(lengths), dtype=np.int64), np.empty(sum(lengths), dtype=np.bool_)
        start = 0
        for conversation, length in zip(conversations, lengths, strict=True):
            tokens[start : start + length] = conversation.input_ids
            mask[start : start + length] = conversation.loss_mask
            start += length
        return cls(
            tokens,
            mask,
            np.asarray(lengths, dtype=np.int64),
            [conversation.topic for conversation in conversations],
            np.asarray([conversation.truncated for conversation in conversations], dtype=np.bool_),
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[Conversation]:
        tokens, mask = self.tokens.tolist(), self.mask.tolist()
        end = 0
        for length, topic, truncated in zip(self.lengths.tolist(), self.topics, self.truncated.tolist(), strict=True):
            start, end = end, end + length
            yield Conversation(tokens[start:end], mask[start:end], topic, truncated)


class ConversationWriter:
    """Writes `conversations-00001-of-0000n.safetensors`, `header.json` and, where rows were rejected, `rejected.jsonl`.

    A shard holds `input_ids` (uint16, or uint32 for vocabularies above 65536), `loss_mask` (bits packed into uint8),
    `offsets` (int32 starts of the conversations and the end), `topics` (uint8, or uint16 from the shard on that makes them more
    than 256) and `truncated` (uint8). Memory is that of one shard.

    Attributes:
        state: what `add` was last told with everything that is on disk, empty for a new folder: where to go on.
        complete: the folder is there already, made with the same settings.

    Args:
        path: must not exist, or be an empty folder, or hold an unfinished or complete run with these settings.
        settings: what the content depends on, as JSON values.
        vocab_size: of the verifier.
        max_shard_bytes: largest shard, unless one call of `add` brings more.

    Raises:
        DataError: see `PartialFolder`.
    """

    def __init__(self, path: str | Path, settings: Mapping[str, Any], *, vocab_size: int, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        self._partial = PartialFolder(Path(path), settings)
        self.complete = self._partial.complete
        self._vocab_size = vocab_size
        self._room = self._max_shard_bytes = max_shard_bytes - 100_000  # safetensors' own
        self._blocks: list[ConversationBlock] = []
        self._rejected: list[str] = []
        sealed = self._partial.state or {"shards": 0, "conversations": 0, "tokens": 0, "reply_tokens": 0, "topics": [], "rejected_bytes": 0}
        self._sealed: dict[str, Any] = {key: value for key, value in sealed.items() if key != "caller"}
        self.state: dict[str, Any] = sealed.get("caller", {})
        self._topics: list[str] = list(self._sealed["topics"])
        self._pending = dict(self.state)
        if not self.complete:
            self._clean()

    def add(self, block: ConversationBlock, state: Mapping[str, Any], rejected: Sequence[str] = ()) -> None:
        """Append conversations.

        Args:
            block: any number of them.
            state: JSON values that say how far the caller is with these; `state` returns them after a kill.
            rejected: lines for `rejected.jsonl`.

        Raises:
            DataError: a token id does not fit the vocabulary, or there are more topics than 65536.
        """
        if len(block.tokens) and (block.tokens.min() < 0 or block.tokens.max() >= self._vocab_size):
            raise DataError(f"token ids from {block.tokens.min()} to {block.tokens.max()} do not fit a vocabulary of {self._vocab_size}")
        needed = len(block.tokens) * (8 * self._token_type.itemsize + 1) // 8 + 8 * len(block)
        if self._blocks and needed > self._room:
            self._flush()
        self._topics += sorted({*block.topics} - {*self._topics})
        if len(self._topics) > MAX_TOPICS:
            raise DataError(f"{len(self._topics)} different topics; at most {MAX_TOPICS} can be stored: leave them out of the metadata")
        self._blocks.append(block)
        self._room -= needed
        self._rejected += rejected
        self._pending = dict(state)

    def finish(self, header: Mapping[str, Any]) -> list[Path]:
        """Write what is left and give the folder its name.

        Args:
            header: JSON values about the data (verifier, settings, counts); counts of tokens and conversations are added.

        Returns:
            The shards.

        Raises:
            DataError: there is no conversation.
        """
        self._flush()
        sealed, folder = self._sealed, self._partial.folder
        if not sealed["conversations"]:
            raise DataError(f"no conversations to save in {self._partial.output}")
        for index in range(1, sealed["shards"] + 1):
            if (folder / _sealed_name(index)).exists():  # a finish that was killed has renamed some already
                (folder / _sealed_name(index)).rename(folder / _final_name(index, sealed["shards"]))
        if not sealed["rejected_bytes"]:
            (folder / REJECTED_FILE).unlink(missing_ok=True)
        counts = {key: sealed[key] for key in ("conversations", "tokens", "reply_tokens", "topics", "shards")}
        self._partial.finish({**header, "format": "speculators-conversations-1", **counts})
        return [self._partial.output / _final_name(index, sealed["shards"]) for index in range(1, sealed["shards"] + 1)]

    def discard(self) -> None:
        """Remove everything; the output will not appear."""
        self._partial.discard()

    # -- inside ------------------------------------------------------------------------------------------------

    @property
    def _token_type(self) -> np.dtype[Any]:
        return np.dtype(np.uint16 if self._vocab_size <= 2**16 else np.uint32)

    def _clean(self) -> None:
        """Back to the last seal."""
        indices = range(1, self._sealed["shards"] + 1)
        names = {_sealed_name(index) for index in indices} | {_final_name(index, len(indices)) for index in indices} | {REJECTED_FILE}
        self._partial.remove_unsealed(names)
        rejected = self._partial.folder / REJECTED_FILE
        with rejected.open("ab") as stream:
            stream.truncate(self._sealed["rejected_bytes"])

    def _flush(self) -> None:
        folder, sealed = self._partial.folder, dict(self._sealed)
        blocks = [block for block in self._blocks if len(block)]
        if blocks:
            sealed["shards"] += 1
            tensors = self._tensors(blocks)
            save_file(tensors, folder / _sealed_name(sealed["shards"]))
            (folder / _sealed_name(sealed["shards"])).chmod(0o644)  # safetensors makes it readable by its owner alone
            sealed["conversations"] += len(tensors["topics"])
            sealed["tokens"] += len(tensors["input_ids"])
            sealed["reply_tokens"] += sum(int(block.mask.sum()) for block in blocks)
        if self._rejected:
            with (folder / REJECTED_FILE).open("ab") as stream:
                # What UTF-8 cannot hold, half of a character, goes back into the escape that JSON spelt it with.
                stream.write("".join(f"{line}\n" for line in self._rejected).encode(errors="backslashreplace"))
                sealed["rejected_bytes"] = stream.tell()
        sealed["topics"] = self._topics
        self._partial.seal({**sealed, "caller": self._pending})
        self._sealed, self.state = sealed, self._pending
        self._blocks, self._rejected, self._room = [], [], self._max_shard_bytes

    def _tensors(self, blocks: Sequence[ConversationBlock]) -> dict[str, NDArray[Any]]:
        number = {topic: index for index, topic in enumerate(self._topics)}
        topic_type = np.uint8 if len(self._topics) <= 2**8 else np.uint16
        return {
            "input_ids": np.concatenate([block.tokens.astype(self._token_type) for block in blocks]),
            "loss_mask": np.packbits(np.concatenate([block.mask for block in blocks])),
            "offsets": np.cumsum(np.concatenate([[0], *(block.lengths for block in blocks)])).astype(np.int32),
            "topics": np.asarray([number[topic] for block in blocks for topic in block.topics], dtype=topic_type),
            "truncated": np.concatenate([block.truncated for block in blocks]).astype(np.uint8),
        }


def save_conversations(
    path: str | Path,
    conversations: Sequence[Conversation],
    header: Mapping[str, Any],
    *,
    vocab_size: int,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    settings: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Write a new folder at once, all of it or nothing; see `ConversationWriter`.

    Args:
        path: must not exist, or be an empty folder.
        conversations: at least one.
        header: JSON values about the data (verifier, settings, counts); its key "conversations" is set here.
        vocab_size: of the verifier.
        max_shard_bytes: largest shard.
        settings: what the content depends on, by which a later run knows that it is complete.

    Raises:
        DataError: there is nothing to write, or the folder holds something already.
    """
    path = Path(path)
    if not conversations:
        raise DataError(f"no conversations to save in {path}")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise DataError(f"{path} exists already; name a new folder, or remove that one first")
    make_folder(path.parent)
    shutil.rmtree(PartialFolder.place(path), ignore_errors=True)  # of a save that was killed: this one begins anew
    writer = ConversationWriter(path, settings or {}, vocab_size=vocab_size, max_shard_bytes=max_shard_bytes)
    try:
        for conversation in conversations:
            writer.add(ConversationBlock.of([conversation]), {})
        return writer.finish(header)
    except BaseException:
        writer.discard()
        raise


def read_header(path: str | Path) -> dict[str, Any]:
    """The header of a folder of conversations.

    Raises:
        DataError: it is missing or damaged.
    """
    header_path = Path(path) / HEADER_FILE
    if not header_path.is_file():
        raise DataError(
            f"{path} holds no conversations: {HEADER_FILE} is missing; pass a folder that `speculators data prepare` or `synthesize` wrote"
        )
    try:
        header: dict[str, Any] = json.loads(header_path.read_text(encoding="utf-8"))
        int(header["shards"]), list(header["topics"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{header_path} is damaged ({error}); generate the data again") from error
    return header


def read_blocks(path: str | Path) -> Iterator[ConversationBlock]:
    """The shards of a folder of conversations, one at a time. They may have been compressed with `xz`.

    Raises:
        DataError: the folder or a shard is missing or damaged.
    """
    path, header = Path(path), read_header(path)
    shard_count, topics, count = int(header["shards"]), list(header["topics"]), 0
    for index in range(1, shard_count + 1):
        shard = path / _final_name(index, shard_count)
        compressed = shard.with_name(f"{shard.name}.xz")
        if not shard.is_file() and not compressed.is_file():
            raise DataError(f"{shard} is missing; {HEADER_FILE} names {shard_count} shards")
        try:
            block = _read_shard(shard.read_bytes() if shard.is_file() else lzma.decompress(compressed.read_bytes()), topics)
        except (SafetensorError, lzma.LZMAError, ValueError, IndexError, KeyError) as error:
            raise DataError(f"{shard} is damaged ({error}); generate the data again") from error
        count += len(block)
        yield block
    if count != header.get("conversations"):
        raise DataError(
            f"{path} holds {count} conversations where {HEADER_FILE} names {header.get('conversations')}; a shard was exchanged"
        )


def load_conversations(path: str | Path) -> tuple[list[Conversation], dict[str, Any]]:
    """Read what `ConversationWriter` wrote.

    Returns:
        The conversations in their order, and the header.

    Raises:
        DataError: the folder or a shard is missing or damaged.
    """
    return [conversation for block in read_blocks(path) for conversation in block], read_header(path)


def _sealed_name(index: int) -> str:
    return f"conversations-{index:05d}.safetensors"


def _final_name(index: int, count: int) -> str:
    return f"conversations-{index:05d}-of-{count:05d}.safetensors"


def _read_shard(content: bytes, topics: Sequence[str]) -> ConversationBlock:
    data = load(content)
    tokens, offsets = data["input_ids"], data["offsets"].astype(np.int64)
    if offsets[0] != 0 or offsets[-1] != len(tokens) or len(offsets) != len(data["topics"]) + 1 or (np.diff(offsets) < 0).any():
        raise ValueError("its offsets do not fit its tokens")
    mask = np.unpackbits(data["loss_mask"], count=len(tokens)).astype(np.bool_)
    names = [topics[topic] for topic in data["topics"].tolist()]
    return ConversationBlock(tokens, mask, np.diff(offsets), names, data["truncated"].astype(np.bool_))
