"""z-lab's DFlash format: layers, fc and norms only, no heads, an anchor slot that only conditions (arXiv 2602.06036)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from speculators.checkpoint.convert.adapter import FormatAdapter, Tensors
from speculators.checkpoint.convert.block_drafters import NESTED, block_causality, block_config, block_to_native, head_fields, nested
from speculators.checkpoint.convert.fields import (
    DEPTH_KEY,
    depth_of,
    drop_verifier_copies,
    flat_config,
    foreign_taps,
    without_zero_bias,
)
from speculators.checkpoint.shared import SHARED_NAMES
from speculators.config import SpeculatorConfig
from speculators.speculator import VerifierWeights


class ZLabDFlash(FormatAdapter):
    """`dflash_config` with taps and mask token; block_size counts the anchor."""

    name = "z-lab"
    title = "z-lab DFlash"

    def detect(self, config: Mapping[str, Any], tensor_names: Collection[str]) -> bool:
        """See `FormatAdapter.detect`."""
        inner = config.get(NESTED)
        heads = any(name.startswith(("markov_head.", "confidence_head.")) for name in tensor_names)
        return isinstance(inner, dict) and "projector_type" not in inner and not heads and "hidden_norm.weight" in tensor_names

    def to_native(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], verifier: VerifierWeights | None
    ) -> tuple[SpeculatorConfig, Tensors]:
        """See `FormatAdapter.to_native`."""
        nested(config)
        kept = without_zero_bias(tensors)
        return block_to_native(self, config, kept, verifier, anchor_predicts=False), kept

    def from_native(
        self, config: SpeculatorConfig, tensors: Mapping[str, Tensor], verifier: VerifierWeights | None
    ) -> tuple[dict[str, Any], Tensors]:
        """See `FormatAdapter.from_native`. Heads and a predicting anchor slot are refused: quality would silently be lost."""
        source = block_config(self, config)
        heads = head_fields(source)
        if heads["markov_rank"]:
            raise self.refuse(f"the drafter has a Markov head of rank {heads['markov_rank']}", "the format has none")
        if heads["enable_confidence_head"]:
            raise self.refuse("the drafter has a confidence head", "the format has none")
        if source.sample_from_anchor:
            raise self.refuse("the drafter's anchor slot predicts (sample_from_anchor)", "slot k of the format predicts anchor + k")
        inner: dict[str, Any] = {"target_layer_ids": foreign_taps(source), "mask_token_id": source.mask_token_id}
        causal = block_causality(source)
        if causal is not None:
            inner["causal"] = causal
        kept = drop_verifier_copies(self, source, tensors, verifier, SHARED_NAMES)
        fields = {
            "architectures": ["DFlashDraftModel"],
            "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
            "block_size": source.block_size,
            NESTED: inner,
            DEPTH_KEY: depth_of(self, source, verifier),
        }
        return flat_config(source, kept, **fields), kept
