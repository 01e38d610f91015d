"""An algorithm defined outside the package: what a third party writes, and all that a third party writes.

The last known hidden state and the anchor's embedding go through one linear map a draft slot; no attention, no state but
the newest feature. It learns little and decodes losslessly like any other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor, nn

from speculators.config import LayerConfig, ProposalConfig, ProposalMethod, SpeculatorConfig, VerifierReference
from speculators.decoding.proposal import DraftSampler, Observation, Proposal
from speculators.registry import VllmServing, register_algorithm
from speculators.speculator import Speculator, VerifierWeights
from speculators.training.batch import LossOutput, TrainingBatch


class ToyConfig(SpeculatorConfig):
    aux_hidden_state_layer_ids: list[int] = Field(default_factory=list)


@dataclass
class ToyFeature:
    """[rows, hidden], the hidden state of the newest committed token."""

    newest: Tensor


@register_algorithm("toy", serving=VllmServing(method=None, architecture="ToyDraftModel"))
class Toy(Speculator):
    """K linear maps of [last hidden state ; anchor embedding]."""

    config_class = ToyConfig

    def __init__(self, config: SpeculatorConfig) -> None:
        super().__init__(config)
        hidden = self.target_hidden_size
        self.slots = nn.ModuleList(nn.Linear(2 * hidden, hidden) for _ in range(config.num_draft_tokens))

    @classmethod
    def default_config(cls, verifier: VerifierWeights, *, num_draft_tokens: int = 3, tap: int = 1) -> ToyConfig:
        hidden = verifier.hidden_size
        return ToyConfig(
            speculators_model_type="toy",
            transformer_layer_config=LayerConfig(
                vocab_size=verifier.vocab_size,
                hidden_size=hidden,
                intermediate_size=hidden,
                num_hidden_layers=1,
                num_attention_heads=1,
                num_key_value_heads=1,
                head_dim=hidden,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            ),
            speculators_config=ProposalConfig(
                algorithm="toy",
                proposal_methods=[ProposalMethod(speculative_tokens=num_draft_tokens)],
                verifier=VerifierReference(name_or_path=verifier.name_or_path, architectures=list(verifier.architectures)),
            ),
            draft_vocab_size=verifier.vocab_size,
            aux_hidden_state_layer_ids=[tap],
        )

    def slot_hidden(self, feature: Tensor, anchor: Tensor) -> Tensor:
        """[..., hidden] and [...] -> [..., K, hidden]."""
        dtype = self.compute_dtype()
        x = torch.cat([feature.to(dtype), self.verifier.embed(anchor).to(dtype)], dim=-1)
        return torch.stack([slot(x) for slot in self.slots], dim=-2)

    def training_loss(self, batch: TrainingBatch) -> LossOutput:
        count, length = len(self.slots), batch.input_ids.shape[1]
        # Anchors are all tokens behind another one of their document; the feature is that token's.
        anchors = torch.arange(1, length - count, device=batch.input_ids.device)
        labels_at = anchors[:, None] + torch.arange(1, count + 1, device=anchors.device)
        documents = batch.document_ids
        same = (documents[:, anchors] == documents[:, anchors - 1])[..., None] & (
            documents[:, labels_at] == documents[:, anchors][..., None]
        )
        mask = (same & batch.loss_mask[:, labels_at]).float()
        logits = self.draft_logits(self.slot_hidden(batch.hidden_states[:, anchors - 1], batch.input_ids[:, anchors])).float()
        labels = batch.input_ids[:, labels_at]
        losses = nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none").view_as(mask)
        total, weight = (losses * mask).sum(), mask.sum()
        with torch.no_grad():
            draft = logits.softmax(-1)
            rows = batch.last_hidden_state[:, labels_at - 1]
            teacher = nn.functional.linear(self.verifier.final_norm(rows).to(self.verifier.head.dtype), self.verifier.head).float()
            accepted = torch.minimum(draft, teacher.softmax(-1)).sum(-1)
            matches = logits.argmax(-1) == teacher.argmax(-1)
        metrics = {
            "loss": (total.detach(), weight),
            "acceptance": ((accepted * mask).sum((0, 1)), mask.sum((0, 1))),
            "greedy_acceptance": ((matches * mask).sum((0, 1)), mask.sum((0, 1))),
        }
        return LossOutput(total / weight.clamp_min(1e-6), metrics)

    def new_state(self, rows: int, max_length: int, device: torch.device, dtype: torch.dtype) -> ToyFeature:
        return ToyFeature(torch.zeros(rows, self.target_hidden_size, device=device, dtype=dtype))

    def observe(self, state: ToyFeature, observation: Observation) -> None:
        last = (observation.counts - 1).clamp_min(0)[:, None, None].expand(-1, -1, state.newest.shape[1])
        newest = observation.hidden_states.gather(1, last)[:, 0]
        state.newest = torch.where((observation.counts > 0)[:, None], newest.to(state.newest.dtype), state.newest)

    def propose(self, state: ToyFeature, anchor: Tensor, sampler: DraftSampler, num_draft_tokens: int) -> Proposal:
        hidden = self.slot_hidden(state.newest, anchor)[:, :num_draft_tokens]
        sampler.draw_block(self.to_verifier_vocabulary(self.draft_logits(hidden)))
        return sampler.proposal()
