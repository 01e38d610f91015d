"""Hidden-state stores: what is kept, what training reads of it, kills, checksums, and files that a serving engine extracted."""

from __future__ import annotations

import os
import shutil
import signal
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_verifier
from tiny_training import packed_rows, tiny_config
from torch import Tensor

from speculators.data import hidden_states as stores
from speculators.data.extracted import ExtractedStates
from speculators.data.hidden_states import Layout, StoreReader, read_store_header, rows_digest, store_hidden_states, stored_lengths
from speculators.data.partial import PartialFolder
from speculators.data.rows import Conversation, PackedRows, pack
from speculators.data.storage import ConversationBlock
from speculators.data.vocabulary import (
    count_labels,
    coverage,
    draft_vocabulary,
    load_vocabulary,
    save_vocabulary,
    vocabulary_key,
)
from speculators.errors import ConfigError, DataError
from speculators.training.order import EpochOrder
from speculators.training.source import CachedRows, ResidentRows, StoredRows, VerifierSource, hidden_state_source
from speculators.training.trainer import train
from speculators.verifier import Verifier

TAPS = (1, 2, 4)
HIDDEN = 32
SMALL_SHARDS = 12_000


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    return tiny_verifier()


@pytest.fixture(scope="module")
def rows() -> PackedRows:
    """Eight rows; of one only the first tokens are labels, and one has none at all."""
    rows = packed_rows(8)
    mask = rows.loss_mask.clone()
    mask[2, 6:] = False
    mask[5] = False
    return replace(rows, loss_mask=mask)


def store(
    output: Path, verifier: Verifier, rows: PackedRows, dtype: str = "bfloat16", taps: tuple[int, ...] = TAPS, **options: Any
) -> Path:
    layout = Layout(taps, verifier.hidden_size, dtype)
    chosen = {"shard_bytes": SMALL_SHARDS, "rows_per_forward": 2, "progress": False, **options}
    store_hidden_states(output, {"train": rows}, stores.verifier_states(verifier, taps), layout, {"verifier": "tiny-llama"}, **chosen)
    return output


# -- what is kept, and what is read ----------------------------------------------------------------------------------


def test_a_store_gives_back_the_verifiers_states_rounded_to_bfloat16_up_to_the_last_label(
    verifier: Verifier, rows: PackedRows, tmp_path: Path
) -> None:
    source = VerifierSource(verifier, TAPS)
    stored = StoredRows(source, rows, store(tmp_path / "store", verifier, rows))
    index = torch.tensor([2, 5, 0, -1])
    expected, found = ResidentRows(source, rows).batch(index), stored.batch(index)
    lengths = stored_lengths(rows)
    assert lengths[[2, 5]].tolist() == [6, 0]
    for place, row in enumerate(index.tolist()):
        length = int(lengths[row]) if row >= 0 else 0
        for name in ("hidden_states", "last_hidden_state"):
            ours, theirs = getattr(found, name)[place], getattr(expected, name)[place]
            assert torch.equal(ours[:length], theirs[:length].to(torch.bfloat16).float())
            assert not ours[length:].any()
    for name in ("input_ids", "loss_mask", "position_ids", "document_ids"):
        assert torch.equal(getattr(found, name), getattr(expected, name))


def test_a_drafter_may_tap_some_of_the_stored_layers_and_no_others(verifier: Verifier, rows: PackedRows, tmp_path: Path) -> None:
    path = store(tmp_path / "store", verifier, rows)
    index = torch.arange(4)
    some = StoredRows(VerifierSource(verifier, (1, 4)), rows, path).batch(index)
    every = StoredRows(VerifierSource(verifier, TAPS), rows, path).batch(index).hidden_states.unflatten(-1, (3, HIDDEN))
    assert torch.equal(some.hidden_states.unflatten(-1, (2, HIDDEN)), every[:, :, [0, 2]])
    with pytest.raises(ConfigError, match=r"holds the layers \[1, 2, 4\], not the tap 3; store it with --taps"):
        StoredRows(VerifierSource(verifier, (3,)), rows, path)


def test_float8_keeps_every_plane_of_every_token_to_a_sixteenth_with_a_scale_of_its_own(
    verifier: Verifier, rows: PackedRows, tmp_path: Path
) -> None:
    source = VerifierSource(verifier, TAPS)
    index = torch.tensor([0, 1])
    found = StoredRows(source, rows, store(tmp_path / "store", verifier, rows, "float8")).batch(index)
    expected = ResidentRows(source, rows).batch(index)
    for row in range(2):
        length = int(stored_lengths(rows)[row])
        ours = torch.cat([found.hidden_states, found.last_hidden_state], -1)[row, :length].unflatten(-1, (4, HIDDEN))
        theirs = torch.cat([expected.hidden_states, expected.last_hidden_state], -1)[row, :length].unflatten(-1, (4, HIDDEN))
        largest = theirs.abs().amax(-1, keepdim=True)
        # Half a step of 3 mantissa bits, and half the smallest number of the format.
        assert ((ours - theirs).abs() <= theirs.abs() / 16 + largest / 448 * 2**-10).all()
    # A plane a thousand times larger takes nothing from its neighbours.
    states = torch.tensor([[[1.0, 2.0], [1000.0, 2000.0]]])
    quantised, scales = stores.quantise(states)
    assert torch.equal(quantised.float()[0, 0], quantised.float()[0, 1])
    torch.testing.assert_close(scales, torch.tensor([[2.0, 2000.0]]) / 448)


def test_a_cached_source_is_filled_from_the_store_where_it_fits(verifier: Verifier, rows: PackedRows, tmp_path: Path) -> None:
    path = store(tmp_path / "store", verifier, rows)
    index = torch.tensor([1, 0, 3])
    cached = hidden_state_source(verifier, TAPS, rows, store=path)
    read = hidden_state_source(verifier, TAPS, rows, store=path, cache_states=False)
    assert isinstance(cached, CachedRows) and isinstance(read, StoredRows)
    for name in ("hidden_states", "last_hidden_state"):
        assert torch.equal(getattr(cached.batch(index), name), getattr(read.batch(index), name))


@pytest.mark.parametrize("method", ["dflash", "dspark", "eagle3", "peagle"])
def test_a_run_from_a_store_has_the_losses_of_the_same_run_in_process(method: str, rows: PackedRows, tmp_path: Path) -> None:
    block = {"aux_hidden_state_layer_ids": [1, 2], "mask_token_id": 3, "num_draft_tokens": 3, "num_layers": 1}
    options = block if method in ("dflash", "dspark", "peagle") else {"aux_hidden_state_layer_ids": [1, 2, 4]}

    def losses(verifier: Verifier, **fields: Any) -> list[float]:
        records: list[dict[str, Any]] = []
        config = tiny_config(method=method, options=options, steps=4, precision="auto", cache_states=False, **fields)
        train(verifier, rows, config, held_out=rows, on_record=records.append)
        return [record["loss"] for record in records]

    # A bfloat16 verifier's states are stored as they are, so nothing at all may differ.
    for dtype, tolerance in ((torch.bfloat16, 0.0), (torch.float32, 2**-8)):
        verifier = tiny_verifier(dtype=dtype)
        path = store(tmp_path / str(dtype), verifier, rows, rows_per_forward=4)
        in_process, from_store = losses(verifier), losses(verifier, hidden_states=path)
        assert len(in_process) >= 6
        assert from_store == pytest.approx(in_process, rel=tolerance, abs=0)


def test_both_sources_see_rows_in_one_order_that_reads_a_region_at_a_time() -> None:
    order = EpochOrder(1000, seed=3, group_rows=100)
    for epoch in range(2):
        visited = order.rows(epoch * 1000, 1000)
        assert sorted(visited.tolist()) == list(range(1000))
        groups = [(visited[start : start + 100] // 100).unique().tolist() for start in range(0, 1000, 100)]
        assert all(len(group) == 1 for group in groups)
        assert [group[0] for group in groups] != list(range(10))
    assert not torch.equal(order.rows(0, 1000), order.rows(1000, 1000))
    uneven = EpochOrder(250, seed=0, group_rows=100)
    assert sorted(uneven.rows(0, 250).tolist()) == list(range(250))


# -- what is refused -------------------------------------------------------------------------------------------------


def test_a_store_of_other_rows_or_width_is_refused(verifier: Verifier, rows: PackedRows, tmp_path: Path) -> None:
    path = store(tmp_path / "store", verifier, rows)
    with pytest.raises(DataError, match="holds hidden states of other rows than these"):
        StoredRows(VerifierSource(verifier, TAPS), packed_rows(8, seed=1), path)
    wider = tiny_verifier(hidden_size=64)
    with pytest.raises(ConfigError, match="states of width 32, the verifier's is 64"):
        StoredRows(VerifierSource(wider, TAPS), rows, path)
    with pytest.raises(DataError, match="is no store of hidden states"):
        read_store_header(tmp_path)
    for header in ("[]", '{"format": "speculators-hidden-states-1"}'):
        (tmp_path / "header.json").write_text(header)
        with pytest.raises(DataError, match="is no store of hidden states but"):
            read_store_header(tmp_path)
    for bad in (((2, 1), "bfloat16"), ((1, 1), "bfloat16"), ((1,), "int8")):
        with pytest.raises(ConfigError):
            Layout(bad[0], HIDDEN, bad[1])


def test_a_disk_that_is_too_small_is_noticed_before_the_first_byte(
    verifier: Verifier, rows: PackedRows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = int(stored_lengths(rows).sum()) * 4 * HIDDEN * 2
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, needed - 1))
    with pytest.raises(DataError, match="train without a store, which needs no disk"):
        store(tmp_path / "store", verifier, rows)
    assert not (tmp_path / "store").exists() and not list(PartialFolder.place(tmp_path / "store").glob("*.safetensors"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, needed))
    header = read_store_header(store(tmp_path / "store", verifier, rows))
    assert 0 <= header["bytes"] - needed < 1000 * len(header["shards"]), "the estimate is the size, but for the shards' headers"


def test_damage_is_found_by_size_at_once_and_by_checksum_on_demand(verifier: Verifier, rows: PackedRows, tmp_path: Path) -> None:
    path = store(tmp_path / "store", verifier, rows)
    assert stores.verify_store(path, progress=False) == read_store_header(path)["bytes"]
    shard = path / "states-00002.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DataError, match=r"states-00002.safetensors is damaged"):
        stores.verify_store(path, progress=False)
    shard.write_bytes(content[:-10])
    with pytest.raises(DataError, match=r"states-00002.safetensors has \d+ bytes instead of"):
        StoreReader(path, rows_digest(rows))
    shard.unlink()
    with pytest.raises(DataError, match=r"states-00002.safetensors is missing"):
        StoreReader(path, rows_digest(rows))


def test_states_that_are_not_finite_are_never_stored(rows: PackedRows, tmp_path: Path) -> None:
    layout = Layout((1,), 2, "bfloat16")

    def broken(input_ids: Tensor, position_ids: Tensor, document_ids: Tensor) -> Tensor:
        return torch.full((*input_ids.shape, 2, 2), float("nan"))

    with pytest.raises(DataError, match="hidden states are not finite"):
        store_hidden_states(tmp_path / "store", {"train": rows}, broken, layout, {}, progress=False)


# -- kills and reruns ------------------------------------------------------------------------------------------------


def killed_at_save(number: int, action: Callable[[], object]) -> bool:
    """Run an action in a child that is killed in the middle of its n-th shard; True when it was."""
    child = os.fork()
    if child == 0:
        save, count = stores._save_shard, iter(range(1, 10**6))

        def counted(file: Path, *arguments: Any) -> None:
            if next(count) == number:
                file.write_bytes(b"half a shard")
                os.kill(os.getpid(), signal.SIGKILL)
            save(file, *arguments)

        stores._save_shard = counted  # type: ignore[assignment]
        try:
            action()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_a_store_killed_in_any_shard_and_repeated_equals_one_of_one_run(verifier: Verifier, rows: PackedRows, tmp_path: Path) -> None:
    whole = store(tmp_path / "whole", verifier, rows)
    shards = len(read_store_header(whole)["shards"])
    assert shards > 2
    for number in range(1, shards + 1):
        path = tmp_path / f"killed{number}"
        assert killed_at_save(number, lambda path=path: store(path, verifier, rows))  # type: ignore[misc]
        assert not path.exists()
        store(path, verifier, rows)
        assert {file.name: file.read_bytes() for file in path.iterdir()} == {file.name: file.read_bytes() for file in whole.iterdir()}
    with pytest.raises(DataError, match="exists already"):
        store(whole, verifier, rows, taps=(1, 2))


# -- files that vLLM extracted ---------------------------------------------------------------------------------------

LENGTHS = (3, 9, 5, 17, 12, 7, 4, 24)


@pytest.fixture(scope="module")
def conversations() -> list[Conversation]:
    generator = torch.Generator().manual_seed(5)
    return [
        Conversation(torch.randint(0, 60, (length,), generator=generator).tolist(), [False] + [True] * (length - 1)) for length in LENGTHS
    ]


def extract(folder: Path, verifier: Verifier, conversations: list[Conversation], layers: list[int], scaled: bool = False) -> Path:
    """What vLLM's connector writes: a file a conversation, in an order of its own, computed one by one."""
    folder.mkdir()
    for number, conversation in enumerate(reversed(conversations)):
        ids = torch.tensor([conversation.input_ids])
        taps = tuple(layers)
        output = verifier.forward(ids, verifier.new_cache(1, ids.shape[1]), taps=taps)
        states = output.hidden_states[0].unflatten(-1, (len(taps), HIDDEN))
        tensors = {"token_ids": ids[0], "hidden_states": states.to(torch.bfloat16).contiguous()}
        if scaled:
            scales = states.abs().amax(dim=(1, 2), keepdim=True) / 448
            tensors |= {"hidden_states": (states / scales).to(torch.float8_e4m3fn), "hidden_states_scales": scales}
        save_file(tensors, folder / f"hs_{number}.safetensors")
    return folder


@pytest.mark.parametrize("scaled", [False, True])
def test_extracted_files_give_packed_rows_the_states_of_the_verifier_whatever_their_order(
    verifier: Verifier, conversations: list[Conversation], tmp_path: Path, scaled: bool
) -> None:
    rows = pack(conversations, 24)
    inputs = [values.long() for values in (rows.input_ids, rows.position_ids, rows.document_ids)]
    extracted = ExtractedStates(extract(tmp_path / "hs", verifier, conversations, [1, 2, 4], scaled), [1, 2, 4], (1, 2), 4, HIDDEN)
    expected = stores.verifier_states(verifier, (1, 2))(*inputs)
    valid = rows.document_ids >= 0
    error = (extracted(*inputs).float() - expected)[valid].abs().amax() / expected[valid].abs().amax()
    assert error < (2**-4 if scaled else 2**-7)
    assert torch.equal(extracted(*inputs), extracted(*inputs))
    assert not extracted(*inputs)[~valid].any()


def test_the_last_state_is_taken_by_its_layer_id_and_never_guessed(
    verifier: Verifier, conversations: list[Conversation], tmp_path: Path
) -> None:
    rows = pack(conversations, 24)
    inputs = [values.long() for values in (rows.input_ids, rows.position_ids, rows.document_ids)]
    folder = extract(tmp_path / "with", verifier, conversations, [1, 2, 4])
    states = ExtractedStates(folder, [1, 2, 4], (1, 2), 4, HIDDEN)(*inputs)
    assert states.shape[2] * HIDDEN == 2 * HIDDEN + HIDDEN
    last = states[:, :, -1].float()
    logits = verifier.logits(last)[rows.document_ids >= 0]
    reference = verifier.logits(stores.verifier_states(verifier, ())(*inputs)[:, :, 0])[rows.document_ids >= 0]
    assert (logits - reference).norm() / reference.norm() < 0.02
    without = extract(tmp_path / "without", verifier, conversations, [1, 2])
    with pytest.raises(ConfigError, match=r"layer 4 \(the stream before the final norm\) is not among the extracted layers \[1, 2\]"):
        ExtractedStates(without, [1, 2], (1, 2), 4, HIDDEN)
    with pytest.raises(ConfigError, match=r"layer 3 \(a tap\) is not among"):
        ExtractedStates(folder, [1, 2, 4], (3,), 4, HIDDEN)


def test_extracted_files_that_do_not_fit_are_named(verifier: Verifier, conversations: list[Conversation], tmp_path: Path) -> None:
    rows = pack(conversations, 24)
    inputs = [values.long() for values in (rows.input_ids, rows.position_ids, rows.document_ids)]
    folder = extract(tmp_path / "hs", verifier, conversations, [1, 4])
    with pytest.raises(DataError, match=r"not \[at least \d+, 3, 32\]"):
        ExtractedStates(folder, [1, 2, 4], (1,), 4, HIDDEN)(*inputs)
    file = folder / "hs_0.safetensors"
    tensors = load_file(file)
    tensors["hidden_states"][0, 0, 0] = float("nan")
    save_file(tensors, file)
    with pytest.raises(DataError, match=r"hs_0.safetensors holds hidden states that are not finite"):
        ExtractedStates(folder, [1, 4], (1,), 4, HIDDEN)(*inputs)
    file.unlink()
    with pytest.raises(DataError, match="no extracted file holds the conversation"):
        ExtractedStates(folder, [1, 4], (1,), 4, HIDDEN)(*inputs)
    (folder / "hs_1.safetensors").write_bytes(b"no safetensors")
    with pytest.raises(DataError, match=r"hs_1.safetensors is damaged"):
        ExtractedStates(folder, [1, 4], (1,), 4, HIDDEN)(*inputs)
    with pytest.raises(DataError, match="holds no extracted hidden states"):
        ExtractedStates(tmp_path / "empty", [1, 4], (1,), 4, HIDDEN)


def test_a_store_made_of_extracted_files_trains_like_one_of_the_verifier(
    verifier: Verifier, conversations: list[Conversation], tmp_path: Path
) -> None:
    rows = pack(conversations, 24)
    extracted = ExtractedStates(extract(tmp_path / "hs", verifier, conversations, [1, 2, 4]), [1, 2, 4], (1, 2), 4, HIDDEN)
    layout = Layout((1, 2), HIDDEN, "bfloat16")
    store_hidden_states(tmp_path / "extracted", {"train": rows}, extracted, layout, {}, progress=False)
    store(tmp_path / "own", verifier, rows, taps=(1, 2))
    index = torch.arange(len(rows))
    source = VerifierSource(verifier, (1, 2))
    ours, theirs = (StoredRows(source, rows, tmp_path / name).batch(index) for name in ("own", "extracted"))
    torch.testing.assert_close(theirs.hidden_states, ours.hidden_states, atol=2e-2, rtol=2e-2)


# -- the draft vocabulary --------------------------------------------------------------------------------------------


def block(*replies: list[int]) -> ConversationBlock:
    return ConversationBlock.of([Conversation([5, *reply], [False] + [True] * len(reply)) for reply in replies])


def test_a_draft_vocabulary_holds_the_labels_used_most_and_fills_up_with_unseen_ones() -> None:
    counts = count_labels([block([7, 7, 7, 3], [3, 9])], vocab_size=12)
    assert (counts[7], counts[3], counts[9], counts[5]) == (3, 2, 1, 0), "prompts do not count"
    assert draft_vocabulary(counts, 2).token_ids.tolist() == [3, 7]
    assert draft_vocabulary(counts, 6).token_ids.tolist() == [0, 1, 2, 3, 7, 9]
    assert draft_vocabulary(counts, 2, keep=(11,)).token_ids.tolist() == [7, 11]
    assert draft_vocabulary(counts, 2).coverage == pytest.approx(5 / 6)
    assert coverage(counts, [1, 2, 3, 100]) == pytest.approx({1: 3 / 6, 2: 5 / 6, 3: 1.0, 100: 1.0})
    for size, keep in ((0, ()), (13, ()), (1, (2, 3))):
        with pytest.raises(ConfigError, match=f"draft_vocab_size = {size}"):
            draft_vocabulary(counts, size, keep)
    with pytest.raises(DataError, match="prepared for another one"):
        count_labels([block([12])], vocab_size=12)


def test_fifty_different_tokens_fill_a_vocabulary_of_a_hundred_of_two_hundred() -> None:
    counts = count_labels([block(list(range(0, 200, 4)))], vocab_size=200)
    vocabulary = draft_vocabulary(counts, 100)
    assert vocabulary.token_ids.tolist() == sorted(set(vocabulary.token_ids.tolist())) and len(vocabulary.token_ids) == 100
    assert set(range(0, 200, 4)) <= set(vocabulary.token_ids.tolist())
    with pytest.raises(ConfigError, match="at most the verifier's 200 tokens"):
        draft_vocabulary(counts, 300)


def test_d2t_holds_offsets_and_t2d_marks_the_same_tokens() -> None:
    vocabulary = draft_vocabulary(count_labels([block([7, 7, 3])], 10), 2)
    assert vocabulary.d2t.tolist() == [3, 6]
    assert vocabulary.t2d.nonzero().flatten().tolist() == [3, 7] == (torch.arange(2) + vocabulary.d2t).tolist()


def test_a_stored_vocabulary_is_found_under_everything_it_depends_on_and_nothing_else(tmp_path: Path) -> None:
    header = {"run": {"sources": ["a"]}, "tokens": 10, "conversations": 1}
    counts = count_labels([block([7, 7, 3])], 1000)
    key = vocabulary_key(header, 8, 1000)
    first = save_vocabulary(tmp_path, key, draft_vocabulary(counts, 8))
    loaded = load_vocabulary(tmp_path, key, 8)
    assert loaded is not None and torch.equal(loaded.token_ids, draft_vocabulary(counts, 8).token_ids) and loaded.coverage == 1.0
    others = [
        vocabulary_key(header, 16, 1000),
        vocabulary_key(header, 8, 2000),
        vocabulary_key(header, 8, 1000, (2,)),
        vocabulary_key({**header, "run": {"sources": ["b"]}}, 8, 1000),
        vocabulary_key({**header, "tokens": 11}, 8, 1000),
    ]
    assert len({key, *others}) == 6
    before = first.read_bytes()
    for other in others:
        assert load_vocabulary(tmp_path, other, 8) is None
        save_vocabulary(tmp_path, other, draft_vocabulary(counts, 8))
    assert first.read_bytes() == before
    first.write_bytes(b"damaged")
    with pytest.raises(DataError, match="is damaged"):
        load_vocabulary(tmp_path, key, 8)
