"""Conversations as tokens with a loss mask, and whole conversations packed into rows of one length."""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from speculators.errors import DataError


@dataclass(frozen=True)
class Conversation:
    """One conversation.

    Attributes:
        input_ids: all tokens, template included.
        loss_mask: True exactly where a token is the verifier's own reply, its stop token included. Prompts, assistant
            headers and what the template puts behind the stop token are False.
        topic: what it is about, for counting.
        truncated: the reply was cut by its budget before the verifier stopped.
    """

    input_ids: list[int]
    loss_mask: list[bool]
    topic: str = ""
    truncated: bool = False

    def __post_init__(self) -> None:
        if len(self.input_ids) != len(self.loss_mask):
            raise DataError(
                f"a conversation has {len(self.input_ids)} tokens and {len(self.loss_mask)} loss mask entries; they must be as many"
            )

    @property
    def reply_tokens(self) -> int:
        """Number of labels."""
        return sum(self.loss_mask)

    @property
    def labels(self) -> list[int]:
        """The supervised tokens, in order."""
        return [token for token, is_label in zip(self.input_ids, self.loss_mask, strict=True) if is_label]


@dataclass(frozen=True)
class PackedRows:
    """n rows of S tokens; a row holds whole documents one after the other, then padding.

    Attributes:
        input_ids: [n, S] int32, 0 on padding.
        loss_mask: [n, S] bool, as in `Conversation`; False on padding.
        position_ids: [n, S] int32, restarting at 0 with every document; 0 on padding.
        document_ids: [n, S] int32, ascending from 0 inside a row; -1 on padding.
    """

    input_ids: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    document_ids: Tensor

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    def __getitem__(self, rows: slice | Tensor) -> PackedRows:
        """Some of the rows."""
        return PackedRows(self.input_ids[rows], self.loss_mask[rows], self.position_ids[rows], self.document_ids[rows])

    @property
    def reply_tokens(self) -> int:
        """Number of labels in all rows."""
        return int(self.loss_mask.sum())

    @property
    def learnable_tokens(self) -> int:
        """Number of labels right behind another label of their document, which is not its first token.

        Drafting goes on from a token of the reply, and from a context in front of it: the other labels are never drafted.
        """
        behind = self.loss_mask[:, :-1] & (self.document_ids[:, :-1] == self.document_ids[:, 1:]) & (self.position_ids[:, :-1] > 0)
        return int((behind & self.loss_mask[:, 1:]).sum())

    @property
    def fill(self) -> float:
        """Share of the positions that is not padding."""
        return float((self.document_ids >= 0).float().mean())


def pack(conversations: Sequence[Conversation], row_length: int, seed: int = 0) -> PackedRows:
    """Pack documents into rows by best fit, longest first: each goes to the fullest row that still has room for it.

    A document longer than a row is cut at the row's end. One without any label within the row is left out, since
    nothing could be learned from it.

    Args:
        conversations: the documents.
        row_length: S, tokens a row.
        seed: of the rows' order, and of the order among documents of equal length.

    Raises:
        DataError: there is no label in any document, or the row length is not positive.
    """
    if row_length < 1:
        raise DataError(f"row_length = {row_length} must be at least 1 token")
    documents = [conversation for conversation in conversations if any(conversation.loss_mask[:row_length])]
    if not conversations:
        raise DataError("there are no conversations to pack; prepare some, or hold fewer of them out")
    if not documents:
        raise DataError(
            f"none of {len(conversations)} conversations holds a reply within its first {row_length} tokens; there is nothing to train on"
        )
    shuffle = random.Random(seed)
    shuffle.shuffle(documents)
    documents.sort(key=lambda document: -len(document.input_ids))  # stable: equal lengths keep their random order
    rows = _best_fit([min(len(document.input_ids), row_length) for document in documents], row_length)
    shuffle.shuffle(rows)
    shape = (len(rows), row_length)
    input_ids, position_ids, document_ids = np.zeros((3, *shape), dtype=np.int32)
    document_ids -= 1
    loss_mask = np.zeros(shape, dtype=np.bool_)
    for row, members in enumerate(rows):
        start = 0
        for index, member in enumerate(members):
            document = documents[member]
            length = min(len(document.input_ids), row_length)
            here = slice(start, start + length)
            input_ids[row, here] = document.input_ids[:length]
            loss_mask[row, here] = document.loss_mask[:length]
            position_ids[row, here] = np.arange(length)
            document_ids[row, here] = index
            start += length
    return PackedRows(*(torch.from_numpy(array) for array in (input_ids, loss_mask, position_ids, document_ids)))


def pack_held_out(conversations: Sequence[Conversation], row_length: int, seed: int = 0) -> PackedRows | None:
    """Pack conversations that are only evaluated; None where none of them has a label within a row: training needs none of them."""
    if not any(any(conversation.loss_mask[:row_length]) for conversation in conversations):
        return None
    return pack(conversations, row_length, seed)


def _best_fit(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Rows of document numbers, for lengths in descending order."""
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # free tokens -> rows with exactly so many
    sizes: list[int] = []  # the keys of with_room, ascending
    for document, length in enumerate(lengths):
        place = bisect_left(sizes, length)
        if place == len(sizes):
            row, room = len(rows), row_length
            rows.append([])
        else:
            room = sizes[place]
            row = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], sizes[place]
        rows[row].append(document)
        left = room - length
        if left:
            if left not in with_room:
                with_room[left] = []
                insort(sizes, left)
            with_room[left].append(row)
    return rows


def split_held_out(conversations: Sequence[Conversation], share: float) -> tuple[list[Conversation], list[Conversation]]:
    """Split into training and held-out conversations by a hash of what precedes the first reply.

    A conversation's side depends on its prompt and the share alone: equal prompts never stand on both sides, and more
    data leaves the earlier ones where they were.

    Args:
        conversations: to be split; order is kept.
        share: expected share held out, in [0, 1).

    Raises:
        DataError: the share is out of range.
    """
    if not 0 <= share < 1:
        raise DataError(f"the held-out share {share} must be at least 0 and below 1")
    train: list[Conversation] = []
    held_out: list[Conversation] = []
    for conversation in conversations:
        prompt = conversation.input_ids[: conversation.loss_mask.index(True)] if any(conversation.loss_mask) else conversation.input_ids
        digest = hashlib.blake2b(np.asarray(prompt, dtype=np.uint32).tobytes(), digest_size=8).digest()
        (held_out if int.from_bytes(digest, "little") < share * 2**64 else train).append(conversation)
    return train, held_out
