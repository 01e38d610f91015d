"""What a server does to a request's cache must not reach the drafter: shared prefixes, prompts in pieces, eviction."""

from __future__ import annotations

from typing import Any

import pytest
import served
from vllm import LLM

NAMES = ["eagle3", "peagle", "dflash", "dspark", "toy"]


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    from speculators.serving import plugin

    plugin.register()


def settings(name: str) -> dict[str, object]:
    return {"method": served.DRAFTERS[name][0], "model": served.checkpoint(name), "num_speculative_tokens": served.K}


def preemptions(llm: LLM) -> list[str]:
    """Requests that are evicted from now on."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    evicted: list[str] = []
    preempt = scheduler._preempt_request

    def note(request: Any, *args: Any, **kwargs: Any) -> Any:
        evicted.append(request.request_id)
        return preempt(request, *args, **kwargs)

    scheduler._preempt_request = note
    return evicted


@pytest.mark.parametrize("name", NAMES)
def test_prefix_caching_changes_neither_replies_nor_acceptance(name: str) -> None:
    shared = [*served.prompts()[2], *served.replies()[2], *served.prompts()[0]]  # longer than two blocks of the cache
    with served.engine(
        served.verifier().weights.name_or_path, speculative_config=settings(name), enable_prefix_caching=True, max_num_batched_tokens=128
    ) as llm:
        first = served.answer(llm, [shared], tokens=24)
        second = served.answer(llm, [shared], tokens=24)
    assert first.cached_tokens == [0] and second.cached_tokens[0] >= 32  # a block of the cache
    assert (second.replies, second.rounds) == (first.replies, first.rounds)


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_in_pieces_and_eviction_leave_the_replies_alone(name: str) -> None:
    """32-token pieces of longer prompts; a cache of 5 blocks, so that of four growing requests some are evicted and computed again."""
    long = [[*prompt, *reply[:30]] for prompt, reply in zip(served.prompts(), served.replies(), strict=True)]
    model = served.verifier().weights.name_or_path
    with served.engine(model, max_num_batched_tokens=32) as llm:
        plain = served.answer(llm, long, tokens=40).replies
    with served.engine(model, speculative_config=settings(name), max_num_batched_tokens=32, num_gpu_blocks_override=6) as llm:
        evicted = preemptions(llm)
        drafted = served.answer(llm, long, tokens=40).replies
    assert drafted == plain
    assert evicted
