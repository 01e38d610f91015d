"""The compact form, saves that fail midway, and the model card."""

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
from tiny_checkpoints import METHODS, SHARED, config_of, contents, frozen_embedding, tensors_of
from tiny_drafters import drafter, verifier_weights

from speculators.checkpoint import (
    Acceptance,
    ModelCard,
    embedding_sha256,
    load,
    native,
    save,
    storage,
    weight_files,
    weights_sha256,
)
from speculators.errors import CheckpointError, ConfigError, PairingError

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


@pytest.mark.parametrize("files", [{"config.json": b'{"model_type": "llama"}', "model.safetensors": b"w"}, {"model.safetensors": b"w"}])
def test_a_save_replaces_an_earlier_checkpoint_and_never_another_model(files: dict[str, bytes], tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match="holds a model that is no checkpoint of this format"):
        save(drafter("dflash"), tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == files
    save(drafter("dflash"), tmp_path / "own")
    save(drafter("dspark"), tmp_path / "own")
    assert load(tmp_path / "own", verifier_weights()).method == "dspark"


def test_an_embedding_that_differs_only_beyond_bfloat16_counts_as_trained_in_float32(tmp_path: Path) -> None:
    speculator = drafter("peagle")
    with torch.no_grad():
        speculator.get_parameter("embed_tokens.weight").copy_(speculator.verifier.embedding).mul_(1 + 2**-20)
    with pytest.raises(CheckpointError, match="in row 0"):
        save(speculator, tmp_path, form="compact", dtype="float32")


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


def test_a_failed_first_save_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(native, "write_json", fail)
    with pytest.raises(KeyboardInterrupt):
        save(drafter("dflash"), tmp_path / "drafter")
    assert not list(tmp_path.iterdir())


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


@pytest.mark.parametrize("max_shard_bytes", [10**9, 40_000])
def test_weights_can_be_read_by_others_than_their_owner(max_shard_bytes: int, tmp_path: Path) -> None:
    save(drafter("dspark"), tmp_path / "saved", max_shard_bytes=max_shard_bytes)
    shards = list((tmp_path / "saved").glob("*.safetensors"))
    assert len(shards) > 1 or max_shard_bytes == 10**9
    assert {shard.stat().st_mode & 0o777 for shard in shards} == {0o644}
