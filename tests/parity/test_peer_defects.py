"""Where the public speculators library 0.9.0 is wrong: what it does, and the right value, which is ours."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peer_jobs import (
    ANCHORS,
    CASES,
    PEER_PYTHON,
    TOLERANCE,
    Answer,
    Case,
    K,
    Peer,
    anchors_of,
    config_json,
    our_drafter,
    row,
    save_verifier,
)
from tiny_checkpoints import edit_config
from tiny_drafters import VOCABULARY, packed_batch
from tiny_models import tiny_model
from torch import Tensor

from speculators.algorithms.anchors import Anchors, Supervision
from speculators.checkpoint import load, save
from speculators.kernels.block_attention import block_attention_table
from speculators.speculator import Speculator, VerifierWeights
from speculators.training.batch import TrainingBatch
from speculators.verifier import Verifier

pytestmark = pytest.mark.skipif(PEER_PYTHON is None, reason="needs the public speculators library: make test-parity")

TRAINED_EMBEDDING = Case("eagle3", {"embed_requires_grad": True})
NARROW_WINDOW = Case("dflash", {}, {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4, "use_sliding_window": True})
REPLY_ENDS = 13  # of the row whose second half is not supervised


def short_reply() -> TrainingBatch:
    """One document whose tokens 3 to 12 are the reply."""
    batch = packed_batch([24])
    return replace(batch, loss_mask=batch.loss_mask & (batch.position_ids < REPLY_ENDS))


def from_the_first_token() -> TrainingBatch:
    """One document that is supervised from its first token on."""
    return packed_batch([24], prompt=0)


def across_documents() -> TrainingBatch:
    """Two documents, the second supervised from its second token on."""
    return packed_batch([20, 14], prompt=1)


def padded(batch: TrainingBatch, count: int) -> TrainingBatch:
    """The row with padding as training packs it."""

    def pad(values: Tensor, fill: Any) -> Tensor:
        return torch.cat([values, values.new_full((1, count, *values.shape[2:]), fill)], dim=1)

    return replace(
        batch,
        input_ids=pad(batch.input_ids, 0),
        hidden_states=pad(batch.hidden_states, 0),
        last_hidden_state=pad(batch.last_hidden_state, 0),
        loss_mask=pad(batch.loss_mask, False),
        position_ids=pad(batch.position_ids, 0),
        document_ids=pad(batch.document_ids, -1),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("defects")


@pytest.fixture(scope="module")
def verifier(folder: Path) -> VerifierWeights:
    return save_verifier(folder / "verifier")


@pytest.fixture(scope="module")
def gemma(folder: Path) -> Verifier:
    """A verifier whose final norm multiplies by 1 + weight."""
    tiny_model("gemma3", vocab_size=VOCABULARY, layers=6).save_pretrained(folder / "gemma")
    return Verifier.from_pretrained(folder / "gemma", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def answers(folder: Path, verifier: VerifierWeights, gemma: Verifier) -> dict[str, Answer]:
    peer = Peer(folder)

    def saved(name: str, case: Case, weights: VerifierWeights = verifier) -> Path:
        save(our_drafter(case, weights), folder / name, dtype="float32")
        return folder / name

    peagle, dflash, dspark = CASES["peagle"], CASES["dflash"], CASES["dspark-vanilla"]
    peer.ask("padding", peagle, saved("padding-checkpoint", peagle), batch=row(), padding=6, attention="eager", backward=True)
    peer.ask("embedding", TRAINED_EMBEDDING, saved("embedding-checkpoint", TRAINED_EMBEDDING), batch=row(), backward=True)
    peer.ask("first token", peagle, folder / "padding-checkpoint", batch=from_the_first_token(), anchors=list(range(24)), random=True)
    peer.ask("documents", dflash, saved("dflash-checkpoint", dflash), batch=across_documents(), anchors=[18])
    for method in ("eagle3", "peagle", "dflash"):
        peer.ask(f"gemma {method}", CASES[method], saved(f"gemma-{method}", CASES[method], gemma.weights), batch=row())
    edit_config(
        saved("nameless", CASES["eagle3"]),
        speculators_config={
            **config_json(CASES["eagle3"], "")["speculators_config"],
            "verifier": {"name_or_path": None, "architectures": []},
        },
    )
    peer.ask("nameless", CASES["eagle3"], folder / "nameless")
    peer.ask("reduced", CASES["dspark-gated-reduced"], saved("reduced-checkpoint", CASES["dspark-gated-reduced"]), batch=row())
    peer.ask("reply", dspark, saved("dspark-checkpoint", dspark), batch=short_reply(), anchors=[9])
    peer.ask("window", NARROW_WINDOW, saved("window-checkpoint", NARROW_WINDOW), batch=row())
    return peer.run()


def answered(answers: dict[str, Answer], name: str) -> Answer:
    answer = answers[name]
    assert answer.error is None, answer.error
    return answer


def loss_at(speculator: Speculator, batch: TrainingBatch, anchors: list[int]) -> Any:
    return speculator.loss_at(batch, anchors_of(batch, anchors))  # type: ignore[operator]


def test_padding_poisons_its_eager_loss_and_changes_nothing_here(answers: dict[str, Answer], verifier: VerifierWeights) -> None:
    answer = answered(answers, "padding")
    assert answer.loss is not None and math.isnan(answer.loss)
    assert any(value is not None and math.isnan(value) for value in answer.gradients.values())
    ours = our_drafter(CASES["peagle"], verifier)
    torch.testing.assert_close(loss_at(ours, padded(row(), 6), ANCHORS).loss, loss_at(ours, row(), ANCHORS).loss)


def test_its_eagle3_embedding_gets_no_gradient_and_ours_gets_the_right_one(answers: dict[str, Answer], verifier: VerifierWeights) -> None:
    assert answered(answers, "embedding").gradients["embed_tokens.weight"] is None
    norm: Any = copy.deepcopy(verifier.final_norm)
    exact = replace(verifier, embedding=verifier.embedding.double(), head=verifier.head.double(), final_norm=norm.double())
    ours = our_drafter(TRAINED_EMBEDDING, exact).double()
    batch = replace(row(), hidden_states=row().hidden_states.double(), last_hidden_state=row().last_hidden_state.double())
    table, token, step = ours.get_parameter("embed_tokens.weight"), int(batch.input_ids[0, ANCHORS[0] + 1]), 1e-5
    (gradient,) = torch.autograd.grad(loss_at(ours, batch, ANCHORS).loss, table)
    assert gradient[token].abs().max() > 1e-4
    with torch.no_grad():
        table[token, 0] += step
        above = loss_at(ours, batch, ANCHORS).loss
        table[token, 0] -= 2 * step
        below = loss_at(ours, batch, ANCHORS).loss
    torch.testing.assert_close(gradient[token, 0], (above - below) / (2 * step), rtol=1e-5, atol=1e-8)


def test_it_draws_chains_from_before_the_row_and_we_start_after_the_first_token(answers: dict[str, Answer]) -> None:
    assert answered(answers, "first token").tensors["anchor.0"].min() == -1
    torch.manual_seed(0)
    for seed in range(20):
        torch.manual_seed(seed)
        drawn = Anchors.sample(from_the_first_token(), 24)
        assert drawn.index[drawn.valid].min() == 1, "the pair that predicts token 2 is the first there is"


def test_its_blocks_run_into_the_next_document_and_ours_end_with_theirs(answers: dict[str, Answer]) -> None:
    batch = across_documents()
    theirs = answered(answers, "documents").tensors["loss_mask.0"][0].bool()
    assert theirs.tolist() == [False, True, False, True, True, True], "tokens 21 to 23 belong to the next document"
    ours = Supervision.of(batch, anchors_of(batch, [18]), K).mask[0, 0]
    assert ours.tolist() == [True, False, False, False, False]


@torch.no_grad()
def test_its_targets_of_a_gemma_verifier_are_not_the_verifiers(answers: dict[str, Answer], gemma: Verifier) -> None:
    batch = row()
    head: Any = gemma.model.get_output_embeddings()
    decoder: Any = gemma.model.get_decoder()
    right = head(decoder.norm(batch.last_hidden_state))[0]
    ours = gemma.weights.final_norm(batch.last_hidden_state)[0] @ gemma.weights.head.T
    torch.testing.assert_close(ours, right, **TOLERANCE)
    shifted = right[batch.position_ids[0] > 0]
    assert (answered(answers, "gemma eagle3").tensors["targets.0"][0] - shifted).abs().max() > 0.1
    anchor, depth = (answered(answers, "gemma peagle").tensors[f"{key}.0"] for key in ("anchor", "depth"))
    assert (answers["gemma peagle"].tensors["targets.0"][0] - shifted[anchor + depth]).abs().max() > 0.1
    # Its DFlash knows this norm.
    blocks = answered(answers, "gemma dflash").tensors["targets.0"].view(len(ANCHORS), K + 1, -1)[:, 1:]
    rows = torch.tensor(ANCHORS)[:, None] + torch.arange(K)
    torch.testing.assert_close(blocks, right[rows], **TOLERANCE)


def test_it_cannot_load_an_eagle3_checkpoint_that_names_no_verifier_and_we_can(
    answers: dict[str, Answer], verifier: VerifierWeights, folder: Path
) -> None:
    assert answers["nameless"].error is not None
    assert load(folder / "nameless", verifier).is_attached


@torch.no_grad()
def test_its_acceptance_of_a_reduced_vocabulary_leaves_out_what_cannot_be_proposed(
    answers: dict[str, Answer], verifier: VerifierWeights
) -> None:
    tensors = answered(answers, "reduced").tensors
    draft, target = tensors["final_logits.0"].double().softmax(-1), tensors["targets.0"].double().softmax(-1)
    theirs = torch.minimum(draft, target).sum(-1).mean()
    ours, batch = our_drafter(CASES["dspark-gated-reduced"], verifier), row()
    rows = torch.tensor(ANCHORS)[:, None] + torch.arange(K)
    full = (verifier.final_norm(batch.last_hidden_state)[0, rows] @ verifier.head.T).double().softmax(-1)
    right = torch.minimum(draft.view(len(ANCHORS), K, -1), full[..., ours.draft_token_ids()]).sum(-1)
    total, count = loss_at(ours, batch, ANCHORS).metrics["acceptance"]
    torch.testing.assert_close(total.double() / count, right.mean(0), atol=1e-6, rtol=1e-5)
    assert theirs > right.mean() + 0.05


def test_it_supervises_the_token_after_the_reply_and_we_do_not(answers: dict[str, Answer]) -> None:
    batch = short_reply()
    theirs = answered(answers, "reply").tensors["loss_mask.0"][0].bool()
    assert theirs.tolist() == [True, True, True, True, False], "the fourth slot predicts token 13"
    ours = Supervision.of(batch, anchors_of(batch, [9]), K).mask[0, 0]
    assert ours.tolist() == [True, True, True, False, False]


def test_its_window_stands_still_and_the_engines_window_moves_with_the_slot(answers: dict[str, Answer]) -> None:
    batch, window = row(), 4
    theirs = answered(answers, "window").tensors["mask.0"].bool()[0, 0]
    anchors = anchors_of(batch, ANCHORS)
    size, length = K + 1, batch.input_ids.shape[1]
    ours = block_attention_table(
        anchors.document_start,
        anchors.index,
        context_length=length,
        block_queries=size,
        block_keys=size,
        causal=True,
        window=window,
    )[0]
    for block, anchor in enumerate(ANCHORS):
        for slot in range(size):
            query = block * size + slot
            assert theirs[query, :length].nonzero().flatten().tolist() == list(range(anchor - window, anchor))
            seen = ours[query, :length].nonzero().flatten().tolist() + [
                anchor + key - block * size for key in ours[query, length:].nonzero().flatten().tolist()
            ]
            assert seen == list(range(anchor + slot - window + 1, anchor + slot + 1)), "the last W positions, its own included"
