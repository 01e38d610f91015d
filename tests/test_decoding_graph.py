"""Rounds over static buffers: the tokens of eager rounds, with buffers that stay where they are; on a GPU as CUDA graphs."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tiny_models import tiny_verifier
from toy_drafters import SequentialTable

from speculators.decoding import engine, graph
from speculators.decoding.batch import Batch
from speculators.decoding.engine import Round, generate
from speculators.decoding.graph import StaticState
from speculators.decoding.length_schedules import FixedLength
from speculators.decoding.prompt_lookup import PromptLookup
from speculators.decoding.proposal import Drafter
from speculators.decoding.sampling import SamplingParams
from speculators.registry import get_algorithm
from speculators.verifier import Verifier

PROMPTS = [[11, 12, 13, 14, 15], [4, 5], [9, 8, 7, 6, 5, 4, 3, 2, 1, 9, 8]]
OTHER_PROMPTS = [[1, 2, 3], [50, 40, 30, 20], [6]]
METHODS = ["eagle3", "peagle", "dflash", "dspark"]


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    return tiny_verifier("llama", layers=2)


def drafter_of(name: str, verifier: Verifier) -> Drafter | None:
    if name == "plain":
        return None
    if name == "prompt lookup":
        return PromptLookup(default_draft_tokens=3)
    torch.manual_seed(0)
    options: dict[str, Any] = {"num_layers": 1, "num_draft_tokens": 3, "aux_hidden_state_layer_ids": [1, 2], "mask_token_id": 3}
    speculator = get_algorithm(name).speculator_class.from_verifier(verifier.weights, **options).to(verifier.device)
    return speculator.eval()


@torch.inference_mode()
def static_replies(batch: Batch, prompts: list[list[int]]) -> list[list[int]]:
    """Replies through `next_round`, counted here and not by the engine."""
    batch.state.reset()
    replies: list[list[int]] = [[] for _ in prompts]
    result = batch.prefill(prompts)
    while True:
        for reply, tokens, emitted in zip(replies, result.tokens.tolist(), result.emitted.tolist(), strict=True):
            reply += tokens[:emitted]
        if bool(result.after.finished.all()):
            return replies
        batch.longest = max(len(prompt) + len(reply) - 1 for prompt, reply in zip(prompts, replies, strict=True))
        result = batch.next_round()


@pytest.mark.parametrize("name", ["plain", "prompt lookup", *METHODS])
@pytest.mark.parametrize(
    "sampling", [SamplingParams(max_new_tokens=12), SamplingParams(temperature=1.0, max_new_tokens=12, seed=4)], ids=["greedy", "sampled"]
)
def test_rounds_over_static_buffers_give_the_tokens_of_eager_rounds_also_when_used_again(
    name: str, sampling: SamplingParams, verifier: Verifier
) -> None:
    drafter = drafter_of(name, verifier)
    draft_tokens = 0 if drafter is None else 3
    with torch.inference_mode():
        batch = Batch(verifier, drafter, PROMPTS, sampling, draft_tokens, FixedLength(), max_length=64)
        batch.use_static_buffers(capture=False)
    for prompts in (PROMPTS, OTHER_PROMPTS, PROMPTS):
        expected = generate(verifier, drafter, prompts, sampling, num_draft_tokens=draft_tokens or None).token_ids
        assert static_replies(batch, prompts) == expected


@torch.inference_mode()
def test_every_tensor_a_round_reads_stays_where_it_was(verifier: Verifier) -> None:
    batch = Batch(verifier, drafter_of("peagle", verifier), PROMPTS, SamplingParams(max_new_tokens=12), 3, FixedLength(), max_length=64)
    batch.use_static_buffers(capture=False)
    batch.prefill(PROMPTS)
    addresses = []
    for longest in (11, 15, 19):
        batch.longest = longest
        batch.next_round()
        pending = batch.draft_state.pending
        tensors = [batch.anchor, batch.emitted, batch.finished, batch.round_index, batch.cache.lengths, batch.draft_state.cache.lengths]
        addresses.append([t.data_ptr() for t in (*tensors, pending.hidden_states, pending.token_ids, pending.start, pending.counts)])
    assert addresses[0] == addresses[1] == addresses[2]
    assert len(set(addresses[0])) == len(addresses[0]), "no two of them share memory"


def test_a_new_value_that_is_another_attributes_buffer_is_read_before_it_is_overwritten() -> None:
    class Holder:
        lengths = torch.tensor([3])
        start = torch.tensor([0])

    holder = Holder()
    state = StaticState([(holder, ("lengths", "start"))])
    state.settle()
    for _ in range(2):  # as in a round: the observation starts at the old lengths
        holder.start, holder.lengths = holder.lengths, holder.lengths + 4
        state.settle()
    assert (holder.lengths.item(), holder.start.item()) == (11, 7)
    state.reset()
    assert (holder.lengths.item(), holder.start.item()) == (3, 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("name", ["plain", "prompt lookup", *METHODS])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])  # of the verifier; drafters are float32
def test_graphs_give_the_tokens_of_eager_rounds(name: str, temperature: float, dtype: torch.dtype) -> None:
    verifier = tiny_verifier("llama", layers=2, dtype=dtype)
    verifier = Verifier(verifier.model.cuda(), name_or_path="tiny-llama")
    drafter = drafter_of(name, verifier)
    sampling = SamplingParams(temperature=temperature, max_new_tokens=40, ignore_eos=True)
    draft_tokens = 0 if drafter is None else 3
    for prompts in (PROMPTS, OTHER_PROMPTS):
        replies = []
        for capture in (False, True):
            with torch.inference_mode():
                batch = Batch(verifier, drafter, prompts, sampling, draft_tokens, FixedLength(), max_length=256)
                batch.use_static_buffers(capture=capture)
            replies.append(static_replies(batch, prompts))
            assert batch.graphs is not None
            assert bool(batch.graphs._graphs) == capture, "rounds were captured"
        assert replies[0] == replies[1]
        if dtype == torch.float32:  # the engine's buffers have another length, and 16-bit sums another rounding with it
            assert generate(verifier, drafter, prompts, sampling, num_draft_tokens=draft_tokens or None).token_ids == replies[0]


@pytest.mark.parametrize("name", METHODS)
def test_long_sampled_replies_over_static_buffers_equal_eager_ones(name: str, verifier: Verifier) -> None:
    drafter, prompts = drafter_of(name, verifier), [[number % 60 + 1 for number in range(24)]]
    for seed in range(12):  # a draft distribution that is off shows in some of them only
        sampling = SamplingParams(temperature=1.0, max_new_tokens=30, seed=seed, ignore_eos=True)
        with torch.inference_mode():
            batch = Batch(verifier, drafter, prompts, sampling, 3, FixedLength(), max_length=64)
            batch.use_static_buffers(capture=False)
        assert static_replies(batch, prompts) == generate(verifier, drafter, prompts, sampling, num_draft_tokens=3).token_ids


class Counting(FixedLength):
    """Counts what the engine asks and tells it."""

    def __init__(self) -> None:
        self.asked = self.told = self.most_ahead = 0

    def draft_tokens(self, limit: int) -> int:
        self.asked += 1
        self.most_ahead = max(self.most_ahead, self.asked // 2 - self.told)  # a round asks for its shape, and to draft
        return limit

    def record(self, rounds: Sequence[Round | None], remaining: Sequence[int]) -> None:
        self.told += 1


@pytest.mark.parametrize("name", ["plain", "prompt lookup", *METHODS])
@pytest.mark.parametrize("stop", [(), tuple(range(0, 300, 9))], ids=["to the end", "with stop tokens"])
def test_the_engine_launches_a_round_ahead_and_gives_the_same_replies(
    name: str, stop: tuple[int, ...], verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, sampling = drafter_of(name, verifier), SamplingParams(max_new_tokens=20, stop_token_ids=stop)
    draft_tokens = 0 if drafter is None else 3
    expected = generate(verifier, drafter, PROMPTS, sampling, num_draft_tokens=draft_tokens or None)
    schedule = Counting()

    def static(verifier: Verifier, drafter: Drafter | None, prompts: Sequence[Sequence[int]], *arguments: Any) -> Batch:
        batch = Batch(verifier, drafter, prompts, sampling, draft_tokens, schedule, max_length=64)
        batch.use_static_buffers(capture=False)
        return batch

    monkeypatch.setattr(engine, "prepare", static)
    monkeypatch.setattr(engine, "choose_schedule", lambda *arguments: schedule)
    decoded = generate(verifier, drafter, PROMPTS, sampling, num_draft_tokens=draft_tokens or None)
    assert decoded.token_ids == expected.token_ids
    assert decoded.finish_reasons == expected.finish_reasons
    assert [sum(r.emitted for r in row) for row in decoded.rounds] == [len(reply) - 1 for reply in expected.token_ids]
    assert schedule.told == decoded.verify_forwards
    if drafter is not None:
        assert schedule.most_ahead == 2, "a round that runs, and one ahead of it"


@pytest.mark.parametrize("name", METHODS)
def test_the_first_round_after_a_prompt_has_the_shapes_of_all_others(name: str, verifier: Verifier) -> None:
    drafter, seen = drafter_of(name, verifier), []
    for prompts in (PROMPTS, OTHER_PROMPTS):
        with torch.inference_mode():
            batch = Batch(verifier, drafter, prompts, SamplingParams(max_new_tokens=12), 3, FixedLength(), max_length=64)
            batch.use_static_buffers(capture=False)
            batch.prefill(prompts)
            for longest in (11, 15):
                batch.longest = longest
                batch.next_round()
        seen.append(batch.graphs._seen if batch.graphs else None)
    assert seen[0] == seen[1]
    assert len(seen[0] or ()) == 1


def test_prepared_batches_leave_oldest_first_beyond_their_number_and_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    cache: OrderedDict[Any, int] = OrderedDict()
    device = torch.device("cpu")
    for key in range(graph.MAX_BATCHES + 1):
        assert graph.reusable(cache, key, lambda key=key: key, device) == key
    assert list(cache) == [1, 2, 3, 4]
    graph.reusable(cache, 2, lambda: pytest.fail("made again"), device)
    monkeypatch.setattr(graph, "_free_share", lambda device: 0.1 + 0.3 * (4 - len(cache)))  # each holds 0.3 of the device
    graph.reusable(cache, 5, lambda: 5, device)
    assert list(cache) == [4, 2, 5], "made room to half of the device, the one used last stayed"


def test_a_prepared_batch_that_leaves_gives_its_memory_back_before_the_next_is_made(
    verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made() -> Batch:
        with torch.inference_mode():
            batch = Batch(
                verifier, drafter_of("peagle", verifier), PROMPTS, SamplingParams(max_new_tokens=12), 3, FixedLength(), max_length=64
            )
            batch.use_static_buffers(capture=False)
        static_replies(batch, PROMPTS)
        return batch

    cache: OrderedDict[Any, Batch] = OrderedDict()
    device = torch.device("cpu")
    first = weakref.ref(graph.reusable(cache, "first", made, device).anchor)
    monkeypatch.setattr(graph, "_free_share", lambda device: float(not cache))
    gc.disable()  # what refers in a circle would stay until the collector's own time
    try:
        graph.reusable(cache, "second", lambda: first() is None or pytest.fail("the first one is still there"), device)
    finally:
        gc.enable()


def test_a_batch_without_static_buffers_runs_as_it_is(verifier: Verifier) -> None:
    sampling = SamplingParams(max_new_tokens=6)
    generate(verifier, SequentialTable(64), PROMPTS, sampling, num_draft_tokens=2)
    assert not verifier.prepared_batches, "only CUDA keeps batches for later calls"
