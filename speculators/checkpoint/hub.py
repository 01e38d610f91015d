"""Upload of checkpoints to the Hub. Download is `storage.resolve`, which every load goes through."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

from speculators.checkpoint.card import ModelCard
from speculators.checkpoint.native import Form, save
from speculators.checkpoint.storage import DEFAULT_SHARD_BYTES, INDEX_FILE
from speculators.errors import CheckpointError
from speculators.speculator import Speculator


def push_to_hub(
    speculator: Speculator,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    form: Form | str = "full",
    card: ModelCard | None = None,
    dtype: str = "bfloat16",
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    commit_message: str | None = None,
    token: str | None = None,
) -> str:
    """Upload a checkpoint with its model card in one commit. Nothing is created on the Hub before it passed all checks.

    Weights of an earlier checkpoint in the repository are replaced, as is its README.md; other files there stay.

    Args:
        speculator: what to upload.
        repo_id: Hub repository `owner/name`, made if needed.
        private: whether a repository that has to be made is private.
        revision: branch, made if needed; None is the main branch.
        form, dtype, max_shard_bytes: as for `save`.
        card: as for `save`; a card that names no repository names this one.
        commit_message: None names the method.
        token: None takes the one that `hf auth login` stored.

    Returns:
        The address of the commit.

    Raises:
        CheckpointError: the checkpoint breaks a rule of the format, the Hub is offline or cannot be reached, or refuses.
        ConfigError: an unknown form or dtype.
    """
    if constants.HF_HUB_OFFLINE:
        raise CheckpointError(
            f"cannot upload to {repo_id}: HF_HUB_OFFLINE is set, so the Hub is never contacted; unset it, or save_pretrained to a folder"
        )
    card = card or ModelCard()
    card = replace(card, repository=card.repository or repo_id)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "checkpoint"
        save(speculator, folder, form=form, card=card, dtype=dtype, max_shard_bytes=max_shard_bytes)
        try:
            api = HfApi(token=token)
            api.create_repo(repo_id=repo_id, private=private, exist_ok=True)
            if revision is not None:
                api.create_branch(repo_id=repo_id, branch=revision, exist_ok=True)
            commit = api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                revision=revision,
                commit_message=commit_message or f"Upload {speculator.method} drafter",
                delete_patterns=["model*.safetensors", INDEX_FILE],
            )
        except HFValidationError:
            reason = "this is no valid Hub repository name; name it owner/name"
        except LocalTokenNotFoundError:
            reason = "no one is logged in to the Hub; run `hf auth login` or pass token"
        except HfHubHTTPError as error:
            status = "it did not answer" if error.response is None else f"status {error.response.status_code}"
            reason = f"the Hub refused ({status}); check that the token may write to this repository"
        except OSError:
            reason = "the Hub cannot be reached; try again, or save_pretrained to a folder"
        else:
            return str(commit.commit_url)
    raise CheckpointError(f"cannot upload to {repo_id}: {reason}")
