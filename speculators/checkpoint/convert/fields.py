"""What all foreign formats have in common: one flat config.json with the drafter's layers and keys side by side."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from speculators.checkpoint.convert.adapter import FormatAdapter, Tensors
from speculators.checkpoint.native import EXTRA_KEY, FAMILY_KEYS, FOREIGN_KEYS, write_both_rope_spellings
from speculators.checkpoint.shared import SHARED_NAMES, check_shared_tensors, verifier_tensor
from speculators.checkpoint.storage import CONFIG_FILE, problem
from speculators.config import LayerConfig, SpeculatorConfig
from speculators.errors import CheckpointError, ConfigError
from speculators.registry import get_algorithm
from speculators.speculator import VerifierWeights

DEPTH_KEY = "num_target_layers"
_CORRECT = "correct this key"
# Keys of a flat configuration that describe the decoder layers; both spellings of the rotary embedding are among them.
_LAYER_KEYS = frozenset(LayerConfig.model_fields) | {
    *("rope_theta", "rope_scaling", "attention_dropout", "max_window_layers", "use_cache", "pretraining_tp"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
}


def needed(config: Mapping[str, Any], key: str) -> Any:
    """The value of a key.

    Raises:
        CheckpointError: it is missing or null.
    """
    value = config.get(key)
    if value is None:
        raise problem(CONFIG_FILE, key, None, "this format needs it", "write down the value the drafter was trained with")
    return value


def integer(config: Mapping[str, Any], key: str) -> int:
    """The value of an integer key.

    Raises:
        CheckpointError: it is missing or no integer.
    """
    value = needed(config, key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise problem(CONFIG_FILE, key, repr(value), "it must be an integer", _CORRECT)
    return value


def remembered(config: Mapping[str, Any]) -> dict[str, Any]:
    """What this library noted in a file because the format has no key for it: a dict, empty for files from elsewhere."""
    extra = config.get(EXTRA_KEY)
    return dict(extra) if isinstance(extra, dict) else {}


# -- layer ids -------------------------------------------------------------------------------------------------


def verifier_depth(config: Mapping[str, Any], verifier: VerifierWeights | None) -> int | None:
    """Layers of the verifier, None when neither the file nor a verifier tells.

    Raises:
        CheckpointError: they contradict each other.
    """
    stored = config.get(DEPTH_KEY)
    if stored is not None and verifier is not None and stored != verifier.num_layers:
        rule = f"{verifier.name_or_path!r} has {verifier.num_layers} layers"
        raise problem(CONFIG_FILE, DEPTH_KEY, stored, rule, "name the verifier the drafter was trained for")
    if stored is None:
        return None if verifier is None else verifier.num_layers
    return integer(config, DEPTH_KEY)


def native_taps(config: Mapping[str, Any], key: str, depth: int | None) -> list[int]:
    """Layer ids in our numbering (residual stream after i layers, 0 = embeddings).

    The foreign ids name the layer whose output is read, counted from 0, with -1 for the embeddings: ours minus one.

    Raises:
        CheckpointError: no list of ids, or an id beyond the verifier of `depth` layers.
    """
    ids = needed(config, key)
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise problem(CONFIG_FILE, key, ids, "it must be a list of layer ids", _CORRECT)
    if min(ids) < -1 or (depth is not None and max(ids) >= depth):
        limit = "up" if depth is None else f"{depth - 1} in a verifier of {depth} layers"
        raise problem(CONFIG_FILE, key, ids, f"ids name layers by their output, from -1 (embeddings) to {limit}", _CORRECT)
    return [i + 1 for i in ids]


def foreign_taps(config: SpeculatorConfig) -> list[int]:
    """Our layer ids in the foreign numbering, see `native_taps`."""
    return [i - 1 for i in config.tapped_layers]


# -- to the speculators format ---------------------------------------------------------------------------------


def layer_fields(config: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """`transformer_layer_config` from a flat configuration."""
    return {key: config[key] for key in _LAYER_KEYS if config.get(key) is not None} | changes


def native_config(
    adapter: FormatAdapter,
    method: str,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    verifier: VerifierWeights | None,
    *,
    taps: list[int],
    num_draft_tokens: int,
    fields: Mapping[str, Any],
    layers: Mapping[str, Any],
) -> SpeculatorConfig:
    """The configuration in the speculators format.

    Args:
        adapter: of the source format.
        method: algorithm.
        config: content of the foreign `config.json`.
        tensors: the drafter's, by native name.
        verifier: names the verifier where the file does not.
        taps: in our numbering.
        num_draft_tokens: K where the file does not tell.
        fields: the algorithm's own keys.
        layers: `transformer_layer_config`.

    Raises:
        CheckpointError: a value is missing or breaks a rule.
    """
    config_class = get_algorithm(method).speculator_class.config_class
    noted = remembered(config)
    name = noted.get("verifier") or config.get("target_model_name_or_path") or (verifier.name_or_path if verifier else None)
    if name is None:
        raise CheckpointError(
            f"{CONFIG_FILE} does not name the verifier of this {adapter.title} drafter, and the speculators format must: give the verifier"
        )
    if "fc.weight" not in tensors:
        raise problem("the weights", "fc.weight", "missing", "every drafter of this format has it", "copy or download the checkpoint again")
    extra = {key: config[key] for key in (DEPTH_KEY, "num_anchors") if config.get(key) is not None}
    vocabulary = int(tensors["d2t"].numel()) if "d2t" in tensors else config.get("vocab_size")
    data = {
        "speculators_model_type": method,
        "transformer_layer_config": dict(layers),
        "speculators_config": {
            "algorithm": method,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": noted.get("speculative_tokens", num_draft_tokens)}],
            "verifier": {"name_or_path": name, "architectures": list(verifier.architectures) if verifier else []},
        },
        "draft_vocab_size": config.get("draft_vocab_size") or vocabulary,
        "target_hidden_size": config.get("target_hidden_size") or config.get("hidden_size"),
        "dtype": str(tensors["fc.weight"].dtype).removeprefix("torch."),
        config_class.aux_layer_key: taps,
        EXTRA_KEY: {"converted_from": adapter.name, **extra},
        **fields,
    }
    try:
        return config_class.parse(data, CONFIG_FILE)
    except ConfigError as error:
        raise CheckpointError(f"{error}; {_CORRECT}") from None


def without_zero_bias(tensors: Mapping[str, Tensor]) -> Tensors:
    """Drop `fc.bias`, which some drafters carry and the speculators format has no place for, where it is zero.

    Raises:
        CheckpointError: it is not zero.
    """
    rest = dict(tensors)
    bias = rest.pop("fc.bias", None)
    if bias is not None and bool((bias != 0).any()):
        largest = f"up to {float(bias.abs().max()):.3g}"
        raise problem("the weights", "fc.bias", largest, "the speculators format has no bias there", "keep it in its own format")
    return rest


# -- from the speculators format -------------------------------------------------------------------------------


def flat_config(config: SpeculatorConfig, tensors: Mapping[str, Tensor], **fields: Any) -> dict[str, Any]:
    """A flat `config.json`: the layers' keys, both spellings of rope and dtype, and `fields`.

    What the format has no key for (K, the verifier's name) is noted under a key of our own, which other readers ignore.
    """
    layers = config.layers.model_dump(mode="json", exclude_none=True)
    set_by_source = config.layers.model_fields_set
    for key in (*FOREIGN_KEYS, *(key for key in FAMILY_KEYS if key not in set_by_source)):
        layers.pop(key, None)
    write_both_rope_spellings(layers)
    dtype = str(tensors["fc.weight"].dtype).removeprefix("torch.")
    noted = {"speculative_tokens": config.num_draft_tokens, "verifier": config.speculators_config.verifier.name_or_path}
    return {**layers, "dtype": dtype, "torch_dtype": dtype, "transformers_version": version("transformers"), EXTRA_KEY: noted, **fields}


def depth_of(adapter: FormatAdapter, config: SpeculatorConfig, verifier: VerifierWeights | None) -> int:
    """Layers of the verifier, for formats that store or imply them.

    Raises:
        CheckpointError: nothing tells.
    """
    if verifier is not None:
        return verifier.num_layers
    noted = remembered(config.model_extra or {}).get(DEPTH_KEY)
    if not isinstance(noted, int):
        raise adapter.refuse("the depth of the verifier is not known", "the format depends on it", "give the verifier")
    return noted


def refuse_reduced_vocabulary(adapter: FormatAdapter, config: SpeculatorConfig) -> None:
    """For formats without d2t and t2d.

    Raises:
        CheckpointError: the drafter proposes only a part of the vocabulary.
    """
    if config.draft_vocab_size != config.vocab_size:
        what = f"the drafter proposes {config.draft_vocab_size} of {config.vocab_size} tokens"
        raise adapter.refuse(what, "the format has no reduced vocabulary", "train a drafter with the full vocabulary")


def refuse_other_width(adapter: FormatAdapter, config: SpeculatorConfig) -> None:
    """For formats whose drafters are as wide as their verifier.

    Raises:
        CheckpointError: this one is not.
    """
    hidden = config.layers.hidden_size
    if config.target_hidden_size not in (None, hidden):
        what = f"the drafter is {hidden} wide and its verifier {config.target_hidden_size}"
        raise adapter.refuse(what, "the format has one width for both")


def drop_verifier_copies(
    adapter: FormatAdapter,
    config: SpeculatorConfig,
    tensors: Mapping[str, Tensor],
    verifier: VerifierWeights | None,
    names: tuple[str, ...],
) -> Tensors:
    """Leave out copies of the verifier's tensors, after asserting that they are copies.

    Raises:
        CheckpointError: there is no verifier to compare with.
        PairingError: one differs.
    """
    copies = {name: tensors[name] for name in names if name in tensors}
    if copies and verifier is None:
        what = f"the checkpoint holds {', '.join(copies)}"
        raise adapter.refuse(what, "the format has no place for it unless it equals the verifier's", "give the verifier, to compare")
    if verifier is not None:
        check_shared_tensors(copies, config.speculators_config.verifier.name_or_path, verifier, tensors.get("t2d"))
    return {name: tensor for name, tensor in tensors.items() if name not in copies}


def with_verifier_copies(
    adapter: FormatAdapter, tensors: Mapping[str, Tensor], verifier: VerifierWeights | None, names: tuple[str, ...] = SHARED_NAMES
) -> Tensors:
    """Add what the format wants repeated of the verifier, in the drafter's dtype, where the checkpoint does not hold it.

    Raises:
        CheckpointError: there is no verifier to take it from.
    """
    complete = dict(tensors)
    for name in names:
        if name in complete:
            continue
        if verifier is None:
            raise adapter.refuse(f"the checkpoint does not hold {name}", "the format repeats it from the verifier", "give the verifier")
        complete[name] = stored_copy(verifier_tensor(name, verifier, tensors.get("t2d")), tensors["fc.weight"].dtype)
    return complete


def stored_copy(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous CPU copy that shares no memory."""
    return tensor.detach().to(device="cpu", dtype=dtype, copy=True).contiguous()
