"""Prompt files: JSON lines in any of the forms that prompt collections commonly have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speculators.data.forms import ACCEPTED_FORMS, RowError, Tokens, read_line
from speculators.errors import DataError


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        turns: the user's turns, at least one, none empty. The library answers the first one only.
        system: the system message that the file gives, or None for the chat template's own.
        identifier: the line's "id", else "<file name>:<line number>".
    """

    turns: tuple[str, ...]
    system: str | None = None
    identifier: str = ""

    @property
    def text(self) -> str:
        """The first turn."""
        return self.turns[0]

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The first turn as chat messages, for `Verifier.encode_chat`."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": self.text}]


def read_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """Read a prompt file. Blank lines are skipped; what stands after the first user turn of a conversation is not used.

    Args:
        path: a JSONL file in UTF-8.
        limit: read at most this many prompts.

    Raises:
        DataError: the file is missing, not text, without prompts, or a line has none of the accepted forms.
    """
    path = Path(path)
    if not path.is_file():
        kind = "a folder, not a file" if path.is_dir() else "missing"
        raise DataError(f"prompt file {path} is {kind}; pass a JSONL file: {ACCEPTED_FORMS}")
    prompts: list[Prompt] = []
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if limit is not None and len(prompts) >= limit:
                    break
                if line.strip():
                    prompts.append(_parse_line(line, f"{path}, line {number}", f"{path.name}:{number}"))
    except UnicodeDecodeError as error:
        raise DataError(f"prompt file {path} is not UTF-8 text (byte {error.start}); pass a JSONL file: {ACCEPTED_FORMS}") from error
    if not prompts and limit != 0:
        raise DataError(f"prompt file {path} holds no prompts; it needs {ACCEPTED_FORMS}")
    return prompts


def _parse_line(line: str, where: str, default_identifier: str) -> Prompt:
    try:
        row = read_line(line)
    except RowError as error:
        raise DataError(f"{where}: {error}") from None
    if isinstance(row, Tokens):
        raise DataError(f"{where}: token ids hold no prompt that could be read; expected {ACCEPTED_FORMS}")
    turns = row.user_turns
    if not all(turn.strip() for turn in turns):
        raise DataError(f"{where}: the prompt is empty; every line needs a user turn with text: {ACCEPTED_FORMS}")
    return Prompt(tuple(turns), row.system, row.identifier or default_identifier)
