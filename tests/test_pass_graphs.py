"""The later passes of an autoregressive drafter in vLLM are recorded with what lies between them, and drafted by one replay."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from speculators.serving.pass_graphs import DONE, can_fuse, extend, is_known

PASSES, MOST_REQUESTS, LONGEST = 5, 4, 32
FULL, NONE = SimpleNamespace(name="FULL"), SimpleNamespace(name="NONE")


class Graphs:
    """vLLM's graph manager: what it is given at capture is repeated on the same memory when a graph is replayed."""

    def __init__(self) -> None:
        self.replays = 0
        self.recorded: dict[int, Callable[[], None]] = {}

    def capture(self, forward: Callable[..., None]) -> None:
        for requests in (4, 2, 1):
            self.recorded[requests] = lambda n=requests: forward(n, n, "metadata of the dummy", {}, None, NONE)  # type: ignore[misc]
            self.recorded[requests]()

    def run_fullgraph(self, batch: Any) -> None:
        self.replays += 1
        self.recorded[batch.num_reqs]()


class Tables:
    """Slots as vLLM computes them: page number times page size and the rest, none for requests past the batch."""

    def __init__(self) -> None:
        self.pages = torch.zeros(MOST_REQUESTS, LONGEST // 4, dtype=torch.int64)
        self.slots = torch.full((1, 16), -1)
        self.init_block_table_layout_tensors()
        self.bound_to: Tensor | None = None

    def init_block_table_layout_tensors(self) -> None:
        """New memory, as in vLLM, at init and when it wakes up."""
        self.block_table_ptrs, self.block_table_strides = torch.tensor([7]), torch.tensor([LONGEST // 4])
        self.block_sizes_tensor = torch.tensor([4])

    def compute_slot_mappings(self, states: Tensor, starts: Tensor, positions: Tensor, padded: int) -> Tensor:
        self.slots.fill_(-1)
        for request in range(len(states)):
            for row in range(int(starts[request]), int(starts[request + 1])):
                assert states[request] >= 0, "the pages of no request were read"
                size = int((self.block_sizes_tensor if self.bound_to is None else self.bound_to)[0])
                self.slots[0, row] = self.pages[states[request], positions[row] // size] * size + positions[row] % size
        return self.slots[:, :padded]


class Drafter:
    """The part of vLLM 0.26's `AutoRegressiveSpeculator` that surrounds a pass; a pass adds up the cache that it sees."""

    advance_draft_positions = True

    def __init__(self, builder: str = "TritonAttentionMetadataBuilder") -> None:
        backend_of = SimpleNamespace(backend=SimpleNamespace(get_builder_cls=lambda: type(builder, (), {})))
        self.attn_groups = [[backend_of]]
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(decode_context_parallel_size=1), model_config=SimpleNamespace(rswa_window=None)
        )
        self.kv_cache_config: Any = None
        self.num_speculative_steps, self.max_model_len = PASSES, LONGEST
        self.draft_max_seq_len = 3
        self.block_tables = Tables()
        self.cache = torch.zeros(256, dtype=torch.int64)
        self.idx_mapping = torch.full((MOST_REQUESTS,), -1)
        self.current_draft_step = torch.tensor(0)
        self.draft_tokens = torch.zeros(MOST_REQUESTS, PASSES, dtype=torch.int64)
        self.input_buffers = SimpleNamespace(
            positions=torch.zeros(MOST_REQUESTS, dtype=torch.int64),
            query_start_loc=torch.arange(MOST_REQUESTS + 1),
            input_ids=torch.zeros(MOST_REQUESTS, dtype=torch.int64),
        )
        self.decode_cudagraph_manager = Graphs()
        self.lengths_seen: set[int] = set()

    def capture(self) -> None:
        self.decode_cudagraph_manager.capture(self._generate_draft)

    def _build_draft_attn_metadata(self, num_reqs: int, num_reqs_padded: int, num_tokens_padded: int) -> Any:
        self.lengths_seen.add(self.draft_max_seq_len)
        return self.block_tables.pages[self.idx_mapping[:num_reqs]]

    def _generate_draft(self, num_reqs: int, padded: int, metadata: Any, slots: Any, across: Any, mode: Any = None) -> None:
        buffers, step = self.input_buffers, int(self.current_draft_step)
        for request in range(num_reqs):
            slot, position = int(slots["layer"][request]), int(buffers.positions[request])
            if slot < 0:
                continue
            self.cache[slot] = buffers.input_ids[request] * (position + 1)
            seen = [int(self.cache[metadata[request, at // 4] * 4 + at % 4]) for at in range(position + 1)]
            self.draft_tokens[request, step] = sum(seen) % 997
        if step < self.num_speculative_steps - 1:
            buffers.input_ids[:num_reqs] = self.draft_tokens[:num_reqs, step]
            buffers.positions[:num_reqs] = (buffers.positions[:num_reqs] + 1).clamp(max=self.max_model_len - 1)

    def _multi_step_decode(self, num_reqs: int, skip_attn: bool, batch: Any, across: Any) -> None:
        buffers = self.input_buffers
        for step in range(1, self.num_speculative_steps):
            padded = batch.num_reqs or num_reqs
            starts, states = buffers.query_start_loc[: num_reqs + 1], self.idx_mapping[:num_reqs]
            slots = self.block_tables.compute_slot_mappings(states, starts, buffers.positions[:num_reqs], padded)
            metadata = self._build_draft_attn_metadata(num_reqs, padded, padded)
            self.current_draft_step.fill_(step)
            if batch.cg_mode is FULL:
                self.decode_cudagraph_manager.run_fullgraph(batch)
            else:
                self._generate_draft(num_reqs, padded, metadata, {"layer": slots[0]}, across, batch.cg_mode)


@pytest.fixture
def extended(monkeypatch: pytest.MonkeyPatch) -> type[Drafter]:
    """The class as the plugin leaves it, with the one function of vLLM that it calls."""
    helpers = ModuleType("vllm.v1.worker.gpu.attn_utils")
    helpers.build_slot_mappings_by_layer = lambda slots, config: {"layer": slots[0]}  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.v1", "vllm.v1.worker", "vllm.v1.worker.gpu"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, helpers.__name__, helpers)
    ours = type("Extended", (Drafter,), {"capture": Drafter.capture, "_multi_step_decode": Drafter._multi_step_decode})
    extend(ours)
    return ours


def after_first_pass(drafter: Drafter, requests: int) -> Drafter:
    """A batch whose first pass is done: requests in other rows of the state, on scattered pages, at their own positions."""
    torch.manual_seed(1)
    drafter.block_tables.pages = (torch.randperm(4 * 8)[: 4 * 8].reshape(MOST_REQUESTS, -1)) + 1
    drafter.cache = torch.zeros(256, dtype=torch.int64)
    drafter.idx_mapping[:requests] = torch.tensor([2, 0, 3, 1])[:requests]
    drafter.idx_mapping[requests:] = -1
    drafter.input_buffers.query_start_loc[:] = torch.arange(MOST_REQUESTS + 1).clamp(max=requests)
    drafter.input_buffers.positions[:requests] = torch.tensor([7, 3, LONGEST - 3, 12])[:requests]
    drafter.input_buffers.input_ids[:requests] = torch.tensor([11, 22, 33, 44])[:requests]
    return drafter


@pytest.mark.parametrize(("requests", "graph"), [(1, 1), (2, 2), (3, 4), (4, 4)])
def test_one_replay_drafts_what_the_passes_draft_one_by_one(extended: type[Drafter], requests: int, graph: int) -> None:
    expected = after_first_pass(Drafter(), requests)
    expected._multi_step_decode(requests, False, SimpleNamespace(cg_mode=NONE, num_reqs=None), None)
    ours = extended()
    ours.capture()
    after_first_pass(ours, requests)._multi_step_decode(requests, False, SimpleNamespace(cg_mode=FULL, num_reqs=graph), None)
    assert ours.decode_cudagraph_manager.replays == 1
    assert torch.equal(ours.draft_tokens[:requests], expected.draft_tokens[:requests])
    assert expected.draft_tokens[:requests, 1:].all() and torch.equal(ours.cache, expected.cache)


def test_a_graph_is_recorded_for_the_longest_sequence_and_vllm_keeps_its_own_pass(extended: type[Drafter]) -> None:
    ours = extended()
    ours.capture()
    assert ours.lengths_seen == {LONGEST}
    assert "_generate_draft" not in vars(ours)


def test_batches_without_a_graph_draft_pass_by_pass(extended: type[Drafter]) -> None:
    batch = SimpleNamespace(cg_mode=NONE, num_reqs=None)
    ours, expected = extended(), after_first_pass(Drafter(), 3)
    ours.capture()
    after_first_pass(ours, 3)._multi_step_decode(3, False, batch, None)
    expected._multi_step_decode(3, False, batch, None)
    assert ours.decode_cudagraph_manager.replays == 0
    assert torch.equal(ours.draft_tokens[:3], expected.draft_tokens[:3])


def test_attention_that_plans_on_the_cpu_keeps_a_graph_a_pass(extended: type[Drafter]) -> None:
    ours = extended("FlashInferMetadataBuilder")
    ours.idx_mapping.zero_()
    ours.decode_cudagraph_manager.capture = lambda forward: None  # type: ignore[method-assign]
    ours.capture()
    assert not getattr(ours, DONE)
    ours.decode_cudagraph_manager.recorded[1] = lambda: None
    after_first_pass(ours, 1)._multi_step_decode(1, False, SimpleNamespace(cg_mode=FULL, num_reqs=1), None)
    assert ours.decode_cudagraph_manager.replays == PASSES - 1


def test_what_a_graph_cannot_repeat_is_left_to_vllm() -> None:
    assert can_fuse(Drafter("FlashAttentionMetadataBuilder")) and can_fuse(Drafter("TritonAttentionMetadataBuilder"))
    # The last two go by the name FLASH_ATTN too, and read lengths on the CPU.
    others = ("FlashInferMetadataBuilder", "AiterFlashAttentionMetadataBuilder", "ChunkedLocalAttentionBuilder")
    assert not any(can_fuse(Drafter(other)) for other in others)
    shared, windowed, fixed = Drafter(), Drafter(), Drafter()
    shared.vllm_config.parallel_config.decode_context_parallel_size = 2
    windowed.vllm_config.model_config.rswa_window = 64
    fixed.advance_draft_positions = False
    assert not any(can_fuse(drafter) for drafter in (shared, windowed, fixed))


def test_after_vllm_wakes_up_its_graphs_still_find_the_pages(extended: type[Drafter]) -> None:
    """Memory of the cache loses what it held while vLLM sleeps, and vLLM then looks up the pages through tensors that it makes anew."""
    ours, expected = extended(), after_first_pass(Drafter(), 3)
    expected._multi_step_decode(3, False, SimpleNamespace(cg_mode=NONE, num_reqs=None), None)
    ours.capture()
    tables = ours.block_tables
    recorded = [tables.block_table_ptrs, tables.block_table_strides, tables.block_sizes_tensor]
    tables.bound_to = tables.block_sizes_tensor  # as a graph is
    for tensor in recorded:
        tensor.fill_(1)
    tables.init_block_table_layout_tensors()
    after_first_pass(ours, 3)._multi_step_decode(3, False, SimpleNamespace(cg_mode=FULL, num_reqs=4), None)
    assert torch.equal(ours.draft_tokens[:3], expected.draft_tokens[:3])
    assert [int(tensor) for tensor in recorded] == [7, LONGEST // 4, 4]


def test_releases_that_call_a_pass_otherwise_or_fuse_them_are_left_alone() -> None:
    assert is_known(Drafter)

    class Later(Drafter):
        def _multi_step_decode(self, num_reqs: int, skip_attn: bool, batch: Any, across: Any, lengths: Tensor) -> None:  # type: ignore[override]
            """Of 0.30, which gives it the lengths on the CPU."""

    class Described(Drafter):
        def _build_draft_attn_metadata(self, num_reqs: int, batch: Any) -> Any:  # type: ignore[override]
            """Of a release that passes on the graph's description."""

    class Fused(Drafter):
        def _generate_fused_drafts(self) -> None:
            """Records the passes together."""

    assert not any(is_known(drafter) for drafter in (Later, Described, Fused))
