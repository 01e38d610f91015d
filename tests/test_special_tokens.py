"""The token of MASK slots: one that no conversation holds, in the vocabularies of the families that drafters are trained for."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from chat_tokenizer import chat_tokenizer
from tiny_drafters import verifier_weights
from tiny_models import tiny_model

from speculators.algorithms.options import default_mask_token
from speculators.special_tokens import unused_special_tokens
from speculators.verifier import Verifier


def tokenizer(special: dict[int, str], content: dict[int, str] | None = None, template: str = "", **roles: int) -> Any:
    """A tokenizer with these special tokens, and with added ones that are content."""
    tokens = {token: SimpleNamespace(content=name, special=True) for token, name in special.items()}
    tokens |= {token: SimpleNamespace(content=name, special=False) for token, name in (content or {}).items()}
    return SimpleNamespace(added_tokens_decoder=tokens, chat_template=template, **roles)


CHATML = "{{ '<|im_start|>' + message['role'] }}<|im_end|><tool_call>"
QWEN3 = {151643: "<|endoftext|>", 151644: "<|im_start|>", 151645: "<|im_end|>", 151646: "<|object_ref_start|>", 151656: "<|video_pad|>"}
QWEN3_CONTENT = {151657: "<tool_call>", 151659: "<|fim_prefix|>", 151662: "<|fim_pad|>", 151664: "<|file_sep|>", 151667: "<think>"}
LLAMA3 = {128000: "<|begin_of_text|>", 128004: "<|finetune_right_pad_id|>", 128009: "<|eot_id|>", 128255: "<|reserved_special_token_247|>"}
SMOLLM2 = {0: "<|endoftext|>", 1: "<|im_start|>", 2: "<|im_end|>", 3: "<repo_name>", 16: "<empty_output>"}
GPT_OSS = {199999: "<|endoftext|>", 200002: "<|return|>", 200006: "<|start|>", 200013: "<|reserved_200013|>", 200018: "<|endofprompt|>"}


@pytest.mark.parametrize(
    ("found", "stops", "vocab_size", "name"),
    [
        (tokenizer(SMOLLM2, template=CHATML, pad_token_id=2), (2,), 49152, "<empty_output>"),
        (
            tokenizer(LLAMA3, template="<|begin_of_text|><|eot_id|>", bos_token_id=128000),
            (128009,),
            128256,
            "<|reserved_special_token_247|>",
        ),
        (tokenizer(LLAMA3, template="<|begin_of_text|><|eot_id|>", bos_token_id=128000), (128009,), 128255, "<|finetune_right_pad_id|>"),
        (tokenizer(QWEN3, QWEN3_CONTENT, CHATML, pad_token_id=151643), (151645, 151643), 151936, "<|fim_pad|>"),
        (tokenizer(GPT_OSS, template="<|start|>"), (200002, 199999), 201088, "<|reserved_200013|>"),
        (tokenizer({2: "<eos>", 4: "<mask>", 105: "<start_of_turn>"}, {6: "<unused0>"}, "<start_of_turn>"), (2,), 200, "<unused0>"),
        (
            tokenizer({1: "</s>", 9: "<\uff5cplace\u2581holder\u2581no\u25817\uff5c>", 8: "<\uff5cUser\uff5c>"}),
            (1,),
            200,
            "<\uff5cplace\u2581holder\u2581no\u25817\uff5c>",
        ),
    ],
    ids=["SmolLM2", "Llama 3", "Llama 3, cut table", "Qwen3", "gpt-oss", "Gemma", "DeepSeek"],
)
def test_families_get_a_token_that_their_chats_do_not_hold(found: Any, stops: tuple[int, ...], vocab_size: int, name: str) -> None:
    first = unused_special_tokens(found, stops, vocab_size)[0]
    assert found.added_tokens_decoder[first].content == name


def test_tokens_with_a_role_in_the_template_or_for_other_inputs_are_never_chosen() -> None:
    roles = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3, "unk_token_id": 4}
    special = {1: "<s>", 2: "</s>", 3: "<pad>", 4: "<unk>", 5: "<|im_start|>", 6: "<|image_pad|>", 7: "<|stop|>", 99: "<|reserved_1|>"}
    assert unused_special_tokens(tokenizer(special, {8: "<think>"}, CHATML, **roles), (7,), 50) == ()
    assert unused_special_tokens(None, (), 50) == ()


def test_the_mask_token_is_an_unused_special_one_and_else_a_row_that_was_never_learned() -> None:
    weights = verifier_weights()
    learned = weights.embedding.clone()
    learned[[7, 9]] = 0.5  # two rows that training never touched
    weights = replace(weights, embedding=learned, unused_token_ids=(), stop_token_ids=(2,))
    assert default_mask_token(weights) == 9
    assert default_mask_token(replace(weights, stop_token_ids=(9,))) == 7
    assert default_mask_token(replace(weights, config={**weights.config, "pad_token_id": 9})) == 7
    assert default_mask_token(replace(weights, unused_token_ids=(2, 5, 4))) == 5, "the first that is no stop token"


def test_a_verifier_knows_the_unused_tokens_of_its_tokenizer() -> None:
    known = chat_tokenizer()
    known.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|reserved_0|>"]})
    model = tiny_model("llama", vocab_size=len(known), layers=1, eos_token_id=known.eos_token_id)
    weights = Verifier(model, known, "tiny").weights
    assert weights.unused_token_ids == (known.convert_tokens_to_ids("<|reserved_0|>"),)
    assert default_mask_token(weights) == weights.unused_token_ids[0]
