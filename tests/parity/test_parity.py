"""A checkpoint saved by the public speculators library loads here, one saved here loads there, and both compute the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from peer_jobs import (
    ANCHORS,
    CASES,
    DOCUMENTS,
    PEER_PYTHON,
    TOLERANCE,
    Answer,
    Case,
    K,
    Peer,
    anchors_of,
    config_json,
    kept_chains,
    our_drafter,
    peer_slots,
    row,
    save_verifier,
)
from tiny_checkpoints import config_of, tensors_of
from tiny_drafters import decode_logits, packed_batch
from torch import Tensor

from speculators.algorithms.anchors import Supervision
from speculators.algorithms.peagle import chain_visibility
from speculators.checkpoint import load, save
from speculators.kernels.block_attention import block_attention_table
from speculators.speculator import Speculator
from speculators.training.batch import TrainingBatch

pytestmark = pytest.mark.skipif(PEER_PYTHON is None, reason="needs the public speculators library: make test-parity")


@dataclass(frozen=True)
class Pair:
    """One checkpoint in both libraries: ours as loaded (or as saved), and what the peer computed with it."""

    case: Case
    ours: Speculator
    peer: Answer
    saved: Path
    peer_saved: Path


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    """Every case in both directions, by "direction case"."""
    folder = tmp_path_factory.mktemp("parity")
    verifier, peer = save_verifier(folder / "verifier"), Peer(folder)
    for name, case in CASES.items():
        save(our_drafter(case, verifier), folder / "ours" / name, dtype="float32")
        peer.ask(f"ours {name}", case, folder / "ours" / name, batch=row(), resave=folder / "resaved" / name)
        skeleton = config_json(case, verifier.name_or_path)
        peer.ask(f"theirs {name}", case, folder / "theirs" / name, create=skeleton, batch=row())
    answers = peer.run()
    found = {}
    for name, case in CASES.items():
        found[f"ours {name}"] = Pair(
            case, our_drafter(case, verifier), answers[f"ours {name}"], folder / "ours" / name, folder / "resaved" / name
        )
        error = answers[f"theirs {name}"].error
        assert error is None, error
        theirs = load(folder / "theirs" / name, verifier)
        found[f"theirs {name}"] = Pair(case, theirs, answers[f"theirs {name}"], folder / "theirs" / name, folder / "theirs" / name)
    return found


@pytest.fixture(params=[f"{direction} {name}" for name in CASES for direction in ("ours", "theirs")])
def pair(request: pytest.FixtureRequest, pairs: dict[str, Pair]) -> Pair:
    found = pairs[request.param]
    assert found.peer.error is None, found.peer.error
    return found


def at_slots(pair: Pair, batch: TrainingBatch, name: str) -> Tensor:
    """Values [N, K, ...] of the peer at the slots that predict the K tokens after each anchor, NaN where COD cut a chain off."""
    values = pair.peer.tensors
    if pair.case.is_block:
        slots = values[f"{name}.0"].view(len(ANCHORS), -1, *values[f"{name}.0"].shape[2:])
        return slots[:, -K:]
    starts = peer_slots(batch, ANCHORS)
    if pair.case.method == "eagle3":
        return torch.stack([values[f"{name}.{step}"][0, starts] for step in range(K)], dim=1)
    flat, elements = values[f"{name}.0"][0], list(zip(*(values[f"{key}.0"].tolist() for key in ("anchor", "depth")), strict=True))
    found = flat.new_full((len(ANCHORS), K, *flat.shape[1:]), torch.nan)
    for chain, start in enumerate(starts):
        for depth, count in enumerate(kept_chains(ANCHORS)):
            if chain < count:
                found[chain, depth] = flat[elements.index((start, depth))]
    return found


def our_hidden(pair: Pair, batch: TrainingBatch) -> Tensor:
    """[N, K, hidden] after the final norm, from the training path."""
    anchors, ours = anchors_of(batch, ANCHORS), pair.ours
    if pair.case.method == "eagle3":
        return ours.training_hidden(batch, anchors, Supervision.of(batch, anchors, K))[0]  # type: ignore[operator]
    hidden = ours.training_hidden(batch, anchors)  # type: ignore[operator]
    return ours.draft_slots(hidden)[0] if pair.case.is_block else hidden[0]  # type: ignore[operator]


def with_trained_length(pair: Pair) -> None:
    """Files of the peer do not say how many passes or depths were trained; the rows here hold K."""
    training = pair.ours.config.training_options  # type: ignore[attr-defined]
    for key in ("passes", "num_depths"):
        if hasattr(training, key):
            setattr(training, key, K)


@torch.no_grad()
def test_hidden_states_agree(pair: Pair) -> None:
    with_trained_length(pair)
    batch = row()
    theirs = at_slots(pair, batch, "hidden")
    kept = ~theirs.isnan()
    assert kept.any(dim=-1).sum() == (len(ANCHORS) * K if pair.case.method != "peagle" else sum(kept_chains(ANCHORS)))
    torch.testing.assert_close(our_hidden(pair, batch)[kept], theirs[kept], **TOLERANCE)


@torch.no_grad()
def test_logits_of_decoding_agree_with_those_of_the_peers_training(pair: Pair) -> None:
    """To rounding: logits of up to 18 carry two units in the last place of float32, 4e-6 of 18, on both sides and from pass to pass."""
    document = packed_batch(DOCUMENTS)
    theirs = at_slots(pair, row(), "final_logits")
    for number, anchor in enumerate(ANCHORS):
        if anchor >= DOCUMENTS[0] - K:
            continue
        ours = decode_logits(pair.ours, document, anchor, K, [anchor])
        if pair.case.reduced:
            ours = ours[:, pair.ours.draft_token_ids()]
        kept = ~theirs[number].isnan()
        largest = float(theirs[number][kept].abs().max())
        torch.testing.assert_close(ours[kept], theirs[number][kept], rtol=0, atol=4e-6 * max(1.0, largest))


@torch.no_grad()
def test_targets_agree(pair: Pair) -> None:
    batch = row()
    supervision = Supervision.of(batch, anchors_of(batch, ANCHORS), K)
    verifier = pair.ours.verifier
    logits = verifier.final_norm(supervision.teacher_hidden(batch)[0]) @ verifier.head.T
    if pair.case.reduced:
        logits = logits[..., pair.ours.draft_token_ids()]
    theirs = at_slots(pair, batch, "targets")
    if pair.case.method == "eagle3":  # its targets are not per pass: pass s of slot q is compared with slot q + s
        rows = torch.tensor(peer_slots(batch, ANCHORS))[:, None] + torch.arange(K)
        theirs = pair.peer.tensors["targets.0"][0, rows]
    kept = ~theirs.isnan()
    torch.testing.assert_close(logits[kept], theirs[kept], **TOLERANCE)


@torch.no_grad()
def test_masks_agree(pair: Pair) -> None:
    batch = row()
    theirs = {name: values.bool()[0, 0] for name, values in pair.peer.tensors.items() if name.startswith("mask.")}
    anchors = anchors_of(batch, ANCHORS)
    if pair.case.is_block:
        config = pair.ours.config
        kinds = {(config.layers.window(layer), config.causal(layer)) for layer in range(2)}  # type: ignore[attr-defined]
        assert len(theirs) == len(kinds)
        for number, (window, causal) in enumerate(sorted(kinds, key=str, reverse=True)):  # the peer makes the mask without window first
            size = config.block_size  # type: ignore[attr-defined]
            ours = block_attention_table(
                anchors.document_start,
                anchors.index,
                context_length=batch.input_ids.shape[1],
                block_queries=size,
                block_keys=size,
                causal=causal,
                window=window,
            )
            assert torch.equal(ours[0], theirs[f"mask.{number}"])
    elif pair.case.method == "peagle":
        anchor, depth = (pair.peer.tensors[f"{key}.0"] for key in ("anchor", "depth"))
        document = torch.cat([torch.full((length - 1,), number) for number, length in enumerate(DOCUMENTS)])[anchor]
        ours = chain_visibility(anchor, depth) & (document[:, None] == document[None])
        assert all(torch.equal(ours, mask) for mask in theirs.values())
    else:
        slots, total = peer_slots(batch, ANCHORS), sum(DOCUMENTS) - len(DOCUMENTS)
        start = [slot - int(batch.position_ids[0, anchor]) + 1 for slot, anchor in zip(slots, ANCHORS, strict=True)]
        for step in range(K):
            # A chain's own slots follow its pair: pass s sees the stream up to the pair, then its own passes.
            chain = block_attention_table(
                torch.tensor([start]),
                torch.tensor([slots]) + 1,
                context_length=total,
                block_queries=1,
                block_keys=max(step, 1),
                causal=True,
            )[0]
            mask = theirs[f"mask.{step}"][slots]
            assert torch.equal(chain[:, :total], mask[:, :total])
            own = torch.zeros(len(slots), total, dtype=torch.bool).scatter_(1, torch.tensor(slots)[:, None], True)
            assert all(torch.equal(mask[:, total * s : total * (s + 1)], own) for s in range(1, step + 1))


@torch.no_grad()
def test_confidence_agrees(pairs: dict[str, Pair]) -> None:
    for name in (name for name in pairs if "dspark" in name):
        pair, batch = pairs[name], row()
        hidden = our_hidden(pair, batch)
        previous = Supervision.of(batch, anchors_of(batch, ANCHORS), K).previous[0]
        ours = pair.ours.confidence_logits(hidden, previous)  # type: ignore[operator]
        torch.testing.assert_close(ours, at_slots(pair, batch, "confidence_logits"), **TOLERANCE)


def test_a_checkpoint_passes_through_the_peer_unchanged(pairs: dict[str, Pair]) -> None:
    for pair in (pair for name, pair in pairs.items() if name.startswith("ours")):
        ours, theirs = tensors_of(pair.saved), tensors_of(pair.peer_saved)
        assert ours.keys() == theirs.keys(), pair.case
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items()), pair.case
        before, after = config_of(pair.saved), config_of(pair.peer_saved)
        ignored = {"transformer_layer_config", "transformers_version", "auto_map"}
        assert {key: after[key] for key in before.keys() - ignored} == {key: before[key] for key in before.keys() - ignored}
        kept = before["transformer_layer_config"]
        assert {key: after["transformer_layer_config"][key] for key in kept.keys() & after["transformer_layer_config"].keys()} == {
            key: kept[key] for key in kept.keys() & after["transformer_layer_config"].keys()
        }


def test_a_checkpoint_of_the_peer_is_saved_here_with_its_tensors_and_keys(pairs: dict[str, Pair], tmp_path: Path) -> None:
    for name, pair in pairs.items():
        if name.startswith("ours"):
            continue
        folder = tmp_path / name
        save(pair.ours, folder, dtype="float32")
        before, after = tensors_of(pair.saved), tensors_of(folder)
        assert before.keys() == after.keys(), name
        assert all(torch.equal(tensor, after[key]) for key, tensor in before.items()), name
        assert config_of(pair.saved).keys() - config_of(folder).keys() <= {"auto_map"}, name
