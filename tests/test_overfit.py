"""A drafter that has learned one reply by heart has its drafts accepted; off by one anywhere, it has not.

Most silent faults between training and decoding (labels, positions, taps, masks, norms) fail this.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from tiny_models import tiny_verifier

from speculators.algorithms.anchors import Supervision
from speculators.data.rows import Conversation
from speculators.decoding.engine import generate
from speculators.decoding.sampling import SamplingParams
from speculators.speculator import Speculator
from speculators.training.overfit import overfit
from speculators.verifier import Verifier

PROMPT, REPLY, K = [5, 9, 11, 23], 72, 5
TRAINING = {"anchors": 64}
METHODS: dict[str, dict[str, Any]] = {
    "eagle3": {"num_layers": 1, "training": {**TRAINING, "passes": K}},
    "peagle": {"num_layers": 2, "training": {**TRAINING, "num_depths": K, "keep_rate": 1.0}},
    "dflash": {"num_layers": 2, "training": TRAINING},
    "dspark": {"num_layers": 2, "markov_rank": 16, "training": TRAINING},
}


def chaotic_verifier() -> tuple[Verifier, Conversation]:
    """A verifier whose greedy reply does not repeat itself, and that reply."""
    verifier = tiny_verifier("llama", seed=1, vocab_size=96, layers=6, initializer_range=0.4)
    reply = generate(verifier, None, [PROMPT], SamplingParams(max_new_tokens=REPLY, ignore_eos=True)).token_ids[0]
    four_grams = [tuple(reply[i : i + 4]) for i in range(len(reply) - 3)]
    assert len(reply) >= 64 and len(set(reply)) >= 32 and len(set(four_grams)) == len(four_grams)
    return verifier, Conversation([*PROMPT, *reply], [False] * len(PROMPT) + [True] * len(reply))


def learn(method: str, verifier: Verifier, conversation: Conversation) -> Speculator:
    """Train until the reply is known by heart."""
    options = {"num_draft_tokens": K, "aux_hidden_state_layer_ids": [1, 3, 5], **METHODS[method]}
    return overfit(method, verifier, conversation, 400, learning_rate=4e-3, **options)


@cache
def learned_once(method: str) -> tuple[Verifier, Speculator]:
    """The verifier and a drafter that was trained without any fault, for all tests that only read them."""
    verifier, conversation = chaotic_verifier()
    return verifier, learn(method, verifier, conversation)


def learned(method: str) -> tuple[Verifier, Speculator]:
    """`learned_once`, the drafter as a copy that a test may change."""
    verifier, speculator = learned_once(method)
    changeable = copy.copy(speculator)
    changeable.config = speculator.config.model_copy(deep=True)
    return verifier, changeable


def accepted_share(verifier: Verifier, speculator: Speculator) -> float:
    """Accepted drafts over proposed drafts while the verifier decodes the reply again, greedily."""
    plain = generate(verifier, None, [PROMPT], SamplingParams(max_new_tokens=REPLY, ignore_eos=True))
    decoded = generate(verifier, speculator, [PROMPT], SamplingParams(max_new_tokens=REPLY, ignore_eos=True))
    assert decoded.token_ids == plain.token_ids
    rounds = decoded.rounds[0]
    return sum(r.accepted for r in rounds) / sum(r.proposed for r in rounds)


@pytest.mark.parametrize("method", METHODS)
def test_an_overfitted_drafter_has_nine_of_ten_drafts_accepted(method: str) -> None:
    verifier, speculator = learned(method)
    assert accepted_share(verifier, speculator) >= 0.9


@pytest.mark.parametrize("method", METHODS)
def test_labels_shifted_by_one_are_noticed(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    verifier, conversation = chaotic_verifier()
    right = Supervision.of.__func__  # type: ignore[attr-defined]

    def shifted(batch: Any, anchors: Any, count: int) -> Supervision:
        wrong: Supervision = right(Supervision, batch, anchors, count, first=2)
        return wrong

    monkeypatch.setattr(Supervision, "of", staticmethod(shifted))
    assert accepted_share(verifier, learn(method, verifier, conversation)) < 0.5


@pytest.mark.parametrize("method", METHODS)
def test_taps_shifted_by_one_are_noticed(method: str) -> None:
    verifier, speculator = learned(method)
    setattr(speculator.config, speculator.config.aux_layer_key, [2, 4, 6])
    assert accepted_share(verifier, speculator) < 0.5


@pytest.mark.parametrize("method", METHODS)
def test_positions_shifted_by_one_are_noticed(method: str) -> None:
    """The anchor is one token further along than the drafter was told: every slot drafts for its neighbour."""
    verifier, speculator = learned(method)
    observe = speculator.observe

    def late(state: Any, observation: Any) -> None:
        features = torch.roll(observation.hidden_states, 1, dims=1)
        observe(state, type(observation)(**{**vars(observation), "hidden_states": features}))

    speculator.observe = late  # type: ignore[method-assign]
    assert accepted_share(verifier, speculator) < 0.5
