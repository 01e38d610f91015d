"""A drafter that has learned one reply by heart has its drafts accepted; off by one anywhere, it has not.

Most silent faults between training and decoding (labels, positions, taps, masks, norms) fail this.
"""

from __future__ import annotations

import copy
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import config_of, edit_config
from tiny_models import tiny_verifier

from speculators.algorithms.anchors import Supervision
from speculators.checkpoint import save
from speculators.checkpoint.convert import convert
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


def first_position_accepted(verifier: Verifier, checkpoint: Path) -> float:
    """Share of the rounds in which the first draft is accepted."""
    drafter = Speculator.from_pretrained(checkpoint, verifier.weights)
    rounds = generate(verifier, drafter, [PROMPT], SamplingParams(max_new_tokens=REPLY, ignore_eos=True)).rounds[0]
    return sum(r.accepted > 0 for r in rounds) / sum(r.proposed > 0 for r in rounds)


@pytest.mark.parametrize(("method", "left"), [("dflash", 0.1), ("dspark", 0.4)])
def test_read_by_the_wrong_anchor_rule_a_trained_drafter_loses_its_first_position(method: str, left: float, tmp_path: Path) -> None:
    """C19's alarm: no tensor tells the two rules apart, and no engine complains.

    DSpark's sequential head still knows which token follows which, whatever slot it corrects.
    """
    verifier, speculator = learned(method)
    save(speculator, tmp_path / "right", dtype="float32")
    shutil.copytree(tmp_path / "right", tmp_path / "wrong")
    predicts = not config_of(tmp_path / "right")["sample_from_anchor"]
    proposal = config_of(tmp_path / "right")["speculators_config"]
    proposal["proposal_methods"][0]["speculative_tokens"] = K if predicts else K - 1
    edit_config(tmp_path / "wrong", sample_from_anchor=predicts, speculators_config=proposal)
    assert first_position_accepted(verifier, tmp_path / "right") >= 0.9
    assert first_position_accepted(verifier, tmp_path / "wrong") <= left


def test_a_format_that_names_no_anchor_rule_is_converted_by_its_own(tmp_path: Path) -> None:
    verifier, speculator = learned("dflash")
    save(speculator, tmp_path / "trained", dtype="float32")
    convert(tmp_path / "trained", tmp_path / "z-lab", to="z-lab", verifier=verifier.weights)
    assert "sample_from_anchor" not in config_of(tmp_path / "z-lab")
    convert(tmp_path / "z-lab", tmp_path / "again", verifier=verifier.weights)
    assert first_position_accepted(verifier, tmp_path / "again") >= 0.9
