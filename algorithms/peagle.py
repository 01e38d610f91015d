"""P-EAGLE: EAGLE with all K draft tokens from one pass (arXiv 2602.01469).

Slots that have no token yet get a mask token's embedding and one learned hidden state shared by all of them.
Training expands sampled positions into chains of such slots (COD sampling), each over the depth-0 stream.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from speculators.algorithms.anchors import Anchors, Supervision
from speculators.algorithms.input_fusion import (
    DepthZero,
    InputFusion,
    InputFusionConfig,
    InputFusionOptions,
    InputFusionState,
    complete_vllm_config,
    fusion_needs,
)
from speculators.algorithms.objective import Objective, block_loss, on_device
from speculators.algorithms.options import default_mask_token
from speculators.config import SpeculatorConfig
from speculators.decoding.proposal import DraftSampler, Proposal
from speculators.kernels.block_attention import block_attention
from speculators.kernels.visible_keys import VisibleKeys, visible_blocks
from speculators.registry import Need, PluginParts, VllmServing, register_algorithm
from speculators.speculator import VerifierWeights
from speculators.training.batch import LossOutput, TrainingBatch


class PEagleTraining(Objective):
    """KL to the verifier on COD-sampled chains.

    Attributes:
        anchors: positions drawn in every packed row of every step; the n of COD sampling.
        num_depths: depths trained, K_train; drafting K <= K_train tokens is possible.
        keep_rate: r, the share of chains that continue from each depth to the next.
    """

    kl: float = Field(1.0, ge=0)
    position_weights: Any = "uniform"
    anchors: int = Field(128, ge=1)
    num_depths: int = Field(8, ge=1)
    keep_rate: float = Field(0.8, gt=0, le=1)


class PEagleConfig(InputFusionConfig):
    """config.json of a P-EAGLE drafter.

    Attributes:
        mask_token_id: id whose embedding fills slots without a token.
        embed_requires_grad: the paper trains the embedding (its Table 5: +5%).
    """

    mask_token_id: int | None = None
    embed_requires_grad: bool = True
    training_options: PEagleTraining = Field(default_factory=PEagleTraining)

    @property
    def max_draft_tokens(self) -> int:
        """The depths it was trained for, or what the checkpoint says to draft."""
        return max(self.training_options.num_depths, self.num_draft_tokens)


class PEagleOptions(InputFusionOptions):
    """Options of P-EAGLE."""

    adjustable = {**InputFusionOptions.adjustable, "train_embedding": "embed_requires_grad"}

    num_layers: int = Field(4, ge=1)
    train_embedding: bool = True
    training: PEagleTraining = Field(default_factory=PEagleTraining)

    @classmethod
    def stored_in(cls, config: SpeculatorConfig) -> dict[str, Any]:
        """See `DrafterOptions.stored_in`."""
        return {**super().stored_in(config), "train_embedding": getattr(config, "embed_requires_grad", False)}


def depth_counts(positions: int, depths: int, keep_rate: float) -> list[int]:
    """COD sampling (section 3.2): how many of n chains reach each depth, floor(n * r^d) for d = 0 .. depths - 1."""
    return [int(positions * keep_rate**depth) for depth in range(depths)]


def chain_visibility(anchor: Tensor, depth: Tensor) -> Tensor:
    """Which element (anchor a, depth d) sees which: depth-0 elements up to its anchor, and its own chain up to itself.

    Args:
        anchor: [elements] int64, a = position - depth.
        depth: [elements] int64.

    Returns:
        [elements, elements] bool, rows are queries. The definition that training's block attention is tested against.
    """
    causal = (depth[None] == 0) & (anchor[None] <= anchor[:, None])
    chain = (anchor[None] == anchor[:, None]) & (depth[None] <= depth[:, None])
    return causal | chain


def partition_chains(positions: list[list[int]], length: int, segments: int) -> list[list[list[int]]]:
    """Sequence partitioning (Algorithm 1): which segment computes which sampled position of each depth.

    Positions of depths 0 and 1 go to the last segment whose boundary s * length / segments is not beyond them; a
    deeper position follows its chain's predecessor, so a chain never crosses segments.

    Args:
        positions: sampled positions of each depth, `positions[0]` all of the sequence.
        length: tokens of the sequence.
        segments: number of segments.

    Returns:
        assigned[segment][depth] = positions, ascending. Segment s also carries every depth-0 position below its end.
    """
    assigned: list[list[list[int]]] = [[[] for _ in positions] for _ in range(segments)]
    previous: dict[int, int] = {}
    for depth, sampled in enumerate(positions):
        current: dict[int, int] = {}
        for position in sampled:
            segment = previous[position - 1] if depth >= 2 else max(s for s in range(segments) if s * length / segments <= position)
            current[position] = segment
            assigned[segment][depth].append(position)
        previous = current
    return assigned


def serving_needs(config: PEagleConfig) -> list[Need]:
    """What vLLM reads differently in a P-EAGLE configuration: it loses the norm of every tap."""
    what = "fc_norm = true: it is ignored for P-EAGLE, so the taps reach fc without their norms"
    return [*fusion_needs(config), *([Need(what, plugin=True)] if config.fc_norm else [])]


@register_algorithm(
    "peagle",
    serving=VllmServing(
        method="eagle3",
        architecture="PEagleDraftModel",
        options={"parallel_drafting": True},
        runners=("V1",),
        minimum_version="0.26.0",
        needs=serving_needs,
        plugin=PluginParts(complete=complete_vllm_config),
    ),
)
class PEagle(InputFusion):
    """Parallel EAGLE: mask-token slots with a shared learned hidden state, all K tokens from one pass."""

    config_class = PEagleConfig
    options_class = PEagleOptions
    warm_start_from = ("eagle3",)
    config: PEagleConfig

    def __init__(self, config: PEagleConfig) -> None:
        super().__init__(config)
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, len(config.tapped_layers) * self.target_hidden_size))

    @classmethod
    def _config_fields(cls, verifier: VerifierWeights, options: Any) -> dict[str, Any]:
        training = options.training
        if "num_depths" not in training.model_fields_set:
            training = training.model_copy(update={"num_depths": options.num_draft_tokens})
        return {
            **super()._config_fields(verifier, options),
            "mask_token_id": default_mask_token(verifier) if options.mask_token_id is None else options.mask_token_id,
            "embed_requires_grad": options.train_embedding,
            "training_options": training,
        }

    def masked_inputs(self) -> tuple[Tensor, Tensor]:
        """The shared hidden state (fused like any other) and the mask token's embedding."""
        assert self.config.mask_token_id is not None
        mask = torch.full((1,), self.config.mask_token_id, device=self.mask_hidden.device)
        return self.fuse(self.mask_hidden[0, 0]), self.embed(mask)[0]

    def training_loss(self, batch: TrainingBatch) -> LossOutput:
        """The objective on COD-sampled chains of every row; see `Speculator.training_loss`."""
        # Sampling without replacement returns anchors in random order, so "the first floor(n r^d)" are a random,
        # nested choice: a chain that reaches depth d has reached every depth before it.
        return self.loss_at(batch, Anchors.sample(batch, self.config.training_options.anchors))

    def loss_at(self, batch: TrainingBatch, anchors: Anchors) -> LossOutput:
        """The objective on the chains of given anchors, the first floor(n r^d) of which reach depth d."""
        options = self.config.training_options
        supervision = Supervision.of(batch, anchors, options.num_depths)
        hidden = self.training_hidden(batch, anchors)
        chains = anchors.index.shape[1]
        counts = depth_counts(chains, options.num_depths, options.keep_rate)
        rank = torch.arange(chains, device=anchors.index.device)
        mask = supervision.mask & (rank[:, None] < on_device(tuple(counts), rank.device))
        factors, bias_head = self.own_head_bias(hidden)
        return block_loss(self, options, batch, supervision, hidden, mask=mask, bias_factors=factors, bias_head=bias_head)[0]

    def training_hidden(self, batch: TrainingBatch, anchors: Anchors) -> Tensor:
        """Outputs [R, N, num_depths, hidden] after the final norm; chains that COD cuts off hold zeros."""
        options = self.config.training_options
        stream = self.depth_zero(batch)
        first = self.at_pairs(stream.hidden, anchors)[:, :, None]
        depths = options.num_depths - 1
        chains = depth_counts(anchors.index.shape[1], options.num_depths, options.keep_rate)[1] if depths else 0
        if not chains:
            normed: Tensor = self.norm(nn.functional.pad(first, (0, 0, 0, depths)))
            return normed
        deeper = self._chains(stream, anchors, chains, depths)
        deeper = nn.functional.pad(deeper, (0, 0, 0, 0, 0, first.shape[1] - chains))
        normed = self.norm(torch.cat([first, deeper], dim=2))
        return normed

    def _chains(self, stream: DepthZero, anchors: Anchors, chains: int, depths: int) -> Tensor:
        """Mask slots of the first `chains` anchors, [R, chains, depths, hidden] before the final norm."""
        start, end = anchors.document_start[:, :chains], anchors.index[:, :chains]
        position = (anchors.position[:, :chains] - 1)[..., None] + torch.arange(1, depths + 1, device=start.device)
        rotation = self._rotary(position)
        hidden, embedding = (x.expand(*position.shape, -1) for x in self.masked_inputs())
        x = hidden
        visible: dict[int | None, VisibleKeys] = {}
        for number, layer in enumerate(self.decoder_layers()):
            window = self.config.layers.window(number)
            if window not in visible:
                visible[window] = visible_blocks(start, end, block_queries=depths, block_keys=depths, causal=True, window=window)

            def attend(query: Tensor, key: Tensor, value: Tensor, number: int = number, window: int | None = window) -> Tensor:
                context = stream.keys[number], stream.values[number]
                return block_attention(query, key, value, *context, start, end, causal=True, window=window, visible=visible[window])

            x = layer(x, rotation, attend, embedding)
        return x

    def new_state(self, rows: int, max_length: int, device: torch.device, dtype: torch.dtype) -> InputFusionState:
        """Preallocated keys and values of every layer, and what fills MASK slots."""
        state = super().new_state(rows, max_length, device, dtype)
        state.placeholder, state.mask_token_id = self.masked_inputs()[0], self.config.mask_token_id
        return state

    def propose(self, state: InputFusionState, anchor: Tensor, sampler: DraftSampler, num_draft_tokens: int) -> Proposal:
        """One pass over the newly observed pairs and K - 1 mask slots; every slot drawn independently."""
        hidden = self.run_pending(state, num_draft_tokens - 1)
        sampler.draw_block(self.to_verifier_vocabulary(self.draft_logits(self.norm(hidden))))
        return sampler.proposal()
