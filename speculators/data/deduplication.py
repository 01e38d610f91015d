"""Which questions have been asked before, word by word or nearly so."""

from __future__ import annotations

import hashlib
import re

_NGRAM_WORDS = 8
_MAX_KNOWN_SHARE = 0.5
_WORD = re.compile(r"\w+|[^\w\s]")


class SeenQuestions:
    """Remembers questions in normal form: lower case, words and signs, any spacing."""

    def __init__(self) -> None:
        self._texts: set[int] = set()
        self._ngrams: set[int] = set()

    def known(self, text: str) -> str | None:
        """Whether a question was asked before.

        Args:
            text: the question.

        Returns:
            "question repeated" for an equal one, "question nearly repeated" where more than half of its 8-grams
            stood in earlier ones, or None for a new one.
        """
        key, ngrams = _normal_form(text)
        if key in self._texts:
            return "question repeated"
        if ngrams and len(ngrams & self._ngrams) > _MAX_KNOWN_SHARE * len(ngrams):
            return "question nearly repeated"
        return None

    def repeats(self, text: str) -> str | None:
        """`known`, and remember a question that is new."""
        repetition = self.known(text)
        if repetition is None:
            key, ngrams = _normal_form(text)
            self._texts.add(key)
            self._ngrams |= ngrams
        return repetition


def _normal_form(text: str) -> tuple[int, set[int]]:
    words = _WORD.findall(text.lower())
    ngrams = {_hash(words[start : start + _NGRAM_WORDS]) for start in range(len(words) - _NGRAM_WORDS + 1)}
    return _hash(words), ngrams


def _hash(words: list[str]) -> int:
    """The same in every process, unlike `hash`: two of 2^64 hashes collide once in many millions of questions."""
    return int.from_bytes(hashlib.blake2b(" ".join(words).encode(), digest_size=8).digest(), "little")
