"""DSpark's sequential sampling in vLLM's V2 runner with every head. Backbone, paged cache and CUDA graphs stay vLLM's."""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

from speculators.algorithms.heads import MarkovHead


class MarkovSpeculator(DSparkSpeculator):  # type: ignore[misc]
    """vLLM's DSpark; with a head of `MarkovDraftModel`, the K steps of the library's own head."""

    def _sample_sequential(self, num_reqs: int, head_hidden: Tensor) -> None:
        head = self.model.model.markov_head
        if not isinstance(head, MarkovHead):
            super()._sample_sequential(num_reqs, head_hidden)
            return
        count = self.num_speculative_steps
        slots = num_reqs * count  # ordered by request, then by step
        hidden = head_hidden[self.sample_indices[:slots]]
        logits = self.model.compute_draft_logits(hidden).view(num_reqs, count, -1)
        requests = self.sample_idx_mapping[:slots].view(num_reqs, count)
        positions = self.sample_pos[:slots].view(num_reqs, count)
        previous = self.input_buffers.input_ids[self._anchor_idx[:num_reqs]]
        state, steps = head.initial_state(previous), hidden.view(num_reqs, count, -1)
        if not self.sample_from_anchor:  # the anchor's slot predicts nothing, but the recurrence has passed it
            state = head.step(previous, head_hidden[self._anchor_idx[:num_reqs]], state)[1]
        embedded = []
        for step in range(count):
            embedded.append(head.markov_w1(previous))
            factors, state = head.step(previous, steps[:, step], state)
            slot = logits[:, step] + head.bias(factors)
            previous = self._draw(slot, requests[:, step], positions[:, step], step)
            self.draft_tokens[:num_reqs, step] = previous
        if getattr(self, "use_confidence_head", False):
            confidence = self.model.compute_confidence(hidden, torch.stack(embedded, dim=1).flatten(0, 1))
            self.draft_token_confidence_probs[:num_reqs] = confidence.view(num_reqs, count)

    def _draw(self, logits: Tensor, requests: Tensor, positions: Tensor, step: int) -> Tensor:
        """Draw one slot of every request as vLLM does; 0.26 has no function for it."""
        if hasattr(self, "_sample_logits"):
            drawn: Tensor = self._sample_logits(logits, requests, positions, step)
            return drawn
        if self.draft_logits is not None:
            raise NotImplementedError("probabilistic drafts with this sequential head need vLLM 0.32; draft greedily")
        greedy: Tensor = self.model.map_draft_to_target(logits.argmax(dim=-1))
        return greedy
