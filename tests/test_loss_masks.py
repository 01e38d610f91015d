"""Labels are exactly the verifier's own reply tokens, whatever the chat template looks like.

Expected texts are written by hand: what stands in ⟦ ⟧ is supervised, all the rest is context. Several texts mean several
documents: the template shows an earlier turn otherwise than it was written.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_verifier
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from speculators.data.chat import ChatEncoder
from speculators.data.forms import RowError, read_record
from speculators.data.rows import Conversation
from speculators.errors import DataError

TEMPLATES = Path(__file__).parent / "chat_templates"
SYSTEM = {"role": "system", "content": "Be brief"}
ONE = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo there"}]
TWO = [*ONE, {"role": "user", "content": "Bye"}, {"role": "assistant", "content": "So long"}]
THOUGHT = [ONE[0], {**ONE[1], "reasoning_content": "Greet back."}]
CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOL = [
    {"role": "user", "content": "Add"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "Three"},
]


def tokenizer_for(template: str, special: list[str]) -> PreTrainedTokenizerFast:
    """Bytes, a few pairs of bytes that merge across careless boundaries, and the template's special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("Ċ", "Ċ"), ("Ġ", "Y"), (":", "Ċ"), (".", "Ċ")]
    vocabulary = {token: index for index, token in enumerate([*letters, *(a + b for a, b in pairs)])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=(TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8"))


def encoder(template: str, special: list[str], stops: list[str], **options: Any) -> tuple[ChatEncoder, PreTrainedTokenizerFast]:
    tokenizer = tokenizer_for(template, special)
    return ChatEncoder(tokenizer, tokenizer.convert_tokens_to_ids(stops), template, **options), tokenizer


def shown(document: Conversation, tokenizer: PreTrainedTokenizerFast) -> str:
    """A document's text with ⟦ ⟧ around what is supervised."""
    text, runs, start = "", document.loss_mask, 0
    for place in range(1, len(runs) + 1):
        if place == len(runs) or runs[place] != runs[start]:
            piece = tokenizer.decode(document.input_ids[start:place])
            text += f"⟦{piece}⟧" if runs[start] else piece
            start = place
    return text


@dataclass(frozen=True)
class Shape:
    template: str
    special: tuple[str, ...]
    stops: tuple[str, ...]
    messages: tuple[list[dict[str, Any]], ...]
    expected: tuple[list[str], ...]
    options: tuple[tuple[str, Any], ...] = ()


CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
LLAMA3 = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
THINK = "<think>\n\n</think>\n\n"
QWEN3 = (*CHATML, "<think>", "</think>")
HARMONY = ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>")
DEEPSEEK = ("<|begin|>", "<|User|>", "<|Assistant|>", "<|end_of_sentence|>", "<think>", "</think>")
PHI3 = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>")
GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>")
COMMAND = ("<BOS>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>")

KIND = "<|im_start|>system\nBe kind<|im_end|>\n"
BYE = "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
HI = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
ADD = '<|im_start|>system\n# Tools\n{"name": "add"}\n<|im_end|>\n<|im_start|>user\nAdd<|im_end|>\n<|im_start|>assistant\n'
ASK_HI = "<|start|>user<|message|>Hi<|end|>"
H = "<|start|>system<|message|>Reasoning: low<|end|>"

SHAPES = {
    "chatml": Shape(
        "chatml",
        CHATML,
        ("<|im_end|>", "<|endoftext|>"),
        (TWO, [SYSTEM, *ONE, {"role": "user", "content": "unanswered"}]),
        (
            [f"{KIND}{HI}⟦Yo there<|im_end|>⟧\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n⟦So long<|im_end|>⟧"],
            [f"<|im_start|>system\nBe brief<|im_end|>\n{HI}⟦Yo there<|im_end|>⟧"],
        ),
    ),
    "llama3": Shape(
        "llama3",
        LLAMA3,
        ("<|eot_id|>", "<|eom_id|>"),
        ([SYSTEM, *TWO],),
        (
            [
                "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief<|eot_id|>"
                "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
                "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Yo there<|eot_id|>⟧"
                "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
                "<|start_header_id|>assistant<|end_header_id|>\n\n⟦So long<|eot_id|>⟧"
            ],
        ),
    ),
    "llama2": Shape(
        "llama2",
        ("<s>", "</s>"),
        ("</s>",),
        ([SYSTEM, *TWO],),
        (["<s>[INST] <<SYS>>\nBe brief\n<</SYS>>\n\nHi [/INST]⟦ Yo there </s>⟧<s>[INST] Bye [/INST]⟦ So long </s>⟧"],),
    ),
    "mistral": Shape(
        "mistral",
        ("<s>", "</s>", "[INST]", "[/INST]"),
        ("</s>",),
        (TWO,),
        (["<s>[INST]Hi[/INST]⟦Yo there</s>⟧[INST]Bye[/INST]⟦So long</s>⟧"],),
    ),
    "mistral whose system prompt moves to the last question": Shape(
        "mistral_system_last",
        ("<s>", "</s>", "[INST]", "[/INST]"),
        ("</s>",),
        ([SYSTEM, *TWO],),
        (
            [
                "<s>[INST]Be brief\n\nHi[/INST]⟦Yo there</s>⟧",
                "<s>[INST]Hi[/INST]Yo there</s>[INST]Be brief\n\nBye[/INST]⟦So long</s>⟧",
            ],
        ),
    ),
    "qwen3 without reasoning": Shape(
        "qwen3",
        QWEN3,
        ("<|im_end|>",),
        (TWO,),
        (
            [
                f"{HI}<think>\n\n</think>\n\n⟦Yo there<|im_end|>⟧",
                f"{HI}Yo there<|im_end|>\n{BYE}{THINK}⟦So long<|im_end|>⟧",
            ],
        ),
    ),
    "qwen3 with reasoning": Shape(
        "qwen3",
        QWEN3,
        ("<|im_end|>",),
        (THOUGHT, [ONE[0], {"role": "assistant", "content": "<think>\nGreet back.\n</think>\n\nYo there"}], [*THOUGHT, *TWO[2:]]),
        (
            [f"{HI}⟦<think>\nGreet back.\n</think>\n\nYo there<|im_end|>⟧"],
            [f"{HI}⟦<think>\nGreet back.\n</think>\n\nYo there<|im_end|>⟧"],
            [
                f"{HI}⟦<think>\nGreet back.\n</think>\n\nYo there<|im_end|>⟧",
                f"{HI}Yo there<|im_end|>\n{BYE}{THINK}⟦So long<|im_end|>⟧",
            ],
        ),
    ),
    "qwen3 with reasoning left out of the labels": Shape(
        "qwen3",
        QWEN3,
        ("<|im_end|>",),
        (THOUGHT,),
        ([f"{HI}<think>\nGreet back.\n</think>\n\n⟦Yo there<|im_end|>⟧"],),
        (("supervise_reasoning", False),),
    ),
    "qwen3 in thinking mode, where an empty block is the verifier's own": Shape(
        "qwen3", QWEN3, ("<|im_end|>",), (ONE,), ([f"{HI}⟦<think>\n\n</think>\n\nYo there<|im_end|>⟧"],), (("thinking", True),)
    ),
    "qwen3 calling a tool": Shape(
        "qwen3",
        QWEN3,
        ("<|im_end|>",),
        (TOOL,),
        (
            [
                f'{ADD}<think>\n\n</think>\n\n⟦<tool_call>\n{{"name": "add", "arguments": {{"a": 1}}}}\n</tool_call><|im_end|>⟧',
                f'{ADD}<tool_call>\n{{"name": "add", "arguments": {{"a": 1}}}}\n</tool_call><|im_end|>\n'
                "<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n⟦Three<|im_end|>⟧",
            ],
        ),
    ),
    "gemma": Shape(
        "gemma",
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        ("<eos>", "<end_of_turn>"),
        (TWO,),
        (
            [
                "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n⟦Yo there<end_of_turn>⟧\n"
                "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n⟦So long<end_of_turn>⟧"
            ],
        ),
    ),
    "gpt-oss harmony": Shape(
        "gpt_oss",
        HARMONY,
        ("<|return|>", "<|call|>"),
        (THOUGHT, TWO, TOOL),
        (
            [
                f"{H}{ASK_HI}<|start|>assistant⟦<|channel|>analysis<|message|>Greet back.<|end|>"
                "<|start|>assistant<|channel|>final<|message|>Yo there<|return|>⟧"
            ],
            [
                f"{H}{ASK_HI}<|start|>assistant⟦<|channel|>final<|message|>Yo there<|return|>⟧",
                f"{H}{ASK_HI}<|start|>assistant<|channel|>final<|message|>Yo there<|end|>"
                "<|start|>user<|message|>Bye<|end|><|start|>assistant⟦<|channel|>final<|message|>So long<|return|>⟧",
            ],
            [
                f"{H}<|start|>user<|message|>Add<|end|><|start|>assistant"
                f'⟦ to=functions.add<|channel|>commentary json<|message|>{{"a": 1}}<|call|>⟧'
                "<|start|>functions to=assistant<|channel|>commentary<|message|>3<|end|>"
                "<|start|>assistant⟦<|channel|>final<|message|>Three<|return|>⟧"
            ],
        ),
    ),
    "deepseek-r1, which hides the reasoning of finished turns": Shape(
        "deepseek_r1",
        DEEPSEEK,
        ("<|end_of_sentence|>",),
        ([*THOUGHT, *TWO[2:]],),
        (
            [
                "<|begin|><|User|>Hi<|Assistant|><think>\n⟦Greet back.\n</think>\n\nYo there<|end_of_sentence|>⟧",
                "<|begin|><|User|>Hi<|Assistant|>Yo there<|end_of_sentence|><|User|>Bye<|Assistant|>⟦So long<|end_of_sentence|>⟧",
            ],
        ),
    ),
    "deepseek-v3.1": Shape(
        "deepseek_v3_1",
        DEEPSEEK,
        ("<|end_of_sentence|>",),
        (TWO, THOUGHT),
        (
            [
                "<|begin|><|User|>Hi<|Assistant|></think>⟦Yo there<|end_of_sentence|>⟧"
                "<|User|>Bye<|Assistant|></think>⟦So long<|end_of_sentence|>⟧"
            ],
            ["<|begin|><|User|>Hi<|Assistant|><think>⟦Greet back.</think>Yo there<|end_of_sentence|>⟧"],
        ),
    ),
    "phi-3, which closes a text with another stop token": Shape(
        "phi3",
        PHI3,
        ("<|end|>", "<|endoftext|>", "<|assistant|>"),
        (TWO,),
        (
            [
                "<|user|>\nHi<|end|>\n<|assistant|>\n⟦Yo there<|end|>⟧\n<|user|>\nBye<|end|>\n<|assistant|>\n⟦So long<|end|>⟧",
            ],
        ),
    ),
    "phi-4": Shape(
        "phi4",
        (*CHATML, "<|im_sep|>"),
        ("<|im_end|>",),
        (TWO,),
        (
            [
                "<|im_start|>user<|im_sep|>Hi<|im_end|><|im_start|>assistant<|im_sep|>⟦Yo there<|im_end|>⟧"
                "<|im_start|>user<|im_sep|>Bye<|im_end|><|im_start|>assistant<|im_sep|>⟦So long<|im_end|>⟧"
            ],
        ),
    ),
    "glm-4, whose turns end with what opens the next": Shape(
        "glm4",
        GLM,
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
        (TWO,),
        (["[gMASK]<sop><|user|>\nHi<|assistant|>\n⟦Yo there<|user|>⟧\nBye<|assistant|>\n⟦So long<|user|>⟧"],),
    ),
    "command-r": Shape(
        "command_r",
        COMMAND,
        ("<|END_OF_TURN_TOKEN|>",),
        (ONE,),
        (
            [
                "<BOS><|START_OF_TURN_TOKEN|><|USER_TOKEN|>Hi<|END_OF_TURN_TOKEN|>"
                "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>⟦Yo there<|END_OF_TURN_TOKEN|>⟧"
            ],
        ),
    ),
    "zephyr": Shape(
        "zephyr", ("</s>",), ("</s>",), ([SYSTEM, *ONE],), (["<|system|>\nBe brief</s>\n<|user|>\nHi</s>\n<|assistant|>\n⟦Yo there</s>⟧"],)
    ),
    "a template whose generation prompt is not what it writes before replies": Shape(
        "alpaca_header_only", ("</s>",), ("</s>",), (ONE,), (["### Instruction:\nHi\n\n### Response:\n⟦Yo there</s>⟧"],)
    ),
    "verifier whose stop ids lack the token that ends its turns": Shape(
        "chatml", CHATML, ("<|endoftext|>",), (ONE,), ([f"{KIND}{HI}⟦Yo there<|im_end|>⟧"],)
    ),
    "reasoning under a template that knows none": Shape(
        "zephyr",
        ("</s>",),
        ("</s>",),
        (THOUGHT,),
        (["<|user|>\nHi</s>\n<|assistant|>\n⟦<think>\nGreet back.\n</think>\n\nYo there</s>⟧"],),
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_labels_are_exactly_the_replies_with_their_stop_tokens(name: str) -> None:
    shape = SHAPES[name]
    chats, tokenizer = encoder(shape.template, list(shape.special), list(shape.stops), **dict(shape.options))
    for messages, expected in zip(shape.messages, shape.expected, strict=True):
        row = {"messages": messages, "tools": [{"name": "add"}]} if messages is TOOL else {"messages": messages}
        documents = chats.documents(read_record(row))  # type: ignore[arg-type]
        assert [shown(document, tokenizer) for document in documents] == expected
        assert all(document.loss_mask[-1] for document in documents), "the last label is the end-of-turn token"


def test_prompt_tokens_are_those_of_the_prompt_alone_where_text_would_merge() -> None:
    # "\n\n", " Y" and ":\n" are tokens: a reply that begins with a line break must not merge with the header's.
    chats, tokenizer = encoder("llama3", list(LLAMA3), ["<|eot_id|>"])
    no_trim = tokenizer.chat_template.replace("message.content | trim", "message.content")
    tokenizer.chat_template = no_trim
    chats = ChatEncoder(tokenizer, tokenizer.convert_tokens_to_ids(["<|eot_id|>"]), "llama3")
    for reply in ("\nYo", "\n\nYo", "Yo"):
        (document,) = chats.documents(read_record({"prompt": "Hi", "response": reply}))  # type: ignore[arg-type]
        start = document.loss_mask.index(True)
        assert document.input_ids[:start] == chats.prompt_ids([{"role": "user", "content": "Hi"}])
        assert document.labels == tokenizer(reply + "<|eot_id|>")["input_ids"]


def test_slow_tokenisation_turn_by_turn_gives_the_same_documents() -> None:
    for name, shape in SHAPES.items():
        chats, _ = encoder(shape.template, list(shape.special), list(shape.stops), **dict(shape.options))
        apart, _ = encoder(shape.template, list(shape.special), list(shape.stops), **dict(shape.options))
        apart._tokens._at_once = lambda text, turns: None  # type: ignore[method-assign]
        for messages in shape.messages:
            chat = read_record({"messages": messages})
            assert apart.documents(chat) == chats.documents(chat), name  # type: ignore[arg-type]


def test_either_of_two_stop_tokens_ends_a_turn_and_is_its_last_label() -> None:
    _, tokenizer = encoder("zephyr", ["<stop>", "<halt>"], [])
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.role }}:{{ message.content }}"
        "{{ '<halt>' if message.content == 'So long' else '<stop>' }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    stops = tokenizer.convert_tokens_to_ids(["<stop>", "<halt>"])
    (document,) = ChatEncoder(tokenizer, stops, "two").documents(read_record({"messages": TWO}))  # type: ignore[arg-type]
    assert shown(document, tokenizer) == "user:Hi<stop>assistant:⟦Yo there<stop>⟧user:Bye<stop>assistant:⟦So long<halt>⟧"


def test_a_truncated_reply_has_no_stop_token_among_its_labels() -> None:
    chats, tokenizer = encoder("zephyr", ["</s>"], ["</s>"])
    (document,) = chats.documents(read_record({"messages": ONE, "metadata": {"finish_reason": "length"}}))  # type: ignore[arg-type]
    assert tokenizer.decode(document.labels) == "Yo there"
    assert document.truncated


@pytest.mark.parametrize(
    ("template", "special", "stops", "row", "reason"),
    [
        ("zephyr", ["</s>"], ["</s>"], {"prompt": "Hi"}, "no reply"),
        ("zephyr", ["</s>"], ["</s>"], {"prompt": "Hi", "response": " "}, "empty reply"),
        ("zephyr", ["</s>"], ["</s>"], {"prompt": "Hi", "response": "a</s>b"}, "a stop token inside a reply"),
        ("zephyr", ["<pad>"], [], {"messages": ONE}, "no stop token ends the reply"),
        ("gemma", ["<bos>", "<end_of_turn>"], ["<end_of_turn>"], {"messages": [SYSTEM, *ONE]}, "System role not supported"),
        ("mistral", ["<s>", "</s>"], ["</s>"], {"messages": [ONE[0], *ONE]}, "roles must alternate"),
        ("command_r", list(COMMAND), ["<|END_OF_TURN_TOKEN|>"], {"messages": TOOL}, "rejects it"),
    ],
)
def test_a_row_that_cannot_be_masked_is_refused_with_a_reason_to_count_by(
    template: str, special: list[str], stops: list[str], row: dict[str, Any], reason: str
) -> None:
    chats, _ = encoder(template, special, stops)
    with pytest.raises(RowError) as error:
        chats.documents(read_record(row))  # type: ignore[arg-type]
    assert reason in error.value.reason


def test_a_template_that_rewrites_replies_is_refused_rather_than_guessed_at() -> None:
    _, tokenizer = encoder("zephyr", ["</s>"], ["</s>"])
    tokenizer.chat_template = "{% for message in messages %}{{ message.content | upper }}</s>{% endfor %}"
    with pytest.raises(RowError, match="cannot be found in the rendered conversation"):
        ChatEncoder(tokenizer, [tokenizer.convert_tokens_to_ids("</s>")], "loud").documents(read_record({"messages": ONE}))  # type: ignore[arg-type]


def test_a_verifier_without_chat_template_is_refused() -> None:
    with pytest.raises(DataError, match="'tiny-llama' has no chat template"):
        ChatEncoder.for_verifier(tiny_verifier())
