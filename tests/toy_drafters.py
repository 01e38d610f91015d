"""Drafters without training, from perfect to hostile, for tests of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from speculators.decoding.proposal import ConfidenceSource, DraftSampler, Observation, Proposal


@dataclass
class ToyState:
    """lengths: [rows] int64, committed tokens observed; observations: everything handed over."""

    lengths: Tensor
    max_length: int
    observations: list[Observation] = field(default_factory=list)


class ToyDrafter:
    """Base: counts what it observes. Subclasses fill `propose`."""

    aux_hidden_state_layer_ids: tuple[int, ...] = ()
    max_draft_tokens = 16
    default_draft_tokens = 4
    confidence_source: ConfidenceSource = "none"

    def new_state(self, rows: int, max_length: int, device: torch.device, dtype: torch.dtype) -> ToyState:
        self.state = ToyState(torch.zeros(rows, dtype=torch.int64, device=device), max_length)
        return self.state

    def observe(self, state: ToyState, observation: Observation) -> None:
        assert torch.equal(state.lengths, observation.start), "rows are observed without gaps"
        state.lengths = observation.start + observation.counts
        state.observations.append(observation)

    def propose(self, state: ToyState, anchor: Tensor, sampler: DraftSampler, num_draft_tokens: int) -> Proposal:
        raise NotImplementedError


class Oracle(ToyDrafter):
    """Knows every row's greedy reply.

    `accept`: how many drafts are right in round 1, 2, ... (the last entry holds for all later rounds); the others are
    wrong on purpose. None: all are right.
    """

    def __init__(
        self, prompts: Sequence[Sequence[int]], replies: Sequence[Sequence[int]], vocab_size: int, accept: Sequence[int] | None = None
    ) -> None:
        self.prompt_lengths = torch.tensor([len(prompt) for prompt in prompts])
        width = max(map(len, replies)) + self.max_draft_tokens + 1
        self.replies = torch.tensor([[*reply, *[0] * (width - len(reply))] for reply in replies])
        self.vocab_size = vocab_size
        self.accept = accept

    def new_state(self, rows: int, max_length: int, device: torch.device, dtype: torch.dtype) -> ToyState:
        self.rounds = 0
        return super().new_state(rows, max_length, device, dtype)

    def propose(self, state: ToyState, anchor: Tensor, sampler: DraftSampler, num_draft_tokens: int) -> Proposal:
        next_index = state.lengths - self.prompt_lengths + 1  # the anchor is the reply's token next_index - 1
        drafts = self.replies.gather(1, next_index[:, None] + torch.arange(num_draft_tokens))
        if self.accept is not None:
            right = self.accept[min(self.rounds, len(self.accept) - 1)]
            drafts[:, right:] = (drafts[:, right:] + 1) % self.vocab_size
        self.rounds += 1
        return sampler.point_mass(drafts)


class RandomTokens(ToyDrafter):
    """Uniformly random tokens, in rows of random lengths, none included."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self.vocab_size = vocab_size
        self.generator = torch.Generator().manual_seed(seed)

    def propose(self, state: ToyState, anchor: Tensor, sampler: DraftSampler, num_draft_tokens: int) -> Proposal:
        drafts = torch.randint(self.vocab_size, (len(anchor), num_draft_tokens), generator=self.generator)
        return sampler.point_mass(drafts, torch.randint(num_draft_tokens + 1, (len(anchor),), generator=self.generator))


class Constant(ToyDrafter):
    """Always the same token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def propose(self, state: ToyState, anchor: Tensor, sampler: DraftSampler, num_draft_tokens: int) -> Proposal:
        return sampler.point_mass(anchor.new_full((len(anchor), num_draft_tokens), self.token))


class BlockTable(ToyDrafter):
    """Parallel drafter: slot k's logits depend on the anchor and on k. `confidence`: a constant for every slot, one a slot."""

    confidence_source = "probability"

    def __init__(self, vocab_size: int, seed: int = 0, scale: float = 1.5, confidence: Sequence[float] | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.logits = scale * torch.randn(vocab_size, self.max_draft_tokens, vocab_size, generator=generator)
        self.confidence = confidence

    def propose(self, state: ToyState, anchor: Tensor, sampler: DraftSampler, num_draft_tokens: int) -> Proposal:
        sampler.draw_block(self.logits[anchor, :num_draft_tokens])
        confidence = None
        if self.confidence is not None:
            confidence = torch.tensor(self.confidence[:num_draft_tokens]).expand(len(anchor), -1)
        return sampler.proposal(confidence)


class SequentialTable(ToyDrafter):
    """Autoregressive drafter: the logits of a slot depend on the token before it."""

    confidence_source = "probability"

    def __init__(self, vocab_size: int, seed: int = 0, scale: float = 1.5) -> None:
        self.logits = scale * torch.randn(vocab_size, vocab_size, generator=torch.Generator().manual_seed(seed))

    def propose(self, state: ToyState, anchor: Tensor, sampler: DraftSampler, num_draft_tokens: int) -> Proposal:
        token = anchor
        for step in range(num_draft_tokens):
            if step and sampler.enough:
                break
            token = sampler.draw(self.logits[token])
        return sampler.proposal()
