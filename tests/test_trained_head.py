"""Drafters of the EAGLE family that train an output head of their own: in the loss, in drafts, in files and from elsewhere."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import config_of, contents, edit_config, reduced, tensors_of
from tiny_drafters import VOCABULARY, decode_logits, drafter, packed_batch, verifier_weights
from tiny_models import tiny_verifier
from tiny_training import packed_rows, tiny_config
from torch import Tensor
from torch.nn import functional as F

from speculators.algorithms.anchors import Anchors, Supervision
from speculators.checkpoint import inspect, load, save
from speculators.errors import ConfigError, PairingError
from speculators.speculator import Speculator, VerifierWeights
from speculators.training.build import build_speculator
from speculators.training.trainer import train

HEAD, K = "lm_head.weight", 5
EXACT: dict[str, Any] = {"position_weights": "uniform", "cross_entropy": 0.3, "kl": 0.7}
METHODS: dict[str, dict[str, Any]] = {
    "eagle3": {"training": {**EXACT, "passes": K}},
    "peagle": {"training": {**EXACT, "num_depths": K, "keep_rate": 1.0}},
}


def scaled_and_shifted() -> VerifierWeights:
    """A verifier with a logit scale and a head bias, which a head of its own has neither of; float64."""
    verifier = verifier_weights(torch.float64)
    bias = torch.randn(VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    return replace(verifier, logit_scale=0.25, head_bias=bias)


def loss_by_definition(speculator: Speculator, head: Tensor) -> Tensor:
    """0.3 CE + 0.7 KL of logits W' h over the supervised slots, with nothing but softmax."""
    batch, verifier = packed_batch([16, 12], dtype=torch.float64), speculator.verifier
    anchors = Anchors.at(batch, torch.tensor([[4, 7, 20]]))
    supervision = Supervision.of(batch, anchors, K)
    arguments = (supervision,) if speculator.method == "eagle3" else ()
    hidden = speculator.training_hidden(batch, anchors, *arguments)  # type: ignore[operator]
    log_p = F.log_softmax(hidden @ head.T, dim=-1)
    teacher = verifier.final_norm(supervision.teacher_hidden(batch)) @ verifier.head.T * verifier.logit_scale + verifier.head_bias
    ids = speculator.draft_token_ids() if speculator.has_reduced_vocabulary else torch.arange(VOCABULARY)
    log_q = F.log_softmax(teacher[..., ids], dim=-1)
    column = (ids == supervision.labels[..., None]).double()  # all zero for a label that cannot be proposed
    terms = 0.3 * -(column * log_p).sum(-1) + 0.7 * (log_q.exp() * (log_q - log_p)).sum(-1)
    return (terms * supervision.mask).sum() / supervision.mask.sum()


@pytest.mark.parametrize("vocabulary", [None, 20])
@pytest.mark.parametrize("method", METHODS)
def test_loss_and_gradients_are_those_of_the_drafters_own_head(method: str, vocabulary: int | None) -> None:
    make = reduced if vocabulary else drafter
    speculator = make(method, dtype=torch.float64, train_head=True, **METHODS[method])
    speculator.attach(scaled_and_shifted())
    batch = packed_batch([16, 12], dtype=torch.float64)
    parameters = [speculator.get_parameter(name) for name in (HEAD, "fc.weight")]
    loss = speculator.loss_at(batch, Anchors.at(batch, torch.tensor([[4, 7, 20]]))).loss  # type: ignore[operator]
    right = loss_by_definition(speculator, parameters[0])
    torch.testing.assert_close(loss, right)
    for found, expected in zip(torch.autograd.grad(loss, parameters), torch.autograd.grad(right, parameters), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("method", METHODS)
def test_a_new_head_starts_as_the_verifiers_rows(method: str) -> None:
    verifier = verifier_weights()
    speculator_class = type(drafter(method))
    options: dict[str, Any] = {"num_layers": 1, "aux_hidden_state_layer_ids": [1, 4], "train_head": True}
    own = speculator_class.from_verifier(verifier, **options)
    assert torch.equal(own.get_parameter(HEAD), verifier.head)
    part = speculator_class.from_verifier(verifier, **options, draft_vocab_size=3)
    part.set_draft_vocabulary(torch.tensor([50, 4, 9]))
    assert torch.equal(part.get_parameter(HEAD), verifier.head[[4, 9, 50]])


def test_a_capped_verifier_is_refused_in_one_sentence() -> None:
    speculator = drafter("eagle3", train_head=True)
    speculator.attach(replace(verifier_weights(), logit_softcap=30.0))
    with pytest.raises(ConfigError, match=r"'tiny-verifier' caps its logits at 30\.0.*leave train_head out"):
        speculator.training_loss(packed_batch([16]))


@pytest.mark.parametrize("vocabulary", [None, 20])
def test_training_moves_the_head_and_the_checkpoint_drafts_with_it(vocabulary: int | None, tmp_path: Path) -> None:
    verifier = tiny_verifier("llama")
    options: dict[str, Any] = {"num_layers": 1, "num_draft_tokens": 3, "aux_hidden_state_layer_ids": [1, 2], "train_head": True}
    if vocabulary:
        options["draft_vocab_size"] = vocabulary
    config = tiny_config(method="eagle3", options=options, learning_rate=1e-2)
    start = build_speculator(config, verifier, packed_rows(), None).get_parameter(HEAD).clone()
    trained = train(verifier, packed_rows(), config).eval()
    head = trained.get_parameter(HEAD)
    assert (head - start).abs().max() > 1e-3
    for form in ("full", "compact"):
        save(trained, tmp_path / form, form=form, dtype="float32")
        assert torch.equal(tensors_of(tmp_path / form)[HEAD], head)
        assert config_of(tmp_path / form)["lm_head_requires_grad"] is True
        restored = load(tmp_path / form, verifier.weights)
        hidden = torch.randn(4, 32)
        assert torch.equal(restored.draft_logits(hidden), hidden @ head.T)


# -- files that do not say that their head was trained ---------------------------------------------------------


@pytest.fixture
def unsaid(tmp_path: Path) -> Path:
    """A checkpoint as version 0.9 writes it: embedding of the verifier, a head that is not, and no key for that."""
    save(drafter("eagle3", train_head=True), tmp_path / "unsaid", dtype="float32")
    config = config_of(tmp_path / "unsaid")
    del config["lm_head_requires_grad"]
    (tmp_path / "unsaid" / "config.json").write_text(json.dumps(config))
    return tmp_path / "unsaid"


def test_a_trained_head_is_told_by_the_embedding_beside_it(unsaid: Path, tmp_path: Path) -> None:
    own = drafter("eagle3", train_head=True)
    restored = load(unsaid, verifier_weights())
    assert torch.equal(restored.get_parameter(HEAD), own.get_parameter(HEAD))
    batch = packed_batch([16])
    assert torch.equal(decode_logits(restored, batch, 8, K, [8]), decode_logits(own, batch, 8, K, [8]))
    save(restored, tmp_path / "said", dtype="float32")
    assert config_of(tmp_path / "said")["lm_head_requires_grad"] is True
    save(load(tmp_path / "said"), tmp_path / "again", dtype="float32")
    assert contents(tmp_path / "again") == contents(tmp_path / "said")
    found = inspect(unsaid, verifier_weights())
    assert found.problems == () and found.shared[HEAD].trained and found.shared[HEAD].equals_verifier is False


def test_a_wrong_verifier_is_not_taken_for_a_trained_head(unsaid: Path) -> None:
    with pytest.raises(PairingError, match=r"embed_tokens\.weight of this checkpoint .* differs"):
        load(unsaid, replace(verifier_weights(seed=9), name_or_path="other/model"))


def test_where_the_embedding_was_trained_too_the_file_must_say_it(tmp_path: Path) -> None:
    save(drafter("peagle", train_head=True), tmp_path)
    edit_config(tmp_path, lm_head_requires_grad=False)
    with pytest.raises(PairingError, match=r"lm_head\.weight .* or the drafter trained its own head; .* set lm_head_requires_grad to true"):
        load(tmp_path, verifier_weights())
    edit_config(tmp_path, lm_head_requires_grad=True)
    assert load(tmp_path, verifier_weights()).get_parameter(HEAD).shape == (VOCABULARY, 32)


def test_a_head_that_is_a_copy_is_still_borrowed(tmp_path: Path) -> None:
    save(drafter("eagle3"), tmp_path)
    assert HEAD in tensors_of(tmp_path)
    assert HEAD not in load(tmp_path, verifier_weights()).state_dict()


def test_the_head_of_a_compact_checkpoint_is_kept_only_where_it_differs(tmp_path: Path) -> None:
    speculator = drafter("eagle3", train_head=True)
    with torch.no_grad():
        speculator.get_parameter(HEAD).copy_(verifier_weights().head)
    save(speculator, tmp_path, form="compact")
    assert HEAD not in tensors_of(tmp_path)
    assert torch.equal(load(tmp_path, verifier_weights()).get_parameter(HEAD), verifier_weights().head)


# -- training that starts from such a drafter ------------------------------------------------------------------


def started(method: str, given: Speculator | Path, **options: Any) -> Speculator:
    return build_speculator(tiny_config(method=method, options=options), tiny_verifier("llama"), packed_rows(seed=7), given)


def first(**options: Any) -> Speculator:
    chosen = {"num_layers": 1, "num_draft_tokens": 3, "aux_hidden_state_layer_ids": [0, 3], **options}
    speculator = build_speculator(tiny_config(method="eagle3", options=chosen), tiny_verifier("llama"), packed_rows(), None)
    with torch.no_grad():
        if "train_head" in options:
            speculator.get_parameter(HEAD).add_(0.5)
    return speculator


@pytest.mark.parametrize("method", ["eagle3", "peagle"])
def test_a_trained_head_goes_on_being_trained(method: str, tmp_path: Path) -> None:
    start = first(train_head=True)
    save(start, tmp_path, dtype="float32")
    for given in (start, tmp_path):
        head = started(method, given, **({"mask_token_id": 5} if method == "peagle" else {})).get_parameter(HEAD)
        assert torch.equal(head, start.get_parameter(HEAD)) and head.requires_grad


def test_a_borrowed_head_may_be_trained_from_now_on_and_a_trained_one_not_be_given_up() -> None:
    speculator = started("eagle3", first(), train_head=True)
    assert torch.equal(speculator.get_parameter(HEAD), tiny_verifier("llama").weights.head)
    with pytest.raises(ConfigError, match=r"\['train_head'\] leave lm_head\.weight of the eagle3 drafter .* without a place"):
        started("eagle3", first(train_head=True), train_head=False)


def test_a_copy_of_a_drafter_has_a_head_of_its_own() -> None:
    speculator = drafter("eagle3", train_head=True)
    other = copy.deepcopy(speculator)
    assert other.get_parameter(HEAD).data_ptr() != speculator.get_parameter(HEAD).data_ptr()
    assert torch.equal(other.draft_logits(torch.ones(1, 32)), speculator.draft_logits(torch.ones(1, 32)))
