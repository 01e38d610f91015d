"""How far a verifier's positions reach, and what of a model depends on the longest row kept from doing so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig

from speculators.errors import DataError
from speculators.speculator import VerifierWeights

__all__ = ["check_documents", "context_length", "ends_hard", "facts", "keep_positions"]

# Frequencies that follow the longest row of a batch: what is in the cache was rotated by other ones.
_CHANGING = ("dynamic", "longrope")


def facts(config: PreTrainedConfig) -> dict[str, Any]:
    """A text config as a dict, where a family's own names (GPT-2's `n_embd`) stand beside the common ones (`hidden_size`)."""
    return config.to_dict() | {name: getattr(config, name) for name in config.attribute_map if hasattr(config, name)}


def rotations(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The rotary embeddings that a config names: one, one for each type of layer, or none."""
    rope = config.get("rope_parameters") or {}
    yield from (rope,) if "rope_type" in rope else (part for part in rope.values() if isinstance(part, dict))


def context_length(config: dict[str, Any]) -> int | None:
    """Positions that all tokens of a row may have, or None where nothing limits them.

    Where a model computes otherwise once the longest row of a batch is longer, rows end: a row that grows past the change would have
    keys of both kinds, shorter rows would change with it, and a block of drafts would reach past it before its tokens do. `longrope`
    has other frequencies then; Llama-4 scales its queries, from a position that it takes from the longest row.
    """
    limits = [config.get("max_position_embeddings")]
    limits += [rope.get("original_max_position_embeddings") for rope in rotations(config) if rope["rope_type"] == "longrope"]
    if config.get("attn_temperature_tuning") and config.get("floor_scale"):
        limits.append(config["floor_scale"] - 1)
    return min((int(limit) for limit in limits if limit), default=None)


def check_documents(position_ids: Tensor, verifier: VerifierWeights) -> None:
    """Refuse packed rows with documents longer than the verifier's context; its forward cannot look without asking the device.

    Args:
        position_ids: [rows, width] on the host.
        verifier: the verifier that they are for.

    Raises:
        DataError: one is longer.
    """
    longest, limit = int(position_ids.max()) + 1, context_length(verifier.config)
    if limit is not None and longest > limit:
        raise DataError(
            f"the data holds conversations of {longest} tokens, which exceeds the context of {limit} tokens of"
            f" {verifier.name_or_path!r}; cut them with a row_length of {limit} or less"
        )


def keep_positions(model: nn.Module) -> None:
    """Let every layer compute as in rows within `context_length`, whatever drafts and padding lie beyond.

    The model's own code would also ask the device for the largest position at every forward.
    """
    for module in model.modules():
        if hasattr(module, "attn_temperature_tuning"):
            module.attn_temperature_tuning = False  # type: ignore[assignment] # all its factors are 1 there
        _keep_rotation(module)


def _keep_rotation(module: Any) -> None:
    kinds = getattr(module, "rope_type", None)
    of_layers = kinds if isinstance(kinds, dict) else {"": kinds}
    for layer_type, kind in of_layers.items():
        if kind in _CHANGING:
            prefix = f"{layer_type}_" if layer_type else ""
            getattr(module, f"{prefix}inv_freq").copy_(getattr(module, f"{prefix}original_inv_freq"))
    kept = {layer_type: "kept" if kind in _CHANGING else kind for layer_type, kind in of_layers.items()}
    if kept != of_layers:
        module.rope_type = kept if isinstance(kinds, dict) else kept[""]


def ends_hard(config: dict[str, Any]) -> bool:
    """Whether no position past the end may reach the model: a table of them ends there (GPT-2, OPT), or all rows would change."""
    kinds = [rope["rope_type"] for rope in rotations(config)]
    return bool(context_length(config)) and (not kinds or any(kind in _CHANGING for kind in kinds))
