"""P-EAGLE's decode rounds as a CUDA graph runs them: from memory that keeps its place, padded to more requests than there are."""

from __future__ import annotations

from typing import Any

import pytest
import served
import torch
from claims import assert_rounds
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


@pytest.mark.parametrize("longest", [128, 23 + served.REPLY_TOKENS])
def test_a_graph_for_more_requests_drafts_the_same_up_to_the_longest_sequence(longest: int) -> None:
    plugin.register()
    settings = speculative_config(served.checkpoint("peagle"))
    model = served.verifier().weights.name_or_path
    with served.engine(model, speculative_config=settings, max_num_seqs=REQUESTS, max_model_len=longest) as llm:
        graphs = Graphs(speculator(llm))
        answer = served.answer(llm, served.prompts())
    assert answer.replies == served.replies()
    assert_rounds("peagle", answer.rounds)
    assert graphs.replays > graphs.eager > 0


def test_drafts_that_are_drawn_are_verified_with_the_probabilities_they_were_drawn_with() -> None:
    """So cold that nothing but the likeliest token is drawn, a token that is verified with another's probability stands out."""
    plugin.register()
    settings = speculative_config(served.checkpoint("peagle-reduced"), draft_sample_method="probabilistic")
    with served.engine(served.verifier().weights.name_or_path, speculative_config=settings) as llm:
        answer = served.answer(llm, served.prompts(), temperature=1e-3)
        assert speculator(llm).draft_logits.isfinite().any(-1).all(dim=1).sum() >= len(served.prompts())
    assert answer.replies == served.replies()
    assert_rounds("peagle-reduced", answer.rounds)
