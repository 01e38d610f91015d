"""Conversations rendered as serving renders them, and which tokens of them are the verifier's own.

A reply begins where the *generation prompt* ends: the text that a server hands to the verifier before the reply is
written. So for every assistant turn two texts are rendered, that prompt and the conversation up to the end of the turn, and
the second must continue the first. What it adds, up to its stop token, are the labels.

A template may show an earlier turn otherwise than it was written (reasoning is removed, a system prompt moves). Then the
later turns do not continue the earlier ones, and the conversation becomes several documents, each exactly as served.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from speculators.data.forms import Chat, Message, RowError
from speculators.data.replies import ReplyTokens, TurnText
from speculators.data.rows import Conversation
from speculators.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from speculators.verifier import Verifier

# Variables by which templates are told whether the verifier reasons before it answers.
_THINKING_VARIABLES = ("enable_thinking", "thinking")
_OPENED_REASONING = re.compile(r"<think>\s*$")
_MARK = "\u2042reply\u2042"


@dataclass
class _Document:
    """Text with the turns supervised in it."""

    text: str
    turns: list[TurnText] = field(default_factory=list)


class ChatEncoder:
    """Turns conversations into documents of token ids with their loss masks, for one tokenizer and its chat template.

    Args:
        tokenizer: with a chat template.
        stop_token_ids: of the verifier, all of them: each may end a turn.
        name: of the verifier, for messages.
        thinking: whether replies are written in thinking mode, for templates that ask. None decides turn by turn: a reply
            with reasoning text was, one without was not, so that the empty reasoning block of a template belongs to the
            prompt.
        supervise_reasoning: False keeps the reasoning text as context and takes it out of the labels.
        template_arguments: further variables for the template.

    Raises:
        DataError: the tokenizer has no chat template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        stop_token_ids: Sequence[int],
        name: str,
        *,
        thinking: bool | None = None,
        supervise_reasoning: bool = True,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        if tokenizer is None or not tokenizer.chat_template:
            raise DataError(
                f"{name!r} has no chat template: choose an instruction-tuned verifier, or pass rows with input_ids and loss_mask"
            )
        self._tokenizer: Any = tokenizer
        self._arguments = dict(template_arguments or {})
        self._thinking, self._supervise_reasoning = thinking, supervise_reasoning
        try:
            template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else tokenizer.get_chat_template()
        except ValueError:
            raise DataError(f"{name!r} has several chat templates and none of them is the default one; give it a single template") from None
        self._switches = [switch for switch in _THINKING_VARIABLES if re.search(rf"(?<![.\w'\"\[]){switch}\b", template)]
        self._tokens = ReplyTokens(tokenizer, stop_token_ids, self._end_of_turn)
        stops = "|".join(re.escape(text) for text in self._tokens.stop_texts)
        self._closing = re.compile(rf"\s*(?:{stops})(?=(?:{stops}|\s)*$)") if stops else None

    @classmethod
    def for_verifier(cls, verifier: Verifier, **options: Any) -> Self:
        """An encoder with a verifier's tokenizer and stop tokens."""
        return cls(verifier.tokenizer, verifier.stop_token_ids, verifier.weights.name_or_path, **options)

    def documents(self, chat: Chat) -> list[Conversation]:
        """Token ids and loss masks of a conversation: one document, or several where the template rewrites earlier turns.

        A document ends with its last label; what the template puts behind it, and messages after the last reply, are left out.

        Raises:
            RowError: there is no reply, the template rejects the conversation, or a reply cannot be found in what it renders.
        """
        messages = [_for_template(message) for message in chat.messages]
        replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if not replies:
            raise RowError("no reply", "the conversation holds no assistant turn; `speculators data generate` writes them")
        documents: list[_Document] = []
        without_calls: list[int] = []
        for index in replies:
            if not messages[index]["content"].strip() and not messages[index].get("tool_calls"):
                raise RowError("empty reply", f"message {index + 1} is an assistant turn without text")
            turn = self._turn(messages, index, chat.tools)
            if any(name not in turn.reply for name in _called(messages[index])):
                without_calls.append(index + 1)
            if documents and turn.prompt.startswith(documents[-1].text):
                documents[-1].turns.append(turn)
            else:
                documents.append(_Document("", [turn]))
            documents[-1].text = turn.through
        if without_calls:
            raise RowError("the template does not show the tool calls", f"the template leaves out a call of message {without_calls[0]}")
        topic = str(chat.facts.get("topic", ""))
        found = [tokens for document in documents for tokens in self._tokens.of(document.text, document.turns)]
        conversations = [Conversation(ids, mask, topic) for ids, mask in found]
        if chat.facts.get("finish_reason") == "length":  # the stop token is the template's, the verifier did not write it
            last = conversations[-1]
            conversations[-1] = Conversation(last.input_ids[:-1], last.loss_mask[:-1], topic, truncated=True)
        return conversations

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> str:
        """The text before the next reply, as a server renders it.

        Raises:
            RowError: the template rejects the conversation.
        """
        variant = next(iter(self._variants(self._thinking)))
        return self._render([_for_template(message) for message in messages], tools, variant, generation_prompt=True)

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[int]:
        """Token ids of `prompt`."""
        return self._tokens.encode(self.prompt(messages, tools))

    # -- inside ------------------------------------------------------------------------------------------------

    def _turn(self, messages: list[Message], index: int, tools: Sequence[Any] | None) -> TurnText:
        """Prompt and reply of the assistant turn `index`."""
        reply = messages[index]
        reasoning = str(reply.get("reasoning_content") or "").strip()
        # Templates that know no reasoning show it as what it is when it stands in the content itself.
        spellings = [reply] if not reasoning else [reply, _with_inline_reasoning(reply, reasoning)]
        for spelling in spellings:
            turn = self._boundary(messages[:index], spelling, reasoning, tools)
            if turn is not None and reasoning in turn.reply:
                return turn if self._supervise_reasoning or not reasoning else turn.without(reasoning)
        if reasoning:
            raise RowError("the template does not show the reasoning", f"the chat template leaves the reasoning of message {index + 1} out")
        raise RowError(
            "no reply boundary",
            f"the reply in message {index + 1} cannot be found in the rendered conversation: its text does not follow the template's"
            " generation prompt, nor does it stand there unchanged",
        )

    def _boundary(self, before: list[Message], reply: Message, reasoning: str, tools: Sequence[Any] | None) -> TurnText | None:
        """The turn's texts by the generation prompt, else by where the template puts a reply."""
        content = reply["content"].strip()
        opened: TurnText | None = None
        for variant in self._variants(bool(reasoning) if self._thinking is None else self._thinking):
            prompt = self._render(before, tools, variant, generation_prompt=True)
            through = self._render([*before, reply], tools, variant)
            if through.startswith(prompt) and content in through[len(prompt) :]:
                return self._closed(prompt, through)
            opening = _OPENED_REASONING.search(prompt)
            base = prompt[: opening.start()] if opening else prompt
            if opening and opened is None and through.startswith(base) and content in through[len(base) :]:
                # The template opens the reasoning for the verifier, and shows no reasoning of a finished turn.
                written = f"{reasoning}\n</think>\n\n{through[len(base) :].lstrip()}"
                opened = self._closed(prompt, prompt + written) if reasoning else self._closed(base, through)
        return opened or self._marked(before, reply, tools)

    def _marked(self, before: list[Message], reply: Message, tools: Sequence[Any] | None) -> TurnText | None:
        """The turn's texts by a mark in the reply's place: what stands before the mark is the prompt."""
        content = reply["content"].strip()
        variant = next(iter(self._variants(self._thinking)))
        prompt, mark, _ = self._render([*before, {**reply, "content": _MARK}], tools, variant).partition(_MARK)
        through = self._render([*before, reply], tools, variant)
        if mark and content and through.startswith(prompt) and through[len(prompt) :].lstrip().startswith(content):
            return self._closed(prompt, through)
        return None

    def _closed(self, prompt: str, through: str) -> TurnText:
        """A turn that ends with its first closing stop token; templates put line breaks and further stop tokens behind it."""
        closing = self._closing.search(through, len(prompt)) if self._closing else None
        return TurnText(prompt, through[: closing.end()] if closing else through)

    def _variants(self, thinking: bool | None) -> Iterator[dict[str, Any]]:
        """Template variables to try: those of the given mode first, then the template's own default, if the mode is ours to find."""
        if self._switches and thinking is not None:
            yield {**dict.fromkeys(self._switches, thinking), **self._arguments}
        if not self._switches or self._thinking is None:
            yield self._arguments

    def _render(
        self, messages: list[Message], tools: Sequence[Any] | None, variant: dict[str, Any], generation_prompt: bool = False
    ) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=generation_prompt, tokenize=False, **variant
            )
        except Exception as error:  # a template is code from elsewhere and may raise whatever it likes
            said = str(error).strip().splitlines()
            reason = (said[0] if said else type(error).__name__)[:120]
            raise RowError(f"the chat template rejects it: {reason}") from None
        return text

    def _end_of_turn(self) -> int | None:
        """The token right behind a reply in a conversation that goes on, if it is a special one."""
        asked, answered = {"role": "user", "content": "A"}, {"role": "assistant", "content": _MARK}
        try:
            rendered = self._render([asked, answered, asked], None, self._arguments)
        except RowError:
            return None
        behind = self._tokens.encode(rendered.partition(_MARK)[2].lstrip())
        return behind[0] if behind and behind[0] in self._tokens.special_ids else None


def _for_template(message: Message) -> Message:
    """A message in the spelling that most templates read: reasoning under all its names, arguments of calls as objects."""
    message = dict(message)
    if reasoning := message.get("reasoning_content"):
        message |= {"reasoning": reasoning, "thinking": reasoning}
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
    return message


def _called(message: Message) -> list[str]:
    """Names of the functions that a message calls."""
    functions = (call.get("function") for call in message.get("tool_calls") or [])
    return [str(function["name"]) for function in functions if isinstance(function, dict) and "name" in function]


def _with_parsed_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    except ValueError:
        return call


def _with_inline_reasoning(message: Message, reasoning: str) -> Message:
    kept = {key: value for key, value in message.items() if key not in ("reasoning_content", "reasoning", "thinking")}
    return {**kept, "content": f"<think>\n{reasoning}\n</think>\n\n{message['content']}"}
