"""Embedding, head and final norm read from a verifier's files are those of the loaded model, whatever else the files hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, tiny_model
from torch import Tensor

from speculators.checkpoint import verifier_files
from speculators.checkpoint.verifier_files import read_verifier_weights
from speculators.errors import CheckpointError
from speculators.speculator import VerifierWeights
from speculators.verifier import Verifier


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Change the stored tensors."""
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", metadata={"format": "pt"})


def edit(folder: Path, **changes: Any) -> None:
    """Change keys of config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def assert_same(found: VerifierWeights, expected: VerifierWeights) -> None:
    hidden = torch.randn(3, 32)
    assert torch.equal(found.embedding, expected.embedding) and torch.equal(found.head, expected.head)
    assert torch.equal(found.final_norm(hidden), expected.final_norm(hidden))
    assert (found.head_bias is None) == (expected.head_bias is None)
    assert found.head_bias is None or torch.equal(found.head_bias, expected.head_bias)
    for fact in ("embedding_scale", "logit_scale", "logit_softcap", "num_layers", "stop_token_ids", "architectures"):
        assert getattr(found, fact) == getattr(expected, fact), fact
    assert found.config["hidden_size"] == expected.config["hidden_size"]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", [*FAMILIES, "gemma2", "cohere", "granite", "phi"])
def test_every_family_tied_or_not_sharded_or_not(family: str, tied: bool, tmp_path: Path) -> None:
    model = tiny_model(family, tie_word_embeddings=tied)
    for name, size in (("single", "1GB"), ("sharded", "16KB")):
        model.save_pretrained(tmp_path / name, max_shard_size=size)
        assert (len(list((tmp_path / name).glob("*.safetensors"))) > 1) == (name == "sharded")
        found = read_verifier_weights(tmp_path / name)
        assert (found.head is found.embedding) == tied
        assert_same(found, Verifier(model, None, str(tmp_path / name)).weights)


def test_a_tied_head_without_a_tensor_of_its_own_is_the_embedding_bit_for_bit(tmp_path: Path) -> None:
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    found = read_verifier_weights(tmp_path)
    assert torch.equal(found.head, load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"])


def test_only_the_three_need_be_in_floating_point(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    expected = Verifier(model, None, "x").weights

    def pack(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        packed = {name: tensor for name, tensor in tensors.items() if "proj" not in name}
        return packed | {name.replace("weight", "qweight"): torch.zeros(4, 4, dtype=torch.int32) for name in tensors if "proj" in name}

    rewrite(tmp_path, pack)
    edit(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128})
    assert_same(read_verifier_weights(tmp_path), expected)


@pytest.mark.parametrize("rows", [1, 64])
def test_a_scaled_head_is_unscaled(rows: int, tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    scale = torch.rand(rows, 1) + 0.5 if rows > 1 else torch.tensor(0.25)
    small = (model.lm_head.weight / scale).to(torch.float8_e4m3fn)
    rewrite(tmp_path, lambda tensors: tensors | {"lm_head.weight": small, "lm_head.weight_scale": scale})
    assert torch.equal(read_verifier_weights(tmp_path).head, small.float() * scale)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: {**{k: v for k, v in t.items() if k != "lm_head.weight"}, "lm_head.qweight": torch.zeros(4)}, "lm_head.weight packed"),
        (lambda t: t | {"lm_head.weight": t["lm_head.weight"].to(torch.float8_e4m3fn)}, "lm_head.weight as float8_e4m3fn without a scale"),
        (lambda t: {k: v for k, v in t.items() if k != "lm_head.weight"}, r"holds no lm_head\.weight"),
        (lambda t: {k: v for k, v in t.items() if k != "model.norm.weight"}, r"holds no model\.norm\.weight"),
    ],
    ids=["packed", "no scale", "no head", "no norm"],
)
def test_what_cannot_be_read_is_said_in_one_sentence(change: Callable[[Any], Any], reason: str, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(CheckpointError, match=reason) as caught:
        read_verifier_weights(tmp_path)
    assert "\n" not in str(caught.value)


def test_the_text_side_of_a_multimodal_model_is_read(tmp_path: Path) -> None:
    model = tiny_model("qwen3", tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    expected = Verifier(model, None, "x").weights

    def as_multimodal(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
        vision = {"model.visual.embed_tokens.weight": torch.zeros(2, 2), "model.visual.norm.weight": torch.zeros(2)}
        return renamed | vision

    rewrite(tmp_path, as_multimodal)
    text = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "qwen3_vl_text"}
    config = {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_verifier_weights(tmp_path)
    hidden = torch.randn(3, 32)
    assert torch.equal(found.embedding, expected.embedding) and torch.equal(found.head, expected.head)
    assert torch.equal(found.final_norm(hidden), expected.final_norm(hidden))
    assert (found.num_layers, found.vocab_size) == (4, 64)


def test_a_folder_without_weights_or_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        read_verifier_weights(tmp_path)
    tiny_model("llama").save_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match="cannot load the verifier"):
        read_verifier_weights(tmp_path)


def test_of_a_hub_repository_only_the_shards_that_hold_the_three_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path, max_shard_size="16KB")
    where = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    fetched: list[tuple[str, str | None]] = []

    def fetch(name: str, file: str, *, revision: str | None) -> str:
        assert name == "org/verifier"
        fetched.append((file, revision))
        if not (tmp_path / file).exists():
            raise LocalEntryNotFoundError(file)
        return str(tmp_path / file)

    monkeypatch.setattr(verifier_files, "hf_hub_download", fetch)
    monkeypatch.setattr(verifier_files.AutoConfig, "from_pretrained", lambda *_, **__: model.config)
    found = read_verifier_weights("org/verifier", revision="v2")
    assert_same(found, Verifier(model, None, "org/verifier").weights)
    needed = {where[name] for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight")}
    assert set(fetched) == {(file, "v2") for file in {"model.safetensors.index.json", *needed}} and len(needed) < len(set(where.values()))
