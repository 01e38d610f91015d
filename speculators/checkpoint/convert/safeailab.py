"""SafeAILab's EAGLE-3 format: one Llama layer called `midlayer`, three taps that no key names (arXiv 2503.01840)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from speculators.algorithms.options import default_taps
from speculators.checkpoint.convert.adapter import FormatAdapter, Tensors
from speculators.checkpoint.convert.eagle_drafters import (
    FIRST_LAYER,
    eagle_config,
    eagle_to_native,
    has_own_embedding,
    has_own_head,
    native_names,
    stored_taps,
)
from speculators.checkpoint.convert.fields import DEPTH_KEY, depth_of, drop_verifier_copies, flat_config, with_verifier_copies
from speculators.checkpoint.shared import EMBEDDING, HEAD
from speculators.config import SpeculatorConfig
from speculators.errors import ConfigError
from speculators.speculator import VerifierWeights

_DRAFT_TOKENS = 3  # the format does not say; what the public converter writes


class SafeAILabEagle3(FormatAdapter):
    """The research code's checkpoints: a head of the draft vocabulary, d2t as offsets, t2d."""

    name = "safeailab"
    title = "SafeAILab EAGLE-3"

    def detect(self, config: Mapping[str, Any], tensor_names: Collection[str]) -> bool:
        """See `FormatAdapter.detect`."""
        first = any(name.startswith(FIRST_LAYER) for name in tensor_names)
        return first and "mask_hidden" not in tensor_names and "ptd_token_id" not in config

    def to_native(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], verifier: VerifierWeights | None
    ) -> tuple[SpeculatorConfig, Tensors]:
        """See `FormatAdapter.to_native`."""
        kept = native_names(tensors, config.get("vocab_size"))
        native = eagle_to_native(
            self,
            "eagle3",
            config,
            kept,
            verifier,
            taps=stored_taps(config, verifier),
            num_draft_tokens=_DRAFT_TOKENS,
            own_embedding=has_own_embedding(config, kept, verifier),
            own_head=has_own_head(kept, verifier),
            fields={},
        )
        return native, kept

    def from_native(
        self, config: SpeculatorConfig, tensors: Mapping[str, Tensor], verifier: VerifierWeights | None
    ) -> tuple[dict[str, Any], Tensors]:
        """See `FormatAdapter.from_native`."""
        source = eagle_config(self, config, "eagle3")
        layers = source.layers
        if layers.num_hidden_layers != 1:
            raise self.refuse(f"the drafter has {layers.num_hidden_layers} layers", "the format has one")
        if layers.model_type != "llama":
            raise self.refuse("the drafter's layers norm queries and keys (Qwen3)", "the format's layers are Llama's")
        if layers.window(0) is not None:
            raise self.refuse("the drafter has a sliding window", "the format's layer sees the whole context")
        depth = depth_of(self, source, verifier)
        try:
            implied = default_taps(depth)
        except ConfigError:
            implied = []
        if source.tapped_layers != implied:
            why = f"the format has no key for taps and implies [2, n/2, n-3] = {implied or 'none'} of the {depth}-layer verifier"
            raise self.refuse(f"the drafter reads layers {source.tapped_layers}", why)
        copies = () if source.embed_requires_grad else (EMBEDDING,)
        kept = with_verifier_copies(self, tensors, verifier, (HEAD,))
        kept = drop_verifier_copies(self, source, kept, verifier, copies)
        fields = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": source.draft_vocab_size,
            "target_hidden_size": source.target_hidden_size or layers.hidden_size,
            DEPTH_KEY: depth,
        }
        first = "layers.0."
        foreign = {FIRST_LAYER + name.removeprefix(first) if name.startswith(first) else name: tensor for name, tensor in kept.items()}
        return flat_config(source, kept, **fields), foreign
