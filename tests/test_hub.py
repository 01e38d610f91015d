"""Upload to and download from the Hub. The network is replaced: what counts is what would be sent, and what is said when it fails."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, LocalTokenNotFoundError, OfflineModeIsEnabled
from tiny_checkpoints import contents, frozen_embedding
from tiny_drafters import drafter, verifier_weights

from speculators.checkpoint import ModelCard, hub, load, save, storage
from speculators.errors import CheckpointError
from speculators.speculator import Speculator


class FakeHub:
    """Stands for huggingface_hub.HfApi: remembers every call, and what each branch of each repository holds."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.files: dict[str, bytes] = {}
        self.failure: Exception | None = None

    def __call__(self, *, token: str | None) -> FakeHub:
        self.calls.append(("login", {"token": token}))
        return self

    def create_repo(self, **arguments: Any) -> None:
        self.calls.append(("create_repo", arguments))
        if self.failure is not None:
            raise self.failure

    def create_branch(self, **arguments: Any) -> None:
        self.calls.append(("create_branch", arguments))

    def upload_folder(self, *, folder_path: Path, **arguments: Any) -> SimpleNamespace:
        self.calls.append(("upload_folder", arguments))
        self.files = contents(folder_path)
        return SimpleNamespace(commit_url=f"https://hub.example/{arguments['repo_id']}/commit/1")


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub()
    monkeypatch.setattr(hub, "HfApi", fake)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return fake


def test_an_upload_is_one_commit_with_a_card_that_names_the_repository(online: FakeHub) -> None:
    address = drafter("dspark").push_to_hub("org/drafter", private=True, card=ModelCard(training_command="speculators train", steps=9))
    assert address == "https://hub.example/org/drafter/commit/1"
    assert [name for name, _ in online.calls] == ["login", "create_repo", "upload_folder"]
    assert online.calls[1][1] == {"repo_id": "org/drafter", "private": True, "exist_ok": True}
    assert online.calls[2][1]["revision"] is None and online.calls[2][1]["commit_message"] == "Upload dspark drafter"
    assert sorted(online.files) == ["README.md", "config.json", "model.safetensors"]
    card = online.files["README.md"].decode()
    assert 'base_model: "tiny-verifier"' in card and "speculators train" in card and '"model": "org/drafter"' in card
    assert json.loads(online.files["config.json"])["speculators_model_type"] == "dspark"


def test_a_revision_is_a_branch_that_is_made_if_needed(online: FakeHub) -> None:
    drafter("dflash").push_to_hub("org/drafter", revision="v2")
    assert ("create_branch", {"repo_id": "org/drafter", "branch": "v2", "exist_ok": True}) in online.calls
    assert online.calls[-1][1]["revision"] == "v2"


def test_weights_of_an_earlier_larger_checkpoint_are_deleted_and_nothing_else(online: FakeHub) -> None:
    drafter("dflash").push_to_hub("org/drafter")
    assert online.calls[-1][1]["delete_patterns"] == ["model*.safetensors", "model.safetensors.index.json"]


def test_what_is_uploaded_is_what_save_writes(online: FakeHub, tmp_path: Path) -> None:
    speculator = frozen_embedding("peagle")
    speculator.push_to_hub("org/drafter", form="compact", dtype="float32")
    save(speculator, tmp_path / "saved", form="compact", dtype="float32", card=ModelCard(repository="org/drafter"))
    assert online.files == contents(tmp_path / "saved")


def test_what_was_uploaded_comes_back_from_the_named_revision(online: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speculator = drafter("eagle3")
    speculator.push_to_hub("org/drafter", revision="v1", dtype="float32")
    for name, content in online.files.items():
        (tmp_path / name).write_bytes(content)
    asked: list[tuple[str, str | None]] = []

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision))
        return str(tmp_path)

    monkeypatch.setattr(storage, "snapshot_download", download)
    again = Speculator.from_pretrained("org/drafter", verifier_weights(), revision="v1")
    assert asked == [("org/drafter", "v1")]
    for name, tensor in speculator.state_dict().items():
        assert again.state_dict()[name].equal(tensor)


def test_a_drafter_that_breaks_a_rule_creates_no_repository(online: FakeHub) -> None:
    speculator = drafter("dflash")
    next(speculator.parameters()).data.fill_(float("nan"))
    with pytest.raises(CheckpointError, match="every value must be finite"):
        speculator.push_to_hub("org/drafter")
    assert online.calls == []


@pytest.mark.parametrize(
    ("failure", "sentence"),
    [
        (HFValidationError("bad"), "this is no valid Hub repository name; name it owner/name"),
        (LocalTokenNotFoundError("none"), "no one is logged in to the Hub; run `hf auth login` or pass token"),
        (ConnectionError("no route"), "the Hub cannot be reached; try again, or save_pretrained to a folder"),
    ],
)
def test_a_refused_upload_is_one_sentence(failure: Exception, sentence: str, online: FakeHub) -> None:
    online.failure = failure
    with pytest.raises(CheckpointError) as raised:
        drafter("dflash").push_to_hub("org/drafter")
    assert str(raised.value) == f"cannot upload to org/drafter: {sentence}"


def test_offline_an_upload_says_so_before_any_work(online: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE is set, so the Hub is never contacted; unset it, or save_pretrained"):
        drafter("dflash").push_to_hub("org/drafter")
    assert online.calls == []


@pytest.mark.parametrize("failure", [LocalEntryNotFoundError("not cached"), OfflineModeIsEnabled("offline")])
def test_offline_a_load_that_finds_no_copy_names_the_setting(failure: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise failure

    monkeypatch.setattr(storage, "snapshot_download", download)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE is set and the Hub's cache holds no copy of this revision"):
        load("org/drafter", revision="v1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(CheckpointError, match="the Hub cannot be reached and its cache holds no copy"):
        load("org/drafter", revision="v1")
