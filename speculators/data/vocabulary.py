"""A reduced draft vocabulary: how often replies use each token, which tokens a drafter keeps, and what it then cannot say.

`d2t` [draft vocabulary] int64 holds what must be added to a draft id to get the verifier's, `t2d` [vocabulary] bool marks the
verifier's tokens that the drafter has. Draft ids ascend with the verifier's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from speculators.data.storage import ConversationBlock
from speculators.errors import ConfigError, DataError
from speculators.files import write_bytes_atomically


@dataclass(frozen=True)
class DraftVocabulary:
    """Some of a verifier's tokens.

    Attributes:
        token_ids: [draft vocabulary] int64, the verifier's ids, ascending.
        vocab_size: of the verifier.
        coverage: share of the supervised tokens that are among them; the others can never be proposed. Positions whose label is
            outside are not trained on as hits: the distribution they are compared with is the verifier's over the kept tokens.
    """

    token_ids: Tensor
    vocab_size: int
    coverage: float

    @property
    def d2t(self) -> Tensor:
        """[draft vocabulary] int64 offsets."""
        return self.token_ids - torch.arange(len(self.token_ids))

    @property
    def t2d(self) -> Tensor:
        """[vocabulary] bool."""
        marks = torch.zeros(self.vocab_size, dtype=torch.bool)
        marks[self.token_ids] = True
        return marks


def count_labels(blocks: Iterable[ConversationBlock], vocab_size: int) -> NDArray[np.int64]:
    """[vocabulary]: how often each token is a label.

    Raises:
        DataError: a token lies outside the vocabulary.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for block in blocks:
        labels = block.tokens[block.mask].astype(np.int64)
        if len(labels) and labels.max() >= vocab_size:
            raise DataError(f"the data holds token {labels.max()}, the verifier has {vocab_size}: it was prepared for another one")
        counts += np.bincount(labels, minlength=vocab_size)
    return counts


def draft_vocabulary(counts: NDArray[np.int64], size: int, keep: Sequence[int] = ()) -> DraftVocabulary:
    """The tokens that replies use most; where they use fewer than `size`, unused ones fill up, lowest ids first.

    Args:
        counts: [vocabulary], from `count_labels`.
        size: of the draft vocabulary.
        keep: tokens that are in it whatever their count, such as stop tokens.

    Raises:
        ConfigError: the size is not positive, above the verifier's, or smaller than what must be kept.
    """
    kept = sorted(set(keep))
    if not max(1, len(kept)) <= size <= len(counts):
        raise ConfigError(f"draft_vocab_size = {size} must be at least {max(1, len(kept))} and at most the verifier's {len(counts)} tokens")
    ranked = np.argsort(-counts, kind="stable")
    chosen = np.concatenate([np.asarray(kept, dtype=np.int64), ranked[~np.isin(ranked, kept)][: size - len(kept)]])
    chosen.sort()
    total = int(counts.sum())
    return DraftVocabulary(torch.from_numpy(chosen), len(counts), int(counts[chosen].sum()) / total if total else 1.0)


def coverage(counts: NDArray[np.int64], sizes: Sequence[int]) -> dict[int, float]:
    """Size -> share of the supervised tokens that a draft vocabulary of that size has."""
    cumulative = np.sort(counts)[::-1].cumsum()
    total = max(1, int(cumulative[-1]))
    return {size: float(cumulative[min(size, len(counts)) - 1]) / total for size in sizes}


def vocabulary_key(header: dict[str, Any], size: int, vocab_size: int, keep: Sequence[int] = ()) -> str:
    """Names everything that a draft vocabulary depends on: the data, both sizes, and what is kept in any case."""
    identity = {name: header.get(name) for name in ("run", "conversations", "tokens", "reply_tokens", "shards")}
    content = json.dumps([identity, size, vocab_size, sorted(set(keep))], sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


def save_vocabulary(folder: Path, key: str, vocabulary: DraftVocabulary) -> Path:
    """Write `draft-vocabulary-<size>-<key>.safetensors` with d2t and t2d; an earlier one of another key stays beside it.

    Raises:
        DataError: the folder cannot be written to.
    """
    path = folder / f"draft-vocabulary-{len(vocabulary.token_ids)}-{key}.safetensors"
    metadata = {"coverage": repr(vocabulary.coverage)}
    write_bytes_atomically(path, save({"d2t": vocabulary.d2t, "t2d": vocabulary.t2d}, metadata=metadata))
    return path


def load_vocabulary(folder: Path, key: str, size: int) -> DraftVocabulary | None:
    """What `save_vocabulary` wrote under this very key, or None.

    Raises:
        DataError: the file is damaged.
    """
    path = folder / f"draft-vocabulary-{size}-{key}.safetensors"
    return read_vocabulary(path) if path.is_file() else None


def read_vocabulary(path: Path) -> DraftVocabulary:
    """What `save_vocabulary` wrote to this file.

    Raises:
        DataError: the file is missing or damaged.
    """
    if not path.is_file():
        raise DataError(f"there is no draft vocabulary {path}; `speculators data vocabulary --save` writes one")
    try:
        with safe_open(path, framework="pt") as content:
            t2d, covered = content.get_tensor("t2d"), float(content.metadata()["coverage"])
    except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
        raise DataError(f"{path} is damaged ({error}); remove it, `speculators data vocabulary --save` makes it anew") from None
    return DraftVocabulary(t2d.nonzero().flatten(), len(t2d), covered)
