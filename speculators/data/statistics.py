"""What a set of conversations looks like, in numbers that show what is wrong with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from speculators.data.rows import Conversation
from speculators.evaluation.metrics import is_degenerate


def statistics(conversations: Iterable[Conversation]) -> dict[str, Any]:
    """Counts and lengths, JSON values.

    Args:
        conversations: read once, so that a stream will do; only lengths and counts of tokens are kept of it.

    Returns:
        conversations, tokens, reply_tokens; the share of tokens supervised; the 10th, 50th and 90th percentile and the largest
        of conversation and reply lengths in tokens; different tokens in replies, and how many of them make up 90% of the
        replies; conversations by topic; shares of truncated and of looping replies.
    """
    lengths: list[int] = []
    replies: list[int] = []
    topics: Counter[str] = Counter()
    tokens: Counter[int] = Counter()
    truncated = looping = 0
    for conversation in conversations:
        labels = conversation.labels
        lengths.append(len(conversation.input_ids))
        replies.append(len(labels))
        tokens.update(labels)
        topics[conversation.topic] += 1
        truncated += conversation.truncated
        looping += is_degenerate(labels)
    count = len(lengths)
    if not count:
        return {"conversations": 0, "tokens": 0, "reply_tokens": 0}
    frequencies = np.sort(np.fromiter(tokens.values(), dtype=np.int64))[::-1]
    return {
        "conversations": count,
        "tokens": sum(lengths),
        "reply_tokens": sum(replies),
        "supervised_share": round(sum(replies) / sum(lengths), 4),
        "conversation_length": _percentiles(lengths),
        "reply_length": _percentiles(replies),
        "different_reply_tokens": len(tokens),
        "tokens_for_90_percent": int(np.searchsorted(frequencies.cumsum(), 0.9 * frequencies.sum()) + 1) if len(frequencies) else 0,
        "conversations_by_topic": dict(topics.most_common()),
        "truncated_share": round(truncated / count, 4),
        "looping_share": round(looping / count, 4),
    }


def _percentiles(values: list[int]) -> dict[str, int]:
    array = np.asarray(values)
    return {name: int(np.percentile(array, share)) for name, share in (("p10", 10), ("p50", 50), ("p90", 90), ("max", 100))}
