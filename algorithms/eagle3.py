"""EAGLE-3: the autoregressive baseline, trained by test-time training (arXiv 2503.01840).

Drafting K tokens takes K passes; each pass feeds the previous draft token and the previous pass's own output back in.
Training unrolls those K passes over the ground-truth tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from speculators.algorithms.anchors import Anchors, Supervision
from speculators.algorithms.input_fusion import (
    InputFusion,
    InputFusionConfig,
    InputFusionOptions,
    InputFusionState,
    complete_vllm_config,
    fusion_needs,
)
from speculators.algorithms.layers import ResidualStream, Rotation, run_layer
from speculators.algorithms.objective import Objective, block_loss
from speculators.decoding.proposal import DraftSampler, Proposal
from speculators.kernels.block_attention import block_attention
from speculators.registry import PluginParts, VllmServing, register_algorithm
from speculators.training.batch import LossOutput, TrainingBatch

# An autoregressive drafter has no block; this bounds the state an engine preallocates for one round.
LONGEST_DRAFT = 64


class Eagle3Training(Objective):
    """KL to the verifier (its soft-label cross entropy) at every unrolled pass.

    Attributes:
        anchors: chains drawn in every packed row of every step.
        passes: unrolled passes, the K it is trained for.
        decay: pass s weighs exp(-s / decay); the default is DeepSpec's 0.8^s.
    """

    kl: float = Field(1.0, ge=0)
    decay: float = Field(4.4814, gt=0)
    anchors: int = Field(128, ge=1)
    passes: int = Field(7, ge=1)


class Eagle3Config(InputFusionConfig):
    """config.json of an EAGLE-3 drafter."""

    training_options: Eagle3Training = Field(default_factory=Eagle3Training)

    @property
    def max_draft_tokens(self) -> int:
        """Any K an engine has room for: quality beyond the trained passes falls, correctness does not."""
        return max(LONGEST_DRAFT, self.num_draft_tokens)


class Eagle3Options(InputFusionOptions):
    """Options of EAGLE-3."""

    training: Eagle3Training = Field(default_factory=Eagle3Training)


@register_algorithm(
    "eagle3",
    serving=VllmServing(
        method="eagle3",
        architecture="Eagle3DraftModel",
        runners=("V1", "V2"),
        minimum_version="0.26.0",
        needs=fusion_needs,
        plugin=PluginParts(complete=complete_vllm_config),
        sglang=("--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "{k}", "--speculative-eagle-topk", "1"),
    ),
)
class Eagle3(InputFusion):
    """Autoregressive baseline: K passes for K tokens, each conditioned on the last one's output."""

    config_class = Eagle3Config
    options_class = Eagle3Options
    config: Eagle3Config

    @classmethod
    def _config_fields(cls, verifier: Any, options: Any) -> dict[str, Any]:
        training = options.training
        if "passes" not in training.model_fields_set:
            training = training.model_copy(update={"passes": options.num_draft_tokens})
        return {**super()._config_fields(verifier, options), "training_options": training}

    def _feedback(self, hidden: Tensor) -> Tensor:
        """What a pass hands to the next one: its output, normed or not."""
        fed: Tensor = self.norm(hidden) if self.config.norm_output else hidden
        return fed

    def training_loss(self, batch: TrainingBatch) -> LossOutput:
        """Test-time training over random chains of every row; see `Speculator.training_loss`."""
        return self.loss_at(batch, Anchors.sample(batch, self.config.training_options.anchors))

    def loss_at(self, batch: TrainingBatch, anchors: Anchors) -> LossOutput:
        """The objective over given chains."""
        options = self.config.training_options
        supervision = Supervision.of(batch, anchors, options.passes)
        hidden = self.training_hidden(batch, anchors, supervision)
        factors, bias_head = self.own_head_bias(hidden)
        return block_loss(self, options, batch, supervision, hidden, bias_factors=factors, bias_head=bias_head)[0]

    def training_hidden(self, batch: TrainingBatch, anchors: Anchors, supervision: Supervision) -> Tensor:
        """Outputs of every pass, [R, N, passes, hidden], after the final norm.

        Pass s of a chain sits at the anchor pair's position + s. It sees the depth-0 stream up to that pair, and the
        keys and values of its own earlier passes, never another chain.
        """
        options, stream = self.config.training_options, self.depth_zero(batch)
        hidden = self.at_pairs(stream.hidden, anchors)[:, :, None]
        outputs = [hidden]
        chain_keys: list[list[Tensor]] = [[] for _ in self.layers]
        chain_values: list[list[Tensor]] = [[] for _ in self.layers]
        position = (anchors.position - 1)[..., None]
        for step in range(1, options.passes):
            # The token drafted before this pass: slot step - 1's label, as ground truth.
            x, embedding = self._feedback(hidden), self.embed(supervision.labels[..., step - 1 : step])
            rotation = self._rotary(position + step)
            for number, layer in enumerate(self.decoder_layers()):
                attend = partial(
                    self._attend_chain,
                    step=step,
                    keys=chain_keys[number],
                    values=chain_values[number],
                    context=(stream.keys[number], stream.values[number]),
                    anchors=anchors,
                    window=self.config.layers.window(number),
                )
                x = run_layer(layer, x, rotation, attend, embedding, checkpointing=options.activation_checkpointing)
            hidden = x
            outputs.append(hidden)
        normed: Tensor = self.norm(torch.cat(outputs, dim=2))
        return normed

    @staticmethod
    def _attend_chain(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        step: int,
        keys: list[Tensor],
        values: list[Tensor],
        context: tuple[Tensor, Tensor],
        anchors: Anchors,
        window: int | None,
    ) -> Tensor:
        if len(keys) < step:  # not again where checkpointing computes the layer a second time
            keys.append(key)
            values.append(value)
        return block_attention(
            query,
            torch.cat([*keys[: step - 1], key], dim=2),
            torch.cat([*values[: step - 1], value], dim=2),
            *context,
            anchors.document_start,
            anchors.index,
            causal=True,
            window=window,
        )

    def propose(self, state: InputFusionState, anchor: Tensor, sampler: DraftSampler, num_draft_tokens: int) -> Proposal:
        """K passes: the first over the newly observed pairs, each further one over the token just drawn."""
        stream = ResidualStream(self.run_pending(state, 0))
        normed = stream.normed(self.norm)
        token = sampler.draw(self.draft_logits(normed[:, 0]), self.draft_vocabulary)
        cache = state.cache
        # Where the passes after the first one stand, [K - 1, rows], and the rotation there: once for all of them.
        starts = cache.lengths + torch.arange(num_draft_tokens - 1, device=anchor.device)[:, None]
        rotations, starts = cache.rotation(starts[..., None]), starts.to(torch.int32)
        for step in range(num_draft_tokens - 1):
            if sampler.enough:
                break
            rotation = Rotation(rotations.cosine[step], rotations.sine[step])
            fed = normed if self.config.norm_output else stream.x
            stream = self.run_block(cache, fed, self.embed(token)[:, None], rotation, starts[step], step + 1)
            normed = stream.normed(self.norm)
            token = sampler.draw(self.draft_logits(normed[:, 0]), self.draft_vocabulary)
        return sampler.proposal()
