"""Prompt files: JSON lines in any of the forms that prompt collections commonly have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speculators.errors import DataError

ACCEPTED_FORMS = (
    'a JSON object a line with "turns" (a list of strings), "messages" (role and content), "conversations" (from and value),'
    ' "prompt", or "instruction" with an optional "input"'
)

_USER_ROLES = ("user", "human")
_ASSISTANT_ROLES = ("assistant", "gpt", "chatgpt", "bot", "model")


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
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not valid JSON ({error.msg} at column {error.colno}); expected {ACCEPTED_FORMS}") from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: a JSON {type(record).__name__} where an object is expected: {ACCEPTED_FORMS}")
    system, turns = _read_turns(record, where)
    if not turns or not all(turn.strip() for turn in turns):
        raise DataError(f"{where}: the prompt is empty; every line needs a user turn with text: {ACCEPTED_FORMS}")
    return Prompt(tuple(turns), system, str(record.get("id", default_identifier)))


def _read_turns(record: Mapping[str, Any], where: str) -> tuple[str | None, list[str]]:
    if "turns" in record:
        turns = record["turns"]
        if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
            raise DataError(f'{where}: "turns" must be a list of strings')
        return record.get("system"), turns
    for key, role_key, content_key in (("messages", "role", "content"), ("conversations", "from", "value")):
        if key in record:
            return _read_messages(record[key], key, role_key, content_key, where)
    if "prompt" in record:
        prompt = record["prompt"]
        if isinstance(prompt, list):
            return _read_messages(prompt, "prompt", "role", "content", where)
        return record.get("system"), [_text(prompt, f'{where}: "prompt"')]
    if "instruction" in record:
        instruction = _text(record["instruction"], f'{where}: "instruction"')
        extra = _text(record.get("input") or "", f'{where}: "input"')
        return record.get("system"), [f"{instruction}\n\n{extra}" if extra.strip() else instruction]
    keys = ", ".join(repr(key) for key in list(record)[:6]) or "none"
    raise DataError(f"{where}: no prompt among the keys {keys}; expected {ACCEPTED_FORMS}")


def _read_messages(messages: Any, key: str, role_key: str, content_key: str, where: str) -> tuple[str | None, list[str]]:
    """The system message and the user turns of a conversation in one of the two common spellings."""
    if not isinstance(messages, list):
        raise DataError(f'{where}: "{key}" must be a list of objects with "{role_key}" and "{content_key}"')
    system: str | None = None
    turns: list[str] = []
    for message in messages:
        if not isinstance(message, dict) or role_key not in message or content_key not in message:
            raise DataError(f'{where}: each entry of "{key}" needs "{role_key}" and "{content_key}"')
        role = message[role_key]
        if role == "system":
            system = _text(message[content_key], f"{where}: the system message")
        elif role in _USER_ROLES:
            turns.append(_text(message[content_key], f"{where}: a user turn"))
        elif role not in _ASSISTANT_ROLES and role != "tool":
            raise DataError(
                f"{where}: unknown {role_key} {role!r}; expected system, {', '.join((*_USER_ROLES, *_ASSISTANT_ROLES))} or tool"
            )
        elif not turns:
            raise DataError(f"{where}: the conversation starts with {role!r}; it must start with a user turn")
    return system, turns


def _text(value: Any, what: str) -> str:
    """A string, or the text parts of a list of content parts."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in value):
        return "\n".join(str(part.get("text", "")) for part in value)
    raise DataError(f"{what} must be text, not {type(value).__name__}; other content (images, audio) cannot be used")
