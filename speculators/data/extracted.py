"""Hidden states that a serving engine extracted: one safetensors file a conversation.

vLLM writes them with its speculative method `extract_hidden_states`: `token_ids` [T] and `hidden_states` [T, planes, hidden],
a plane for every layer id it was asked for, in ascending order. Layer ids are ours: the residual stream after so many layers,
the last of all before the final norm. Some connectors quantise to float8 and add `hidden_states_scales` [T, 1, 1].

A file is found by its tokens, never by its name or place: engines reorder and retry, and a state of another conversation's
token would train a drafter to nothing without any error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from speculators.errors import ConfigError, DataError


class ExtractedStates:
    """Looks up the hidden states of packed rows in extracted files.

    Args:
        folder: of the files; folders in it are searched too.
        layers: layer ids of the planes in the files.
        taps: layer ids wanted.
        num_layers: of the verifier; its own id, the stream before the final norm, must be among `layers`.
        hidden_size: of the verifier.

    Raises:
        ConfigError: a wanted layer was not extracted.
        DataError: there are no files, or one cannot be read.
    """

    def __init__(self, folder: str | Path, layers: Sequence[int], taps: Sequence[int], num_layers: int, hidden_size: int) -> None:
        self._layers, self._hidden_size = sorted(set(layers)), hidden_size
        missing = sorted({*taps, num_layers} - set(self._layers))
        if missing:
            name = "the stream before the final norm" if missing[0] == num_layers else "a tap"
            raise ConfigError(
                f"layer {missing[0]} ({name}) is not among the extracted layers {self._layers};"
                f" extract {sorted({*taps, num_layers})} of the {num_layers}-layer verifier"
            )
        self._planes = [self._layers.index(layer) for layer in (*taps, num_layers)]
        self._files = sorted(Path(folder).rglob("*.safetensors"))
        if not self._files:
            raise DataError(f"{folder} holds no extracted hidden states (*.safetensors)")
        self._by_tokens: dict[bytes, Path] = {}
        self._row_length = 0

    def __call__(self, input_ids: Tensor, position_ids: Tensor, document_ids: Tensor) -> Tensor:
        """[R, S, taps + 1, hidden] bfloat16, the taps in order and then the last stream; zeros on padding.

        Args:
            input_ids, position_ids, document_ids: [R, S] int64, as in `PackedRows`.

        Raises:
            DataError: a document has no file, or its file is damaged or of another shape.
        """
        self._index(input_ids.shape[1])
        states = torch.zeros((*input_ids.shape, len(self._planes), self._hidden_size), dtype=torch.bfloat16)
        for row in range(len(input_ids)):
            for document in document_ids[row].unique().tolist():
                if document >= 0:
                    places = (document_ids[row] == document).nonzero().flatten()
                    states[row, places] = self._read(input_ids[row, places])
        return states

    def _index(self, row_length: int) -> None:
        """Find every file by the tokens that a row of this length can hold of it."""
        if self._row_length == row_length:
            return
        self._row_length, self._by_tokens = row_length, {}
        for file in self._files:
            with _opened(file) as content:
                self._by_tokens[_key(content.get_tensor("token_ids").flatten()[:row_length])] = file

    def _read(self, token_ids: Tensor) -> Tensor:
        file = self._by_tokens.get(_key(token_ids))
        if file is None:
            raise DataError(
                f"no extracted file holds the conversation that begins with the tokens {token_ids[:8].tolist()}...;"
                " extract the hidden states of exactly the prepared conversations"
            )
        with _opened(file) as content:
            part = content.get_slice("hidden_states")
            shape = part.get_shape()
            if len(shape) != 3 or shape[0] < len(token_ids) or shape[1:] != [len(self._layers), self._hidden_size]:
                raise DataError(
                    f"{file} has hidden states of shape {shape}, not [at least {len(token_ids)}, {len(self._layers)},"
                    f" {self._hidden_size}] for the layers {self._layers}; extract them again"
                )
            states: Tensor = part[: len(token_ids)]
            if "hidden_states_scales" in content.keys():  # noqa: SIM118 (no mapping)
                states = states.float() * content.get_slice("hidden_states_scales")[: len(token_ids)].view(len(token_ids), -1, 1)
        states = states[:, self._planes].to(torch.bfloat16)
        if not bool(states.isfinite().all()):
            raise DataError(f"{file} holds hidden states that are not finite; extract them again")
        return states


def _key(token_ids: Tensor) -> bytes:
    return hashlib.blake2b(token_ids.to(torch.int64).numpy().astype(np.int64).tobytes(), digest_size=16).digest()


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """`safe_open` whose errors name the file in one sentence."""
    try:
        with safe_open(file, framework="pt") as content:
            if not {"token_ids", "hidden_states"} <= set(content.keys()):
                raise DataError(f"{file} holds no token_ids and hidden_states; pass the folder that the engine extracted to")
            yield content
    except (SafetensorError, OSError) as error:
        raise DataError(f"{file} is damaged ({error}); extract it again") from None
