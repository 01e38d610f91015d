"""Special tokens that no conversation holds: what a drafter can feed to slots that have no token yet."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

# Set aside by the makers of the model, and met in no text: Llama 3's and gpt-oss's reserved tokens, Gemma's unused ones,
# Phi's dummies and DeepSeek's placeholders, Mistral's control and special tokens by number.
_RESERVED = re.compile(r"reserved|unused|dummy|place.?holder|extra_?(id)?_?\d|control_\d|special_\d|^\W*mask\W*$", re.IGNORECASE)
# Met in other training data than chats: code to fill in, and the padding of it.
_OUTSIDE_CHATS = re.compile(r"fim\W|fim_|pad", re.IGNORECASE)
# Stand for inputs that a conversation may have.
_INPUTS = re.compile(r"image|img|video|vision|audio|speech|sound", re.IGNORECASE)


def unused_special_tokens(tokenizer: Any, excluded: Collection[int], vocab_size: int) -> tuple[int, ...]:
    """Special tokens that occur in no chat, the best first: reserved ones, those of code to fill in, then the others.

    Left out is what the chat template mentions, what has a role (begin, end, padding, unknown), and what stands for other inputs.

    Args:
        tokenizer: of transformers; None has none.
        excluded: further ids that have a role, such as stop tokens.
        vocab_size: rows of the embedding table; a tokenizer may have more tokens.

    Returns:
        Token ids; in each of the three groups, the highest first.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {})
    template = str(getattr(tokenizer, "chat_template", None) or "")
    roles = {getattr(tokenizer, f"{role}_token_id", None) for role in ("bos", "eos", "pad", "unk", "sep", "cls")} | set(excluded)
    groups: tuple[list[int], list[int], list[int]] = ([], [], [])
    for token_id, token in sorted(added.items(), reverse=True):
        name = str(token.content)
        if token_id in roles or token_id >= vocab_size or name in template or not name.strip():
            continue
        if _RESERVED.search(name):
            groups[0].append(token_id)
        elif _INPUTS.search(name):
            continue
        elif _OUTSIDE_CHATS.search(name):
            groups[1].append(token_id)
        elif token.special:  # others, such as <tool_call> or <think>, are what replies are made of
            groups[2].append(token_id)
    return tuple(token_id for group in groups for token_id in group)
