"""A document in the terminal, its supervised tokens coloured."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text

from speculators.data.rows import Conversation

SUPERVISED, CONTEXT = "bold black on green", "dim"


def coloured(document: Conversation, tokenizer: Any, *, marks: bool = False) -> Text:
    """The document's text. Supervised runs are green; with `marks` they stand in brackets as well, for terminals without colour."""
    text = Text()
    start = 0
    for supervised, run in groupby(document.loss_mask):
        length = len(list(run))
        piece: str = tokenizer.decode(document.input_ids[start : start + length])
        text.append(f"\u27e6{piece}\u27e7" if supervised and marks else piece, style=SUPERVISED if supervised else CONTEXT)
        start += length
    return text


def show(documents: list[Conversation], tokenizer: Any, title: str, console: Console) -> None:
    """Print a row's documents under a title."""
    for number, document in enumerate(documents, start=1):
        part = f", document {number} of {len(documents)}" if len(documents) > 1 else ""
        console.rule(f"{title}{part}: {document.reply_tokens} of {len(document.input_ids)} tokens supervised", style="cyan")
        console.print(coloured(document, tokenizer, marks=not console.is_terminal), soft_wrap=True)
