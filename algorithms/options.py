"""From a verifier and a few named options to a drafter's configuration: what all algorithms have in common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from speculators.config import (
    LARGEST_VOCABULARY,
    MOST_LAYERS,
    WIDEST,
    LayerConfig,
    ProposalConfig,
    ProposalMethod,
    SpeculatorConfig,
    VerifierReference,
)
from speculators.errors import ConfigError
from speculators.json_values import NoTruthValues
from speculators.speculator import VerifierWeights

# Rotary embeddings that a drafter shares with its verifier, and the base of one whose verifier has none.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_USUAL_ROPE_THETA = 10000.0
# Far beyond any drafter: a slip of the keyboard must be refused, not allocated.
_MOST_DRAFT_TOKENS, _LONGEST_WINDOW = 1 << 12, 1 << 30


class DrafterOptions(NoTruthValues):
    """Options of every algorithm; each adds its own.

    Attributes:
        num_draft_tokens: K, tokens proposed a round.
        num_layers: decoder layers of the drafter.
        intermediate_size: MLP width; None takes the verifier's.
        aux_hidden_state_layer_ids: tapped layers, id i = residual stream after i layers; None takes [2, n/2, n-3].
        mask_token_id: id fed to MASK slots; None picks one that no conversation holds, see `default_mask_token`.
        draft_vocab_size: tokens the drafter can propose; None takes the whole vocabulary.
        sliding_window: tokens of context each layer sees; None sees all.

    Class attributes:
        adjustable: options on which no trained weight depends, with the key of config.json each one sets; a drafter that
            starts from another's weights may change them.
    """

    model_config = ConfigDict(extra="forbid")
    adjustable: ClassVar[dict[str, str]] = {}

    num_draft_tokens: int = Field(7, ge=1, le=_MOST_DRAFT_TOKENS)
    num_layers: int = Field(1, ge=1, le=MOST_LAYERS)
    intermediate_size: int | None = Field(None, ge=1, le=WIDEST)
    aux_hidden_state_layer_ids: list[int] | None = None
    mask_token_id: int | None = Field(None, ge=0)
    draft_vocab_size: int | None = Field(None, ge=1, le=LARGEST_VOCABULARY)
    sliding_window: int | None = Field(None, ge=1, le=_LONGEST_WINDOW)

    @classmethod
    def parse(cls, method: str, options: dict[str, Any]) -> Self:
        """Validate options given by name.

        Raises:
            ConfigError: an option, or a key inside of one, is unknown (the message lists the known ones) or out of range.
        """
        try:
            chosen = cls.model_validate(options)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            if first["type"] == "extra_forbidden":
                raise ConfigError(f"{method} has no option {key!r}; it takes {', '.join(cls.model_fields)}") from None
            raise ConfigError(f"{method} option {key} = {first['input']!r}: {first['msg'].removeprefix('Value error, ')}") from None
        for key, known in _unknown_keys(chosen):
            raise ConfigError(f"{method} has no option {key!r}; there it takes {', '.join(known)}")
        return chosen

    @classmethod
    def stored_in(cls, config: SpeculatorConfig) -> dict[str, Any]:
        """The options that would give this configuration, as far as it holds them; it may be another method's."""
        layers = config.layers
        stored = {
            "num_draft_tokens": config.max_draft_tokens if "block_size" in type(config).model_fields else config.num_draft_tokens,
            "num_layers": layers.num_hidden_layers,
            "intermediate_size": layers.intermediate_size,
            "aux_hidden_state_layer_ids": config.tapped_layers,
            "sliding_window": layers.window(0),
        }
        for name in cls.model_fields.keys() & type(config).model_fields.keys():
            stored.setdefault(name, getattr(config, name))
        return stored


def _unknown_keys(model: BaseModel, prefix: str = "") -> Iterator[tuple[str, list[str]]]:
    """Keys that models of the stored format, which keep what they do not know, were given; and the keys each of these models has."""
    for key in model.model_extra or {}:
        yield prefix + key, list(type(model).model_fields)
    for name in type(model).model_fields:
        if isinstance(part := getattr(model, name), BaseModel):
            yield from _unknown_keys(part, f"{prefix}{name}.")


def default_taps(num_layers: int) -> list[int]:
    """[2, n/2, n-3] of an n-layer verifier (EAGLE-3, arXiv 2503.01840).

    Raises:
        ConfigError: the verifier is too shallow for three different taps.
    """
    taps = [2, num_layers // 2, num_layers - 3]
    if taps != sorted(set(taps)):
        raise ConfigError(
            f"a verifier of {num_layers} layers is too shallow for the default taps [2, n/2, n-3];"
            f" name aux_hidden_state_layer_ids yourself, ascending ids from 0 to {num_layers}"
        )
    return taps


def check_taps(taps: list[int], num_layers: int) -> list[int]:
    """Taps as given, if they are ascending, unique and within the verifier.

    Raises:
        ConfigError: naming the offending list and the limit.
    """
    if not taps or taps != sorted(set(taps)) or taps[0] < 0 or taps[-1] > num_layers:
        raise ConfigError(
            f"aux_hidden_state_layer_ids {taps} must be ascending, unique layer ids between 0 (embeddings) and {num_layers}"
            f" (before the final norm): the verifier has {num_layers} layers"
        )
    return taps


def default_mask_token(verifier: VerifierWeights) -> int:
    """A token that no conversation holds: a special one that chats do not use, or else one the verifier never learned.

    A slot without a token must not look like text. Where the tokenizer has no unused special token, it is the highest id whose
    embedding row is one of the rows that are all equal (rows that training never touched keep one common value in many models), and
    without such rows the highest id. Never a stop token or the pad token.

    Raises:
        ConfigError: no token is left.
    """
    taken = {*verifier.stop_token_ids, verifier.config.get("pad_token_id")}
    special = next((token for token in verifier.unused_token_ids if token not in taken), None)
    return _never_learned(verifier, taken) if special is None else special


def _never_learned(verifier: VerifierWeights, taken: set[int | None]) -> int:
    table = verifier.embedding
    # Equal rows have equal checksums; two random projections make a collision of different rows implausible.
    generator = table.new_tensor(range(1, table.shape[1] + 1)).float()
    checksum = table.float() @ (generator.sin() + generator.mul(0.37).cos())
    _, inverse, counts = checksum.unique(return_inverse=True, return_counts=True)
    group = int(counts.argmax())
    candidates = [int(i) for i in (inverse == group).nonzero().flatten()] if int(counts[group]) > 1 else []
    for token in [*sorted(candidates, reverse=True), *range(verifier.vocab_size - 1, -1, -1)]:
        if token not in taken:
            return int(token)
    raise ConfigError("every token of this verifier is a stop token or its pad token; name mask_token_id yourself")


def layer_config(verifier: VerifierWeights, options: DrafterOptions, model_type: str) -> LayerConfig:
    """Decoder layers shaped like the verifier's: same hidden size, heads, norms and rotary embedding.

    Partial rotary factors and quantisation are the verifier's own business: drafters rotate whole heads and keep
    plain weights. A verifier without one MLP width to copy (mixture of experts, GPT-2) has three times its hidden size taken.
    """
    source = verifier.config
    hidden = int(source["hidden_size"])
    heads = int(source["num_attention_heads"])
    experts = any(key in source for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    copied = None if experts else source.get("intermediate_size")
    width = options.intermediate_size or (int(copied) if isinstance(copied, int | float) else 3 * hidden)
    kinds = None
    if model_type == "qwen3" or options.sliding_window is not None:
        kinds = ["sliding_attention" if options.sliding_window else "full_attention"] * options.num_layers
    shape: dict[str, Any] = {
        "model_type": model_type,
        "vocab_size": verifier.vocab_size,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": options.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": int(source.get("num_key_value_heads") or heads),
        "head_dim": int(source.get("head_dim") or hidden // heads),
        "rms_norm_eps": float(source.get("rms_norm_eps") or 1e-6),
        "max_position_embeddings": int(source.get("max_position_embeddings") or 32768),
        "rope_parameters": _rope(source),
        "layer_types": kinds,
        "sliding_window": options.sliding_window,
        "use_sliding_window": options.sliding_window is not None,
    }
    return LayerConfig.parse(shape, f"the drafter's layers for {verifier.name_or_path!r}")


def _rope(source: dict[str, Any]) -> dict[str, Any]:
    """The verifier's rotary embedding, or the plain one of its base where drafters do not have its kind (it changes with the length).

    A verifier without one, of learned positions or attention biases, names no base.
    """
    rope = source.get("rope_parameters") or {}
    of_layer_types = [part for part in rope.values() if isinstance(part, dict)]
    if of_layer_types:
        rope = rope.get("full_attention") or of_layer_types[0]
    theta = rope.get("rope_theta") or source.get("rope_theta") or _USUAL_ROPE_THETA
    if rope.get("rope_type", "default") not in _ROPE_TYPES:
        return {"rope_type": "default", "rope_theta": theta}
    kept = {key: value for key, value in rope.items() if key not in {"partial_rotary_factor", "mrope_section", "mrope_interleaved"}}
    return {"rope_type": "default", **kept, "rope_theta": theta}


def proposal_config(method: str, verifier: VerifierWeights, num_draft_tokens: int) -> ProposalConfig:
    """`speculators_config` for K draft tokens."""
    return ProposalConfig(
        algorithm=method,
        proposal_methods=[ProposalMethod(speculative_tokens=num_draft_tokens)],
        verifier=VerifierReference(name_or_path=verifier.name_or_path, architectures=list(verifier.architectures)),
    )


def common_config(method: str, architecture: str, verifier: VerifierWeights, options: DrafterOptions, model_type: str) -> dict[str, Any]:
    """Keyword arguments every algorithm's config shares, taps excepted."""
    return {
        "speculators_model_type": method,
        "architectures": [architecture],
        "transformer_layer_config": layer_config(verifier, options, model_type),
        "speculators_config": proposal_config(method, verifier, options.num_draft_tokens),
        "draft_vocab_size": options.draft_vocab_size or verifier.vocab_size,
        "target_hidden_size": verifier.hidden_size,
    }


def taps_for(verifier: VerifierWeights, options: DrafterOptions) -> list[int]:
    """The options' taps, checked, or the default ones."""
    taps = options.aux_hidden_state_layer_ids
    return default_taps(verifier.num_layers) if taps is None else check_taps(taps, verifier.num_layers)
