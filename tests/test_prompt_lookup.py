"""Prompt lookup proposes what followed the latest occurrence of the longest n-gram that ends at the anchor."""

import pytest
import torch

from speculators.decoding.prompt_lookup import PromptLookup
from speculators.decoding.proposal import Observation
from speculators.decoding.sampling import RoundSampler, SamplingParams
from speculators.errors import ConfigError


def drafts(rows: list[list[int]], draft_tokens: int = 4, drafter: PromptLookup | None = None) -> list[list[int]]:
    """Proposals for rows whose last token is the anchor; observed in two parts, the second one ragged."""
    drafter = drafter or PromptLookup()
    width = max(map(len, rows))
    tokens = torch.tensor([[*row, *[99] * (width - len(row))] for row in rows])
    counts = torch.tensor([len(row) - 1 for row in rows])
    state = drafter.new_state(len(rows), width + draft_tokens, torch.device("cpu"), torch.float32)
    first = counts // 2
    none = torch.empty(len(rows), width, 0)
    drafter.observe(state, Observation(tokens, tokens, none, torch.zeros_like(first), first))
    rest = tokens.gather(1, (first[:, None] + torch.arange(width)).clamp(max=width - 1))
    drafter.observe(state, Observation(rest, rest, none, first, counts - first))
    sampler = RoundSampler(SamplingParams(), torch.arange(len(rows)), torch.tensor(1))
    proposal = drafter.propose(state, tokens.gather(1, counts[:, None])[:, 0], sampler, draft_tokens)
    assert proposal.probabilities is None
    return [row[:length].tolist() for row, length in zip(proposal.token_ids, proposal.lengths, strict=True)]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 1, 2, 3], [4, 5, 6, 7]),
        ([1, 2, 3], []),
        ([5], []),
        ([5, 5], [5]),
        ([1, 2, 8, 9, 1, 2, 3, 4, 1, 2], [3, 4, 1, 2]),  # the latest of two occurrences of (1, 2)
        ([7, 1, 2, 8, 0, 0, 0, 9, 1, 2, 5, 7, 1, 2], [8, 0, 0, 0]),  # the longer (7, 1, 2) before the later (1, 2)
        ([3, 4, 3, 4, 3], [4, 3]),  # only tokens that exist: up to the anchor
        ([2, 6, 1, 9, 6], [1, 9, 6]),  # a single token
    ],
    ids=str,
)
def test_proposal_is_what_followed_the_latest_longest_match(row: list[int], expected: list[int]) -> None:
    assert drafts([row]) == [expected]


def test_rows_are_searched_separately() -> None:
    rows = [[1, 2, 3, 4, 5, 6, 7, 1, 2, 3], [1, 2, 3], [5, 5], [2, 6, 1, 9, 6]]
    assert drafts(rows) == [[4, 5, 6, 7], [], [5], [1, 9, 6]]


def test_batched_search_equals_a_plain_search() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(4, (length,), generator=generator).tolist() for length in range(1, 60)]

    def search(row: list[int]) -> list[int]:
        for size in (3, 2, 1):
            for start in range(len(row) - size - 1, -1, -1):
                if len(row) > size and row[start : start + size] == row[-size:]:
                    return row[start + size :][:4]
        return []

    assert drafts(rows) == [search(row) for row in rows]


def test_longest_ngram_can_be_limited() -> None:
    row = [7, 1, 2, 8, 0, 0, 0, 9, 1, 2, 5, 7, 1, 2]
    assert drafts([row], drafter=PromptLookup(max_ngram=2)) == [[5, 7, 1, 2]]


def test_settings_out_of_range_are_refused() -> None:
    for settings in ({"max_ngram": 0}, {"default_draft_tokens": 0}, {"default_draft_tokens": 9, "max_draft_tokens": 8}):
        with pytest.raises(ConfigError, match="prompt lookup: max_ngram"):
            PromptLookup(**settings)
