"""Do a checkpoint and the verifier it is to be served with belong together? Answered from files, without loading a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from speculators.checkpoint.shared import embedding_sha256
from speculators.config import SpeculatorConfig
from speculators.errors import CheckpointError, PairingError
from speculators.loading import locate_verifier

_EMBEDDINGS = ("model.embed_tokens.weight", "embed_tokens.weight", "language_model.model.embed_tokens.weight")


def check_pair(config: SpeculatorConfig, embedding_hash: str | None, verifier: str) -> str | None:
    """Compare what both sides say about themselves.

    Args:
        config: of the checkpoint.
        embedding_hash: the compact form's hash of its verifier's embedding, None for the full form.
        verifier: folder or Hub name.

    Returns:
        None, or a sentence saying what could not be checked here.

    Raises:
        PairingError: vocabulary, hidden size, depth or embedding contradict each other.
        CheckpointError: the verifier's folder is missing, holds no language model, or a damaged one.
    """
    from transformers import AutoConfig

    try:
        theirs = AutoConfig.from_pretrained(locate_verifier(verifier)).get_text_config()
    except (OSError, ValueError) as error:
        return f"the pair could not be checked: no configuration of {verifier!r} here ({str(error).splitlines()[0].rstrip('.')})"
    for fact in ("vocab_size", "hidden_size", "num_hidden_layers"):
        if not hasattr(theirs, fact):
            raise CheckpointError(f"the configuration of {verifier!r} has no {fact}: it is no language model; choose another verifier")
    hidden = config.target_hidden_size or config.layers.hidden_size
    for what, ours, found in (("vocabulary", config.vocab_size, theirs.vocab_size), ("hidden size", hidden, theirs.hidden_size)):
        if ours != found:
            raise PairingError(
                f"this {config.speculators_model_type} drafter was made for a verifier with {what} {ours}, but {verifier!r} has {found};"
                f" serve it with {config.speculators_config.verifier.name_or_path!r}"
            )
    if (deepest := max(config.tapped_layers, default=0)) > theirs.num_hidden_layers:
        raise PairingError(
            f"{config.aux_layer_key} {config.tapped_layers} reads layer {deepest}, but {verifier!r} has {theirs.num_hidden_layers}"
            f" layers; serve the drafter with {config.speculators_config.verifier.name_or_path!r}"
        )
    if embedding_hash is None:
        return None
    table = _embedding(Path(verifier))
    if table is None:
        return f"the checkpoint borrows its embedding, and that of {verifier!r} could not be compared here"
    if embedding_sha256(table) != embedding_hash:
        raise PairingError(
            f"this compact checkpoint borrows the embedding of {config.speculators_config.verifier.name_or_path!r}, and that of"
            f" {verifier!r} is another; serve it with the verifier it was made for"
        )
    return None


def _embedding(folder: Path) -> Tensor | None:
    """The embedding table in a folder of safetensors, or None."""
    for file in sorted(folder.glob("*.safetensors")) if folder.is_dir() else ():
        stored: Any
        try:
            with safe_open(file, framework="pt") as stored:
                for name in _EMBEDDINGS:
                    if name in stored.keys():  # noqa: SIM118 (no mapping)
                        table: Tensor = stored.get_tensor(name)
                        return table
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is no complete safetensors file ({error}); copy or download the verifier again") from None
    return None
