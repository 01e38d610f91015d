"""What is claimed of every drafter in vLLM."""

from __future__ import annotations

from typing import Any

import served
from dense_reference import DenseReference

from speculators.serving.rounds import ServedRound

TIE = 1e-3  # logits this close may fall either way in another order of summation


def assert_serves(name: str, model: str | None = None, **options: Any) -> Any:
    """vLLM answers as without a drafter, drafts what our engine drafts, round by round, and what the formulas say.

    Args:
        name: of `served.DRAFTERS`.
        model: what vLLM is given as its model: the checkpoint itself when None.
        options: of the engine.

    Returns:
        vLLM's configuration.
    """
    with served.engine(model or served.checkpoint(name), **options) as llm:
        answer = served.answer(llm, served.prompts())
        config = llm.llm_engine.vllm_config
    assert answer.replies == served.replies()
    assert_rounds(name, answer.rounds)
    if name != "toy":  # the reference knows the four methods
        assert_agrees_with_formulas(name, answer.rounds)
    return config


def assert_rounds(name: str, rounds: list[list[ServedRound]]) -> None:
    """The same drafts and the same acceptance by position as our engine; both enough that a wrong drafter would show."""
    ours, accepted = served.our_rounds(name)
    for of_prompt, proposals in zip(rounds, ours, strict=True):
        assert {one.length: one.drafts for one in of_prompt}.items() <= proposals.items()
    # Our engine cuts the last round to the token budget, vLLM cuts its reply: all rounds but the last are alike.
    assert [[one.accepted for one in of_prompt][:-1] for of_prompt in rounds] == [of_prompt[:-1] for of_prompt in accepted]
    flat = [count for of_prompt in accepted for count in of_prompt]
    assert sum(flat) > 0.8 * len(flat), "the drafter learned too little for this test to tell anything"


def assert_agrees_with_formulas(name: str, rounds: list[list[ServedRound]]) -> None:
    """Every draft token is the most likely one of the dense reference."""
    dense = DenseReference(served.checkpoint(name), served.verifier().weights.name_or_path)
    checked = 0
    for prompt, reply, of_prompt in zip(served.prompts(), served.replies(), rounds, strict=True):
        for one in of_prompt:
            known = [*prompt, *reply][: one.length]
            logits = dense.draft_logits(known, list(one.drafts))
            drawn = logits.gather(1, logits.new_tensor(one.drafts).long()[:, None])[:, 0]
            assert (drawn >= logits.max(-1).values - TIE).all(), f"round after {one.length} tokens drafted {one.drafts}"
            checked += 1
    assert checked >= len(rounds)
