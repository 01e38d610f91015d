"""Which questions have been asked before, word by word or nearly so."""

from __future__ import annotations

import re

_NGRAM_WORDS = 8
_MAX_KNOWN_SHARE = 0.5
_WORD = re.compile(r"\w+|[^\w\s]")


class SeenQuestions:
    """Remembers questions in normal form: lower case, words and signs, any spacing."""

    def __init__(self) -> None:
        self._texts: set[int] = set()
        self._ngrams: set[int] = set()

    def repeats(self, text: str) -> str | None:
        """Remember a question unless it was asked before.

        Args:
            text: the question.

        Returns:
            "question repeated" for an equal one, "question nearly repeated" where more than half of its 8-grams
            stood in earlier ones, or None for a new one. Only new ones are remembered.
        """
        words = _WORD.findall(text.lower())
        key = hash(tuple(words))
        if key in self._texts:
            return "question repeated"
        ngrams = {hash(tuple(words[start : start + _NGRAM_WORDS])) for start in range(len(words) - _NGRAM_WORDS + 1)}
        if ngrams and len(ngrams & self._ngrams) > _MAX_KNOWN_SHARE * len(ngrams):
            return "question nearly repeated"
        self._texts.add(key)
        self._ngrams |= ngrams
        return None
