"""Configuration of a speculator = `config.json` on disk, in the speculators format.

The field names, nesting and defaults are those of the public format (version 0.9), so that vLLM loads what
we save. Unknown keys survive a round trip; `auto_map` (a leftover of remote code) does not.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from speculators.errors import ConfigError

FORMAT_VERSION = "0.9.0"
FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"
# Far beyond any model: a damaged size must be refused, not allocated.
MOST_LAYERS, WIDEST, LARGEST_VOCABULARY = 1 << 10, 1 << 20, 1 << 24


class FormatModel(BaseModel):
    """A pydantic model of the on-disk format: keeps unknown keys and reports errors as one sentence."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    @classmethod
    def parse(cls, data: dict[str, Any], where: str = "config") -> Self:
        """Validate `data`.

        Raises:
            ConfigError: naming the key, the value and the rule of the first offence.
        """
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            # A rule between several keys names them and their values itself; its input would be the whole file.
            between_keys = first["type"] == "value_error" and isinstance(first["input"], dict)
            value = "" if first["type"] == "missing" or between_keys else f" = {first['input']!r}"
            place = f"{key}{value}: " if key or value else ""
            raise ConfigError(f"{where}: {place}{first['msg'].removeprefix('Value error, ')}") from None


class LayerConfig(FormatModel):
    """`transformer_layer_config`: the shape of the drafter's decoder layers (a transformers config on disk).

    `vocab_size` is the verifier's vocabulary, never the draft vocabulary.
    """

    model_type: str = "qwen3"
    vocab_size: int = Field(ge=1, le=LARGEST_VOCABULARY)
    hidden_size: int = Field(ge=1, le=WIDEST)
    intermediate_size: int = Field(ge=1, le=WIDEST)
    num_hidden_layers: int = Field(ge=1, le=MOST_LAYERS)
    num_attention_heads: int = Field(ge=1, le=WIDEST)
    num_key_value_heads: int = Field(ge=1, le=WIDEST)
    head_dim: int = Field(ge=2, le=WIDEST)
    hidden_act: str = "silu"
    rms_norm_eps: float = Field(1e-6, gt=0, allow_inf_nan=False)
    max_position_embeddings: int = Field(32768, ge=1)
    rope_parameters: dict[str, Any]
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    initializer_range: float = Field(0.02, gt=0)
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    use_sliding_window: bool = False

    @model_validator(mode="before")
    @classmethod
    def _accept_both_rope_spellings(cls, data: Any) -> Any:
        """transformers 4 wrote `rope_theta` and `rope_scaling`; transformers 5 writes `rope_parameters`."""
        if isinstance(data, dict):
            data = dict(data)
            rope = data.get("rope_parameters")
            if isinstance(rope, dict) and "rope_theta" not in rope and isinstance(rope.get("sliding_attention"), dict):
                # A dict per layer type: drafters have one rotary embedding, that of their sliding layers.
                data["rope_parameters"] = rope["sliding_attention"]
            if not rope and "rope_theta" in data:
                if not isinstance(data.get("rope_scaling") or {}, dict):
                    raise ValueError(f"rope_scaling {data['rope_scaling']!r} must be an object or null")
                scaling = dict(data.get("rope_scaling") or {})
                scaling.setdefault("rope_type", scaling.pop("type", "default"))  # the oldest files say `type`
                data["rope_parameters"] = {**scaling, "rope_theta": data["rope_theta"]}
            if "head_dim" not in data and "hidden_size" in data and "num_attention_heads" in data:
                data["head_dim"] = data["hidden_size"] // data["num_attention_heads"]
        return data

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} must be a multiple of num_key_value_heads {self.num_key_value_heads}"
            )
        if "rope_theta" not in self.rope_parameters:
            raise ValueError("rope_parameters must hold rope_theta")
        theta = self.rope_parameters["rope_theta"]
        if isinstance(theta, bool) or not isinstance(theta, int | float) or not 0 < theta < math.inf:
            raise ValueError(f"rope_theta {theta!r} must be a positive number")
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(f"layer_types has {len(self.layer_types)} entries for {self.num_hidden_layers} layers")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} must be even: rotary position embedding turns pairs of channels")
        if unknown := sorted(set(self.layer_types or ()) - {FULL_ATTENTION, SLIDING_ATTENTION}):
            raise ValueError(f"layer_types holds {unknown[0]!r}; drafter layers know {FULL_ATTENTION!r} and {SLIDING_ATTENTION!r}")
        if SLIDING_ATTENTION in (self.layer_types or ()) and (self.sliding_window is None or self.sliding_window < 1):
            raise ValueError(f"sliding_window {self.sliding_window} must be at least 1, since layer_types holds {SLIDING_ATTENTION!r}")
        return self

    def window(self, layer: int) -> int | None:
        """Sliding window of one layer in tokens, or None for full attention."""
        sliding = self.layer_types is not None and self.layer_types[layer] == SLIDING_ATTENTION
        return self.sliding_window if sliding else None


class ProposalMethod(FormatModel):
    """One entry of `proposal_methods`. vLLM reads `speculative_tokens` of the first."""

    proposal_type: str = "greedy"
    speculative_tokens: int = Field(5, ge=1)
    verifier_accept_k: int = Field(1, ge=1)
    accept_tolerance: float = Field(0.0, ge=0)


class VerifierReference(FormatModel):
    """Which verifier a drafter belongs to."""

    name_or_path: str | None = None
    architectures: list[str] = Field(default_factory=list)


class ProposalConfig(FormatModel):
    """`speculators_config`: what an engine must know to draft."""

    algorithm: str
    proposal_methods: list[ProposalMethod] = Field(min_length=1)
    default_proposal_method: str = "greedy"
    verifier: VerifierReference = Field(default_factory=VerifierReference)

    @model_validator(mode="after")
    def _check(self) -> Self:
        kinds = [method.proposal_type for method in self.proposal_methods]
        if self.default_proposal_method not in kinds:
            raise ValueError(f"default_proposal_method {self.default_proposal_method!r} is not among proposal_methods {kinds}")
        return self


class SpeculatorConfig(FormatModel):
    """Keys every algorithm shares. Each algorithm subclasses it with its own keys.

    `aux_layer_key` names the on-disk key of the tapped layers: it differs between families of the format.
    """

    aux_layer_key: ClassVar[str] = "aux_hidden_state_layer_ids"

    speculators_model_type: str
    speculators_version: str = FORMAT_VERSION
    architectures: list[str] = Field(default_factory=list)
    transformer_layer_config: LayerConfig
    speculators_config: ProposalConfig
    draft_vocab_size: int = Field(ge=1)
    target_hidden_size: int | None = None
    tie_word_embeddings: bool = False
    dtype: str = "bfloat16"

    @model_validator(mode="before")
    @classmethod
    def _drop_remote_code(cls, data: Any) -> Any:
        if isinstance(data, dict):
            data = {key: value for key, value in data.items() if key != "auto_map"}
        return data

    @model_validator(mode="after")
    def _check_common(self) -> Self:
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size} exceeds the verifier's vocabulary of {self.vocab_size} tokens")
        taps = self.tapped_layers
        if taps != sorted(set(taps)) or (taps and taps[0] < 0):
            raise ValueError(f"{self.aux_layer_key} {taps} must be unique, ascending and not negative")
        if self.num_draft_tokens > self.max_draft_tokens:
            raise ValueError(
                f"speculative_tokens {self.num_draft_tokens} exceeds the {self.max_draft_tokens} tokens this drafter proposes in one block"
            )
        mask_id = getattr(self, "mask_token_id", None)
        if mask_id is not None and not 0 <= mask_id < self.vocab_size:
            raise ValueError(f"mask_token_id {mask_id} must lie inside the verifier's vocabulary of {self.vocab_size} tokens")
        return self

    @property
    def layers(self) -> LayerConfig:
        """The decoder layers' shape."""
        return self.transformer_layer_config

    @property
    def vocab_size(self) -> int:
        """The verifier's vocabulary size."""
        return self.transformer_layer_config.vocab_size

    @property
    def tapped_layers(self) -> list[int]:
        """Verifier layers this drafter reads: id i = residual stream after i layers, 0 = embeddings."""
        value = getattr(self, self.aux_layer_key, None)
        return list(value) if value else []

    @property
    def num_draft_tokens(self) -> int:
        """K, the number of draft tokens a round, as stored (`speculative_tokens`)."""
        return self.speculators_config.proposal_methods[0].speculative_tokens

    @property
    def max_draft_tokens(self) -> int:
        """The largest K this drafter can propose; algorithms with a block override it."""
        return self.num_draft_tokens
