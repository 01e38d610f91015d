"""DSpark's sequential sampling in vLLM's V2 runner with every head. Backbone, paged cache and CUDA graphs stay vLLM's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

from speculators.algorithms.heads import MarkovHead


class MarkovSpeculator(DSparkSpeculator):  # type: ignore[misc]
    """vLLM's DSpark; where `MarkovDraftModel` put another head, or none, the K steps are those of the library."""

    def _sample_sequential(self, num_reqs: int, head_hidden: Tensor) -> None:
        head = self.model.model.markov_head
        if not (head is None or isinstance(head, MarkovHead)):
            super()._sample_sequential(num_reqs, head_hidden)
            return
        count = self.num_speculative_steps
        slots = num_reqs * count  # ordered by request, then by step
        hidden = head_hidden[self.sample_indices[:slots]]
        logits = self.model.compute_draft_logits(hidden).view(num_reqs, count, -1)
        requests = self.sample_idx_mapping[:slots].view(num_reqs, count)
        positions = self.sample_pos[:slots].view(num_reqs, count)
        anchors = self._anchor_idx[:num_reqs]
        chain = _no_head if head is None else self._chain(head, hidden.view(num_reqs, count, -1), head_hidden[anchors])
        previous = anchor = self.input_buffers.input_ids[anchors]
        for step in range(count):
            slot = logits[:, step] + chain(step, previous)
            previous = self._draw(slot, requests[:, step], positions[:, step], step)
            self.draft_tokens[:num_reqs, step] = previous
        if getattr(self, "use_confidence_head", False):
            before = torch.cat([anchor[:, None], self.draft_tokens[:num_reqs, : count - 1]], dim=1).flatten()
            embedded = hidden if head is None else head.markov_w1(before)  # without a head it is not looked at
            self.draft_token_confidence_probs[:num_reqs] = self.model.compute_confidence(hidden, embedded).view(num_reqs, count)

    def _chain(self, head: MarkovHead, hidden: Tensor, anchor_hidden: Tensor) -> Callable[[int, Tensor], Tensor]:
        """The head as a function of (step, tokens before it) -> bias [requests, draft vocabulary], called in order."""
        state: Tensor | None = None

        def bias(step: int, previous: Tensor) -> Tensor:
            nonlocal state
            if state is None:
                state = head.initial_state(previous)
                if not self.sample_from_anchor:  # the anchor's slot predicts nothing, but the recurrence has passed it
                    state = head.step(previous, anchor_hidden, state)[1]
            factors, state = head.step(previous, hidden[:, step], state)
            return head.bias(factors)

        return bias

    def _draw(self, logits: Tensor, requests: Tensor, positions: Tensor, step: int) -> Tensor:
        """Draw one slot of every request as vLLM does; 0.26 has no function for it."""
        if hasattr(self, "_sample_logits"):
            drawn: Tensor = self._sample_logits(logits, requests, positions, step)
            return drawn
        if self.draft_logits is not None:
            raise NotImplementedError("probabilistic drafts with this sequential head need vLLM 0.32; draft greedily")
        greedy: Tensor = self.model.map_draft_to_target(logits.argmax(dim=-1))
        return greedy


def _no_head(step: int, previous: Tensor) -> Tensor:
    return torch.zeros((), device=previous.device)
