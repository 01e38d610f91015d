"""From what a user writes in `--speculative-config` to what vLLM validates. Needs no vLLM."""

from __future__ import annotations

from typing import Any

from speculators.checkpoint import read_config
from speculators.checkpoint.storage import CONFIG_FILE, read_json, resolve
from speculators.errors import CheckpointError, ConfigError
from speculators.registry import algorithms

# Where a proposer of ours finds its checkpoint: vLLM's `additional_config`, since `model` names the proposer's class.
CHECKPOINT_KEY = "speculators_checkpoint"


def translate(settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Translate one speculative config; what is not ours passes unchanged.

    Args:
        settings: as the user wrote them; "-" and "_" in keys are the same to vLLM.

    Returns:
        The config for vLLM, and entries for its `additional_config`.

    Raises:
        ConfigError: the method is not that of the checkpoint, or no checkpoint is named for a method that needs one.
    """
    settings = {key.replace("-", "_"): value for key, value in settings.items()}
    method, model = settings.get("method"), settings.get("model")
    known = algorithms()
    stored = _stored_method(model) if isinstance(model, str) and (method is None or method in known) else None
    if stored not in known:
        stored = None
    if stored is None and (method is None or method not in known):
        return settings, {}
    name = stored or str(method)
    if stored is not None and method not in (None, stored, known[stored].serving.method):
        raise ConfigError(f"method {method!r} and the {stored} checkpoint {model} contradict each other; leave the method out")
    serving = known[name].serving
    if stored is not None:
        settings.setdefault("num_speculative_tokens", read_config(str(model)).num_draft_tokens)
    if serving.method is not None:
        return {**serving.options, **settings, "method": serving.method}, {}
    if stored is None:
        raise ConfigError(f"method {name!r} needs a checkpoint: name its folder or Hub repository under model")
    proposer = serving.plugin.proposer.replace(":", ".")
    return {**settings, "method": "custom_class", "model": proposer}, {CHECKPOINT_KEY: str(model)}


def _stored_method(model: str) -> str | None:
    """The algorithm of a checkpoint in the speculators format, or None for anything else (another format, an n-gram method ...)."""
    try:
        method = read_json(resolve(model) / CONFIG_FILE).get("speculators_model_type")
    except CheckpointError:
        return None
    return method if isinstance(method, str) else None
