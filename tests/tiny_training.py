"""Packed rows of random conversations and short runs over them, for tests of training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import toy_algorithm  # noqa: F401 (registers the toy)

from speculators.data.rows import Conversation, PackedRows, pack
from speculators.training.config import TrainingConfig

ROW_LENGTH = 24


def packed_rows(count: int = 8, seed: int = 0, vocab_size: int = 64, prompt: int = 3) -> PackedRows:
    """`count` rows of two random conversations each, with a little padding; the first `prompt` tokens are not supervised."""
    generator = torch.Generator().manual_seed(seed)
    conversations = []
    for _ in range(count):
        # Two lengths of which two fill one row, and three never fit.
        first = int(torch.randint(9, 13, (1,), generator=generator))
        for length in (first, ROW_LENGTH - first - 1):
            tokens = torch.randint(0, vocab_size - 1, (length,), generator=generator).tolist()
            conversations.append(Conversation(tokens, [index >= prompt for index in range(length)]))
    rows = pack(conversations, row_length=ROW_LENGTH)
    assert rows.input_ids.shape == (count, ROW_LENGTH)
    return rows


def without_supervision(rows: PackedRows, *numbers: int) -> PackedRows:
    """The same rows, nothing supervised in some of them (in all of them, if none are named)."""
    mask = rows.loss_mask.clone()
    mask[list(numbers) if numbers else slice(None)] = False
    return replace(rows, loss_mask=mask)


def tiny_config(**fields: Any) -> TrainingConfig:
    """A short toy run on the CPU; `fields` override."""
    chosen: dict[str, Any] = {
        "method": "toy",
        "steps": 6,
        "rows_per_step": 4,
        "learning_rate": 3e-3,
        "warmup": 0.25,
        "log_every": 1,
        "progress": False,
        **fields,
    }
    return TrainingConfig(**chosen)


_BLOCK: dict[str, Any] = {"num_layers": 1, "num_draft_tokens": 3, "aux_hidden_state_layer_ids": [1, 2], "mask_token_id": 3}

# Options of drafters that fit the tiny verifiers.
DRAFTERS: dict[str, dict[str, Any]] = {
    "toy": {},
    "dflash": {**_BLOCK, "training": {"anchors": 4}},
    "dspark": {**_BLOCK, "training": {"anchors": 4}, "markov_rank": 4},
}
