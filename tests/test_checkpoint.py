"""Checkpoints come back as they were saved, in the format that other engines read."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_drafters import HIDDEN, TAPS, VOCABULARY, drafter, packed_batch, verifier_weights
from torch import Tensor

from speculators.checkpoint import (
    Acceptance,
    ModelCard,
    embedding_sha256,
    load,
    native,
    read_config,
    save,
    storage,
    weight_files,
    weights_sha256,
)
from speculators.errors import CheckpointError, ConfigError, PairingError
from speculators.speculator import Speculator

METHODS = ("dflash", "dspark", "eagle3", "peagle")
SHARED = {"embed_tokens.weight", "lm_head.weight"}


def tensors_of(folder: Path) -> dict[str, Tensor]:
    merged: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        merged |= load_file(file)
    return merged


def config_of(folder: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return data


def edit_config(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(config_of(folder) | changes))


def edit_layers(folder: Path, remove: tuple[str, ...] = (), **changes: Any) -> None:
    layers = config_of(folder)["transformer_layer_config"] | changes
    edit_config(folder, transformer_layer_config={key: value for key, value in layers.items() if key not in remove})


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def frozen_embedding(method: str, **options: Any) -> Speculator:
    return drafter(method, **({"train_embedding": False} if method == "peagle" else {}), **options)


def reduced(method: str, **options: Any) -> Speculator:
    speculator = drafter(method, draft_vocab_size=20, **options)
    speculator.set_draft_vocabulary(torch.arange(1, 60, 3))
    return speculator


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
        losses.append(model.training_loss(replace(batch, last_hidden_state=batch.last_hidden_state)).loss)
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


# -- the compact form ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_the_compact_form_leaves_out_what_the_verifier_has(method: str, tmp_path: Path) -> None:
    speculator = frozen_embedding(method)
    save(speculator, tmp_path, form="compact")
    assert not SHARED & set(tensors_of(tmp_path))
    # bfloat16 is the upper half of float32, rounded to nearest even: computed here with integers alone.
    bits = speculator.verifier.embedding.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    expected = hashlib.sha256(rounded.numpy().astype("<u2").tobytes()).hexdigest()
    assert config_of(tmp_path)["unified_speculators"] == {"form": "compact", "verifier_embedding_sha256": expected}
    assert load(tmp_path, verifier_weights()).is_attached


def test_an_owned_embedding_that_still_equals_the_verifiers_is_left_out_and_comes_back(tmp_path: Path) -> None:
    speculator = drafter("peagle")
    with torch.no_grad():
        speculator.get_parameter("embed_tokens.weight").copy_(speculator.verifier.embedding)
    save(speculator, tmp_path, form="compact")
    assert "embed_tokens.weight" not in tensors_of(tmp_path)
    restored = load(tmp_path, verifier_weights())
    assert torch.equal(restored.get_parameter("embed_tokens.weight"), verifier_weights().embedding)


def test_a_trained_embedding_cannot_be_saved_compact(tmp_path: Path) -> None:
    speculator = drafter("peagle")
    with torch.no_grad():
        speculator.get_parameter("embed_tokens.weight").copy_(speculator.verifier.embedding)[7] += 1
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight differs from that of 'tiny-verifier' in row 7\); save form='full'"):
        save(speculator, tmp_path / "x", form="compact")
    assert not (tmp_path / "x").exists()


def test_a_compact_checkpoint_refuses_another_verifier(tmp_path: Path) -> None:
    save(drafter("dflash"), tmp_path, form="compact")
    stranger = replace(verifier_weights(seed=9), name_or_path="other/model")
    with pytest.raises(PairingError, match=r"borrows the embedding of 'tiny-verifier' .* 'other/model' is another"):
        load(tmp_path, stranger)
    with pytest.raises(CheckpointError, match="borrows the embedding of its verifier 'tiny-verifier'"):
        load(tmp_path)
    load(tmp_path, verifier_weights(torch.bfloat16))


def test_the_embedding_hash_follows_the_values_and_not_the_dtype() -> None:
    table = torch.randn(50, 8).bfloat16()
    digest = embedding_sha256(table)
    assert digest == hashlib.sha256(table.view(torch.uint8).numpy().tobytes()).hexdigest()
    assert digest == embedding_sha256(table.float())
    table[3, 3] += 1
    assert embedding_sha256(table) != digest


def test_a_compact_checkpoint_expands_to_the_full_form(tmp_path: Path) -> None:
    speculator = frozen_embedding("eagle3")
    save(speculator, tmp_path / "full")
    save(speculator, tmp_path / "compact", form="compact")
    save(load(tmp_path / "compact", verifier_weights()), tmp_path / "expanded")
    assert contents(tmp_path / "expanded") == contents(tmp_path / "full")


# -- whole or not at all ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["save_file", "write_json", "render_card", "os.replace", "os.fsync"])
def test_a_save_that_fails_midway_changes_nothing(step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "drafter"
    save(drafter("dflash"), target)
    (target / "notes.txt").write_text("mine")
    before = contents(tmp_path)
    owner: Any = {"save_file": storage, "write_json": native, "render_card": native, "os.replace": os, "os.fsync": os}[step]
    name = step.removeprefix("os.")
    original, calls = getattr(owner, name), []

    def fail_the_second_time(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        if len(calls) == (2 if step in ("save_file", "os.replace", "os.fsync") else 1):
            raise OSError("no space left on device")
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, fail_the_second_time)
    with pytest.raises(OSError, match="no space left"):
        save(drafter("dflash", seed=8), target, max_shard_bytes=20_000)
    assert calls and contents(tmp_path) == before
    with pytest.raises(OSError, match="no space left"):
        calls.clear()
        save(drafter("dflash", seed=8), tmp_path / "new", max_shard_bytes=20_000) if step != "os.replace" else original(
            "absent", "no space left"
        )
    assert contents(tmp_path) == before


def test_saving_again_replaces_old_shards_and_keeps_the_users_files(tmp_path: Path) -> None:
    save(drafter("dspark"), tmp_path, max_shard_bytes=40_000)
    assert len(weight_files(tmp_path)) > 2
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "README.md").write_text("# mine")
    newer = drafter("dspark", seed=4)
    save(newer, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"README.md", "config.json", "model.safetensors", "notes.txt", "tokenizer.json"}
    assert (tmp_path / "README.md").read_text() == "# mine"
    assert torch.equal(load(tmp_path).get_parameter("fc.weight"), newer.get_parameter("fc.weight").bfloat16())
    save(newer, tmp_path, card=ModelCard(summary="Theirs to replace."))
    assert "Theirs to replace." in (tmp_path / "README.md").read_text()


def test_a_link_to_a_folder_keeps_pointing_there(tmp_path: Path) -> None:
    save(drafter("dflash"), tmp_path / "step")
    (tmp_path / "best").symlink_to("step")
    save(drafter("dflash", seed=3), tmp_path / "best")
    assert (tmp_path / "best").is_symlink() and contents(tmp_path / "best") == contents(tmp_path / "step")


# -- the Hub and the card --------------------------------------------------------------------------------------


def test_a_hub_name_is_downloaded_without_code_or_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(drafter("dflash"), tmp_path)
    asked: list[Any] = []

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(storage, "snapshot_download", download)
    assert load("some-org/some-drafter", revision="v1").method == "dflash"
    assert asked == [("some-org/some-drafter", "v1", ["*.json", "*.safetensors", "*.md"])]


def test_the_card_tells_what_is_known_and_labels_every_number(tmp_path: Path) -> None:
    card = ModelCard(
        summary="A test.",
        base_model="org/Verifier: the one",
        repository="me/drafter",
        training_command="speculators train --method dspark",
        data="self-synthesised prompts, thinking off",
        tokens=940_000,
        steps=774,
        seconds=85.4,
        hardware="one GPU",
        seed=0,
        acceptance=(
            Acceptance("gsm8k", 7, 2.54, "decode", by_position=(0.8, 0.55), speedup=1.9),
            Acceptance("held-out", 7, 2.71, "teacher-forced"),
        ),
    )
    save(drafter("dspark"), tmp_path, card=card)
    text = (tmp_path / "README.md").read_text()
    yaml = pytest.importorskip("yaml")
    front = yaml.safe_load(text.split("---")[1])
    assert front["base_model"] == "org/Verifier: the one" and front["pipeline_tag"] == "text-generation"
    assert front["library_name"] == "unified-speculators" and {"speculative-decoding", "dspark"} <= set(front["tags"])
    decode, forced = text.index("## Acceptance (decode)"), text.index("## Acceptance (teacher-forced)")
    assert decode < text.index("2.54") < forced < text.index("2.71")
    for fact in ("speculators train --method dspark", "thinking off", "940,000", "774", "85", "one GPU", "| seed | 0 |", "1.90x"):
        assert fact in text
    assert weights_sha256(tmp_path)["model.safetensors"] in text
    parameters = sum(parameter.numel() for parameter in drafter("dspark").parameters())
    assert f"| parameters | {parameters:,} |" in text
    settings = json.loads(text.split("--speculative-config '")[1].split("'")[0])
    assert settings == {"method": "dspark", "model": "me/drafter", "num_speculative_tokens": 5}
    with pytest.raises(ConfigError, match="kind = 'guessed'"):
        Acceptance("gsm8k", 7, 2.5, "guessed")  # type: ignore[arg-type]


def test_folders_can_be_copied(tmp_path: Path) -> None:
    save(drafter("peagle"), tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert load(tmp_path / "b", verifier_weights()).method == "peagle"
