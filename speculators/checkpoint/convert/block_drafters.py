"""DFlash and DSpark in foreign formats: same tensor names everywhere, different places and meanings of the keys.

The trap is the anchor rule. With block_size B, z-lab's slot k predicts the token at anchor + k, so that a block gives
B - 1 drafts; DeepSpec's slot k predicts anchor + k + 1, so that it gives B. The tensors look alike and no key of either
format tells; read by the wrong rule, a drafter loses nearly all acceptance. `sample_from_anchor` says it in ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from speculators.algorithms.dflash import DFlashConfig
from speculators.algorithms.dspark import DSparkConfig
from speculators.checkpoint.convert.adapter import FormatAdapter
from speculators.checkpoint.convert.fields import (
    integer,
    layer_fields,
    native_config,
    native_taps,
    refuse_other_width,
    refuse_reduced_vocabulary,
    verifier_depth,
)
from speculators.checkpoint.storage import CONFIG_FILE, problem
from speculators.config import SpeculatorConfig
from speculators.speculator import VerifierWeights

NESTED = "dflash_config"
_W1 = "markov_head.markov_w1.weight"
_CONFIDENCE = "confidence_head.proj.weight"
_KNOWN = {
    *("target_layer_ids", "mask_token_id", "block_size", "causal", "projector_type", "use_aux_hidden_state", "num_anchors"),
    *("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"),
    *("sample_from_anchor", "shift_label", "dspark_bonus_anchor"),
}


def nested(config: Mapping[str, Any]) -> dict[str, Any]:
    """`dflash_config`, empty where there is none.

    Raises:
        CheckpointError: it is no object, or switches something on that we do not implement.
    """
    inner = config.get(NESTED) or {}
    if not isinstance(inner, dict):
        raise problem(CONFIG_FILE, NESTED, repr(inner), "it must be an object", "correct this key")
    for key, value in inner.items():
        if key not in _KNOWN and value:
            rule = "no algorithm here has this setting, and ignoring it would change what the drafter computes"
            raise problem(CONFIG_FILE, f"{NESTED}.{key}", value, rule, "keep the drafter in its own format")
    return inner


def merged(config: Mapping[str, Any]) -> dict[str, Any]:
    """The flat configuration with the keys of `dflash_config` lifted to the top: files use either place.

    Raises:
        CheckpointError: a key stands in both places with different values.
    """
    inner = nested(config)
    for key, value in inner.items():
        if key in _KNOWN and config.get(key) not in (None, value):
            rule = f"{NESTED}.{key} = {value!r} contradicts it"
            raise problem(CONFIG_FILE, key, repr(config[key]), rule, "keep the value the drafter was trained with")
    return {**config, **{key: value for key, value in inner.items() if value is not None}}


def predicts_from_anchor(config: Mapping[str, Any], default: bool) -> bool:
    """Whether the anchor slot predicts, by whichever key says so; the format's own rule where none does.

    `sample_from_anchor` and `shift_label` mean the same; `dspark_bonus_anchor` (an anchor that only conditions) the opposite.

    Raises:
        CheckpointError: the keys contradict each other, or one is no boolean.
    """
    answers = {}
    for key in ("sample_from_anchor", "shift_label", "dspark_bonus_anchor"):
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, bool):
            raise problem(CONFIG_FILE, key, repr(value), "it must be true or false", "correct this key")
        answers[key] = value != (key == "dspark_bonus_anchor")
    if len(set(answers.values())) > 1:
        first, second, *_ = answers
        rule = f"{second} = {config[second]} says the opposite about the anchor slot"
        raise problem(CONFIG_FILE, first, config[first], rule, "keep the one the drafter was trained with")
    return next(iter(answers.values()), default)


def block_to_native(
    adapter: FormatAdapter,
    source: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    verifier: VerifierWeights | None,
    *,
    anchor_predicts: bool,
) -> SpeculatorConfig:
    """The configuration of a DFlash or DSpark drafter in the speculators format; its tensors have the same names.

    A drafter whose anchor slot predicts, or that has a head, becomes DSpark, if need be of Markov rank 0: engines read
    `sample_from_anchor` for DSpark and some ignore it for DFlash.

    Args:
        adapter: of the source format.
        source: the foreign `config.json`.
        tensors: as stored.
        verifier: None when it is not at hand.
        anchor_predicts: the format's anchor rule.

    Raises:
        CheckpointError: see `FormatAdapter.to_native`.
    """
    config = merged(source)
    from_anchor = predicts_from_anchor(config, anchor_predicts)
    block = integer(config, "block_size")
    rank = config.get("markov_rank")
    if rank is None:
        rank = tensors[_W1].shape[-1] if _W1 in tensors and tensors[_W1].ndim else 0
    confidence = config.get("enable_confidence_head")
    if confidence is None:
        confidence = _CONFIDENCE in tensors
    fields: dict[str, Any] = {
        "block_size": block,
        "mask_token_id": integer(config, "mask_token_id"),
        "sample_from_anchor": from_anchor,
    }
    causal = config.get("causal") if config.get("is_causal") is None else config["is_causal"]
    if causal is not None:
        fields["is_causal"] = causal
    method = "dspark" if from_anchor or rank or confidence else "dflash"
    if method == "dspark":
        with_markov = config.get("confidence_head_with_markov")
        if with_markov is None:
            with_markov = _CONFIDENCE in tensors and tensors[_CONFIDENCE].shape != (1, config.get("hidden_size"))
        fields |= {
            "markov_rank": rank,
            "markov_head_type": config.get("markov_head_type") or "vanilla",
            "enable_confidence_head": confidence,
            "confidence_head_with_markov": bool(confidence and with_markov),
        }
    return native_config(
        adapter,
        method,
        config,
        tensors,
        verifier,
        taps=native_taps(config, "target_layer_ids", verifier_depth(config, verifier)),
        num_draft_tokens=block if from_anchor else block - 1,
        fields=fields,
        layers=layer_fields(config),
    )


def block_config(adapter: FormatAdapter, config: SpeculatorConfig) -> DFlashConfig:
    """The configuration as that of a DFlash or DSpark drafter that a foreign format can hold at all.

    Raises:
        CheckpointError: another algorithm, a reduced vocabulary, or another width than the verifier's.
    """
    if not isinstance(config, DFlashConfig) or config.speculators_model_type not in ("dflash", "dspark"):
        raise adapter.refuse(f"this is a {config.speculators_model_type} drafter", "the format has no such algorithm")
    refuse_reduced_vocabulary(adapter, config)
    refuse_other_width(adapter, config)
    return config


def block_causality(config: DFlashConfig) -> bool | None:
    """One value for all layers, None where the layer types say it (sliding layers are causal, full ones are not)."""
    if config.is_causal is None and config.sliding_window_non_causal:
        return False
    return config.is_causal


def head_fields(config: DFlashConfig) -> dict[str, Any]:
    """Keys of the sequential and confidence heads; rank 0 and no confidence head for a DFlash drafter."""
    if not isinstance(config, DSparkConfig):
        return {"markov_rank": 0, "enable_confidence_head": False}
    fields: dict[str, Any] = {"markov_rank": config.markov_rank, "enable_confidence_head": config.enable_confidence_head}
    if config.markov_rank:
        fields["markov_head_type"] = config.markov_head_type
    if config.enable_confidence_head:
        fields["confidence_head_with_markov"] = config.confidence_head_with_markov
    return fields


def anchor_fields(config: DFlashConfig) -> dict[str, bool]:
    """The anchor rule in the words of newer and of older engines."""
    return {"sample_from_anchor": config.sample_from_anchor, "dspark_bonus_anchor": not config.sample_from_anchor}
