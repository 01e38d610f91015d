"""A byte-level tokenizer with a ChatML template, so that tests of chat data need no download."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

START, END = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """Ids 0 to 255 are bytes, 256 and 257 two and three double quotes; then <|im_start|>, and <|im_end|>, which ends a turn."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate([*alphabet, '""', '"""'])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[('"', '"'), ('""', '"')]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in (START, END)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, additional_special_tokens=[START], chat_template=TEMPLATE)
