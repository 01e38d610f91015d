"""The training loop: what a step computes, what is counted, what the log says."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_verifier
from tiny_training import DRAFTERS, ROW_LENGTH, packed_rows, tiny_config, without_supervision

from speculators.data.rows import Conversation, PackedRows, pack
from speculators.data.vocabulary import DraftVocabulary, save_vocabulary
from speculators.errors import ConfigError, DataError
from speculators.registry import get_algorithm
from speculators.speculator import Speculator
from speculators.training.batch import LossOutput, TrainingBatch
from speculators.training.build import most_frequent_tokens
from speculators.training.graph import Capture
from speculators.training.meters import Meters, estimated_acceptance_length
from speculators.training.order import EpochOrder
from speculators.training.schedule import Progress, learning_rate_factor
from speculators.training.source import CachedRows, ResidentRows, VerifierSource, hidden_state_source, without_damaged_rows
from speculators.training.trainer import train
from speculators.verifier import Verifier, VerifierOutput


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    return tiny_verifier(seed=3)


def run(verifier: Verifier, rows: Any, **fields: Any) -> tuple[Speculator, list[dict[str, Any]]]:
    """Train; return the speculator and the records of its log."""
    records: list[dict[str, Any]] = []
    held_out = fields.pop("held_out", None)
    return train(verifier, rows, tiny_config(**fields), held_out=held_out, on_record=records.append), records


def assert_same_weights(first: Speculator, second: Speculator, **tolerance: float) -> None:
    torch.testing.assert_close(second.state_dict(), first.state_dict(), **{"rtol": 0.0, "atol": 0.0, **tolerance})


# -- schedule and order --------------------------------------------------------------------------------------------


def test_the_learning_rate_rises_linearly_and_falls_as_a_cosine_to_its_floor() -> None:
    expected = {0.0: 0.0, 0.02: 0.5, 0.04: 1.0, 0.52: 0.55, 1.0: 0.1, 1.7: 0.1}
    for fraction, factor in expected.items():
        assert learning_rate_factor(fraction, warmup=0.04, floor=0.1) == pytest.approx(factor, abs=1e-12)
    quarter = 0.04 + 0.96 / 4
    assert learning_rate_factor(quarter, warmup=0.04, floor=0.0) == pytest.approx((1 + math.sqrt(0.5)) / 2, abs=1e-12)
    assert learning_rate_factor(0.0, warmup=0.0, floor=0.0) == 1.0


def test_a_run_is_as_far_as_its_steps_or_its_clock_whichever_is_further() -> None:
    now = [100.0]
    progress = Progress(total_steps=10, budget_seconds=50.0, clock=lambda: now[0])
    now[0] += 10.0  # setup
    progress.begin(reserve_seconds=8.0)  # leaves 32 seconds for the schedule
    assert progress.fraction(0) == 0.0
    assert progress.fraction(5) == 0.5
    now[0] += 24.0
    assert progress.fraction(5) == 0.75 and not progress.finished(9)
    assert progress.fraction(9) == 0.9 and progress.finished(10)
    now[0] += 8.0
    assert progress.finished(0)


def test_a_resumed_run_spreads_the_rest_of_its_schedule_over_its_own_budget() -> None:
    now = [0.0]
    progress = Progress(None, budget_seconds=10.0, done=0.4, clock=lambda: now[0])
    progress.begin()
    assert progress.fraction(0) == pytest.approx(0.4)
    now[0] = 5.0
    assert progress.fraction(0) == pytest.approx(0.7)


def test_a_time_budget_alone_ends_the_run_inside_it_with_its_whole_schedule_done(verifier: Verifier) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 0.25
        return now[0]

    records: list[dict[str, Any]] = []
    config = tiny_config(steps=None, time_budget_seconds=60.0, warmup=0.1)
    train(verifier, packed_rows(), config, on_record=records.append, clock=clock)
    rates = [record["learning_rate"] / config.learning_rate for record in records]
    assert now[0] <= 60.0 + 5 * 0.25  # the step that the budget runs out in is finished: five looks at the clock
    assert max(rates) > 0.99 and rates[0] < 0.2 and rates[-1] < 0.01
    peak = rates.index(max(rates))
    assert rates[: peak + 1] == sorted(rates[: peak + 1]) and rates[peak:] == sorted(rates[peak:], reverse=True)


def test_every_epoch_visits_every_row_once_in_an_order_of_its_own() -> None:
    order = EpochOrder(num_rows=10, seed=5)
    stream = order.rows(0, 30)
    epochs = stream.view(3, 10)
    assert all(sorted(epoch.tolist()) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == 3
    assert torch.equal(EpochOrder(10, 5).rows(13, 9), stream[13:22])
    assert not torch.equal(EpochOrder(10, 6).rows(0, 30), stream)


def test_epochs_count_whole_steps_only() -> None:
    assert tiny_config(steps=None, epochs=1, rows_per_step=4).total_steps(num_rows=10) == 2
    assert tiny_config(steps=None, epochs=2.5, rows_per_step=5).total_steps(num_rows=10) == 5
    assert tiny_config(steps=7).total_steps(num_rows=10) == 7


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"steps": None}, "give the run a length"),
        ({"epochs": 2}, "give one of them"),
        ({"accumulation": 3}, "accumulation 3 must divide rows_per_step 4"),
        ({"learning_rate": -1}, "learning_rate = -1"),
        ({"lr": 1e-3}, "there is no such field"),
        *(({name: True}, rf"{name} = True: true and false are no numbers") for name in ("steps", "seed", "rows_per_step", "learning_rate")),
        ({"betas": [0.9, True]}, "true and false are no numbers"),
        ({"learning_rate": 1e6}, "learning_rate = 1000000.0: Input should be less than or equal to 100"),
        ({"learning_rate": 0.1, "weight_decay": 10}, r"weight_decay 10.0 times the learning rate 0.1 .* must be below 1"),
        ({"method": "medusa"}, "unknown method 'medusa'"),
        ({"learning_rate_scale": {"markov": 2.0}}, "'markov' is in the name of no trainable parameter"),
        ({"options": {"tap": 9}}, "layer"),
    ],
)
def test_impossible_settings_are_refused_in_one_sentence(verifier: Verifier, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(Exception, match=said) as caught:
        run(verifier, packed_rows(), **fields)
    assert "\n" not in str(caught.value)


# -- what a step computes --------------------------------------------------------------------------------------------


def test_a_run_equals_the_plain_pytorch_loop(verifier: Verifier) -> None:
    rows, config = packed_rows(), tiny_config(steps=8, gradient_clip=0.5, weight_decay=0.1, options={"tap": 2})
    trained, records = run(verifier, rows, steps=8, gradient_clip=0.5, weight_decay=0.1, options={"tap": 2})

    torch.manual_seed(config.seed)
    plain = get_algorithm("toy").speculator_class.from_verifier(verifier.weights, tap=2)
    matrices = [p for p in plain.parameters() if p.ndim == 2]
    vectors = [p for p in plain.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], betas=config.betas)
    source, order = ResidentRows(VerifierSource(verifier, (2,)), rows), EpochOrder(8, config.seed)
    for step in range(8):
        loss = plain.training_loss(source.batch(order.rows(4 * step, 4))).loss
        assert records[step]["loss"] == pytest.approx(loss.item(), rel=1e-5)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        assert records[step]["gradient_norm"] == pytest.approx(norm.item(), rel=1e-4)
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * learning_rate_factor((step + 0.5) / 8, 0.25, 0.0)
        optimizer.step()
    assert max(record["gradient_norm"] for record in records) > 0.5  # clipping did happen
    assert_same_weights(plain, trained, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_cutting_a_step_into_micro_batches_changes_neither_loss_nor_weights(verifier: Verifier, optimizer: str) -> None:
    # Rows with very different numbers of supervised tokens: a mean of means would differ.
    rows = without_supervision(packed_rows(), 0, 3)
    rows.loss_mask[1, :18] = False
    whole, whole_records = run(verifier, rows, optimizer=optimizer)
    cut, cut_records = run(verifier, rows, optimizer=optimizer, accumulation=4)
    for first, second in zip(whole_records, cut_records, strict=True):
        assert second["loss"] == pytest.approx(first["loss"], rel=1e-5)
        assert second["gradient_norm"] == pytest.approx(first["gradient_norm"], rel=1e-4)
        assert second["acceptance"] == pytest.approx(first["acceptance"], rel=1e-4)
        assert second["tokens"] == first["tokens"]
    assert_same_weights(whole, cut, rtol=1e-3, atol=2e-5)


def test_caching_the_hidden_states_changes_nothing(verifier: Verifier) -> None:
    cached, cached_records = run(verifier, packed_rows(7), cache_states=True)
    computed, computed_records = run(verifier, packed_rows(7), cache_states=False)
    assert [record["loss"] for record in cached_records] == pytest.approx([record["loss"] for record in computed_records], rel=1e-6)
    assert_same_weights(cached, computed, rtol=1e-4, atol=1e-6)


def test_states_that_do_not_fit_are_computed_at_every_visit(verifier: Verifier, caplog: pytest.LogCaptureFixture) -> None:
    rows = packed_rows()
    fitting = hidden_state_source(verifier, (1, 2), rows)
    assert isinstance(fitting, CachedRows)
    # 8 rows of 24 tokens, two taps and the last state of 32 float32 numbers each.
    assert CachedRows.bytes_needed(fitting.rows, torch.float32) == 8 * ROW_LENGTH * 3 * 32 * 4
    with caplog.at_level(logging.WARNING, logger="speculators"):
        assert isinstance(hidden_state_source(verifier, (1, 2), rows, memory_fraction=1e-9), ResidentRows)
    assert "computed anew at every visit" in caplog.text


def test_packed_documents_have_the_hidden_states_they_have_alone(verifier: Verifier) -> None:
    rows = packed_rows(1)
    batch = hidden_state_source(verifier, (1, 4), rows).batch(torch.tensor([0]))
    documents = batch.document_ids[0]
    assert documents.max() == 1
    for number in range(2):
        part = documents == number
        ids = batch.input_ids[:, part]
        alone = verifier.encode(ids, torch.arange(ids.shape[1])[None], torch.zeros_like(ids), (1, 4))
        torch.testing.assert_close(batch.hidden_states[:, part], alone.hidden_states, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(batch.last_hidden_state[:, part], alone.last_hidden_state, rtol=1e-4, atol=1e-5)


def test_the_verifier_and_the_callers_random_numbers_stay_as_they_were(verifier: Verifier) -> None:
    before = {name: value.clone() for name, value in verifier.model.state_dict().items()}
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    run(verifier, packed_rows(), steps=2)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(value, before[name]) for name, value in verifier.model.state_dict().items())


@pytest.mark.parametrize("method", list(DRAFTERS))
def test_every_kind_of_drafter_trains_beside_a_bfloat16_verifier(method: str) -> None:
    verifier = tiny_verifier(seed=3, dtype=torch.bfloat16)
    speculator, records = run(verifier, packed_rows(), method=method, options=DRAFTERS[method], steps=4)
    assert all(math.isfinite(record["loss"]) and record["skipped_steps"] == 0 for record in records)
    assert next(speculator.parameters()).dtype == torch.bfloat16  # ready to decode beside it


def test_float32_precision_beside_a_bfloat16_verifier_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs a float32 verifier.*dtype=torch\.float32"):
        run(tiny_verifier(dtype=torch.bfloat16), packed_rows(), precision="float32")


# -- batches without supervision, damaged rows -----------------------------------------------------------------------


@pytest.mark.parametrize("method", list(DRAFTERS))
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_batch_without_supervised_tokens_changes_nothing_and_is_counted(
    verifier: Verifier, method: str, optimizer: str, caplog: pytest.LogCaptureFixture
) -> None:
    # Of the four steps of an epoch only the first has labels; with a constant learning rate it alone is a run of one step.
    rows = packed_rows(16)
    later = EpochOrder(16, seed=0).rows(4, 12).tolist()
    settings = {"method": method, "options": DRAFTERS[method], "optimizer": optimizer, "weight_decay": 0.1}
    settings |= {"warmup": 0.0, "learning_rate_floor": 1.0}
    expected, _ = run(verifier, rows, steps=1, **settings)
    with caplog.at_level(logging.WARNING, logger="speculators"):
        trained, records = run(verifier, without_supervision(rows, *later), steps=4, log_every=2, **settings)
    assert_same_weights(expected, trained)
    assert [(record["skipped_steps"], record["empty_batches"]) for record in records] == [(1, 1), (2, 2)]
    assert caplog.text.count("no step since the last record changed a weight, up to step 4") == 1
    assert caplog.text.count("no step since") == 1

    fresh, rows = get_algorithm(method).speculator_class.from_verifier(verifier.weights, **DRAFTERS[method]), without_supervision(rows)
    batch = hidden_state_source(verifier, fresh.aux_hidden_state_layer_ids, rows).batch(torch.arange(4))
    loss = fresh.training_loss(batch).loss
    loss.backward()
    assert loss.item() == 0.0
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in fresh.parameters())


def lonely_labels(rows: PackedRows) -> PackedRows:
    """The same rows, every other label taken away: none stands behind another one."""
    return replace(rows, loss_mask=rows.loss_mask & (rows.position_ids % 2 == 0))


@pytest.mark.parametrize("method", list(DRAFTERS))
def test_rows_from_which_nothing_can_be_learned_are_refused(verifier: Verifier, method: str, tmp_path: Path) -> None:
    rows, nothing = packed_rows(), lonely_labels(packed_rows())
    assert nothing.reply_tokens > 0 and nothing.learnable_tokens == 0
    settings = {"method": method, "options": DRAFTERS[method], "output": tmp_path / "run"}
    for training, held_out, said in (
        (nothing, None, r"nothing can be learned from the training rows \(8 of 24 tokens\).*longer replies"),
        (without_supervision(rows), None, "the training rows"),
        (rows, nothing, r"nothing can be learned from the held-out rows.*hold more of the conversations out, or none"),
    ):
        with pytest.raises(DataError, match=said):
            train(verifier, training, tiny_config(**settings), held_out=held_out)
    assert not (tmp_path / "run").exists()


def test_learnable_are_the_labels_behind_another_one_but_for_that_of_a_documents_second_token() -> None:
    def rows(*documents: str) -> PackedRows:
        return pack([Conversation([5] * len(each), [place == "x" for place in each]) for each in documents], row_length=8)

    assert rows("...xxxx.").learnable_tokens == 3
    assert rows(".x.x.x.x").learnable_tokens == 0
    assert rows("xx......").learnable_tokens == 0, "no context in front of the first of them"
    assert rows("xxx.....").learnable_tokens == 1
    assert rows("...x", "x...").learnable_tokens == 0, "labels of two documents"


def test_a_run_in_which_no_step_learned_ends_without_a_drafter(verifier: Verifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = get_algorithm("toy").speculator_class
    real = toy.training_loss

    def explode(self: Speculator, batch: TrainingBatch) -> LossOutput:
        output = real(self, batch)
        return replace(output, loss=output.loss * float("inf")) if torch.is_grad_enabled() else output

    monkeypatch.setattr(toy, "training_loss", explode)
    with pytest.raises(DataError, match=r"none of the 6 steps of this run changed a weight: .*lower learning_rate, or check the data"):
        train(verifier, packed_rows(), tiny_config(output=tmp_path / "run"), held_out=packed_rows(4, seed=9))
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_run_whose_weights_diverged_says_so_instead_of_saving_them(
    verifier: Verifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = get_algorithm("toy").speculator_class
    real = toy.training_loss
    steps = []

    def diverge(self: Speculator, batch: TrainingBatch) -> LossOutput:
        steps.append(torch.is_grad_enabled())
        output = real(self, batch)
        return replace(output, loss=output.loss * float("nan")) if any(steps) and not steps[-1] else output

    monkeypatch.setattr(toy, "training_loss", diverge)
    config = tiny_config(output=tmp_path / "run", evaluate_every=2, best_by="loss")
    with pytest.raises(DataError, match="the evaluation after step 2 has no finite loss: the weights have diverged"):
        train(verifier, packed_rows(), config, held_out=packed_rows(4, seed=9))
    assert not (tmp_path / "run" / "latest").exists()


def test_settings_that_wait_for_evaluations_need_held_out_rows(verifier: Verifier, caplog: pytest.LogCaptureFixture) -> None:
    for fields in ({"best_by": "loss"}, {"patience": 1, "evaluate_every": 1}):
        with pytest.raises(ConfigError, match=f"{next(iter(fields))} = .* needs evaluations, and there are no held-out rows"):
            run(verifier, packed_rows(), **fields)
    run(verifier, packed_rows(), evaluate_every=2, steps=1)
    assert "evaluate_every = 2 has no effect: there are no held-out rows" in caplog.text


def encode_with_damage(verifier: Verifier, damaged_row: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the verifier returns a NaN in the row that holds these tokens."""
    real = verifier.encode

    def encode(input_ids: torch.Tensor, *args: Any) -> VerifierOutput:
        output = real(input_ids, *args)
        hit = (input_ids == damaged_row).all(dim=1)
        hidden = output.hidden_states.clone()
        hidden[hit, 5, 0] = float("nan")
        return replace(output, hidden_states=hidden)

    monkeypatch.setattr(verifier, "encode", encode)


def test_a_row_with_damaged_hidden_states_trains_as_if_it_were_not_supervised(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    verifier, rows = tiny_verifier(seed=3), packed_rows(20)
    expected, _ = run(verifier, without_supervision(rows, 7), rows_per_step=5, steps=8)
    encode_with_damage(verifier, rows.input_ids[7], monkeypatch)
    with caplog.at_level(logging.WARNING, logger="speculators"):
        trained, records = run(verifier, rows, rows_per_step=5, steps=8, log_every=4)
    assert [record["damaged_rows"] for record in records] == [1, 1]  # an epoch is four steps
    assert "skipped 1 training rows" in caplog.text
    assert_same_weights(expected, trained, rtol=1e-5, atol=1e-7)


def test_too_many_damaged_rows_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier, rows = tiny_verifier(seed=3), packed_rows(4)
    encode_with_damage(verifier, rows.input_ids[1], monkeypatch)
    with pytest.raises(DataError, match=r"1 of the last 4 training rows .* max_damaged_fraction = 0.05"):
        run(verifier, rows)


def test_what_the_verifier_computes_on_padding_never_matters(verifier: Verifier) -> None:
    batch = ResidentRows(VerifierSource(verifier, (1,)), packed_rows(2)).batch(torch.tensor([0, 1]))
    padding = batch.document_ids < 0
    assert padding.any()
    poisoned = replace(batch, hidden_states=batch.hidden_states.masked_fill(padding[..., None], float("nan")))
    cleaned, damaged = without_damaged_rows(poisoned)
    assert not damaged.any() and cleaned.hidden_states.isfinite().all()
    assert torch.equal(cleaned.hidden_states[~padding], batch.hidden_states[~padding])
    assert torch.equal(cleaned.loss_mask, batch.loss_mask)


def test_a_step_whose_gradient_is_not_finite_is_skipped_and_counted(verifier: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = get_algorithm("toy").speculator_class
    real = toy.training_loss
    calls = []

    def explode_once(self: Speculator, batch: TrainingBatch) -> LossOutput:
        calls.append(1)
        output = real(self, batch)
        return replace(output, loss=output.loss * float("inf")) if len(calls) == 3 else output

    monkeypatch.setattr(toy, "training_loss", explode_once)
    trained, records = run(verifier, packed_rows())
    assert [record["skipped_steps"] for record in records] == [0, 0, 1, 0, 0, 0]
    assert records[2]["loss"] is None and records[2]["gradient_norm"] is None
    assert all(value.isfinite().all() for value in trained.state_dict().values())


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_ratios_are_formed_after_summing() -> None:
    meters = Meters()
    meters.add("loss", torch.tensor(3.0), torch.tensor(1.0))
    meters.add("loss", torch.tensor(1.0), torch.tensor(3.0))
    meters.add("acceptance", torch.tensor([1.0, 0.0, 0.0]), torch.tensor([2, 1, 0]))
    meters.add("rows", torch.tensor(4))
    assert meters.read() == {"loss": 1.0, "acceptance": [0.5, 0.0, None], "rows": 4.0}
    assert meters.read() == {"loss": None, "acceptance": [None, None, None], "rows": 0.0}


def test_acceptance_length_is_one_plus_the_products_of_conditional_acceptances() -> None:
    assert estimated_acceptance_length([0.8, 0.5, 0.25]) == pytest.approx(1 + 0.8 + 0.4 + 0.1)
    assert estimated_acceptance_length([0.5, None]) == pytest.approx(1.5)
    assert estimated_acceptance_length(None) is estimated_acceptance_length([None, 0.5]) is None
    assert estimated_acceptance_length([0.5, None, 0.5]) is None  # a slot whose loss weighs nothing; taken for 0 it would say 1.5


def test_the_log_names_the_kind_of_every_number_and_has_it_by_position(verifier: Verifier, tmp_path: Path) -> None:
    rows, held_out = packed_rows(), packed_rows(3, seed=9)
    _, records = run(verifier, rows, held_out=held_out, output=tmp_path / "run", log_every=2, evaluate_every=4, accumulation=2)
    assert [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()] == records
    kinds = [(record["kind"], record["step"]) for record in records]
    evaluations = [("teacher-forced", 0), ("teacher-forced", 4), ("teacher-forced", 6)]
    assert kinds == [evaluations[0], ("train", 2), ("train", 4), evaluations[1], ("train", 6), evaluations[2]]
    for record in records:
        assert len(record["acceptance"]) == len(record["greedy_acceptance"]) == 3
        assert record["acceptance_length"] == pytest.approx(estimated_acceptance_length(record["acceptance"]))
    # The held-out numbers are those of all three rows, however they are cut into batches of two.
    torch.manual_seed(0)
    fresh = get_algorithm("toy").speculator_class.from_verifier(verifier.weights)
    loss = fresh.training_loss(hidden_state_source(verifier, (1,), held_out).batch(torch.arange(3))).loss
    assert records[0]["loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_a_run_without_acceptance_in_training_learns_the_same_and_evaluates_it(verifier: Verifier) -> None:
    runs = []
    for measured in (True, False):
        options = {**DRAFTERS["dflash"], "training": {"anchors": 4, "acceptance_in_training": measured}}
        runs.append(run(verifier, packed_rows(), held_out=packed_rows(3, seed=9), evaluate_every=3, method="dflash", options=options))
    (expected, asked), (speculator, records) = runs
    assert_same_weights(expected, speculator, rtol=1e-5, atol=1e-6)
    assert [record["kind"] for record in records] == [record["kind"] for record in asked]
    of_verifier = {"l1", "acceptance", "greedy_acceptance", "acceptance_length", "greedy_acceptance_length"}
    for record, full in zip(records, asked, strict=True):
        assert record.keys() == (full.keys() - of_verifier if record["kind"] == "train" else full.keys())
        assert record["loss"] == pytest.approx(full["loss"], rel=1e-5)
        assert record["cross_entropy"] == pytest.approx(full["cross_entropy"], rel=1e-5)
    lengths = [record["acceptance_length"] for record in records if record["kind"] == "teacher-forced"]
    assert lengths == pytest.approx([full["acceptance_length"] for full in asked if full["kind"] == "teacher-forced"], rel=1e-4)


def test_evaluating_does_not_change_the_run_and_draws_the_same_anchors_every_time(verifier: Verifier) -> None:
    settings = {"method": "dflash", "options": DRAFTERS["dflash"]}
    rows, held_out = packed_rows(), packed_rows(3, seed=9)
    alone, _ = run(verifier, rows, **settings)
    evaluated, _ = run(verifier, rows, held_out=held_out, evaluate_every=1, **settings)
    assert_same_weights(alone, evaluated)
    _, still = run(verifier, rows, held_out=held_out, evaluate_every=1, learning_rate=1e-30, **settings)
    losses = {record["loss"] for record in still if record["kind"] == "teacher-forced"}
    assert len(losses) == 1


def test_a_reduced_draft_vocabulary_takes_the_most_frequent_reply_tokens_and_fills_up_with_unused_ones(verifier: Verifier) -> None:
    rows = packed_rows(1)
    rows.input_ids[0, :10] = torch.tensor([1, 1, 1, 40, 41, 40, 41, 40, 42, 43])
    rows.loss_mask[:] = False
    rows.loss_mask[0, 3:10] = True
    assert most_frequent_tokens(rows, 2, 64).tolist() == [40, 41]
    assert most_frequent_tokens(rows, 6, 64).tolist() == [0, 1, 40, 41, 42, 43]
    options = {**DRAFTERS["dflash"], "draft_vocab_size": 16}
    speculator, records = run(verifier, packed_rows(), method="dflash", options=options, steps=2)
    assert torch.equal(speculator.draft_token_ids(), most_frequent_tokens(packed_rows(), 16, 64))
    assert all(record["skipped_steps"] == 0 for record in records)


def test_a_saved_draft_vocabulary_is_the_drafters_and_one_that_does_not_fit_is_refused(verifier: Verifier, tmp_path: Path) -> None:
    tokens = torch.tensor([0, 5, 9, 63])  # not the most frequent ones
    path = save_vocabulary(tmp_path, "key", DraftVocabulary(tokens, 64, 0.5))
    settings = {"method": "dflash", "options": DRAFTERS["dflash"], "steps": 1, "draft_vocabulary": path}
    speculator, _ = run(verifier, packed_rows(), **settings)
    assert torch.equal(speculator.draft_token_ids(), tokens)

    def refused(words: str, **changes: Any) -> None:
        with pytest.raises((ConfigError, DataError), match=words):
            run(verifier, packed_rows(), **{**settings, **changes})

    refused("draft_vocab_size = 8, but .* holds 4 tokens", options={**DRAFTERS["dflash"], "draft_vocab_size": 8})
    refused("there is no draft vocabulary", draft_vocabulary=tmp_path / "none.safetensors")
    other = save_vocabulary(tmp_path, "other", DraftVocabulary(tokens, 128, 0.5))
    refused("is for a verifier of 128 tokens, .* has 64", draft_vocabulary=other)
    with pytest.raises(ConfigError, match="brings its draft vocabulary along"):
        train(verifier, packed_rows(), tiny_config(**settings), init_from=speculator)


def test_on_the_cpu_nothing_is_captured() -> None:
    calls = []
    function = Capture(torch.device("cpu"))(lambda: calls.append(1))
    assert calls == []
    function()
    assert calls == [1]


@pytest.mark.parametrize("weights", [[0.0, 1.0, 1.0], [1.0, 0.0, 1.0]])
def test_a_slot_whose_loss_weighs_nothing_is_no_mismatch(verifier: Verifier, weights: list[float]) -> None:
    acceptances = []
    for chosen in (weights, [1.0, 1.0, 1.0]):
        training = {"anchors": 4, "depth_weights": chosen}
        options = {**DRAFTERS["dspark"], "training": training}
        _, records = run(verifier, packed_rows(), method="dspark", options=options, steps=1, learning_rate=1e-30)
        acceptances.append(records[0]["acceptance"])
    ignored, counted = acceptances
    for place, weight in enumerate(weights):
        if weight:
            assert ignored[place] == pytest.approx(counted[place], rel=1e-5)
        else:
            assert ignored[place] is None  # unknown, which is not zero
