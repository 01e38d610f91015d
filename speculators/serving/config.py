"""From a checkpoint to the value of vLLM's `--speculative-config`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from speculators.checkpoint import read_config
from speculators.config import SpeculatorConfig
from speculators.errors import ConfigError
from speculators.registry import get_algorithm

_OURS = ("method", "model", "num_speculative_tokens")


def speculative_config(checkpoint: str | Path, *, num_draft_tokens: int | None = None, **options: Any) -> dict[str, Any]:
    """The dict that vLLM takes: `LLM(model=VERIFIER, speculative_config=...)`, or as JSON `vllm serve --speculative-config`.

    Nothing of it is left for vLLM to guess: without `method` it goes by the folder's name, and without a number of draft
    tokens DSpark drafts one too many.

    Args:
        checkpoint: a folder, or a Hub repository `owner/name`.
        num_draft_tokens: K; what the checkpoint says when None.
        options: further keys of vLLM's speculative config, e.g. `draft_sample_method="probabilistic"`.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        ConfigError: K is not what the drafter can propose, or an option is one of those set here.
    """
    config = read_config(checkpoint)
    return build(config, str(checkpoint), check_draft_tokens(config, num_draft_tokens), options)


def build(config: SpeculatorConfig, model: str, num_draft_tokens: int, options: dict[str, Any]) -> dict[str, Any]:
    """The dict, from a configuration that is read already; the arguments of `speculative_config`."""
    if taken := [key for key in _OURS if key in options]:
        raise ConfigError(f"{taken[0]} follows from the checkpoint; leave it out of the options (num_draft_tokens sets K)")
    serving = get_algorithm(config.speculators_model_type).serving
    settings = serving.speculative_config(model, num_draft_tokens)
    if serving.method is None:  # the plugin knows our name for it
        settings["method"] = config.speculators_model_type
    return {**settings, **options}


def check_draft_tokens(config: SpeculatorConfig, requested: int | None) -> int:
    """K as requested, or the checkpoint's.

    Raises:
        ConfigError: it is below 1 or above what the drafter proposes in one block.
    """
    count = config.num_draft_tokens if requested is None else requested
    if not 1 <= count <= config.max_draft_tokens:
        raise ConfigError(
            f"num_draft_tokens = {count}: this {config.speculators_model_type} drafter proposes 1 to {config.max_draft_tokens}"
            " tokens a round; beyond that vLLM would draft from slots it was never trained on"
        )
    return count
