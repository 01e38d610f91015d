"""Prompt lookup: a drafter without weights. What followed the latest earlier occurrence of the last few tokens may follow again."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from speculators.decoding.proposal import ConfidenceSource, DraftSampler, Observation, Proposal
from speculators.errors import ConfigError


@dataclass
class PromptLookupState:
    """token_ids: [rows, max_length] int64, the committed tokens; lengths: [rows] int64, how many."""

    token_ids: Tensor
    lengths: Tensor


class PromptLookup:
    """n-gram lookup in the row's own prompt and reply.

    The longest n-gram that ends at the anchor and occurred before wins, its latest occurrence first. The tokens after it
    are proposed, as many as there are up to the anchor, so rows propose different counts, possibly none. A proposal is a
    point mass: under sampling a draft is accepted with the verifier's own probability of it.

    Args:
        max_ngram: longest n-gram to look for.
        default_draft_tokens: K when the caller names none.
        max_draft_tokens: the largest K.

    Raises:
        ConfigError: a value is below 1, or the default K is above the largest.
    """

    aux_hidden_state_layer_ids: tuple[int, ...] = ()
    confidence_source: ConfidenceSource = "none"

    def __init__(self, max_ngram: int = 3, default_draft_tokens: int = 7, max_draft_tokens: int = 64) -> None:
        if max_ngram < 1 or not 1 <= default_draft_tokens <= max_draft_tokens:
            raise ConfigError(
                f"prompt lookup: max_ngram {max_ngram} must be at least 1, and default_draft_tokens {default_draft_tokens}"
                f" between 1 and max_draft_tokens {max_draft_tokens}"
            )
        self.max_ngram = max_ngram
        self.default_draft_tokens = default_draft_tokens
        self.max_draft_tokens = max_draft_tokens

    def new_state(self, rows: int, max_length: int, device: torch.device, dtype: torch.dtype) -> PromptLookupState:
        """Room for the tokens; see `Drafter.new_state`."""
        token_ids = torch.zeros(rows, max_length + 1, dtype=torch.int64, device=device)  # last column: a bin for padding
        return PromptLookupState(token_ids, torch.zeros(rows, dtype=torch.int64, device=device))

    def observe(self, state: PromptLookupState, observation: Observation) -> None:
        """Append the committed tokens; see `Drafter.observe`."""
        column = torch.arange(observation.token_ids.shape[1], device=observation.token_ids.device)
        position = observation.start[:, None] + column
        padding = column >= observation.counts[:, None]
        state.token_ids.scatter_(1, position.masked_fill(padding, state.token_ids.shape[1] - 1), observation.token_ids)
        state.lengths = observation.start + observation.counts

    def propose(self, state: PromptLookupState, anchor: Tensor, sampler: DraftSampler, num_draft_tokens: int) -> Proposal:
        """The tokens after the latest match; see `Drafter.propose`."""
        tokens, end = state.token_ids, state.lengths[:, None]
        tokens.scatter_(1, end, anchor[:, None])  # the n-gram ends with the anchor, at position `end`
        position = torch.arange(tokens.shape[1], device=tokens.device)

        # match[b, i]: the last n tokens up to position i equal the last n up to the anchor, for n = 1, 2, ...
        match = (tokens == anchor[:, None]) & (position < end)
        best = _latest(match)
        for back in range(1, self.max_ngram):
            shifted = tokens.roll(back, dims=1)
            wanted = tokens.gather(1, (end - back).clamp(min=0))
            match = match & (shifted == wanted) & (position >= back) & (end >= back)
            longer = _latest(match)
            best = torch.where(longer >= 0, longer, best)

        source = best + 1 + torch.arange(num_draft_tokens, device=tokens.device)
        lengths = torch.where(best >= 0, end - best, 0).clamp(max=num_draft_tokens)[:, 0]
        return sampler.point_mass(tokens.gather(1, source.clamp(max=tokens.shape[1] - 1)), lengths)


def _latest(match: Tensor) -> Tensor:
    """[rows, 1] int64: the last True column of each row, -1 where there is none."""
    position = torch.arange(match.shape[1], device=match.device)
    return torch.where(match, position, -1).amax(1, keepdim=True)
