"""Checkpoints come back as they were saved, in the format that other engines read."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_checkpoints import METHODS, SHARED, config_of, contents, edit_config, edit_layers, frozen_embedding, reduced, tensors_of
from tiny_drafters import HIDDEN, TAPS, VOCABULARY, drafter, packed_batch, verifier_weights
from transformers import AutoConfig

from speculators.checkpoint import (
    load,
    read_config,
    save,
    weight_files,
    weights_sha256,
)
from speculators.errors import CheckpointError, PairingError
from speculators.speculator import Speculator

# -- round trips -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["full", "compact"])
@pytest.mark.parametrize("vocabulary", [None, 20])
@pytest.mark.parametrize("method", METHODS)
def test_saving_what_was_loaded_gives_the_same_bytes(method: str, vocabulary: int | None, form: str, tmp_path: Path) -> None:
    make = reduced if vocabulary else drafter
    speculator = make(method, **({"train_embedding": False} if method == "peagle" else {}))
    save(speculator, tmp_path / "first", form=form)
    save(load(tmp_path / "first", verifier_weights()), tmp_path / "second", form=form)
    assert contents(tmp_path / "second") == contents(tmp_path / "first")
    assert set(contents(tmp_path / "first")) == {"README.md", "config.json", "model.safetensors"}


@pytest.mark.parametrize("method", METHODS)
def test_every_trained_parameter_is_in_the_file_with_its_own_values(method: str, tmp_path: Path) -> None:
    speculator = drafter(method)
    save(speculator, tmp_path, dtype="float32")
    stored = tensors_of(tmp_path)
    trained = dict(speculator.named_parameters())
    for name, parameter in trained.items():
        assert torch.equal(stored[name], parameter), name
    verifier = speculator.verifier
    for name, tensor in {"embed_tokens.weight": verifier.embedding, "lm_head.weight": verifier.head}.items():
        if name not in trained and name in stored:
            assert torch.equal(stored[name], tensor), name
    assert set(stored) - set(trained) <= SHARED


@pytest.mark.parametrize("method", METHODS)
def test_a_loaded_drafter_has_the_same_loss_to_the_last_bit(method: str, tmp_path: Path) -> None:
    speculator, batch = drafter(method), packed_batch([20, 12])
    save(speculator, tmp_path, dtype="float32")
    restored = load(tmp_path, verifier_weights())
    losses = []
    for model in (speculator, restored):
        torch.manual_seed(5)
        losses.append(model.training_loss(batch).loss)
    assert torch.equal(losses[0], losses[1])


def test_a_folder_without_a_verifier_round_trips_through_the_full_form(tmp_path: Path) -> None:
    save(drafter("eagle3"), tmp_path / "first")
    alone = load(tmp_path / "first")
    assert not alone.is_attached
    save(alone, tmp_path / "second")
    assert contents(tmp_path / "second") == contents(tmp_path / "first")


def test_the_hub_reads_the_same_through_the_speculator_class(tmp_path: Path) -> None:
    drafter("dflash").save_pretrained(tmp_path)
    assert Speculator.from_pretrained(tmp_path, verifier_weights()).method == "dflash"
    assert read_config(tmp_path).num_draft_tokens == 5


def test_loading_leaves_the_callers_random_numbers_alone(tmp_path: Path) -> None:
    save(drafter("dflash"), tmp_path)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    load(tmp_path)
    assert torch.equal(torch.rand(4), expected)


def test_changing_the_file_later_does_not_change_the_loaded_weights(tmp_path: Path) -> None:
    save(drafter("dflash"), tmp_path)
    speculator = load(tmp_path)
    before = {name: tensor.clone() for name, tensor in speculator.state_dict().items()}
    file = tmp_path / "model.safetensors"
    with file.open("rb+") as stream:
        stream.seek(-4096, os.SEEK_END)
        stream.write(bytes(4096))
    assert all(torch.equal(tensor, before[name]) for name, tensor in speculator.state_dict().items())


# -- what is written -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_config_holds_what_engines_need_and_nothing_they_must_not_see(method: str, tmp_path: Path) -> None:
    speculator = drafter(method)
    speculator.config.layers.__pydantic_extra__["quantization_config"] = {"quant_method": "fp8"}  # type: ignore[index]
    save(speculator, tmp_path)
    text, config = (tmp_path / "config.json").read_text(), config_of(tmp_path)
    assert text == json.dumps(config, indent=2, sort_keys=True) + "\n"
    architecture = {"dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel", "eagle3": "Eagle3DraftModel", "peagle": "PEagleDraftModel"}[
        method
    ]
    expected = {
        "speculators_model_type": method,
        "speculators_version": "0.9.0",
        "architectures": [architecture],
        "dtype": "bfloat16",
        "draft_vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids" if method in ("eagle3", "peagle") else "aux_hidden_state_layer_ids": TAPS,
    }
    assert {key: config[key] for key in expected} == expected
    assert config["transformers_version"]
    assert config["speculators_config"] == {
        "algorithm": method,
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
        "verifier": {"name_or_path": "tiny-verifier", "architectures": ["LlamaForCausalLM"]},
    }
    layers = config["transformer_layer_config"]
    assert layers["model_type"] in ("llama", "qwen3") and layers["vocab_size"] == VOCABULARY
    assert layers["num_hidden_layers"] == 2 and layers["head_dim"] == 8
    assert method == "eagle3" or config["mask_token_id"] == 3
    assert method not in ("dflash", "dspark") or config["sample_from_anchor"] == (method == "dspark")
    assert method not in ("eagle3", "peagle") or config["norm_before_residual"] is False
    assert not {"auto_map", "model_type", "_name_or_path"} & set(config)
    assert "quantization_config" not in layers
    assert not {name for name in tensors_of(tmp_path) if name.startswith("verifier_")}
    assert not (tmp_path / "config.py").exists()
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_peagle_stores_its_shared_hidden_state_unprojected(tmp_path: Path) -> None:
    save(drafter("peagle"), tmp_path)
    assert tensors_of(tmp_path)["mask_hidden"].shape == (1, 1, len(TAPS) * HIDDEN)
    assert "embed_tokens.weight" in tensors_of(tmp_path)


def test_a_reduced_vocabulary_is_stored_as_offsets_with_its_rows_of_the_head(tmp_path: Path) -> None:
    speculator = reduced("dflash")
    for form in ("full", "compact"):
        save(speculator, tmp_path / form, form=form, dtype="float32")
        stored, ids = tensors_of(tmp_path / form), torch.arange(1, 60, 3)
        assert stored["d2t"].dtype == torch.int64 and torch.equal(stored["d2t"], ids - torch.arange(20))
        assert stored["t2d"].dtype == torch.bool and torch.equal(stored["t2d"].nonzero().flatten(), ids)
        # No engine can alias a part of the verifier's head: without these rows nothing would ever be accepted.
        assert torch.equal(stored["lm_head.weight"], speculator.verifier.head[ids])
    config = config_of(tmp_path / "full")
    assert config["transformer_layer_config"]["vocab_size"] == VOCABULARY and config["draft_vocab_size"] == 20


def test_a_full_vocabulary_has_no_mapping(tmp_path: Path) -> None:
    save(drafter("dspark"), tmp_path)
    assert not {"d2t", "t2d"} & set(tensors_of(tmp_path))


def test_a_tied_verifier_gives_the_file_a_head_equal_to_its_embedding(tmp_path: Path) -> None:
    speculator, verifier = frozen_embedding("eagle3"), verifier_weights()
    speculator.attach(replace(verifier, head=verifier.embedding))
    save(speculator, tmp_path)
    stored = tensors_of(tmp_path)
    assert torch.equal(stored["lm_head.weight"], stored["embed_tokens.weight"])
    assert torch.equal(stored["lm_head.weight"], verifier.embedding.bfloat16())


def test_an_explicit_head_size_survives(tmp_path: Path) -> None:
    verifier = verifier_weights()
    config = verifier.config | {"hidden_size": 80, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32}
    wide = replace(verifier, embedding=torch.randn(61, 80), head=torch.randn(61, 80), config=config)
    cls = type(drafter("dflash"))
    save(cls.from_verifier(wide, num_layers=1, aux_hidden_state_layer_ids=[1, 4], mask_token_id=3), tmp_path)
    assert load(tmp_path, wide).get_parameter("layers.0.self_attn.q_proj.weight").shape == (128, 80)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_stored_dtype_and_the_configured_dtype_agree(dtype: str, tmp_path: Path) -> None:
    save(drafter("dspark"), tmp_path, dtype=dtype)
    assert config_of(tmp_path)["dtype"] == dtype
    assert {tensor.dtype for tensor in tensors_of(tmp_path).values()} == {getattr(torch, dtype)}
    assert {tensor.dtype for tensor in load(tmp_path).parameters()} == {getattr(torch, dtype)}
    assert {tensor.dtype for tensor in load(tmp_path, verifier_weights(torch.bfloat16)).parameters()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in load(tmp_path, dtype=torch.float64).parameters()} == {torch.float64}


def test_shards_stay_below_their_limit_and_load_as_one(tmp_path: Path) -> None:
    speculator = drafter("dspark")
    save(speculator, tmp_path, dtype="float32", max_shard_bytes=80_000)
    shards = [file for file in weight_files(tmp_path) if file.suffix == ".safetensors"]
    assert len(shards) > 1 and all(file.stat().st_size <= 80_000 for file in shards)
    exactly = sum(tensor.nbytes for tensor in speculator.state_dict().values())
    save(speculator, tmp_path / "exactly", dtype="float32", max_shard_bytes=exactly)
    assert all(file.stat().st_size <= exactly for file in weight_files(tmp_path / "exactly")), "the header counts"
    restored = load(tmp_path, verifier_weights()).state_dict()
    assert all(torch.equal(tensor, restored[name]) for name, tensor in speculator.state_dict().items())
    assert weights_sha256(tmp_path) == {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in shards}
    with pytest.raises(CheckpointError, match=r"markov_head.markov_w1.weight takes 62464 bytes .* max_shard_bytes = 30000"):
        save(speculator, tmp_path / "new", dtype="float32", max_shard_bytes=30_000)
    assert not (tmp_path / "new").exists()


# -- what is read ----------------------------------------------------------------------------------------------


def test_unknown_keys_survive_and_remote_code_does_not(tmp_path: Path) -> None:
    save(drafter("dflash"), tmp_path / "a")
    edit_config(tmp_path / "a", their_key={"x": [1, None]}, auto_map={"": "config.DFlash"}, unified_speculators={"note": "kept"})
    edit_layers(tmp_path / "a", max_window_layers=28)
    save(load(tmp_path / "a", verifier_weights()), tmp_path / "b")
    config = config_of(tmp_path / "b")
    assert config["their_key"] == {"x": [1, None]} and config["unified_speculators"] == {"note": "kept"}
    assert config["transformer_layer_config"]["max_window_layers"] == 28
    assert "auto_map" not in config
    assert set(config) == set(config_of(tmp_path / "a")) - {"auto_map"}


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_version_0_8_files_that_repeat_embedding_and_head_are_read(method: str, tmp_path: Path) -> None:
    speculator = drafter(method)
    save(speculator, tmp_path)
    own = tensors_of(tmp_path)
    extra = {"embed_tokens.weight": speculator.verifier.embedding.bfloat16(), "lm_head.weight": speculator.verifier.head.bfloat16()}
    save_file(own | extra, tmp_path / "model.safetensors", metadata={"format": "pt"})
    edit_config(tmp_path, speculators_version="0.8.0", architectures=["DFlashSpeculator"])
    paired = load(tmp_path, verifier_weights())
    assert set(paired.state_dict()) == set(own) - SHARED and not paired.unchecked_shared_tensors
    other = replace(verifier_weights(), head=verifier_weights().head.roll(1, 0), name_or_path="other/model")
    with pytest.raises(
        PairingError, match=r"lm_head.weight of this checkpoint \(made for 'tiny-verifier'\) differs .* 'other/model' in row 0"
    ):
        load(tmp_path, other)
    alone = load(tmp_path)
    with pytest.raises(PairingError, match=r"lm_head\.weight"):
        alone.attach(other)
    alone.attach(verifier_weights())
    assert alone.is_attached and not alone.unchecked_shared_tensors


def test_optional_keys_may_be_missing(tmp_path: Path) -> None:
    speculator = drafter("dspark", markov_rank=256)
    save(speculator, tmp_path)
    optional = (
        "sample_from_anchor",
        "markov_rank",
        "markov_head_type",
        "speculators_version",
        "architectures",
        "training_options",
        "tie_word_embeddings",
    )
    (tmp_path / "config.json").write_text(json.dumps({key: value for key, value in config_of(tmp_path).items() if key not in optional}))
    config: Any = load(tmp_path).config
    assert (config.sample_from_anchor, config.markov_rank, config.markov_head_type) == (True, 256, "vanilla")
    save(load(tmp_path), tmp_path / "again")
    assert config_of(tmp_path / "again")["sample_from_anchor"] is True
    assert "training_options" not in config_of(tmp_path / "again"), "a file from elsewhere does not say how it was trained"


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize("spelling", ["new", "old", "oldest"])
def test_yarn_is_read_from_either_spelling_and_written_in_both(spelling: str, tmp_path: Path) -> None:
    save(drafter("dflash"), tmp_path / "a")
    oldest = {("type" if key == "rope_type" else key): value for key, value in YARN.items()}
    if spelling == "new":
        edit_layers(tmp_path / "a", ("rope_theta",), rope_parameters={**YARN, "rope_theta": 5e5})
    else:
        edit_layers(tmp_path / "a", ("rope_parameters",), rope_theta=5e5, rope_scaling=YARN if spelling == "old" else oldest)
    save(load(tmp_path / "a", verifier_weights()), tmp_path / "b")
    layers = config_of(tmp_path / "b")["transformer_layer_config"]
    assert layers["rope_parameters"] == {**YARN, "rope_theta": 5e5}
    assert (layers["rope_theta"], layers["rope_scaling"]) == (5e5, YARN)
    # What transformers, and so vLLM and the public library, make of it.
    assert AutoConfig.for_model(**layers).rope_parameters == {**YARN, "rope_theta": 5e5}


def test_files_without_taps_get_the_formats_default_and_say_so_afterwards(tmp_path: Path) -> None:
    verifier = replace(verifier_weights(), num_layers=8)
    speculator = type(drafter("eagle3")).from_verifier(verifier, num_layers=1)
    assert speculator.aux_hidden_state_layer_ids == (2, 4, 5)
    save(speculator, tmp_path)
    edit_config(tmp_path, eagle_aux_hidden_state_layer_ids=None)
    restored = load(tmp_path, verifier)
    save(restored, tmp_path / "again")
    assert config_of(tmp_path / "again")["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    with pytest.raises(CheckpointError, match=r"eagle_aux_hidden_state_layer_ids = None: .* 7 layers or more, not 6"):
        load(tmp_path, verifier_weights())


def test_t2d_follows_from_d2t(tmp_path: Path) -> None:
    save(reduced("dspark"), tmp_path)
    stored = tensors_of(tmp_path)
    expected = stored.pop("t2d")
    save_file(stored, tmp_path / "model.safetensors")
    assert torch.equal(load(tmp_path).get_buffer("t2d"), expected)


def test_the_widest_stored_dtype_is_kept_when_dtypes_are_mixed(tmp_path: Path) -> None:
    save(drafter("dflash"), tmp_path)
    stored = tensors_of(tmp_path)
    precise = stored["norm.weight"].float() + 1e-6
    save_file(stored | {"norm.weight": precise}, tmp_path / "model.safetensors")
    assert torch.equal(load(tmp_path).get_parameter("norm.weight"), precise)
