"""DeepSpec's formats: dspark_* and dflash_* (one class, the latter with Markov rank 0), and eagle3_*.

All store copies of the verifier's embedding and head. Their block drafters predict from the anchor slot (arXiv 2607.05147).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from speculators.algorithms.eagle3 import Eagle3Config
from speculators.checkpoint.convert.adapter import FormatAdapter, Tensors
from speculators.checkpoint.convert.block_drafters import (
    NESTED,
    anchor_fields,
    block_causality,
    block_config,
    block_to_native,
    head_fields,
)
from speculators.checkpoint.convert.eagle_drafters import eagle_config, eagle_to_native
from speculators.checkpoint.convert.fields import (
    DEPTH_KEY,
    depth_of,
    flat_config,
    foreign_taps,
    integer,
    native_taps,
    refuse_other_width,
    refuse_reduced_vocabulary,
    remembered,
    verifier_depth,
    with_verifier_copies,
    without_zero_bias,
)
from speculators.checkpoint.storage import CONFIG_FILE, problem
from speculators.config import SpeculatorConfig
from speculators.speculator import VerifierWeights

_ANCHORS = 512  # num_anchors of the released drafters
_FUSION_NORM = "layers.0.hidden_norm.weight"  # in EAGLE-3 drafters only: the norm of the fused half


class DeepSpec(FormatAdapter):
    """Flat keys, `target_layer_ids` at the top level, unprefixed tensor names."""

    name = "deepspec"
    title = "DeepSpec"

    def detect(self, config: Mapping[str, Any], tensor_names: Collection[str]) -> bool:
        """See `FormatAdapter.detect`."""
        kind = {"hidden_norm.weight", _FUSION_NORM} & set(tensor_names)
        return "target_layer_ids" in config and NESTED not in config and bool(kind)

    def to_native(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], verifier: VerifierWeights | None
    ) -> tuple[SpeculatorConfig, Tensors]:
        """See `FormatAdapter.to_native`."""
        if any("pre_feedforward_layernorm" in name or "layer_scalar" in name for name in tensors):
            architectures = config.get("architectures")
            rule = "its layers have norms and scalars that no algorithm here has"
            raise problem(CONFIG_FILE, "architectures", architectures, rule, "keep the drafter in its own format")
        kept = without_zero_bias(tensors)
        if _FUSION_NORM not in kept:
            return block_to_native(self, config, kept, verifier, anchor_predicts=True), kept
        native = eagle_to_native(
            self,
            "eagle3",
            config,
            kept,
            verifier,
            taps=native_taps(config, "target_layer_ids", verifier_depth(config, verifier)),
            num_draft_tokens=integer(config, "ttt_length"),
            own_embedding=False,
            own_head=False,
            fields={},
        )
        return native, kept

    def from_native(
        self, config: SpeculatorConfig, tensors: Mapping[str, Tensor], verifier: VerifierWeights | None
    ) -> tuple[dict[str, Any], Tensors]:
        """See `FormatAdapter.from_native`."""
        if config.speculators_model_type == "eagle3":
            return self._eagle(config, tensors, verifier)
        source = block_config(self, config)
        if not source.sample_from_anchor:
            what = "the drafter's anchor slot only conditions (sample_from_anchor is false)"
            raise self.refuse(what, "slot k of the format predicts anchor + k + 1", "convert to z-lab or specforge")
        self._refuse_windows(source)
        if block_causality(source):
            raise self.refuse("the drafter attends causally inside its block", "the format's blocks are bidirectional")
        kept = with_verifier_copies(self, tensors, verifier)
        fields = {
            **self._common(source, verifier),
            "architectures": ["Qwen3DSparkModel"],
            "block_size": source.block_size,
            "mask_token_id": source.mask_token_id,
            "num_anchors": remembered(source.model_extra or {}).get("num_anchors", _ANCHORS),
            **head_fields(source),
            **anchor_fields(source),
        }
        if len(source.tapped_layers) != source.layers.num_hidden_layers:
            # The released drafters have one tap a layer, and vLLM before 0.32 counts on it unless this key says otherwise.
            fields["eagle_config"] = {"layer_ids": source.tapped_layers}
        return flat_config(source, kept, **fields), kept

    def _eagle(
        self, config: SpeculatorConfig, tensors: Mapping[str, Tensor], verifier: VerifierWeights | None
    ) -> tuple[dict[str, Any], Tensors]:
        source = eagle_config(self, config, "eagle3")
        refuse_reduced_vocabulary(self, source)
        refuse_other_width(self, source)
        self._refuse_windows(source)
        if source.embed_requires_grad:
            raise self.refuse("the drafter trained its own embedding", "the format repeats the verifier's")
        if source.lm_head_requires_grad:
            raise self.refuse("the drafter trained its own output head", "the format repeats the verifier's")
        if source.layers.model_type != "qwen3":
            raise self.refuse("the drafter has Llama layers", "the format's have query and key norms (Qwen3)")
        if source.layers.num_hidden_layers != 1:
            raise self.refuse(f"the drafter has {source.layers.num_hidden_layers} layers", "the format has one")
        passes = (
            source.training_options.passes if isinstance(source, Eagle3Config) and self._tells_passes(source) else source.num_draft_tokens
        )
        kept = with_verifier_copies(self, tensors, verifier)
        fields = {
            **self._common(source, verifier),
            "architectures": ["Qwen3Eagle3Model"],
            "draft_num_hidden_layers": 1,
            "ttt_length": passes,
        }
        return flat_config(source, kept, **fields), kept

    @staticmethod
    def _tells_passes(config: Eagle3Config) -> bool:
        """Whether the file says how it was trained, rather than the defaults."""
        return "training_options" in config.model_fields_set

    @staticmethod
    def _common(config: SpeculatorConfig, verifier: VerifierWeights | None) -> dict[str, Any]:
        return {
            "target_layer_ids": foreign_taps(config),
            "target_model_name_or_path": config.speculators_config.verifier.name_or_path,
            DEPTH_KEY: depth_of(DeepSpec(), config, verifier),
            "tie_word_embeddings": False,
        }

    def _refuse_windows(self, config: SpeculatorConfig) -> None:
        if any(config.layers.window(layer) is not None for layer in range(config.layers.num_hidden_layers)):
            raise self.refuse("the drafter has sliding windows", "the format's layers see the whole context")
