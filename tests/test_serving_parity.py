"""The parts of parity and of the CPU repairs that need no vLLM."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_verifier

from speculators.cli.parity import described
from speculators.decoding.engine import generate
from speculators.decoding.sampling import SamplingParams
from speculators.registry import get_algorithm
from speculators.serving.cpu_repairs import _expand
from speculators.serving.parity import Difference, Parity, WatchedDrafter
from speculators.serving.rounds import ServedRound
from speculators.serving.tensors import near_tie
from speculators.speculator import Speculator
from speculators.verifier import Verifier

PROMPTS = [[5, 9, 20, 33], [7, 8, 9]]
K = 3


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    return tiny_verifier(seed=3)


@pytest.fixture(scope="module", params=["eagle3", "dspark"])
def drafter(request: pytest.FixtureRequest, verifier: Verifier) -> Speculator:
    torch.manual_seed(0)
    options = {"num_draft_tokens": K, "aux_hidden_state_layer_ids": [1, 2], **({"markov_rank": 4} if request.param == "dspark" else {})}
    speculator = get_algorithm(request.param).speculator_class.from_verifier(verifier.weights, **options)
    for parameter in speculator.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return speculator.requires_grad_(False).eval()


def test_watching_a_drafter_changes_nothing_and_notes_every_round(verifier: Verifier, drafter: Speculator) -> None:
    sampling = SamplingParams(max_new_tokens=12, ignore_eos=True)
    watched = WatchedDrafter(drafter, len(PROMPTS))
    seen, plain = generate(verifier, watched, PROMPTS, sampling), generate(verifier, drafter, PROMPTS, sampling)
    assert (seen.token_ids, seen.rounds) == (plain.token_ids, plain.rounds)
    for prompt, proposals, reply, rounds in zip(PROMPTS, watched.proposals, seen.token_ids, seen.rounds, strict=True):
        known = len(prompt) + 1  # the first token comes from the prompt alone
        for one in rounds:
            drafts = proposals[known]
            assert len(drafts) == K
            assert list(drafts[: one.accepted]) == reply[known - len(prompt) :][: one.accepted]
            known += one.emitted


def test_only_tokens_that_the_drafter_finds_as_likely_are_a_near_tie(verifier: Verifier, drafter: Speculator) -> None:
    watched = WatchedDrafter(drafter, 1)
    generate(verifier, watched, PROMPTS[:1], SamplingParams(max_new_tokens=8, ignore_eos=True))
    ours = watched.proposals[0][len(PROMPTS[0]) + 1]
    other = (*ours[:-1], (ours[-1] + 1) % verifier.vocab_size)
    assert not near_tie(verifier, drafter, PROMPTS[0], ours, other)
    with torch.no_grad():  # two rows of the head alike: two tokens alike
        rows = [ours[0], (ours[0] + 1) % verifier.vocab_size]
        kept = verifier.weights.head[rows[1]].clone()
        verifier.weights.head[rows[1]] = verifier.weights.head[rows[0]]
        if getattr(drafter, "markov_head", None) is not None:
            drafter.markov_head.markov_w2.weight[rows[1]] = drafter.markov_head.markov_w2.weight[rows[0]]
        try:
            assert near_tie(verifier, drafter, PROMPTS[0], ours, (rows[1], *ours[1:]))
        finally:
            verifier.weights.head[rows[1]] = kept


def test_acceptance_stands_side_by_side_and_the_tensor_is_named() -> None:
    tensor = "aux hidden states, row 0 of 9: differs by up to 1.5 where values reach 2"
    found = Parity(2, 2, 10, 8, 1, (2.5, 1.25), ([0.75, 0.75], [0.25, 0.0]), Difference(1, 14, (5, 6), (5, 7), tensor))
    assert described(found) == [
        "8 of 10 rounds drafted alike (1 more up to a near tie); 2 of 2 replies identical",
        "accepted (decode)     our engine        vLLM",
        "draft token 1              0.750       0.250",
        "draft token 2              0.750       0.000",
        "acceptance length          2.500       1.250",
        "prompt 1, after 14 tokens: our engine drafts [5, 6], vLLM [5, 7]",
        f"first differing tensor: {tensor}",
    ]


def test_a_served_round_accepts_one_token_less_than_it_emits() -> None:
    assert ServedRound(10, (4, 5, 6), (4, 5, 9)).accepted == 2


def test_each_requests_temperature_is_repeated_for_its_drafts() -> None:
    out = torch.full((6,), -7.0)
    _expand(out, torch.tensor([0.5, 0.0, 2.0]), torch.tensor([2, 2, 5]), 0, 1)  # greedy's 0 becomes 1; the second has no drafts
    assert out.tolist() == [0.5, 0.5, 2.0, 2.0, 2.0, -7.0]
