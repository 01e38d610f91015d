"""Adding an algorithm is one file: the toy, defined outside the package, goes through everything with no edit to the library."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import tiny_verifier
from toy_algorithm import Toy

from speculators import checkpoint
from speculators.data.rows import Conversation
from speculators.decoding.engine import generate
from speculators.decoding.sampling import SamplingParams
from speculators.evaluation.evaluate import EvaluationSettings, PromptSet, evaluate
from speculators.evaluation.metrics import acceptance_length
from speculators.registry import algorithms
from speculators.speculator import Speculator
from speculators.training.overfit import overfit
from speculators.verifier import Verifier

PROMPT = [5, 9, 20, 33]
REPLY_TOKENS = 40


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    return tiny_verifier(seed=3)


@pytest.fixture(scope="module")
def reply(verifier: Verifier) -> list[int]:
    return generate(verifier, None, [PROMPT], SamplingParams(max_new_tokens=REPLY_TOKENS, ignore_eos=True)).token_ids[0]


@pytest.fixture(scope="module")
def toy(verifier: Verifier, reply: list[int]) -> Speculator:
    conversation = Conversation(PROMPT + reply, [False] * len(PROMPT) + [True] * len(reply))
    return overfit("toy", verifier, conversation, steps=150, learning_rate=1e-2, tap=2)


def test_the_registry_lists_it_beside_the_built_in_ones() -> None:
    assert {"toy", "dflash", "dspark", "eagle3", "peagle"} <= set(algorithms())


def test_it_learns_a_reply_by_heart_and_decodes_it_losslessly(verifier: Verifier, toy: Speculator, reply: list[int]) -> None:
    sampling = SamplingParams(max_new_tokens=REPLY_TOKENS, ignore_eos=True)
    drafted = generate(verifier, toy, [PROMPT], sampling)
    assert drafted.token_ids[0] == reply
    length = acceptance_length(drafted.rounds)
    assert length is not None and length >= 0.9 * (1 + toy.default_draft_tokens)


def test_a_saved_toy_loads_by_its_folder_alone_and_drafts_the_same(verifier: Verifier, toy: Speculator, tmp_path: Path) -> None:
    toy.save_pretrained(tmp_path / "toy", dtype="float32")
    loaded = checkpoint.load(tmp_path / "toy", verifier.weights)
    assert isinstance(loaded, Toy)
    for name, tensor in toy.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    sampling = SamplingParams(max_new_tokens=24, temperature=1.0, seed=7)
    first, second = (generate(verifier, drafter, [PROMPT, PROMPT[::-1]], sampling) for drafter in (toy, loaded))
    assert first.token_ids == second.token_ids and first.rounds == second.rounds


def test_it_gets_its_row_in_the_comparison(verifier: Verifier, toy: Speculator) -> None:
    prompts = PromptSet("tiny", ("one", "two"), (tuple(PROMPT), (7, 8, 9)))
    evaluation = evaluate(verifier, {"toy": toy}, prompts, EvaluationSettings(max_new_tokens=16))
    rows = [row for row in evaluation.rows if row["method"] == "toy"]
    assert rows and all(row["token_identical"] for row in rows)
