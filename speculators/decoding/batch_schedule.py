"""K by batch size, for servers that choose it from the number of running requests alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from speculators.decoding.step_times import StepTimes
from speculators.errors import ConfigError


def num_speculative_tokens_per_batch_size(
    acceptance: Sequence[float], times: StepTimes, *, max_batch_size: int, min_draft_tokens: int = 0
) -> list[tuple[int, int, int]]:
    """The K of most tokens a second for every batch size, as vLLM's option of this name takes it.

    A batch of n requests that drafts K tokens each earns n (1 + sum over k <= K of the product of the first k acceptances) tokens in
    the time of such a round.

    Args:
        acceptance: conditional acceptance of drafts 1 .. K_max, e.g. `Calibration.acceptance` of the checkpoint.
        times: measured step times; beyond the grid they go on linearly.
        max_batch_size: of the server.
        min_draft_tokens: least K; 0 lets large batches decode plainly.

    Returns:
        (smallest batch size, largest batch size, K), from 1 to `max_batch_size` without gaps.

    Raises:
        ConfigError: an acceptance is no probability, or a bound is out of range.
    """
    if not acceptance or not all(0 <= value <= 1 for value in acceptance):
        raise ConfigError(f"acceptance {list(acceptance)} must hold at least one probability between 0 and 1")
    if max_batch_size < 1 or not 0 <= min_draft_tokens <= len(acceptance):
        raise ConfigError(
            f"max_batch_size {max_batch_size} must be at least 1, and min_draft_tokens {min_draft_tokens} between 0 and {len(acceptance)}"
        )
    sizes, drafts = np.arange(1, max_batch_size + 1), np.arange(min_draft_tokens, len(acceptance) + 1)
    tokens = 1 + np.concatenate([[0.0], np.cumsum(np.cumprod(acceptance))])[drafts]
    best = drafts[(tokens / times.round(sizes[:, None], drafts[None])).argmax(axis=1)]
    starts = [0, *(np.flatnonzero(np.diff(best)) + 1)]
    ends = [*starts[1:], max_batch_size]
    return [(int(start) + 1, int(end), int(best[start])) for start, end in zip(starts, ends, strict=True)]
