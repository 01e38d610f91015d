"""AWS's P-EAGLE format: an EAGLE-3 file with `mask_hidden`, and the mask token as `ptd_token_id` (arXiv 2602.01469)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from speculators.algorithms.peagle import PEagleConfig, PEagleTraining
from speculators.checkpoint.convert.adapter import FormatAdapter, Tensors
from speculators.checkpoint.convert.eagle_drafters import (
    NESTED,
    SWITCHES,
    TAPS_KEY,
    eagle_config,
    eagle_to_native,
    has_own_head,
    native_names,
    stored_taps,
)
from speculators.checkpoint.convert.fields import flat_config, integer, with_verifier_copies
from speculators.checkpoint.shared import EMBEDDING, HEAD
from speculators.checkpoint.storage import problem
from speculators.config import SpeculatorConfig
from speculators.speculator import VerifierWeights

_MASK_HIDDEN = "mask_hidden"
_MASK_KEY = "ptd_token_id"
_HELD = ("norm_before_residual",)  # the norm switch that engines read from this format


class AwsPEagle(FormatAdapter):
    """Engines run it as EAGLE-3 with `parallel_drafting`."""

    name = "aws-peagle"
    title = "AWS P-EAGLE"

    def detect(self, config: Mapping[str, Any], tensor_names: Collection[str]) -> bool:
        """See `FormatAdapter.detect`."""
        return _MASK_KEY in config or _MASK_HIDDEN in tensor_names

    def to_native(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], verifier: VerifierWeights | None
    ) -> tuple[SpeculatorConfig, Tensors]:
        """See `FormatAdapter.to_native`."""
        kept = native_names(tensors, config.get("vocab_size"))
        mask = kept.get(_MASK_HIDDEN)
        if mask is None:
            raise problem("the weights", _MASK_HIDDEN, "missing", "mask slots are fed with it", "copy or download the checkpoint again")
        kept[_MASK_HIDDEN] = mask.reshape(1, 1, -1)  # engines accept any shape of these values; ours is [1, 1, taps * hidden]
        native = eagle_to_native(
            self,
            "peagle",
            config,
            kept,
            verifier,
            taps=stored_taps(config, verifier),
            num_draft_tokens=PEagleTraining().num_depths,  # the format does not say; engines take K from the command line
            own_embedding=EMBEDDING in kept,
            own_head=has_own_head(kept, verifier),
            fields={"mask_token_id": integer(config, _MASK_KEY)},
        )
        return native, kept

    def from_native(
        self, config: SpeculatorConfig, tensors: Mapping[str, Tensor], verifier: VerifierWeights | None
    ) -> tuple[dict[str, Any], Tensors]:
        """See `FormatAdapter.from_native`. Embedding and head are always in the file."""
        source = eagle_config(self, config, "peagle", held=_HELD)
        assert isinstance(source, PEagleConfig)
        kept = with_verifier_copies(self, tensors, verifier, (EMBEDDING, HEAD))
        fields = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": source.draft_vocab_size,
            "target_hidden_size": source.target_hidden_size or source.layers.hidden_size,
            "parallel_drafting": True,
            _MASK_KEY: source.mask_token_id,
            TAPS_KEY: source.tapped_layers,
            NESTED: {TAPS_KEY: source.tapped_layers, "use_aux_hidden_state": True},
            **{key: getattr(source, key) for key in SWITCHES if key in _HELD},
        }
        return flat_config(source, kept, **fields), kept
