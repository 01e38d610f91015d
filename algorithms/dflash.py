"""DFlash: block diffusion with the verifier's features injected as keys and values (arXiv 2602.06036).

The context never enters the drafter's residual stream. The tapped hidden states are fused once,
H = RMSNorm(W_c [h_1 ; ... ; h_m]), and every layer projects H with its own k_proj and v_proj into keys and values
that the block attends to. A block is the anchor token and MASK tokens; all its slots are predicted in one pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer
from torch import Tensor, nn

from speculators.algorithms.anchors import Anchors, Supervision
from speculators.algorithms.draft_state import DraftState
from speculators.algorithms.layers import DecoderLayer, Projection, ResidualStream, RMSNorm, RotaryEmbedding, initialise, run_layer
from speculators.algorithms.objective import Objective, block_loss
from speculators.algorithms.options import DrafterOptions, common_config, default_mask_token, taps_for
from speculators.algorithms.warm_start import continued_config
from speculators.config import MOST_LAYERS, SpeculatorConfig
from speculators.decoding.proposal import DraftSampler, Observation, Proposal
from speculators.kernels.block_attention import attention, block_attention
from speculators.kernels.kv_injection import InjectionWeights, kv_injection
from speculators.kernels.packed_linear import announce
from speculators.kernels.visible_keys import VisibleKeys, visible_blocks
from speculators.registry import Need, PluginParts, VllmServing, register_algorithm
from speculators.speculator import Speculator, VerifierWeights
from speculators.training.batch import LossOutput, TrainingBatch


class DFlashTraining(Objective):
    """How DFlash is trained: hard labels, exponentially decaying weights, random anchors.

    Attributes:
        anchors: blocks drawn in every packed row of every step.
    """

    cross_entropy: float = Field(1.0, ge=0)
    anchors: int = Field(128, ge=1)


class DFlashConfig(SpeculatorConfig):
    """config.json of a DFlash drafter.

    Attributes:
        block_size: slots of a block. Draft tokens: block_size - 1, or block_size when the anchor slot predicts.
        aux_hidden_state_layer_ids: tapped verifier layers.
        mask_token_id: id whose embedding fills MASK slots.
        sample_from_anchor: whether the anchor slot predicts the first draft token (DSpark) or only conditions (DFlash).
        sliding_window_non_causal: sliding layers attend bidirectionally inside the block; by default they are causal.
        is_causal: every layer attends causally inside the block; None follows the layer types.
    """

    block_size: int = Field(8, ge=1)
    aux_hidden_state_layer_ids: list[int] | None = None
    mask_token_id: int | None = None
    sample_from_anchor: bool = False
    sliding_window_non_causal: bool = False
    is_causal: bool | None = None
    training_options: DFlashTraining = Field(default_factory=DFlashTraining)

    @property
    def max_draft_tokens(self) -> int:
        """Tokens one block proposes."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @model_serializer(mode="wrap")
    def _causality_as_engines_read_it(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Where all layers agree, `sliding_window_non_causal` says how they attend, sliding or not.

        vLLM takes the key for every layer: with the format's default, false, it drafts causally with a bidirectional
        drafter of full attention, and acceptance drops. Readers that look at sliding layers only see no difference.
        And engines read `is_causal` where it stands, whatever it is; unset, it must not stand there.
        """
        data: dict[str, Any] = handler(self)
        if data.get("is_causal") is None:
            data.pop("is_causal", None)
        if len(kinds := self.causalities) == 1:
            data["sliding_window_non_causal"] = not kinds.pop()
        return data

    @property
    def causalities(self) -> set[bool]:
        """Whether its layers attend causally inside the block: one value, or both where they differ."""
        return {self.causal(layer) for layer in range(self.layers.num_hidden_layers)}

    def causal(self, layer: int) -> bool:
        """Whether a layer's attention inside the block is causal."""
        if self.is_causal is not None:
            return self.is_causal
        return self.layers.window(layer) is not None and not self.sliding_window_non_causal


class DFlashOptions(DrafterOptions):
    """Options of DFlash.

    Attributes:
        is_causal: causal instead of bidirectional attention inside the block.
        training: objective and anchors.
    """

    num_layers: int = Field(5, ge=1, le=MOST_LAYERS)
    sample_from_anchor: bool = False
    is_causal: bool | None = None
    sliding_window_non_causal: bool = False
    training: DFlashTraining = Field(default_factory=DFlashTraining)


@dataclass
class InjectionState:
    """Draft state: the injected keys and values, and the layers' weights laid out for injection."""

    cache: DraftState
    weights: InjectionWeights


def serving_needs(config: DFlashConfig) -> list[Need]:
    """What vLLM reads differently in a DFlash configuration."""
    needs = []
    if config.sample_from_anchor:
        what = "sample_from_anchor = true: the V1 runner ignores it and drafts from wrong slots, the V2 runner refuses it"
        needs.append(Need(what, remedy="train the drafter as dspark, whose anchor slot predicts"))
    if config.causalities != {not config.sliding_window_non_causal}:
        value = str(config.sliding_window_non_causal).lower()
        what = f"sliding_window_non_causal = {value}: vLLM takes it for every layer, whatever its attention"
        needs.append(Need(what, plugin=True, remedy="save the checkpoint again" if len(config.causalities) == 1 else ""))
    if len({config.layers.window(layer) for layer in range(config.layers.num_hidden_layers)}) > 1:
        needs.append(Need("layer_types mixes sliding and full attention: only the V2 runner serves it", since="0.26.0", runner="V2"))
    return needs


def complete_vllm_config(config: dict[str, Any], transformers_config: dict[str, Any]) -> None:
    """Say how each layer attends: one value where all agree, else vLLM's own rule, which goes by layer types as ours does."""
    causalities = DFlashConfig.parse(config).causalities
    transformers_config["dflash_config"].pop("causal", None)
    if len(causalities) == 1:
        transformers_config["is_causal"] = transformers_config["dflash_config"]["causal"] = causalities.pop()


@register_algorithm(
    "dflash",
    serving=VllmServing(
        method="dflash",
        architecture="DFlashDraftModel",
        runners=("V1", "V2"),
        parallel=True,
        minimum_version="0.26.0",
        needs=serving_needs,
        plugin=PluginParts(complete=complete_vllm_config),
        sglang=("--speculative-algorithm", "DFLASH"),
    ),
)
class DFlash(Speculator):
    """Block diffusion over injected verifier features: all draft tokens in one bidirectional pass."""

    config_class = DFlashConfig
    options_class: ClassVar[type[DFlashOptions]] = DFlashOptions
    config: DFlashConfig

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        layers = config.layers
        features = len(config.tapped_layers) * self.target_hidden_size
        self.fc = Projection(features, layers.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(layers.hidden_size, eps=layers.rms_norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(layers, normalise_heads=True) for _ in range(layers.num_hidden_layers))
        self.norm = RMSNorm(layers.hidden_size, eps=layers.rms_norm_eps)
        self._rotary = RotaryEmbedding(layers)
        initialise(self, layers.initializer_range)

    @classmethod
    def default_config(cls, verifier: VerifierWeights, **options: Any) -> DFlashConfig:
        """See `Speculator.default_config`; the options are those of `options_class`."""
        chosen = cls.options_class.parse(cls.method, options)
        config: DFlashConfig = cls.config_class.parse(cls._config_fields(verifier, chosen), f"{cls.method} options")
        return config

    @classmethod
    def continued_config(cls, source: SpeculatorConfig, verifier: VerifierWeights, **options: Any) -> SpeculatorConfig:
        """See `Speculator.continued_config`."""
        return continued_config(cls, cls.options_class, source, verifier, options)

    @classmethod
    def _config_fields(cls, verifier: VerifierWeights, options: Any) -> dict[str, Any]:
        mask = default_mask_token(verifier) if options.mask_token_id is None else options.mask_token_id
        return {
            **common_config(cls.method, cls.serving.architecture, verifier, options, "qwen3"),
            "aux_hidden_state_layer_ids": taps_for(verifier, options),
            "block_size": options.num_draft_tokens + (not options.sample_from_anchor),
            "mask_token_id": mask,
            "sample_from_anchor": options.sample_from_anchor,
            "sliding_window_non_causal": options.sliding_window_non_causal,
            "is_causal": options.is_causal,
            "training_options": options.training,
        }

    # -- the network -----------------------------------------------------------------------------------------

    def context_features(self, hidden_states: Tensor) -> Tensor:
        """Fuse the taps, [..., taps * hidden] -> [..., hidden]: once a token, for all layers."""
        fused: Tensor = self.hidden_norm(self.fc(hidden_states.to(self.compute_dtype())))
        return fused

    def block_inputs(self, anchor: Tensor, slots: int) -> Tensor:
        """Embeddings of the anchor and slots - 1 MASK tokens: [...] int64 -> [..., slots, hidden]."""
        assert self.config.mask_token_id is not None
        ids = torch.full((*anchor.shape, slots), self.config.mask_token_id, device=anchor.device)
        ids[..., 0] = anchor
        return self.verifier.embed(ids).to(self.compute_dtype())

    def draft_slots(self, hidden: Tensor) -> Tensor:
        """The slots that predict draft tokens: all, or all but the anchor's. [..., slots, hidden]."""
        return hidden if self.config.sample_from_anchor else hidden[..., 1:, :]

    def _decoder_layers(self) -> list[DecoderLayer]:
        return list(self.layers)  # type: ignore[arg-type]

    def _attention_kind(self, layer: int) -> tuple[bool, int | None]:
        return self.config.causal(layer), self.config.layers.window(layer)

    def training_hidden(self, batch: TrainingBatch, anchors: Anchors) -> Tensor:
        """Block outputs [R, N, slots, hidden] after the final norm, each block over its own prefix of the row."""
        slots = self.config.block_size
        context = self.context_features(batch.hidden_states)
        context_rotation = self._rotary(batch.position_ids)
        rotation = self._rotary(anchors.position[..., None] + torch.arange(slots, device=anchors.index.device))
        x = self.block_inputs(anchors.input_ids(batch), slots)
        visible: dict[tuple[bool, int | None], VisibleKeys] = {}
        for index, layer in enumerate(self._decoder_layers()):
            causal, window = kind = self._attention_kind(index)
            if kind not in visible:  # layers of one kind share it
                visible[kind] = visible_blocks(
                    anchors.document_start,
                    anchors.index,
                    block_queries=slots,
                    block_keys=slots,
                    causal=causal,
                    window=window,
                    block_valid=anchors.valid,
                )
            key, value = layer.self_attn.key_value(context, context_rotation)
            attend = partial(
                block_attention,
                context_key=key,
                context_value=value,
                context_start=anchors.document_start,
                context_end=anchors.index,
                causal=causal,
                window=window,
                visible=visible[kind],
            )
            x = run_layer(layer, x, rotation, attend, checkpointing=self.config.training_options.activation_checkpointing)
        hidden: Tensor = self.norm(x)
        return hidden

    def training_loss(self, batch: TrainingBatch) -> LossOutput:
        """The objective over random anchors of every row; see `Speculator.training_loss`."""
        anchors = Anchors.sample(batch, self.config.training_options.anchors)
        return self.loss_at(batch, anchors)

    def loss_at(self, batch: TrainingBatch, anchors: Anchors) -> LossOutput:
        """The objective over given anchors."""
        hidden = self.draft_slots(self.training_hidden(batch, anchors))
        supervision = Supervision.of(batch, anchors, hidden.shape[2])
        return block_loss(self, self.config.training_options, batch, supervision, hidden)[0]

    # -- decoding --------------------------------------------------------------------------------------------

    def new_state(self, rows: int, max_length: int, device: torch.device, dtype: torch.dtype) -> InjectionState:
        """Preallocated keys and values of every layer's injected context; lays out the weights for decoding."""
        config, layers = self.config.layers, self._decoder_layers()
        for layer in layers:
            layer.lay_together()
        announce([self.head_weight()])
        attentions = [layer.self_attn for layer in layers]
        half = config.head_dim // 2
        cache = DraftState.allocate(config, self._rotary, rows, max_length, device, self.compute_dtype())
        weights = InjectionWeights.stack(
            [attention.k_proj.weight for attention in attentions],
            [attention.v_proj.weight for attention in attentions],
            [attention.k_norm.weight for attention in attentions if attention.k_norm is not None],
            config.rms_norm_eps,
            cache.rotations.cosine[:, 0, :half],
            cache.rotations.sine[:, 0, :half],
            [part.bias for a in attentions for part in (a.k_proj, a.v_proj)] if config.attention_bias else None,
        )
        return InjectionState(cache, weights)

    def observe(self, state: InjectionState, observation: Observation) -> None:
        """Inject the new tokens' features as keys and values of every layer; the input gets no longer."""
        features = self.context_features(observation.hidden_states)
        kv_injection(features, state.weights, observation.start, observation.counts, state.cache.memory)
        state.cache.commit(observation)

    def decode_hidden(self, state: InjectionState, anchor: Tensor, num_draft_tokens: int) -> Tensor:
        """Hidden states [rows, slots, hidden] of the whole block, after the final norm; see `draft_slots`."""
        assert self.config.mask_token_id is not None
        cache, slots = state.cache, num_draft_tokens + (not self.config.sample_from_anchor)
        inputs = cache.draft_inputs(
            anchor[:, None], torch.ones_like(anchor), anchor, cache.lengths, mask_slots=slots - 1, mask_token_id=self.config.mask_token_id
        )
        rotation = cache.rotation(inputs.positions.view(-1, slots))
        stream = ResidualStream(self.verifier.embed(inputs.input_ids).to(self.compute_dtype()).view(len(anchor), slots, -1))
        visible: dict[tuple[bool, int | None], VisibleKeys] = {}
        for index, layer in enumerate(self._decoder_layers()):
            key, value = cache.context(index)
            causal, window = kind = self._attention_kind(index)
            if kind not in visible:
                visible[kind] = cache.visible(cache.lengths, slots, causal=causal, window=window)
            layer.step(stream, rotation, partial(attention, context_key=key, context_value=value, visible=visible[kind]))
        return stream.normed(self.norm)

    def propose(self, state: InjectionState, anchor: Tensor, sampler: DraftSampler, num_draft_tokens: int) -> Proposal:
        """Draw every slot independently of the others, all from one pass."""
        logits = self.draft_logits(self.draft_slots(self.decode_hidden(state, anchor, num_draft_tokens)))
        sampler.draw_block(logits, self.draft_vocabulary)
        return sampler.proposal()
