"""P-EAGLE's decode rounds as a CUDA graph runs them: from memory that keeps its place, padded to more requests than there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import served
import torch
import triton.language as tl
from dense_reference import DenseReference
from triton.language.extra import libdevice
from triton.runtime import interpreter
from vllm import LLM
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from speculators.serving import plugin, speculative_config

REQUESTS = 4  # of the only graph; vLLM serves three


def speculator(llm: LLM) -> Any:
    """What drafts inside a running vLLM."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.speculator


class Graphs:
    """In the place of vLLM's: what it would have captured is called anew, with no argument that a replay does not have."""

    def __init__(self, speculator: Any) -> None:
        self.speculator, self.replays, self.eager = speculator, 0, 0
        # What is no request's must reach none.
        speculator._features = torch.full((REQUESTS * (served.K + 1), speculator.model.mask_hidden.shape[-1]), float("nan"))
        build = speculator._metadata

        def noted(*args: Any) -> Any:
            self.metadata = build(*args)  # a backend keeps it in place; here it is handed on
            return self.metadata

        speculator._metadata = noted
        speculator.query_cudagraph_manager = self

    def dispatch(self, num_reqs: int, num_tokens: int, uniform_token_count: int | None, **_: Any) -> BatchExecutionDescriptor:
        if uniform_token_count is None:
            self.eager += 1
            return BatchExecutionDescriptor(CUDAGraphMode.NONE, num_tokens, num_reqs)
        assert (uniform_token_count, num_tokens) == (2 * served.K, 2 * served.K * num_reqs)
        return BatchExecutionDescriptor(CUDAGraphMode.FULL, 2 * served.K * REQUESTS, REQUESTS, uniform_token_count)

    def run_fullgraph(self, graph: BatchExecutionDescriptor) -> None:
        self.replays += 1
        slots = self.speculator.block_tables.slot_mappings[:, : graph.num_tokens]
        by_layer = build_slot_mappings_by_layer(slots, self.speculator.kv_cache_config)
        self.speculator._generate_draft(REQUESTS, graph.num_tokens, self.metadata, by_layer, None, CUDAGraphMode.NONE)


def test_a_graph_for_more_requests_drafts_the_same_up_to_the_longest_sequence() -> None:
    plugin.register()
    settings = speculative_config(served.checkpoint("peagle"))
    model, longest = served.verifier().weights.name_or_path, max(map(len, served.prompts())) + served.REPLY_TOKENS
    with served.engine(model, speculative_config=settings, max_num_seqs=REQUESTS, max_model_len=longest) as llm:
        graphs = Graphs(speculator(llm))
        answer = served.answer(llm, served.prompts())
    assert answer.replies == served.replies()
    ours, accepted = served.our_rounds("peagle")
    for of_prompt, proposals, counts in zip(answer.rounds, ours, accepted, strict=True):
        for one in of_prompt:  # vLLM verifies no draft that would make the sequence too long
            assert one.drafts == proposals[one.length][: len(one.drafts)]
        assert [one.accepted for one in of_prompt][: len(counts) - 2] == counts[:-2]
    assert graphs.replays > graphs.eager > 0


@pytest.fixture
def complete_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two things that vLLM's kernels for probabilities use and Triton's interpreter lacks: masks of one bit, and log1p."""

    def with_bits(method: str, mask_at: int) -> None:
        original = getattr(interpreter.InterpreterBuilder, method)

        def call(self: Any, *args: Any) -> Any:
            mask = args[mask_at]
            bits = interpreter.TensorHandle(mask.data.astype(np.bool_), mask.dtype)
            return original(self, *args[:mask_at], bits, *args[mask_at + 1 :])

        monkeypatch.setattr(interpreter.InterpreterBuilder, method, call)

    def log1p(x: Any, _semantic: Any = None) -> Any:
        return tl.core.tensor(interpreter.TensorHandle(np.log1p(x.handle.data), x.handle.dtype), x.type)

    with_bits("create_masked_load", 1)
    with_bits("create_masked_store", 2)
    monkeypatch.setattr(libdevice, "log1p", log1p)


def test_drafts_are_drawn_and_verified_by_their_probabilities(complete_interpreter: None) -> None:
    """At this temperature a token 0.2 below the best is drawn once in e^20, and only as often kept if it is another's that is verified."""
    plugin.register()
    name, model, never = "peagle-reduced", served.verifier().model, 0.2
    settings = speculative_config(served.checkpoint(name), draft_sample_method="probabilistic")
    dense = DenseReference(served.checkpoint(name), served.verifier().weights.name_or_path)
    with served.engine(dense.model.name_or_path, speculative_config=settings) as llm:
        answer = served.answer(llm, served.prompts(), temperature=0.01)

    def nearly_best(logits: torch.Tensor, tokens: Sequence[int]) -> bool:
        return bool((logits[range(len(tokens)), list(tokens)] > logits.max(-1).values - never).all())

    for prompt, reply, rounds in zip(served.prompts(), answer.replies, answer.rounds, strict=True):
        with torch.no_grad():
            assert nearly_best(model(torch.tensor([[*prompt, *reply]])).logits[0, len(prompt) - 1 : -1], reply)
        for one in rounds:
            assert nearly_best(dense.draft_logits([*prompt, *reply][: one.length], list(one.drafts)), one.drafts)
    assert sum(one.accepted for rounds in answer.rounds for one in rounds) > 30  # of 117 tokens that were not a round's own
