"""SpecForge's nestings: DFlash and DSpark with heads and all inside `dflash_config`, told apart by `projector_type`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from speculators.checkpoint.convert.adapter import FormatAdapter, Tensors
from speculators.checkpoint.convert.block_drafters import (
    NESTED,
    anchor_fields,
    block_causality,
    block_config,
    block_to_native,
    head_fields,
    nested,
)
from speculators.checkpoint.convert.fields import (
    DEPTH_KEY,
    depth_of,
    drop_verifier_copies,
    flat_config,
    foreign_taps,
    without_zero_bias,
)
from speculators.checkpoint.shared import SHARED_NAMES
from speculators.checkpoint.storage import CONFIG_FILE, problem
from speculators.config import SpeculatorConfig
from speculators.speculator import VerifierWeights

_PROJECTORS = ("dflash", "dspark")


class SpecForge(FormatAdapter):
    """Says the anchor rule by `projector_type`, or explicitly; both are written."""

    name = "specforge"
    title = "SpecForge"

    def detect(self, config: Mapping[str, Any], tensor_names: Collection[str]) -> bool:
        """See `FormatAdapter.detect`."""
        inner = config.get(NESTED)
        heads = any(name.startswith(("markov_head.", "confidence_head.")) for name in tensor_names)
        return isinstance(inner, dict) and ("projector_type" in inner or heads) and "hidden_norm.weight" in tensor_names

    def to_native(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], verifier: VerifierWeights | None
    ) -> tuple[SpeculatorConfig, Tensors]:
        """See `FormatAdapter.to_native`."""
        inner = nested(config)
        projector = inner.get("projector_type", "dspark")  # a head without this key: only DSpark has heads
        if projector not in _PROJECTORS:
            rule = f"the projectors known here are {' and '.join(_PROJECTORS)}"
            raise problem(CONFIG_FILE, f"{NESTED}.projector_type", repr(projector), rule, "keep the drafter in its own format")
        kept = without_zero_bias(tensors)
        return block_to_native(self, config, kept, verifier, anchor_predicts=projector == "dspark"), kept

    def from_native(
        self, config: SpeculatorConfig, tensors: Mapping[str, Tensor], verifier: VerifierWeights | None
    ) -> tuple[dict[str, Any], Tensors]:
        """See `FormatAdapter.from_native`."""
        source = block_config(self, config)
        dspark = source.speculators_model_type == "dspark"
        inner: dict[str, Any] = {
            "projector_type": source.speculators_model_type,
            "target_layer_ids": foreign_taps(source),
            "mask_token_id": source.mask_token_id,
            **(head_fields(source) if dspark else {}),
            **anchor_fields(source),
        }
        causal = block_causality(source)
        if causal is not None:
            inner["causal"] = causal
        kept = drop_verifier_copies(self, source, tensors, verifier, SHARED_NAMES)
        fields = {
            "architectures": ["DSparkDraftModel" if dspark else "DFlashDraftModel"],
            "block_size": source.block_size,
            NESTED: inner,
            DEPTH_KEY: depth_of(self, source, verifier),
            **anchor_fields(source),
        }
        return flat_config(source, kept, **fields), kept
