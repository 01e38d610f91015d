"""Loading verifiers: files, tied heads, stop tokens, what is refused, chat templates."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_tokenizer import chat_tokenizer
from safetensors.torch import load_file
from tiny_models import tiny_model, tiny_verifier
from torch import Tensor
from transformers import MambaConfig, PreTrainedTokenizerFast, Qwen3NextConfig, T5Config

from speculators.errors import CheckpointError, ConfigError, DataError
from speculators.verifier import Verifier, fast_dtype

INPUT_IDS = torch.tensor([[5, 1, 40, 22, 3, 3, 61]])


def logits_of(verifier: Verifier) -> Tensor:
    """Logits of INPUT_IDS from the library's cached forward."""
    return verifier.logits(verifier.forward(INPUT_IDS, verifier.new_cache(1, 8)).last_hidden_state)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard_size", ["1GB", "16KB"])
def test_single_and_sharded_files_with_tied_and_untied_heads_load_the_same_weights(tmp_path: Path, tied: bool, shard_size: str) -> None:
    model = tiny_model("llama", tie_word_embeddings=tied)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) == (shard_size == "16KB") == (tmp_path / "model.safetensors.index.json").exists()
    assert any("lm_head.weight" in load_file(file) for file in files) != tied
    verifier = Verifier.from_pretrained(tmp_path, dtype=torch.float32, device="cpu")
    weights = verifier.weights
    assert torch.equal(weights.embedding, model.model.embed_tokens.weight)
    assert torch.equal(weights.head, model.lm_head.weight)
    assert (weights.head.data_ptr() == weights.embedding.data_ptr()) == tied == torch.equal(weights.head, weights.embedding)
    torch.testing.assert_close(logits_of(verifier), model(INPUT_IDS, use_cache=False).logits, atol=1e-5, rtol=1e-5)


def test_facts_of_the_verifier_are_reported(tmp_path: Path) -> None:
    model = tiny_model("qwen3", vocab_size=62, layers=3)
    model.generation_config.eos_token_id = [2, 7]
    model.save_pretrained(tmp_path)
    verifier = Verifier.from_pretrained(str(tmp_path), dtype="bfloat16", device="cpu")
    assert (verifier.num_layers, verifier.hidden_size, verifier.vocab_size) == (3, 32, 62)
    assert (verifier.dtype, verifier.device.type) == (torch.bfloat16, "cpu")
    assert verifier.stop_token_ids == (2, 7)
    assert verifier.weights.name_or_path == str(tmp_path)
    assert verifier.weights.architectures == ("Qwen3ForCausalLM",)
    assert verifier.weights.config["hidden_size"] == 32 and verifier.weights.config["model_type"] == "qwen3"
    assert not verifier.model.training and not any(parameter.requires_grad for parameter in verifier.model.parameters())
    assert verifier.tokenizer is None
    assert logits_of(verifier).dtype == torch.bfloat16


@pytest.mark.parametrize(("generation", "config", "expected"), [(5, 6, (5,)), (None, 6, (6,)), ([4, 3], 6, (4, 3)), (None, None, ())])
def test_stop_tokens_come_from_the_generation_config_then_the_config(generation: Any, config: Any, expected: tuple[int, ...]) -> None:
    model = tiny_model("llama")
    model.generation_config.eos_token_id, model.config.eos_token_id = generation, config
    assert Verifier(model).stop_token_ids == expected


def test_auto_dtype_is_the_devices_fast_one(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    assert Verifier.from_pretrained(tmp_path, device="cpu").dtype == fast_dtype("cpu")
    assert fast_dtype("cuda") == torch.bfloat16
    with pytest.raises(ConfigError, match="dtype 'int8' is unknown"):
        Verifier.from_pretrained(tmp_path, device="cpu", dtype="int8")


def test_missing_folder_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no folder .*absent; pass an existing folder, a Hub name"):
        Verifier.from_pretrained(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        Verifier.from_pretrained(tmp_path)


def test_damaged_and_incomplete_folders_fail_at_load(tmp_path: Path) -> None:
    model = tiny_model("llama")
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "model.layers.1.mlp.up_proj.weight"}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(CheckpointError, match=r"lack 1 of its tensors, model\.layers\.1\.mlp\.up_proj\.weight first"):
        Verifier.from_pretrained(tmp_path, device="cpu")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="cannot load the verifier"):
        Verifier.from_pretrained(tmp_path, device="cpu")


@pytest.mark.parametrize("content", ["", "{not", "[]", "null", "5", "\xff\x00"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"])
def test_files_of_other_content_are_one_sentence(tmp_path: Path, name: str, content: str) -> None:
    tiny_model("llama", vocab_size=len(chat_tokenizer())).save_pretrained(tmp_path)
    chat_tokenizer().save_pretrained(tmp_path)
    whole = Verifier.from_pretrained(tmp_path, device="cpu")
    (tmp_path / name).write_text(content, encoding="latin-1")
    try:
        assert Verifier.from_pretrained(tmp_path, device="cpu").stop_token_ids  # transformers goes without a file that holds no JSON
        assert name == "generation_config.json" and whole.stop_token_ids
    except CheckpointError as error:
        assert "cannot load the verifier" in str(error) and "; pass a complete folder" in str(error) and "\n" not in str(error)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": "x"}, "hidden_size"),
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "KeyError 'spiral'"),
        ({"hidden_act": "spiral"}, "KeyError 'spiral'"),
        ({"eos_token_id": "x"}, "eos_token_id"),
        ({"layer_types": ["spiral"] * 4}, "layer_types"),
        ({"head_dim": 7}, "even rotary dimension"),
        ({"model_type": "spiral"}, "spiral"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "optimum"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_configuration_that_transformers_cannot_build_is_one_sentence(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(CheckpointError, match="cannot load the verifier") as refused:
        Verifier.from_pretrained(tmp_path, device="cpu")
    assert words in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("changes", [{"vocab_size": 70}, {"num_key_value_heads": 1}, {"intermediate_size": 50}], ids=str)
def test_a_configuration_of_another_shape_than_the_files_names_the_tensor(tmp_path: Path, changes: dict[str, Any]) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(CheckpointError, match=r"hold \S+\.weight of shape \(\d+, \d+\) where its config.json makes it \(\d+, \d+\)"):
        Verifier.from_pretrained(tmp_path, device="cpu")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("key", ["model.norm.weight", "model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_are_not_finite_fail_at_load(tmp_path: Path, value: float, key: str, dtype: str) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    Verifier.from_pretrained(tmp_path, dtype=dtype, device="cpu")
    model.get_parameter(key).data.view(-1)[-1] = value
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=rf"hold values in {re.escape(key)} that are not finite"):
        Verifier.from_pretrained(tmp_path, dtype=dtype, device="cpu")


@pytest.mark.parametrize(
    ("config", "reason"),
    [(T5Config(), "encoder-decoder"), (MambaConfig(), "recurrent state"), (Qwen3NextConfig(num_hidden_layers=4), "recurrent state")],
    ids=["t5", "mamba", "qwen3_next"],
)
def test_models_that_cannot_roll_back_are_refused_before_their_weights_are_read(tmp_path: Path, config: Any, reason: str) -> None:
    config.save_pretrained(tmp_path)  # there are no weights to read
    with pytest.raises(CheckpointError, match=reason):
        Verifier.from_pretrained(tmp_path, device="cpu")


# -- chat ------------------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% if messages[0].role != 'user' %}{{ raise_exception('conversations start with the user') }}{% endif %}"
    "{% for message in messages %}[{{ message.role }}] {{ message.content }} [end] {% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def chat_verifier() -> Verifier:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["[user]", "[assistant]", "[end]", "hello", "there"]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[end]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Verifier(tiny_model("llama"), PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=TEMPLATE), "chatty")


def test_chat_is_encoded_with_the_models_template() -> None:
    verifier = chat_verifier()
    messages = [{"role": "user", "content": "hello there"}]
    assert verifier.encode_chat(messages) == [0, 3, 4, 2, 1]
    assert verifier.encode_chat(messages, add_generation_prompt=False) == [0, 3, 4, 2]


def test_chat_without_template_or_against_it_is_a_data_error() -> None:
    with pytest.raises(DataError, match="'tiny-llama' has no chat template"):
        tiny_verifier().encode_chat([{"role": "user", "content": "hello"}])
    with pytest.raises(DataError, match="'chatty' rejects the conversation: conversations start with the user"):
        chat_verifier().encode_chat([{"role": "assistant", "content": "hello"}])
