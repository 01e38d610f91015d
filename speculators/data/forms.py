"""The forms that conversations have in files, read into one: chat messages, or token ids with their loss mask."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from speculators.data.rows import Conversation
from speculators.errors import DataError

ACCEPTED_FORMS = (
    'a JSON object a line with "messages" (role and content), "conversations" (from and value), "turns" (strings, or messages),'
    ' "prompt", "instruction" with optional "input" and "output", or "input_ids" with "loss_mask"'
)

Message = dict[str, Any]

_ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model", "bing", "bard"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "function_response", "tool_response"), "tool"),
    "function_call": "function_call",
}
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_KEPT_KEYS = ("tool_calls", "tool_call_id", "name")


class RowError(DataError):
    """A row that cannot be used.

    Attributes:
        reason: why, in few words that are the same for all rows of its kind; rejected rows are counted by it.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason


@dataclass(frozen=True)
class Chat:
    """A conversation as text.

    Attributes:
        messages: `role` (system, user, assistant or tool) and `content` (a string); assistants may have `reasoning_content`
            and `tool_calls`.
        tools: JSON schemas of the tools that the assistant may call, or None.
        identifier: the row's "id", or "".
        facts: the row's "metadata" (who wrote the replies and how), as far as it has any.
    """

    messages: list[Message]
    tools: list[Any] | None = None
    identifier: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def user_turns(self) -> list[str]:
        """The texts of the user's messages."""
        return [message["content"] for message in self.messages if message["role"] == "user"]

    @property
    def system(self) -> str | None:
        """The system message, or None."""
        return next((message["content"] for message in self.messages if message["role"] == "system"), None)


@dataclass(frozen=True)
class Tokens:
    """A conversation as tokens.

    Attributes:
        conversation: token ids and loss mask.
        identifier, facts: as in `Chat`.
    """

    conversation: Conversation
    identifier: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


def main_reasons(counts: Mapping[str, int]) -> str:
    """The three most frequent reasons with their numbers, as "3 not valid JSON; 1 no user turn"; empty where there are none."""
    return "; ".join(f"{count} {reason}" for reason, count in Counter(counts).most_common(3))


def read_line(line: str) -> Chat | Tokens:
    """A line of a JSONL file; see `read_record`.

    Raises:
        RowError: it is not JSON, or none of the forms.
    """
    try:
        record = json.loads(line)
    except ValueError as error:
        where = f" ({error.msg} at column {error.colno})" if isinstance(error, json.JSONDecodeError) else ""
        raise RowError("not valid JSON", f"not valid JSON{where}; expected {ACCEPTED_FORMS}") from None
    except RecursionError:
        raise RowError("not valid JSON", f"JSON nested too deeply; expected {ACCEPTED_FORMS}") from None
    return read_record(record)


def read_record(record: Any) -> Chat | Tokens:
    """Read one row in whatever form it has.

    A row with token ids and a loss mask is taken as tokens, also where it has messages, since only tokens say exactly what
    the verifier wrote.

    Args:
        record: the parsed JSON.

    Raises:
        RowError: it has none of the forms, or breaks the rules of its own.
    """
    if not isinstance(record, dict):
        raise RowError("not an object", f"a JSON {type(record).__name__} where an object is expected: {ACCEPTED_FORMS}")
    facts = record.get("metadata")
    facts = facts if isinstance(facts, dict) else {}
    identifier = str(record.get("id", record.get("conversation_id", "")))
    ids_key = next((key for key in ("input_ids", "token_ids") if key in record), None)
    if ids_key is not None and "loss_mask" in record:
        return Tokens(_read_tokens(record, ids_key), identifier, facts)
    messages = _read_messages(record)
    if isinstance(system := record.get("system"), str) and system and messages and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    if not any(message["role"] == "user" and message["content"].strip() for message in messages):
        raise RowError("no user turn", f"the prompt is empty; every line needs a user turn with text: {ACCEPTED_FORMS}")
    tools = _read_tools(record.get("tools"))
    _refuse_lone_surrogates([messages, tools])
    return Chat(messages, tools, identifier, facts)


def _read_messages(record: Mapping[str, Any]) -> list[Message]:
    for key, role_key, content_key in (("messages", "role", "content"), ("conversations", "from", "value")):
        if key in record:
            return _listed(record[key], key, role_key, content_key)
    if "turns" in record:
        turns = record["turns"]
        if isinstance(turns, list) and all(isinstance(turn, str) for turn in turns):
            return [{"role": "user", "content": turn} for turn in turns]
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            raise RowError("malformed turns", '"turns" must be a list of strings, or of messages')
        return _listed(turns, "turns", "role", "content")
    if "prompt" in record:
        prompt = record["prompt"]
        messages = _listed(prompt, "prompt", "role", "content") if isinstance(prompt, list) else [_user(prompt, '"prompt"')]
        return messages + _answer(record, ("response", "completion", "output"))
    if "instruction" in record:
        instruction, extra = _text(record["instruction"], '"instruction"'), _text(record.get("input") or "", '"input"')
        question = f"{instruction}\n\n{extra}" if extra.strip() else instruction
        return [{"role": "user", "content": question}, *_answer(record, ("output", "response"))]
    keys = ", ".join(repr(key) for key in list(record)[:6]) or "none"
    raise RowError("none of the known forms", f"no prompt among the keys {keys}; expected {ACCEPTED_FORMS}")


def _listed(entries: Any, key: str, role_key: str, content_key: str) -> list[Message]:
    """Messages in one of the two common spellings, each entry on its own."""
    if not isinstance(entries, list):
        raise RowError("malformed messages", f'"{key}" must be a list of objects with "{role_key}" and "{content_key}"')
    messages: list[Message] = []
    for entry in entries:
        spelling = (role_key, content_key)
        if isinstance(entry, dict) and role_key not in entry:  # both spellings are met under both keys
            spelling = ("from", "value") if role_key == "role" else ("role", "content")
        if not isinstance(entry, dict) or spelling[0] not in entry or not (spelling[1] in entry or "tool_calls" in entry):
            raise RowError("malformed messages", f'each entry of "{key}" needs "{role_key}" and "{content_key}"')
        messages.append(_message(entry, *spelling))
    first = next((message["role"] for message in messages if message["role"] != "system"), "user")
    if first != "user":
        raise RowError("no user turn first", f"the conversation starts with {first!r}; it must start with a user turn")
    return messages


def _message(entry: Mapping[str, Any], role_key: str, content_key: str) -> Message:
    role = _ROLES.get(str(entry[role_key]).lower())
    if role is None:
        raise RowError("unknown role", f"unknown {role_key} {entry[role_key]!r}; expected {', '.join(dict.fromkeys(_ROLES))}")
    content = _text(entry.get(content_key) or "", f"a {role} turn" if role != "system" else "the system message")
    if role == "function_call":
        return {"role": "assistant", "content": "", "tool_calls": [_called_function(content)]}
    message: Message = {"role": role, "content": content}
    message |= {key: entry[key] for key in _KEPT_KEYS if entry.get(key)}
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise RowError("malformed tool call", '"tool_calls" must be a list of objects')
    if role == "assistant":
        reasoning = next((entry[key] for key in _REASONING_KEYS if entry.get(key)), None)
        if reasoning is None:
            reasoning, message["content"] = split_reasoning(content)
        if reasoning:
            message["reasoning_content"] = _text(reasoning, "the reasoning")
    return message


def split_reasoning(content: str) -> tuple[str | None, str]:
    """The text inside a leading `<think> ... </think>` and what follows it; None and everything where there is none."""
    stripped = content.lstrip()
    if not stripped.startswith("<think>") or "</think>" not in stripped:
        return None, content
    reasoning, _, answer = stripped.removeprefix("<think>").partition("</think>")
    return reasoning.strip() or None, answer.lstrip("\n")


def _called_function(text: str) -> dict[str, Any]:
    try:
        call = json.loads(text)
        return {"type": "function", "function": {"name": str(call["name"]), "arguments": call.get("arguments", {})}}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise RowError("malformed tool call", 'a function call must be JSON with "name" and "arguments"') from None


def _answer(record: Mapping[str, Any], keys: tuple[str, ...]) -> list[Message]:
    key = next((key for key in keys if record.get(key)), None)
    return [] if key is None else [_message({"role": "assistant", "content": record[key]}, "role", "content")]


def _user(value: Any, what: str) -> Message:
    return {"role": "user", "content": _text(value, what)}


def _read_tools(tools: Any) -> list[Any] | None:
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except ValueError:
            raise RowError("malformed tools", '"tools" is a string that is not JSON') from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError("malformed tools", '"tools" must be a list of JSON schemas')
    return tools


def _refuse_lone_surrogates(values: Any) -> None:
    """JSON escapes can spell half of a character, a surrogate without its other, which no tokenizer takes."""
    try:
        json.dumps(values, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        raise RowError("not UTF-8 text", "an escape as \\ud83d spells only half of a character") from None


def _read_tokens(record: Mapping[str, Any], ids_key: str) -> Conversation:
    ids, mask = record[ids_key], record["loss_mask"]
    if not isinstance(ids, list) or not isinstance(mask, list) or len(ids) != len(mask):
        raise RowError("malformed tokens", f'"{ids_key}" and "loss_mask" must be lists of one length')
    if not all(type(token) is int and token >= 0 for token in ids):
        raise RowError("malformed tokens", f'"{ids_key}" must hold integers of at least 0')
    if not all(value in (0, 1) for value in mask):
        raise RowError("malformed tokens", '"loss_mask" must hold 0 and 1')
    return Conversation(ids, [bool(value) for value in mask], str(record.get("topic", "")), bool(record.get("truncated", False)))


def _text(value: Any, what: str) -> str:
    """A string, or the text parts of a list of content parts."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in value):
        return "\n".join(str(part.get("text", "")) for part in value)
    raise RowError(
        "content that is not text", f"{what} must be text, not {type(value).__name__}; other content (images, audio) cannot be used"
    )
