"""P-EAGLE: EAGLE with all K draft tokens from one pass (arXiv 2602.01469).

Slots that have no token yet get a mask token's embedding and one learned hidden state shared by all of them.
Training expands sampled positions into chains of such slots (COD sampling), each over the depth-0 stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
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
from speculators.algorithms.layers import run_layer
from speculators.algorithms.objective import Objective, block_loss
from speculators.algorithms.options import default_mask_token
from speculators.algorithms.partitioning import sum_of_parts
from speculators.config import MOST_LAYERS, SpeculatorConfig
from speculators.decoding.proposal import DraftSampler, Proposal
from speculators.kernels.block_attention import attention
from speculators.kernels.visible_keys import VisibleKeys
from speculators.registry import Need, PluginParts, VllmServing, register_algorithm
from speculators.speculator import VerifierWeights
from speculators.training.batch import LossOutput, TrainingBatch


class PEagleTraining(Objective):
    """KL to the verifier on COD-sampled chains.

    Attributes:
        anchors: positions drawn in every packed row of every step; the n of COD sampling.
        num_depths: depths trained, K_train; drafting K <= K_train tokens is possible.
        keep_rate: r, the share of chains that continue from each depth to the next.
        segments: parts of the chains that are trained one after the other, gradients accumulated inside the sequence
            (section 3.3): the same loss and gradients in less memory, for long rows.
    """

    kl: float = Field(1.0, ge=0)
    position_weights: Any = "uniform"
    anchors: int = Field(128, ge=1)
    num_depths: int = Field(8, ge=1)
    keep_rate: float = Field(0.8, gt=0, le=1)
    segments: int = Field(1, ge=1)


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

    num_layers: int = Field(4, ge=1, le=MOST_LAYERS)
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


@dataclass(frozen=True)
class ChainLayout:
    """Chains of unequal length: element (n, d) is depth d of anchor n's chain, and every chain has depth 0.

    How many chains go deeper, not which ones, is the same in every row, so that all shapes are known beforehand. The deeper
    elements lie flat in a row, those of one chain after those of another, depth 1 first.

    Attributes:
        anchors: of the chains, [R, N].
        num_depths: K.
        deepest: [R, N] int64, the last depth of each chain.
        chain, depth: [R, D] int64, n and d >= 1 of each deeper element.
        first: [R, D] int64, where its chain begins among the deeper elements.
        elements: [R, N + D] int64, all elements, n * K + d, ascending.
    """

    anchors: Anchors
    num_depths: int
    deepest: Tensor
    chain: Tensor
    depth: Tensor
    first: Tensor
    elements: Tensor

    @classmethod
    def of(cls, anchors: Anchors, counts: list[int]) -> ChainLayout:
        """Chains of which those of the first counts[d] ranks reach depth d; counts[0] is all of them."""
        rank = anchors.rank
        deepest = torch.stack([rank < count for count in counts[1:]] or [rank < 0]).sum(dim=0)
        chain, slot = _ragged(deepest, sum(counts[1:]))
        first = (deepest.cumsum(dim=1) - deepest).gather(1, chain)
        every_chain, every_depth = _ragged(deepest + 1, sum(counts))
        return cls(anchors, len(counts), deepest, chain, slot + 1, first, every_chain * len(counts) + every_depth)

    @property
    def mask(self) -> Tensor:
        """[R, N, K] bool, the elements there are."""
        return torch.arange(self.num_depths, device=self.deepest.device) <= self.deepest[..., None]

    def interleave(self, depth_zero: Tensor, deeper: Tensor) -> Tensor:
        """Values of the anchors [R, N, size] and of the deeper elements [R, D, size] -> of all elements, in their order."""
        chain, depth = self.elements // self.num_depths, self.elements % self.num_depths
        begins = (self.deepest.cumsum(dim=1) - self.deepest).gather(1, chain)
        source = torch.where(depth == 0, chain, self.deepest.shape[1] + begins + depth - 1)
        return torch.cat([depth_zero, deeper], dim=1).gather(1, source[..., None].expand(-1, -1, depth_zero.shape[-1]))

    def dense(self, values: Tensor) -> Tensor:
        """Values of all elements [R, N + D, size] -> [R, N, K, size], zero where there is no element."""
        rows, chains = self.deepest.shape
        full = values.new_zeros(rows, chains * self.num_depths, values.shape[-1])
        index = self.elements[..., None].expand(-1, -1, values.shape[-1])
        return full.scatter(1, index, values).view(rows, chains, self.num_depths, values.shape[-1])

    def visible(self, window: int | None) -> VisibleKeys:
        """What the deeper elements see: depth 0 before their anchor token, and their chain up to themselves."""
        return VisibleKeys.of_queries(
            self.anchors.document_start.gather(1, self.chain),
            self.anchors.index.gather(1, self.chain),
            self.first,
            self.num_depths,  # not read: chains are causal
            self.depth - 1,
            causal=True,
            window=window,
            reach=self.num_depths,
        )


def _ragged(lengths: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Pieces of lengths [R, n] laid out one after the other, `total` places a row: piece and place in it, [R, total] each."""
    ends = lengths.cumsum(dim=1)
    index = torch.arange(total, device=lengths.device).expand(len(lengths), -1).contiguous()
    piece = torch.searchsorted(ends, index, right=True)
    return piece, index - (ends - lengths).gather(1, piece)


@register_algorithm(
    "peagle",
    serving=VllmServing(
        method="eagle3",
        architecture="PEagleDraftModel",
        options={"parallel_drafting": True},
        runners=("V1",),
        parallel=True,
        minimum_version="0.26.0",
        needs=serving_needs,
        plugin=PluginParts(
            speculator="speculators.serving.peagle_speculator:PEagleSpeculator",
            lifts=("parallel drafting for EAGLE speculative decoding",),
            complete=complete_vllm_config,
        ),
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

    def _training_streams(self, batch: TrainingBatch) -> tuple[DepthZero, Tensor, Tensor]:
        """Depth 0, and what `masked_inputs` returns, of one lookup in the embedding."""
        stream = self.depth_zero(batch)
        assert stream.mask_embedding is not None
        return stream, self.fuse(self.mask_hidden[0, 0]), stream.mask_embedding

    def training_loss(self, batch: TrainingBatch) -> LossOutput:
        """The objective on COD-sampled chains of every row; see `Speculator.training_loss`."""
        return self.loss_at(batch, Anchors.sample(batch, self.config.training_options.anchors))

    def loss_at(self, batch: TrainingBatch, anchors: Anchors) -> LossOutput:
        """The objective on the chains of given anchors, those of the first floor(n r^d) ranks as far as depth d.

        Depth 0 runs once. Its last hidden states, keys and values are the context of every chain, and the chains'
        gradients on them go back through it once.
        """
        stream, mask_hidden, mask_embedding = self._training_streams(batch)
        options, chains = self.config.training_options, anchors.index.shape[1]
        counts, number = depth_counts(chains, options.num_depths, options.keep_rate), min(options.segments, chains)
        segments = [ChainLayout.of(anchors.part(s, number), [len(range(s, count, number)) for count in counts]) for s in range(number)]
        if number == 1:
            return self._segment_loss(batch, segments[0], stream, mask_hidden, mask_embedding)[0]

        metrics: dict[str, tuple[Tensor, Tensor]] = {}

        def run(segment: ChainLayout, shared: list[Tensor]) -> Tensor:
            hidden, mask_hidden, mask_embedding, *context = shared
            part = DepthZero(hidden, context[: len(stream.keys)], context[len(stream.keys) :])
            output, loss = self._segment_loss(batch, segment, part, mask_hidden, mask_embedding)
            for name, (numerator, denominator) in output.metrics.items():
                before = metrics.get(name, (0.0, 0.0))
                metrics[name] = (before[0] + numerator, before[1] + denominator)
            return loss

        shared = [stream.hidden, mask_hidden, mask_embedding, *stream.keys, *stream.values]
        used = (self.layers, self.norm, self.lm_head)
        parameters = [parameter for module in used if module is not None for parameter in module.parameters()]
        loss = sum_of_parts([partial(run, segment) for segment in segments], shared, parameters)
        return LossOutput(loss / metrics["loss"][1].clamp_min(1e-6), metrics)

    def _segment_loss(
        self, batch: TrainingBatch, segment: ChainLayout, stream: DepthZero, mask_hidden: Tensor, mask_embedding: Tensor
    ) -> tuple[LossOutput, Tensor]:
        """The loss of some chains, as `block_loss` gives it and as a plain sum over elements."""
        options = self.config.training_options
        supervision = Supervision.of(batch, segment.anchors, options.num_depths)
        hidden = self._chain_outputs(segment, stream, mask_hidden, mask_embedding)
        elements: Tensor | None = segment.elements
        if options.position_weights == "dpace" and options.depth_weights is None:
            hidden, elements = segment.dense(hidden), None
        mask = supervision.mask & segment.mask
        factors, bias_head = self.own_head_bias(hidden)
        output, terms, _ = block_loss(
            self, options, batch, supervision, hidden, mask=mask, elements=elements, bias_factors=factors, bias_head=bias_head
        )
        return output, terms.loss

    def training_hidden(self, batch: TrainingBatch, anchors: Anchors) -> Tensor:
        """Outputs [R, N, num_depths, hidden] after the final norm; elements that COD cuts off hold zeros."""
        options = self.config.training_options
        segment = ChainLayout.of(anchors, depth_counts(anchors.index.shape[1], options.num_depths, options.keep_rate))
        return segment.dense(self._chain_outputs(segment, *self._training_streams(batch)))

    def _chain_outputs(self, segment: ChainLayout, stream: DepthZero, mask_hidden: Tensor, mask_embedding: Tensor) -> Tensor:
        """Outputs [R, E, hidden] of a segment's elements after the final norm."""
        x = self.at_pairs(stream.hidden, segment.anchors)
        if segment.chain.shape[1]:
            x = segment.interleave(x, self._deeper_depths(segment, stream, mask_hidden, mask_embedding))
        normed: Tensor = self.norm(x)
        return normed

    def _deeper_depths(self, segment: ChainLayout, stream: DepthZero, mask_hidden: Tensor, mask_embedding: Tensor) -> Tensor:
        """Mask slots of depths 1 and on, [R, deeper elements, hidden] before the final norm.

        They enter the first layer alike, so its queries, keys and values are projected once and differ by rotation only.
        """
        rotation = self._rotary(segment.anchors.position.gather(1, segment.chain) - 1 + segment.depth)
        x, embedding = mask_hidden[None, None], mask_embedding[None, None]
        visible: dict[int | None, VisibleKeys] = {}
        for number, layer in enumerate(self.decoder_layers()):
            window = self.config.layers.window(number)
            if window not in visible:
                visible[window] = segment.visible(window)

            def attend(query: Tensor, key: Tensor, value: Tensor, number: int = number, window: int | None = window) -> Tensor:
                return attention(query, key, value, stream.keys[number], stream.values[number], visible[window])

            x = run_layer(layer, x, rotation, attend, embedding, checkpointing=self.config.training_options.activation_checkpointing)
        return x

    def propose(self, state: InputFusionState, anchor: Tensor, sampler: DraftSampler, num_draft_tokens: int) -> Proposal:
        """One pass over the newly observed pairs and K - 1 mask slots; every slot drawn independently."""
        hidden = self.run_pending(state, num_draft_tokens - 1)
        sampler.draw_block(self.draft_logits(self.norm(hidden)), self.draft_vocabulary)
        return sampler.proposal()
