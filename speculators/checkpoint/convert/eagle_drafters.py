"""EAGLE-3 and P-EAGLE in foreign formats: names of the first layer, taps that a file may leave out, norm switches."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from speculators.algorithms.input_fusion import InputFusionConfig
from speculators.algorithms.options import default_taps
from speculators.checkpoint.convert.adapter import FormatAdapter, Tensors
from speculators.checkpoint.convert.fields import layer_fields, native_config, verifier_depth, without_zero_bias
from speculators.checkpoint.shared import EMBEDDING, EMBEDDING_KEY, HEAD, HEAD_KEY, first_difference
from speculators.checkpoint.storage import CONFIG_FILE, problem
from speculators.config import SpeculatorConfig
from speculators.errors import CheckpointError, ConfigError
from speculators.speculator import VerifierWeights

FIRST_LAYER = "midlayer."
TAPS_KEY = "eagle_aux_hidden_state_layer_ids"
NESTED = "eagle_config"
SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def native_names(tensors: Mapping[str, Tensor], vocab_size: object) -> Tensors:
    """Rename the first layer; drop a zero bias of fc, and a vocabulary mapping that keeps the whole vocabulary.

    Raises:
        CheckpointError: fc has a bias, or a layer is stored under both names.
    """
    renamed: Tensors = {}
    for name, tensor in without_zero_bias(tensors).items():
        native = "layers.0." + name.removeprefix(FIRST_LAYER) if name.startswith(FIRST_LAYER) else name
        if native in renamed:
            raise problem("the weights", name, "stored twice", f"it is {native} under another name", "keep the trained one")
        renamed[native] = tensor
    d2t = renamed.get("d2t")
    if d2t is not None and d2t.numel() == vocab_size and not bool(d2t.any()):
        del renamed["d2t"]
        renamed.pop("t2d", None)
    return renamed


def stored_taps(config: Mapping[str, Any], verifier: VerifierWeights | None) -> list[int]:
    """Taps of a file that may not name them: then [2, n/2, n-3] of the n-layer verifier. These ids are numbered as ours.

    Raises:
        CheckpointError: the depth is not known or too small for the default.
    """
    nested = config.get(NESTED)
    named = [holder[TAPS_KEY] for holder in (config, nested) if isinstance(holder, dict) and holder.get(TAPS_KEY) is not None]
    if named:
        if any(ids != named[0] for ids in named):
            raise problem(CONFIG_FILE, TAPS_KEY, named[0], f"{NESTED}.{TAPS_KEY} = {named[1]} contradicts it", "keep the trained taps")
        if not isinstance(named[0], list):
            raise problem(CONFIG_FILE, TAPS_KEY, repr(named[0]), "it must be a list of layer ids", "correct this key")
        return list(named[0])
    depth = verifier_depth(config, verifier)
    if depth is None:
        raise CheckpointError(
            f"{CONFIG_FILE} names no {TAPS_KEY}, so the taps follow from the verifier's depth, which is not known; give the verifier"
        )
    try:
        return default_taps(depth)
    except ConfigError as error:
        raise CheckpointError(f"{CONFIG_FILE}: {error}") from None


def eagle_to_native(
    adapter: FormatAdapter,
    method: str,
    config: Mapping[str, Any],
    tensors: Tensors,
    verifier: VerifierWeights | None,
    *,
    taps: list[int],
    num_draft_tokens: int,
    own_embedding: bool,
    own_head: bool,
    fields: Mapping[str, Any],
) -> SpeculatorConfig:
    """The configuration of a drafter with input fusion in the speculators format.

    Raises:
        CheckpointError: see `FormatAdapter.to_native`.
    """
    # Whether heads are normalised is a property of the weights; files call both kinds by either family's name.
    family = "qwen3" if "layers.0.self_attn.q_norm.weight" in tensors else "llama"
    switches = {key: bool(config.get(key, False)) for key in SWITCHES}
    layers = layer_fields(config, model_type=family, num_aux_hidden_states=len(taps))
    return native_config(
        adapter,
        method,
        config,
        tensors,
        verifier,
        taps=taps,
        num_draft_tokens=num_draft_tokens,
        fields={**switches, EMBEDDING_KEY: own_embedding, HEAD_KEY: own_head, **fields},
        layers=layers,
    )


def has_own_embedding(config: Mapping[str, Any], tensors: Mapping[str, Tensor], verifier: VerifierWeights | None) -> bool:
    """Whether a stored embedding is the drafter's own: another width than the verifier's, or other values.

    Without a verifier a table of its width counts as its copy, which is compared when they are paired.
    """
    table = tensors.get(EMBEDDING)
    if table is None:
        return False
    if table.ndim == 2 and table.shape[1] != (config.get("target_hidden_size") or table.shape[1]):
        return True
    return verifier is not None and table.shape == verifier.embedding.shape and first_difference(table, verifier.embedding) is not None


def has_own_head(tensors: Mapping[str, Tensor], verifier: VerifierWeights | None) -> bool:
    """Whether a stored head is the drafter's own, in formats whose drafters train one: unless it is known to be the verifier's."""
    head, d2t = tensors.get(HEAD), tensors.get("d2t")
    if head is None or verifier is None:
        return head is not None
    theirs = verifier.head
    if d2t is not None:
        ids = (d2t.to(torch.int64) + torch.arange(d2t.numel())).to(theirs.device)
        if bool(((ids < 0) | (ids >= len(theirs))).any()):
            return False  # validation says more
        theirs = theirs[ids]
    return head.shape == theirs.shape and first_difference(head, theirs) is not None


def eagle_config(adapter: FormatAdapter, config: SpeculatorConfig, method: str, held: Collection[str] = ()) -> InputFusionConfig:
    """The configuration as that of a drafter with input fusion that the format can hold.

    Args:
        adapter: of the target format.
        config: of the checkpoint.
        method: the only algorithm of the format.
        held: the norm switches it has keys for.

    Raises:
        CheckpointError: another algorithm, or a norm switch that the format has no key for.
    """
    if not isinstance(config, InputFusionConfig) or config.speculators_model_type != method:
        raise adapter.refuse(f"this is a {config.speculators_model_type} drafter", "the format has no such algorithm")
    for key in SWITCHES:
        if getattr(config, key) and key not in held:
            raise adapter.refuse(f"the drafter was trained with {key}", "the format's network has no such norm")
    return config
