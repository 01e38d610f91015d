"""Learn one conversation by heart: the sharpest end-to-end test of an algorithm, and a smoke drafter for demos.

A drafter that has seen the conversation hundreds of times must have nearly all of its drafts accepted when the verifier
decodes it again. Shifted labels, positions or taps, or a mismatch between training and decoding, show at once.
"""

from __future__ import annotations

from typing import Any

from speculators.data.rows import Conversation, pack
from speculators.speculator import Speculator
from speculators.training.config import TrainingConfig
from speculators.training.trainer import train
from speculators.verifier import Verifier


def overfit(
    method: str, verifier: Verifier, conversation: Conversation, steps: int, *, learning_rate: float = 2e-3, seed: int = 0, **options: Any
) -> Speculator:
    """Train a drafter on one conversation.

    Args:
        method: the algorithm's method string.
        verifier: the verifier; its own greedy reply should be the conversation's.
        conversation: token ids and loss mask.
        steps: optimizer steps.
        learning_rate: peak.
        seed: of weights and draws.
        options: the algorithm's own settings.

    Returns:
        The speculator in the verifier's dtype, ready to decode.
    """
    rows = pack([conversation], row_length=len(conversation.input_ids))
    config = TrainingConfig(
        method=method,
        options=options,
        steps=steps,
        rows_per_step=1,
        learning_rate=learning_rate,
        seed=seed,
        log_every=steps,
        progress=False,
    )
    return train(verifier, rows, config)
