"""What EAGLE-3 and P-EAGLE share: the verifier's features enter through the drafter's input, not as keys and values.

Slot t pairs the verifier's hidden state of token t with the embedding of token t + 1, at rotary position t
(EAGLE-3, arXiv 2503.01840). The drafter's first layer reads both halves. Real pairs form an ordinary causal
stream, "depth 0", whose keys and values are the context of everything drafted deeper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from speculators.algorithms.anchors import Anchors
from speculators.algorithms.draft_state import DraftState
from speculators.algorithms.layers import (
    DecoderLayer,
    Projection,
    ResidualStream,
    RMSNorm,
    RotaryEmbedding,
    Rotation,
    initialise,
    run_layer,
)
from speculators.algorithms.objective import Objective
from speculators.algorithms.options import DrafterOptions, common_config, taps_for
from speculators.algorithms.warm_start import continued_config
from speculators.config import SpeculatorConfig
from speculators.decoding.proposal import Observation
from speculators.errors import ConfigError
from speculators.kernels.block_attention import attention
from speculators.kernels.hidden_state_scatter import hidden_state_scatter
from speculators.kernels.packed_linear import announce
from speculators.kernels.skinny_linear import skinny_linear
from speculators.kernels.visible_keys import VisibleKeys, visible_documents
from speculators.registry import Need
from speculators.speculator import Speculator, VerifierWeights
from speculators.training.batch import TrainingBatch


class InputFusionConfig(SpeculatorConfig):
    """Keys that EAGLE-3 and P-EAGLE share in config.json.

    Attributes:
        eagle_aux_hidden_state_layer_ids: tapped verifier layers.
        norm_before_residual: the first layer's residual is the normed hidden half instead of the raw one.
        norm_before_fc: one RMS norm over the concatenated taps before fc.
        fc_norm: one RMS norm for each tap before fc; excludes norm_before_fc.
        norm_output: EAGLE-3 feeds the normed output back into its next pass.
        embed_requires_grad: the drafter owns and trains its token embedding instead of sharing the verifier's.
        lm_head_requires_grad: the same of its output head. Not a key of version 0.9, whose files may hold such a head and
            do not say so; see `speculators.checkpoint.shared.with_own_head`.
        training_options: how it was trained; each method has its own.
    """

    aux_layer_key = "eagle_aux_hidden_state_layer_ids"

    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    embed_requires_grad: bool = False
    lm_head_requires_grad: bool = False
    training_options: Objective = Field(default_factory=Objective)


class InputFusionOptions(DrafterOptions):
    """Options of EAGLE-3 and P-EAGLE. Both draft any number of tokens with the same weights.

    Attributes:
        train_head: the drafter trains an output head of its own, which starts as the verifier's.
    """

    adjustable = {"num_draft_tokens": "speculators_config", "train_head": "lm_head_requires_grad"}

    norm_before_residual: bool = False
    norm_before_fc: bool = True
    fc_norm: bool = False
    norm_output: bool = False
    train_head: bool = False

    @classmethod
    def stored_in(cls, config: SpeculatorConfig) -> dict[str, Any]:
        """See `DrafterOptions.stored_in`."""
        return {**super().stored_in(config), "train_head": getattr(config, "lm_head_requires_grad", False)}


def fusion_needs(config: InputFusionConfig) -> list[Need]:
    """What vLLM reads differently in a configuration of this family: its Llama class takes fc for three taps wide."""
    taps, nested = len(config.tapped_layers), getattr(config.layers, "num_aux_hidden_states", None)
    if config.layers.model_type == "llama" and taps != (nested or 3):
        what = f"{taps} taps need transformer_layer_config.num_aux_hidden_states = {taps}, or the first request fails"
        return [Need(what, plugin=True, remedy="save it again")]
    return []


def complete_vllm_config(config: dict[str, Any], transformers_config: dict[str, Any]) -> None:
    """Take over what vLLM drops: the number of taps (Llama), and for P-EAGLE the norms."""
    transformers_config["num_aux_hidden_states"] = len(InputFusionConfig.parse(config).tapped_layers)
    for key in ("fc_norm", "norm_output"):
        transformers_config[key] = bool(config.get(key, False))


@dataclass
class InputFusionState:
    """Draft state: keys and values of the committed pairs, and the pairs observed since the last pass.

    placeholder, mask_token_id: [hidden] and id, what fills MASK slots, for drafters that have them.
    """

    cache: DraftState
    pending: Observation | None = None
    placeholder: Tensor | None = None
    mask_token_id: int | None = None


@dataclass(frozen=True)
class DepthZero:
    """The depth-0 stream of a packed batch.

    Attributes:
        hidden: [R, S, hidden], output of the last layer, before the final norm.
        keys, values: one [R, S, key/value heads, head_dim] tensor a layer: the context of all deeper slots.
        mask_embedding: [hidden] of the mask token, for drafters that have one.
    """

    hidden: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    mask_embedding: Tensor | None = None


class InputFusion(Speculator):
    """Base of the drafters that fuse features at their input."""

    config: InputFusionConfig
    options_class: ClassVar[type[InputFusionOptions]] = InputFusionOptions
    stored_verifier_tensors = ("embed_tokens.weight", "lm_head.weight")

    def __init__(self, config: InputFusionConfig) -> None:
        super().__init__(config)
        if config.fc_norm and config.norm_before_fc:
            raise ConfigError("fc_norm and norm_before_fc exclude each other: keep one of them")
        layers, taps, eps = config.layers, len(config.tapped_layers), config.layers.rms_norm_eps
        features = taps * self.target_hidden_size
        self.input_norm = RMSNorm(features, eps=eps) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList(RMSNorm(self.target_hidden_size, eps=eps) for _ in range(taps)) if config.fc_norm else None
        self.fc = Projection(features, layers.hidden_size, bias=False)
        self.layers = nn.ModuleList(
            DecoderLayer(
                layers,
                normalise_heads=layers.model_type == "qwen3",
                fuses_embedding=index == 0,
                norm_before_residual=config.norm_before_residual,
            )
            for index in range(layers.num_hidden_layers)
        )
        self.norm = RMSNorm(layers.hidden_size, eps=eps)
        self.embed_tokens = nn.Embedding(layers.vocab_size, layers.hidden_size) if config.embed_requires_grad else None
        self.lm_head = nn.Linear(layers.hidden_size, config.draft_vocab_size, bias=False) if config.lm_head_requires_grad else None
        self._rotary = RotaryEmbedding(layers)
        initialise(self, layers.initializer_range)

    @classmethod
    def default_config(cls, verifier: VerifierWeights, **options: Any) -> SpeculatorConfig:
        """See `Speculator.default_config`; the options are those of `options_class`."""
        chosen = cls.options_class.parse(cls.method, options)
        return cls.config_class.parse(cls._config_fields(verifier, chosen), f"{cls.method} options")

    @classmethod
    def continued_config(cls, source: SpeculatorConfig, verifier: VerifierWeights, **options: Any) -> SpeculatorConfig:
        """See `Speculator.continued_config`. A head that a drafter of another method trained stays the drafter's own."""
        if source.speculators_model_type != cls.method and getattr(source, "lm_head_requires_grad", False):
            options = {"train_head": True, **options}
        return continued_config(cls, cls.options_class, source, verifier, options)

    @classmethod
    def _config_fields(cls, verifier: VerifierWeights, options: Any) -> dict[str, Any]:
        fields = common_config(cls.method, cls.serving.architecture, verifier, options, "llama")
        taps = taps_for(verifier, options)
        # vLLM's Llama class takes the width of fc from this nested key.
        fields["transformer_layer_config"] = fields["transformer_layer_config"].model_copy(update={"num_aux_hidden_states": len(taps)})
        return {
            **fields,
            "eagle_aux_hidden_state_layer_ids": taps,
            "norm_before_residual": options.norm_before_residual,
            "norm_before_fc": options.norm_before_fc,
            "fc_norm": options.fc_norm,
            "norm_output": options.norm_output,
            **({"lm_head_requires_grad": True} if options.train_head else {}),
        }

    @classmethod
    def from_verifier(cls, verifier: VerifierWeights, **options: Any) -> Any:
        """A fresh drafter; an embedding or head that it trains starts from the verifier's."""
        speculator = super().from_verifier(verifier, **options)
        with torch.no_grad():
            if speculator.embed_tokens is not None:
                speculator.embed_tokens.weight.copy_(verifier.embedding)
            if speculator.lm_head is not None and not speculator.has_reduced_vocabulary:
                speculator.lm_head.weight.copy_(verifier.head)
        return speculator

    def set_draft_vocabulary(self, verifier_ids: Tensor) -> None:
        """See `Speculator.set_draft_vocabulary`; a head that the drafter trains starts from the verifier's rows of it."""
        super().set_draft_vocabulary(verifier_ids)
        if self.lm_head is not None and self.is_attached:
            with torch.no_grad():
                self.lm_head.weight.copy_(self.head_weight())

    # -- the network -----------------------------------------------------------------------------------------

    def fuse(self, hidden_states: Tensor) -> Tensor:
        """Project the concatenated taps, [..., taps * hidden] -> [..., hidden]."""
        x = hidden_states.to(self.compute_dtype())
        if self.input_norm is not None:
            x = self.input_norm(x)
        if self.fc_norm is not None:
            parts = x.chunk(len(self.fc_norm), dim=-1)
            x = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        fused: Tensor = self.fc(x)
        return fused

    def embed(self, token_ids: Tensor) -> Tensor:
        """Token embeddings in the compute dtype: the drafter's own table where it trains one, else the verifier's."""
        embedded = self.verifier.embed(token_ids) if self.embed_tokens is None else self.embed_tokens(token_ids)
        return embedded.to(self.compute_dtype())

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """See `Speculator.draft_logits`. A head of its own is all there is: engines add no scale, cap or bias to it."""
        return super().draft_logits(hidden) if self.lm_head is None else skinny_linear(hidden, self.lm_head.weight)

    def own_head_bias(self, hidden: Tensor) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """What `block_loss` takes as bias for the drafter to be scored with its own head W'; None twice where it has none.

        The loss knows the verifier's head, logits s W h + b, and a bias B f on the drafter's. With f = [h ; 1] and
        B = [W' - s W ; -b] the drafter's logits are W' h, and gradients reach W' and h.

        Args:
            hidden: [..., hidden] after the drafter's final norm.

        Returns:
            f [..., hidden or hidden + 1] and B [draft vocabulary, the same].

        Raises:
            ConfigError: the verifier caps its logits, and a bias after the cap cannot undo it.
        """
        if self.lm_head is None:
            return None, None
        verifier = self.verifier
        if verifier.logit_softcap is not None:
            raise ConfigError(
                f"{verifier.name_or_path!r} caps its logits at {verifier.logit_softcap}, and no head of its own can be trained beside"
                " that; leave train_head out"
            )
        factors, difference = hidden, self.lm_head.weight - verifier.logit_scale * self.head_weight()
        if verifier.head_bias is not None:
            bias = verifier.head_bias[self.draft_token_ids()] if self.has_reduced_vocabulary else verifier.head_bias
            factors = torch.cat([hidden, hidden.new_ones(*hidden.shape[:-1], 1)], dim=-1)
            difference = torch.cat([difference, -bias[:, None]], dim=-1)
        return factors, difference

    def decoder_layers(self) -> list[DecoderLayer]:
        """The layers, typed."""
        return list(self.layers)  # type: ignore[arg-type]

    def depth_zero(self, batch: TrainingBatch) -> DepthZero:
        """Run the real pairs of a packed batch through all layers, causally inside each document.

        The last token of a row has no successor; its slot is computed with a placeholder that nothing looks at. Where there is a
        mask token, that is the placeholder: every lookup makes a gradient as large as the table, so one serves both.
        """
        following = batch.input_ids.roll(-1, dims=1)
        mask_token_id = getattr(self.config, "mask_token_id", None)
        if mask_token_id is not None:
            following[:, -1].fill_(mask_token_id)
        rotation = self._rotary(batch.position_ids)
        x, embedding = self.fuse(batch.hidden_states), self.embed(following)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        visible: dict[int | None, VisibleKeys] = {}
        for number, layer in enumerate(self.decoder_layers()):
            window = self.config.layers.window(number)
            if window not in visible:
                visible[window] = visible_documents(batch.position_ids, window=window)

            def attend(query: Tensor, key: Tensor, value: Tensor, number: int = number, window: int | None = window) -> Tensor:
                if len(keys) == number:  # not again where checkpointing computes the layer a second time
                    keys.append(key)
                    values.append(value)
                return attention(query, None, None, key, value, visible[window])

            x = run_layer(layer, x, rotation, attend, embedding, checkpointing=self.config.training_options.activation_checkpointing)
        return DepthZero(x, keys, values, None if mask_token_id is None else embedding[0, -1])

    @staticmethod
    def at_pairs(values: Tensor, anchors: Anchors) -> Tensor:
        """Values [R, S, size] of the pair that predicts each anchor's first draft token: [R, N, size].

        The pair before the anchor token holds the anchor's embedding.
        """
        index = (anchors.index - 1).clamp_min(0)[..., None].expand(-1, -1, values.shape[-1])
        return values.gather(1, index)

    # -- decoding --------------------------------------------------------------------------------------------

    def new_state(self, rows: int, max_length: int, device: torch.device, dtype: torch.dtype) -> InputFusionState:
        """Preallocated keys and values of every layer, and what fills MASK slots; lays out the weights for decoding."""
        for layer in self.decoder_layers():
            layer.lay_together()
        announce([self.head_weight() if self.lm_head is None else self.lm_head.weight])
        cache = DraftState.allocate(self.config.layers, self._rotary, rows, max_length, device, self.compute_dtype())
        state = InputFusionState(cache)
        state.mask_token_id = getattr(self.config, "mask_token_id", None)
        if state.mask_token_id is not None:
            state.placeholder = self.masked_inputs()[0]
        return state

    def observe(self, state: InputFusionState, observation: Observation) -> None:
        """Keep the new pairs for the next pass, which runs them and drafts at once."""
        if state.pending is not None:  # a long prompt arrives in pieces: run the earlier one now
            self.run_pending(state, 0)
        state.pending = observation

    def run_pending(self, state: InputFusionState, mask_slots: int) -> Tensor:
        """One pass over the pending pairs, each row followed by `mask_slots` slots of `masked_inputs`.

        Returns:
            [rows, 1 + mask_slots, hidden] before the final norm: the last pair's output, then the mask slots'.
        """
        observed = state.pending
        assert observed is not None, "propose needs an observation since the last one"
        state.pending = None
        rows, width = observed.token_ids.shape
        hidden, last = self.fuse(observed.hidden_states), (observed.counts - 1).clamp_min(0)[:, None]
        if mask_slots:
            # MASK slots follow each row's own last pair; what lies past them is never looked at.
            assert state.placeholder is not None and state.mask_token_id is not None
            inputs = state.cache.draft_inputs(
                observed.token_ids,
                observed.counts,
                observed.next_token_ids.gather(1, last)[:, 0],
                observed.start,
                mask_slots=mask_slots,
                mask_token_id=state.mask_token_id,
            )
            width += mask_slots
            hidden = hidden_state_scatter(hidden.flatten(0, 1), inputs.hidden_rows, state.placeholder).view(rows, width, -1)
            embedding, positions = self.embed(inputs.input_ids.view(rows, width)), inputs.positions.view(rows, width)
        else:
            embedding = self.embed(observed.next_token_ids)
            positions = observed.start[:, None] + torch.arange(width, device=observed.start.device)
        x = self.run_block(state.cache, hidden, embedding, state.cache.rotation(positions), observed.start).value()
        state.cache.commit(observed)
        sampled = last + torch.arange(1 + mask_slots, device=last.device)
        return x.gather(1, sampled[..., None].expand(-1, -1, x.shape[-1]))

    def run_block(
        self, cache: DraftState, hidden: Tensor, embedding: Tensor, rotation: Rotation, start: Tensor, ahead: int = 0
    ) -> ResidualStream:
        """All layers over one causal block a row, [rows, width, hidden], that continues the cache at `start`.

        The block's keys and values are written to the cache; `ahead` slots past the committed length are read.
        """
        stream, width = ResidualStream(hidden), hidden.shape[1]
        visible: dict[int | None, VisibleKeys] = {}
        for number, layer in enumerate(self.decoder_layers()):
            window = self.config.layers.window(number)
            if window not in visible:
                visible[window] = cache.visible(start, width, causal=True, window=window)

            def attend(query: Tensor, key: Tensor, value: Tensor, number: int = number, window: int | None = window) -> Tensor:
                return attention(query, key, value, *cache.context(number, ahead), visible[window])

            layer.step(stream, rotation, attend, embedding, cache=cache.slots(number, start))
        return stream

    def masked_inputs(self) -> tuple[Tensor, Tensor]:
        """Hidden and embedding halves of a mask slot, [hidden] each, for drafters that have them."""
        raise ConfigError(f"{self.method} has no mask slots: it drafts one token a pass")
