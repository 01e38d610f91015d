"""Keeping evaluation prompts out of training data: no 13 tokens and no 13 words in a row in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from speculators.data.prompts import read_prompts
from speculators.data.rows import Conversation
from speculators.verifier import Verifier

NGRAM_SIZE = 13

Ngram = tuple[int, ...]


class PromptIndex:
    """All 13-grams of a set of texts, as token ids and as whitespace-separated words in lower case."""

    def __init__(
        self, texts: Iterable[str], encode: Callable[[str], Sequence[int]], decode: Callable[[Sequence[int]], str], size: int = NGRAM_SIZE
    ) -> None:
        """Index texts.

        Args:
            texts: all turns of the evaluation prompts.
            encode: text to token ids, without special tokens.
            decode: token ids to text, special tokens left out.
            size: n of the n-grams.
        """
        self._encode, self._decode, self._size = encode, decode, size
        self._vocabulary: dict[str, int] = {}
        self._tokens, self._words = _NgramSet(size), _NgramSet(size)
        for text in texts:
            self._tokens.add(encode(text))
            self._words.add([self._vocabulary.setdefault(word, len(self._vocabulary) + 1) for word in text.lower().split()])

    @classmethod
    def from_prompt_files(cls, paths: Iterable[str | Path], verifier: Verifier) -> PromptIndex:
        """Index every turn of every prompt in JSONL files.

        Raises:
            DataError: a file cannot be read.
        """
        tokenizer = verifier.tokenizer
        assert tokenizer is not None
        return cls(
            (turn for path in paths for prompt in read_prompts(path) for turn in prompt.turns),
            lambda text: tokenizer(text, add_special_tokens=False)["input_ids"],
            lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)),
        )

    def overlaps(self, conversation: Conversation | Sequence[int]) -> bool:
        """Whether a conversation, prompt and reply, shares an n-gram of tokens or of words with an indexed text."""
        token_ids = conversation.input_ids if isinstance(conversation, Conversation) else conversation
        if self._tokens.meets(token_ids):
            return True
        # Words that no prompt contains become 0, which no indexed n-gram contains.
        words = [self._vocabulary.get(word, 0) for word in self._decode(token_ids).lower().split()]
        return self._words.meets(words)


class _NgramSet:
    """n-grams of integers. A hash finds candidates quickly, the n-grams themselves decide."""

    def __init__(self, size: int) -> None:
        self._size = size
        # Odd multipliers make a fixed linear hash modulo 2^64.
        self._multipliers = np.random.default_rng(13).integers(2**63, size=size, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        self._hashes: set[int] = set()
        self._ngrams: set[Ngram] = set()

    def add(self, sequence: Sequence[int]) -> None:
        self._hashes.update(self._hash(sequence).tolist())
        self._ngrams.update(self._split(sequence))

    def meets(self, sequence: Sequence[int]) -> bool:
        if self._hashes.isdisjoint(self._hash(sequence).tolist()):
            return False
        return any(ngram in self._ngrams for ngram in self._split(sequence))

    def _split(self, sequence: Sequence[int]) -> Iterable[Ngram]:
        return (tuple(sequence[start : start + self._size]) for start in range(len(sequence) - self._size + 1))

    def _hash(self, sequence: Sequence[int]) -> NDArray[np.uint64]:
        if len(sequence) < self._size:
            return np.zeros(0, dtype=np.uint64)
        windows = np.lib.stride_tricks.sliding_window_view(np.asarray(sequence, dtype=np.uint64), self._size)
        hashes: NDArray[np.uint64] = (windows * self._multipliers).sum(axis=1, dtype=np.uint64)
        return hashes
