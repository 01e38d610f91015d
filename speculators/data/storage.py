"""Conversations on disk: a folder of safetensors shards with token ids as small as the vocabulary allows."""

from __future__ import annotations

import json
import lzma
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save_file

from speculators.data.rows import Conversation
from speculators.errors import DataError
from speculators.files import make_folder

HEADER_FILE = "header.json"
MAX_SHARD_BYTES = 15_000_000


def save_conversations(
    path: str | Path,
    conversations: Sequence[Conversation],
    header: Mapping[str, Any],
    *,
    vocab_size: int,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> list[Path]:
    """Write a new folder: `conversations-00001-of-0000n.safetensors` and `header.json`; all of it or nothing.

    A shard holds `input_ids` (uint16, or uint32 for vocabularies above 65536), `loss_mask` (bits packed into uint8),
    `offsets` (int32 starts of the conversations and the end), `topics` and `truncated` (uint8).

    Args:
        path: must not exist, or be an empty folder.
        conversations: at least one.
        header: JSON values about the data (verifier, settings, counts); its key "conversations" is set here.
        vocab_size: of the verifier.
        max_shard_bytes: largest shard.

    Raises:
        DataError: there is nothing to write, or the folder holds something already.
    """
    path = Path(path)
    if not conversations:
        raise DataError(f"no conversations to save in {path}")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise DataError(f"{path} exists already; name a new folder, or remove that one first")
    topics = sorted({conversation.topic for conversation in conversations})
    if len(topics) > 256:
        raise DataError(f"{len(topics)} different topics; at most 256 can be stored")
    shards = list(_shards(conversations, max_shard_bytes, 2 if vocab_size <= 2**16 else 4))
    full_header = {
        **header,
        "format": "speculators-conversations-1",
        "conversations": len(conversations),
        "tokens": sum(len(conversation.input_ids) for conversation in conversations),
        "reply_tokens": sum(conversation.reply_tokens for conversation in conversations),
        "topics": topics,
        "shards": len(shards),
    }
    make_folder(path.parent)
    scratch = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}-"))
    try:
        scratch.chmod(0o755)
        text = json.dumps(full_header, indent=2)
        names = [f"conversations-{index:05d}-of-{len(shards):05d}.safetensors" for index in range(1, len(shards) + 1)]
        for name, shard in zip(names, shards, strict=True):
            save_file(_tensors(shard, topics, vocab_size), scratch / name, metadata={"header": text})
            (scratch / name).chmod(0o644)  # safetensors makes it readable by its owner alone
        (scratch / HEADER_FILE).write_text(text + "\n", encoding="utf-8")
        if path.is_dir():
            path.rmdir()  # empty, as checked
        scratch.rename(path)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return [path / name for name in names]


def load_conversations(path: str | Path) -> tuple[list[Conversation], dict[str, Any]]:
    """Read what `save_conversations` wrote. Shards may have been compressed with `xz`.

    Returns:
        The conversations in their order, and the header.

    Raises:
        DataError: the folder or a shard is missing or damaged.
    """
    path = Path(path)
    header_path = path / HEADER_FILE
    if not header_path.is_file():
        raise DataError(f"{path} holds no conversations: {HEADER_FILE} is missing; pass a folder that `speculators data synthesize` wrote")
    try:
        header: dict[str, Any] = json.loads(header_path.read_text(encoding="utf-8"))
        shard_count, topics = int(header["shards"]), list(header["topics"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{header_path} is damaged ({error}); generate the data again") from error
    conversations: list[Conversation] = []
    for index in range(1, shard_count + 1):
        shard = path / f"conversations-{index:05d}-of-{shard_count:05d}.safetensors"
        compressed = shard.with_name(f"{shard.name}.xz")
        if not shard.is_file() and not compressed.is_file():
            raise DataError(f"{shard} is missing; {HEADER_FILE} names {shard_count} shards")
        try:
            content = shard.read_bytes() if shard.is_file() else lzma.decompress(compressed.read_bytes())
            conversations += _read_shard(content, topics)
        except (SafetensorError, lzma.LZMAError, ValueError, IndexError, KeyError) as error:
            raise DataError(f"{shard} is damaged ({error}); generate the data again") from error
    named = header.get("conversations")
    if len(conversations) != named:
        raise DataError(f"{path} holds {len(conversations)} conversations where {HEADER_FILE} names {named}; a shard was exchanged")
    return conversations, header


def _shards(conversations: Sequence[Conversation], max_bytes: int, bytes_a_token: int) -> Iterator[list[Conversation]]:
    shard: list[Conversation] = []
    budget = size = max_bytes - 100_000  # the header and safetensors' own
    for conversation in conversations:
        needed = len(conversation.input_ids) * (8 * bytes_a_token + 1) // 8 + 8
        if shard and needed > size:
            yield shard
            shard, size = [], budget
        shard.append(conversation)
        size -= needed
    yield shard


def _tensors(shard: Sequence[Conversation], topics: Sequence[str], vocab_size: int) -> dict[str, np.ndarray[Any, Any]]:
    lengths = [len(conversation.input_ids) for conversation in shard]
    number = {topic: index for index, topic in enumerate(topics)}
    tokens = np.concatenate([np.asarray(conversation.input_ids, dtype=np.int64) for conversation in shard])
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise DataError(f"token ids from {tokens.min()} to {tokens.max()} do not fit a vocabulary of {vocab_size}")
    return {
        "input_ids": tokens.astype(np.uint16 if vocab_size <= 2**16 else np.uint32),
        "loss_mask": np.packbits(np.concatenate([np.asarray(conversation.loss_mask, dtype=np.bool_) for conversation in shard])),
        "offsets": np.cumsum([0, *lengths], dtype=np.int32),
        "topics": np.asarray([number[conversation.topic] for conversation in shard], dtype=np.uint8),
        "truncated": np.asarray([conversation.truncated for conversation in shard], dtype=np.uint8),
    }


def _read_shard(content: bytes, topics: Sequence[str]) -> list[Conversation]:
    data = load(content)
    tokens: list[int] = data["input_ids"].tolist()
    mask: list[bool] = np.unpackbits(data["loss_mask"], count=len(tokens)).astype(np.bool_).tolist()
    offsets: list[int] = data["offsets"].tolist()
    if offsets[0] != 0 or offsets[-1] != len(tokens) or len(offsets) != len(data["topics"]) + 1:
        raise ValueError("its offsets do not fit its tokens")
    return [
        Conversation(tokens[start:end], mask[start:end], topics[topic], bool(truncated))
        for start, end, topic, truncated in zip(offsets[:-1], offsets[1:], data["topics"].tolist(), data["truncated"].tolist(), strict=True)
    ]
