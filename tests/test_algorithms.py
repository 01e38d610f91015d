"""Every algorithm: what it trains on is what it decodes with, and blocks see nothing they must not see."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_drafters import HIDDEN, VOCABULARY, decode_logits, drafter, packed_batch, verifier_weights
from torch import Tensor

from speculators.algorithms import objective
from speculators.algorithms.anchors import Anchors
from speculators.errors import ConfigError
from speculators.registry import get_algorithm
from speculators.speculator import Speculator
from speculators.training.batch import TrainingBatch

# A block drawn shorter than it was trained is another computation only where its slots see later ones.
CASES: list[tuple[str, dict[str, Any]]] = [
    ("eagle3", {}),
    ("eagle3", {"norm_output": True, "norm_before_residual": True}),
    ("eagle3", {"fc_norm": True, "norm_before_fc": False, "sliding_window": 4}),
    ("eagle3", {"train_head": True}),
    ("peagle", {"training": {"keep_rate": 1.0, "num_depths": 5}}),
    ("peagle", {"training": {"keep_rate": 1.0, "num_depths": 5}, "train_head": True}),
    ("peagle", {"training": {"keep_rate": 1.0, "num_depths": 5}, "train_embedding": False, "sliding_window": 4}),
    ("dflash", {}),
    ("dflash", {"is_causal": True}),
    ("dflash", {"sliding_window": 4}),
    ("dflash", {"sliding_window": 4, "sliding_window_non_causal": True}),
    ("dspark", {"markov_rank": 4}),
    ("dspark", {"markov_rank": 4, "markov_head_type": "gated"}),
    ("dspark", {"markov_rank": 4, "markov_head_type": "rnn"}),
    ("dspark", {"markov_rank": 4, "sample_from_anchor": False}),
    ("dspark", {"markov_rank": 0}),
]
IDS = ["-".join([method, *(str(v) if not isinstance(v, dict) else "" for v in options.values())]) for method, options in CASES]


def loss_at(speculator: Speculator, batch: TrainingBatch, index: list[int]) -> Any:
    """Training loss at given anchors."""
    return speculator.loss_at(batch, Anchors.at(batch, torch.tensor([index])))  # type: ignore[operator]


def training_logits(speculator: Speculator, batch: TrainingBatch, index: list[int], monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Logits [N, K, vocabulary] that the training loss compares with the verifier, for N anchors."""
    seen: list[Tensor] = []
    real = objective.distillation_loss

    def capture(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        logits = Speculator.draft_logits(speculator, hidden)  # of the verifier's head, as the loss knows it
        if kwargs["bias_factors"] is not None:
            logits = logits + kwargs["bias_factors"] @ kwargs["bias_head"].T
        seen.append(logits.detach())
        return real(hidden, *args, **kwargs)

    monkeypatch.setattr(objective, "distillation_loss", capture)
    loss_at(speculator, batch, index)
    monkeypatch.undo()
    return seen[0].view(len(index), -1, VOCABULARY)


@pytest.mark.parametrize(("method", "options"), CASES, ids=IDS)
def test_packed_training_offers_the_logits_that_decoding_offers(
    method: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    speculator, batch, index = drafter(method, **options), packed_batch([40]), [5, 9, 20, 33]
    trained = training_logits(speculator, batch, index, monkeypatch)
    for row, anchor in enumerate(index):
        for pieces in ([anchor], [3, anchor - 3], [anchor - 2, 1, 1]):
            decoded = decode_logits(speculator, batch, anchor, 5, pieces)
            torch.testing.assert_close(decoded, trained[row], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(("method", "options"), CASES, ids=IDS)
def test_a_document_packed_behind_others_trains_as_if_alone(method: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    speculator, batch = drafter(method, **options), packed_batch([17, 30, 11])
    part = slice(17, 47)
    fields = {name: getattr(batch, name)[:, part] for name in TrainingBatch.__dataclass_fields__}
    alone = training_logits(speculator, TrainingBatch(**fields), [5, 20], monkeypatch)
    packed = training_logits(speculator, batch, [22, 37], monkeypatch)
    torch.testing.assert_close(packed, alone, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(("method", "options"), CASES, ids=IDS)
def test_block_cannot_see_context_at_or_after_its_anchor(method: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    speculator, batch = drafter(method, **options), packed_batch([40])
    before = training_logits(speculator, batch, [9, 20], monkeypatch)
    hidden = batch.hidden_states.clone()
    hidden[:, 9:] += 1.0
    after = training_logits(speculator, replace(batch, hidden_states=hidden), [9, 20], monkeypatch)
    assert torch.equal(after[0], before[0])
    assert not torch.equal(after[1], before[1])
    hidden = batch.hidden_states.clone()
    hidden[:, 8] += 1.0
    after = training_logits(speculator, replace(batch, hidden_states=hidden), [9, 20], monkeypatch)
    assert not torch.equal(after[0], before[0])


@pytest.mark.parametrize("method", ["eagle3", "peagle", "dflash", "dspark"])
def test_blocks_are_independent_of_each_other(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"training": {"keep_rate": 1.0, "num_depths": 5}} if method == "peagle" else {}
    speculator, batch = drafter(method, **options), packed_batch([40])
    one = training_logits(speculator, batch, [9, 20], monkeypatch)
    other = training_logits(speculator, batch, [9, 31], monkeypatch)
    torch.testing.assert_close(one[0], other[0], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("method", "options"), CASES, ids=IDS)
def test_every_parameter_is_trained(method: str, options: dict[str, Any]) -> None:
    speculator = drafter(method, **options).train()
    batch = packed_batch([40])
    loss_at(speculator, batch, [5, 9, 20, 33]).loss.backward()
    untouched = [name for name, p in speculator.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    # A vanilla head over K = 1 has no untouched part either; the anchor of an rnn head's state is fed back as input.
    assert untouched == []


@pytest.mark.parametrize("method", ["eagle3", "peagle", "dflash", "dspark"])
def test_a_row_without_supervised_tokens_has_loss_zero_and_zero_gradients(method: str) -> None:
    speculator = drafter(method).train()
    batch = packed_batch([40])
    output = speculator.training_loss(replace(batch, loss_mask=torch.zeros_like(batch.loss_mask)))
    output.loss.backward()
    assert output.loss.item() == 0.0
    assert all(p.grad is None or not p.grad.any() for p in speculator.parameters())


VERIFIER_METRICS = {"l1", "acceptance", "greedy_acceptance"}
LABELS_ALONE: dict[str, Any] = {"cross_entropy": 1.0, "l1": 0.0, "kl": 0.0, "labels": "data"}


@pytest.mark.parametrize("weights", ["decay", "dpace"])
@pytest.mark.parametrize("method", ["eagle3", "peagle", "dflash", "dspark"])
def test_leaving_acceptance_out_of_training_changes_no_gradient_and_validation_has_it(method: str, weights: str) -> None:
    found = []
    for measured in (True, False):
        training = {**LABELS_ALONE, "position_weights": weights, "acceptance_in_training": measured}
        options: dict[str, Any] = {"markov_rank": 4, "enable_confidence_head": False} if method == "dspark" else {}
        if method == "peagle":
            training |= {"segments": 2, "num_depths": 5}
        speculator, batch = drafter(method, torch.float64, training=training, **options).train(), packed_batch([40], dtype=torch.float64)
        output = loss_at(speculator, batch, [5, 9, 20, 33])
        output.loss.backward()
        found.append((output.loss.detach(), {name: p.grad for name, p in speculator.named_parameters()}))
        assert VERIFIER_METRICS & output.metrics.keys() == (VERIFIER_METRICS if measured else set())
        with torch.no_grad():
            validated = loss_at(speculator, batch, [5, 9, 20, 33])
        assert validated.metrics.keys() == output.metrics.keys() | VERIFIER_METRICS
        torch.testing.assert_close({name: validated.metrics[name] for name in output.metrics}, output.metrics)
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("method", "training"), [("dflash", {"kl": 0.1}), ("dflash", {"l1": 0.1}), ("dflash", {"labels": "verifier"}), ("dspark", {})]
)
def test_a_loss_that_needs_the_verifier_always_has_its_metrics(method: str, training: dict[str, Any]) -> None:
    """DSpark for the target of its confidence head."""
    speculator = drafter(method, training={**LABELS_ALONE, "acceptance_in_training": False, **training}).train()
    output = loss_at(speculator, packed_batch([40]), [5, 9])
    assert VERIFIER_METRICS <= output.metrics.keys()
    assert ("confidence_error" in output.metrics) == (method == "dspark")


def test_dspark_confidence_loss_sends_no_gradient_into_the_backbone() -> None:
    """C7: no gradient flows from the confidence target or its inputs into the draft logits."""
    options = {"markov_rank": 4, "training": {"cross_entropy": 0.0, "l1": 0.0, "confidence": 1.0}}
    speculator = drafter("dspark", **options).train()
    loss_at(speculator, packed_batch([40]), [5, 9]).loss.backward()
    touched = {name for name, p in speculator.named_parameters() if p.grad is not None and p.grad.any()}
    assert touched == {"confidence_head.proj.weight", "confidence_head.proj.bias"}


def test_dspark_confidence_of_a_slot_ignores_the_token_drawn_there() -> None:
    """Truncation by confidence is lossless only if c_k is known before x_k (DSpark, section 3.2)."""
    speculator, batch = drafter("dspark", markov_rank=4), packed_batch([40])
    hidden = torch.randn(1, HIDDEN)
    one = speculator.confidence_logits(hidden, batch.input_ids[:, 4])  # type: ignore[operator]
    assert torch.equal(one, speculator.confidence_logits(hidden, batch.input_ids[:, 4]))  # type: ignore[operator]
    assert not torch.equal(one, speculator.confidence_logits(hidden, (batch.input_ids[:, 4] + 1) % VOCABULARY))  # type: ignore[operator]


def test_reduced_draft_vocabulary_proposes_only_its_tokens() -> None:
    speculator, batch = drafter("dspark", markov_rank=4, draft_vocab_size=10), packed_batch([40])
    kept = torch.tensor([0, 3, 7, 11, 20, 21, 33, 40, 59, 60])
    speculator.set_draft_vocabulary(kept)
    logits = decode_logits(speculator, batch, 9, 5, [9])
    assert logits.shape == (5, VOCABULARY)
    assert torch.equal(torch.isfinite(logits).nonzero()[:, 1].view(5, -1), kept.expand(5, -1))
    assert torch.equal(speculator.get_buffer("d2t"), kept - torch.arange(10))


def test_a_drafter_without_verifier_says_how_to_attach_one() -> None:
    from speculators.errors import PairingError
    from speculators.registry import get_algorithm

    cls = get_algorithm("dflash").speculator_class
    config = cls.default_config(verifier_weights(), aux_hidden_state_layer_ids=[1, 2], num_draft_tokens=3)
    with pytest.raises(PairingError, match="attach"):
        cls(config).verifier  # noqa: B018


@pytest.mark.parametrize("method", ["eagle3", "peagle", "dflash", "dspark"])
def test_training_settings_are_refused_where_given_wrongly_and_kept_where_stored(method: str) -> None:
    speculator_class, weights = get_algorithm(method).speculator_class, verifier_weights()
    given: dict[str, Any] = {"aux_hidden_state_layer_ids": [1, 2], "mask_token_id": 3}
    for training, said in (
        ({"anchor": 1}, rf"{method} has no option 'training\.anchor'; there it takes .*anchors"),
        ({"anchors": True}, rf"{method} option training\.anchors = True: true and false are no numbers"),
        ({"depth_weights": [1.0, False]}, "true and false are no numbers"),
    ):
        with pytest.raises(ConfigError, match=said):
            speculator_class.default_config(weights, **given, training=training)
    for option in ("num_layers", "num_draft_tokens"):
        with pytest.raises(ConfigError, match=rf"{method} option {option} = True: true and false are no numbers"):
            speculator_class.default_config(weights, **{**given, option: True})

    stored = speculator_class.default_config(weights, **given).model_dump(mode="json")
    stored["training_options"]["of_a_later_version"] = 1
    config = speculator_class.config_class.parse(stored)
    assert config.model_dump(mode="json")["training_options"]["of_a_later_version"] == 1


def test_no_anchor_is_the_first_token_of_a_document() -> None:
    """Nothing precedes it: in decoding it is never drafted from, and the pair before it belongs to another document."""
    for seed in range(10):
        torch.manual_seed(seed)
        drawn = Anchors.sample(packed_batch([9, 7], prompt=0), 16)
        assert sorted(drawn.index[drawn.valid].tolist()) == [*range(1, 8), *range(10, 15)]
