"""Evaluation: metric definitions on exact values, identity and near ties, rows, runs on disk, and the result tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_verifier
from toy_drafters import BlockTable, Constant, Oracle

from speculators.decoding import statistics
from speculators.decoding.engine import generate
from speculators.decoding.sampling import SamplingParams
from speculators.decoding.statistics import Round
from speculators.errors import ConfigError, DataError
from speculators.evaluation import metrics
from speculators.evaluation.evaluate import EvaluationSettings, PromptSet, compare, evaluate, top_two_gap
from speculators.evaluation.report import below_prompt_lookup, remarks
from speculators.evaluation.results import document, load_folder
from speculators.evaluation.rows import Row, row_of
from speculators.evaluation.runs import Run, from_json, load_runs, save_runs, to_json
from speculators.verifier import Verifier

# C15: g = 3; in the fourth round the second draft is an accepted stop token, so 2 of 2 count and there is no bonus.
C15_ROUNDS = [Round(3, 2, 3), Round(3, 0, 1), Round(3, 3, 4), Round(2, 2, 2)]
ROW_KEYS = [
    *("method", "checkpoint", "prompts", "k", "temperature", "acceptance_length", "acceptance_by_position"),
    *("conditional_acceptance_by_position", "tokens_per_second", "baseline_tokens_per_second", "speedup"),
    *("token_identical", "near_ties", "degenerate_prompts", "parameters", "kind"),
]


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    return tiny_verifier()


@pytest.fixture(scope="module")
def prompts() -> PromptSet:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 60, (length,), generator=generator).tolist() for length in (5, 9, 3)]
    return PromptSet("toy", ("toy/0", "toy/1", "toy/2"), tuple(map(tuple, rows)))


def a_run(**changes: object) -> Run:
    run = Run(
        verifier="a verifier",
        method="dspark",
        checkpoint="checkpoints/dspark",
        parameters=10_000_000,
        prompts="gsm8k",
        prompt_ids=("a", "b", "c"),
        k=3,
        temperature=0.0,
        confidence_threshold=0.0,
        seed=0,
        max_new_tokens=128,
        batch_size=1,
        dtype="float32",
        device="a machine",
        rounds=(tuple(C15_ROUNDS), (Round(3, 1, 2),), ()),
        degenerate=(False, True, False),
        identical=(True, True, True),
        near_tie=(True, False, False),
        batch_seconds=(2.0, 1.0, 0.5),
    )
    return replace(run, **changes)  # type: ignore[arg-type]


# -- metrics -----------------------------------------------------------------------------------------------------


def test_tau_is_one_plus_the_sum_of_products_of_conditional_acceptances() -> None:
    conditional = (0.905, 0.890, 0.888, 0.885, 0.887, 0.891, 0.882)
    assert metrics.acceptance_length_from_conditional(conditional) == pytest.approx(5.562, abs=5e-4)


def test_acceptance_length_equals_tau_of_its_conditional_acceptances_without_stops() -> None:
    accepted = torch.randint(0, 8, (500,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [[Round(7, a, a + 1) for a in accepted[:200]], [Round(7, a, a + 1) for a in accepted[200:]]]
    conditional = metrics.conditional_acceptance_by_position(rows, 7)
    survival = metrics.acceptance_by_position(rows, 7)
    length = metrics.acceptance_length(rows)
    assert length == pytest.approx(metrics.acceptance_length_from_conditional([c for c in conditional if c is not None]), abs=1e-12)
    assert length == pytest.approx(1 + sum(s for s in survival if s is not None), abs=1e-12)


def test_metrics_of_c15_rounds_with_an_accepted_stop() -> None:
    rows = [C15_ROUNDS]
    assert metrics.acceptance_length(rows) == 2.5
    assert statistics.mean_proposed(C15_ROUNDS) == 2.75
    assert metrics.verification_rate(rows) == pytest.approx(10 / 15)
    assert statistics.proposed_by_position(C15_ROUNDS) == [4, 4, 3]
    assert statistics.accepted_by_position(C15_ROUNDS) == [3, 3, 1]
    assert metrics.acceptance_by_position(rows, 3) == pytest.approx([3 / 4, 3 / 4, 1 / 3])
    # Draft 3 was proposed and reached in rounds 1 and 3 only; the stop round never proposed it.
    assert metrics.conditional_acceptance_by_position(rows, 3) == pytest.approx([3 / 4, 1.0, 1 / 2])


def test_micro_average_weighs_rounds_and_macro_average_weighs_rows() -> None:
    rows = [C15_ROUNDS[:1], C15_ROUNDS[1:], []]
    assert metrics.acceptance_length(rows) == 2.5
    assert metrics.macro_acceptance_length(rows) == pytest.approx(8 / 3)


def test_z_lab_counts_a_bonus_after_an_accepted_stop_and_we_do_not() -> None:
    with_bonus = [*C15_ROUNDS[1:3], Round(2, 2, 3)]
    assert metrics.macro_acceptance_length([C15_ROUNDS[:1], with_bonus]) == pytest.approx(17 / 6)
    assert metrics.macro_acceptance_length([C15_ROUNDS[:1], C15_ROUNDS[1:]]) == pytest.approx(16 / 6)


def test_what_was_never_measured_is_none_not_zero() -> None:
    assert metrics.acceptance_length([[], []]) is None
    assert metrics.acceptance_by_position([[Round(1, 0, 1)]], 3) == [0.0, None, None]
    assert metrics.conditional_acceptance_by_position([[Round(2, 0, 1)]], 2) == [0.0, None]


def test_first_divergence_finds_the_first_other_token_or_the_shorter_end() -> None:
    assert metrics.first_divergence([1, 2, 3], [1, 2, 3]) is None
    assert metrics.first_divergence([1, 9, 3], [1, 2, 3]) == 1
    assert metrics.first_divergence([1, 2], [1, 2, 3]) == 2


def test_more_than_a_fifth_repeated_8_grams_is_a_loop() -> None:
    assert metrics.repeated_ngram_fraction(range(128)) == 0.0
    assert metrics.repeated_ngram_fraction([1, 2, 3, 4] * 32) == pytest.approx(1 - 4 / 121)
    assert metrics.repeated_ngram_fraction([5] * 7) == 0.0
    # 40 different tokens, then the first n + 7 again: n of the 40 + n 8-grams repeat (those over the seam are new).
    assert not metrics.is_degenerate([*range(40), *range(7 + 10)]), "10 of 50 is exactly a fifth"
    assert metrics.is_degenerate([*range(40), *range(7 + 11)])


# -- identity ----------------------------------------------------------------------------------------------------


def test_a_divergence_is_a_near_tie_only_below_the_gap(verifier: Verifier, prompts: PromptSet, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = generate(verifier, None, prompts.token_ids, SamplingParams(max_new_tokens=8, ignore_eos=True)).token_ids
    changed = [plain[0], [*plain[1][:4], (plain[1][4] + 1) % 64, *plain[1][5:]], plain[2][:-1]]
    assert compare(verifier, prompts, changed, plain) == [(True, False), (False, False), (False, False)]
    seen: list[list[int]] = []

    def tied(verifier: Verifier, prefix: list[int]) -> float:
        seen.append(list(prefix))
        return 1.9e-4

    monkeypatch.setattr("speculators.evaluation.evaluate.top_two_gap", tied)
    # A reply that merely ends early stays a difference whatever the logits say.
    assert compare(verifier, prompts, changed, plain) == [(True, False), (True, True), (False, False)]
    assert seen == [[*prompts.token_ids[1], *plain[1][:4]]], "the gap is read after the prefix both outputs share"


def test_top_two_gap_is_that_of_the_model_itself(verifier: Verifier, prompts: PromptSet) -> None:
    with torch.no_grad():
        logits = verifier.model(torch.tensor([prompts.token_ids[1]])).logits[0, -1]
    first, second = logits.topk(2).values.tolist()
    assert top_two_gap(verifier, prompts.token_ids[1]) == pytest.approx(first - second, abs=1e-5)


# -- evaluate ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 2])
def test_an_oracle_is_identical_and_accepts_everything(verifier: Verifier, prompts: PromptSet, batch_size: int) -> None:
    settings = EvaluationSettings(max_new_tokens=13, num_draft_tokens=3, batch_size=batch_size)
    # Batches need their own oracle, since it knows rows by index; a batch of 1 takes only the first prompt.
    some = replace(prompts, ids=prompts.ids[:batch_size], token_ids=prompts.token_ids[:batch_size])
    replies = generate(verifier, None, some.token_ids, SamplingParams(max_new_tokens=13)).token_ids
    evaluation = evaluate(verifier, {"oracle": Oracle(some.token_ids, replies, 64)}, some, settings)
    row = evaluation.rows[1]
    assert list(row) == ROW_KEYS
    assert (row["method"], row["prompts"], row["k"], row["kind"]) == ("oracle", "toy, all prompts, 13 tokens", 3, "decode")
    assert row["acceptance_by_position"] == [1.0, 1.0, 1.0]
    assert row["acceptance_length"] == 4.0
    assert row["token_identical"] is True and row["near_ties"] == 0
    assert row["speedup"] == pytest.approx(row["tokens_per_second"] / row["baseline_tokens_per_second"])  # type: ignore[operator]


def test_a_hopeless_drafter_is_identical_with_acceptance_length_one(verifier: Verifier, prompts: PromptSet) -> None:
    replies = generate(verifier, None, prompts.token_ids, SamplingParams(max_new_tokens=10)).token_ids
    absent = next(token for token in range(64) if all(token not in reply for reply in replies))
    rows = evaluate(verifier, {"constant": Constant(absent)}, prompts, EvaluationSettings(max_new_tokens=10, num_draft_tokens=2)).rows
    assert rows[1]["acceptance_length"] == 1.0
    assert rows[1]["acceptance_by_position"] == [0.0, 0.0]
    assert rows[1]["conditional_acceptance_by_position"] == [0.0, None]
    assert rows[1]["token_identical"] is True


def test_every_table_has_prompt_lookup_and_two_rows_a_method_and_set(verifier: Verifier, prompts: PromptSet) -> None:
    other = replace(prompts, name="other")
    rows = evaluate(verifier, {"plain": None}, [prompts, other], EvaluationSettings(max_new_tokens=6)).rows
    labels = [(row["method"], row["prompts"]) for row in rows]
    assert labels == [
        (method, f"{name}{suffix}, 6 tokens")
        for name in ("toy", "other")
        for method in ("plain", "prompt_lookup")
        for suffix in ("", ", all prompts")
    ]
    plain = rows[1]
    assert plain["acceptance_length"] == 1.0 and plain["acceptance_by_position"] == [] and plain["speedup"] == 1.0


def test_identity_is_not_claimed_when_sampling(verifier: Verifier, prompts: PromptSet) -> None:
    settings = EvaluationSettings(max_new_tokens=8, temperature=1.0, num_draft_tokens=3)
    evaluation = evaluate(verifier, {"table": BlockTable(64)}, prompts, settings)
    assert all(row["token_identical"] is None and row["near_ties"] is None for row in evaluation.rows)
    assert {run.method for run in evaluation.runs} == {"plain", "table", "prompt_lookup"}


def test_sampled_prompts_of_different_batches_draw_different_numbers(verifier: Verifier, prompts: PromptSet) -> None:
    same = replace(prompts, token_ids=(prompts.token_ids[0],) * 3)
    runs = evaluate(verifier, {}, same, EvaluationSettings(max_new_tokens=24, temperature=1.0)).runs
    lookup = next(run for run in runs if run.method == "prompt_lookup")
    assert len(set(lookup.rounds)) > 1


def test_a_confidence_threshold_cuts_blocks_but_not_those_of_prompt_lookup(verifier: Verifier, prompts: PromptSet) -> None:
    settings = EvaluationSettings(max_new_tokens=12, num_draft_tokens=4, confidence_threshold=0.5)
    runs = evaluate(verifier, {"table": BlockTable(64, confidence=(0.9, 0.6, 0.4, 0.9))}, prompts, settings).runs
    table, lookup = (next(run for run in runs if run.method == method) for method in ("table", "prompt_lookup"))
    assert {a_round.proposed for row in table.rounds for a_round in row} <= {0, 1, 2}
    assert table.confidence_threshold == 0.5 and lookup.confidence_threshold == 0.0


def test_k_above_the_block_is_refused_before_anything_is_decoded(verifier: Verifier, prompts: PromptSet) -> None:
    said: list[str] = []
    with pytest.raises(ConfigError, match="k 17 exceeds the 16 tokens table proposes in one block"):
        evaluate(verifier, {"table": BlockTable(64)}, prompts, EvaluationSettings(num_draft_tokens=17), on_progress=said.append)
    assert said == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 1),
        ("batch_size", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("num_draft_tokens", 0),
        ("num_draft_tokens", 36),
        ("confidence_threshold", 1.5),
        ("confidence_threshold", float("nan")),
    ],
)
def test_settings_out_of_range_are_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=str(value)):
        EvaluationSettings(**{field: value})  # type: ignore[arg-type]


def test_an_empty_prompt_set_is_refused(verifier: Verifier) -> None:
    with pytest.raises(DataError, match="at least one prompt"):
        evaluate(verifier, {}, PromptSet("empty", (), ()))
    with pytest.raises(DataError, match="'empty' is empty"):
        PromptSet.from_prompts(verifier, "empty", [])


def test_looping_prompts_are_left_out_counted_and_kept_in_the_second_row(
    verifier: Verifier, prompts: PromptSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    looping = generate(verifier, None, prompts.token_ids, SamplingParams(max_new_tokens=40)).token_ids[1]
    monkeypatch.setattr("speculators.evaluation.evaluate.is_degenerate", lambda token_ids: token_ids == looping)
    # Sampled, so that the judged output (plain greedy decoding) is not the one that is measured.
    settings = EvaluationSettings(max_new_tokens=40, num_draft_tokens=3, temperature=1.0)
    evaluation = evaluate(verifier, {"table": BlockTable(64)}, prompts, settings)
    run = next(run for run in evaluation.runs if run.method == "table")
    assert run.degenerate == (False, True, False)
    without, with_loops = (row for row in evaluation.rows if row["method"] == "table")
    assert without["acceptance_length"] == metrics.acceptance_length([run.rounds[0], run.rounds[2]])
    assert with_loops["acceptance_length"] == metrics.acceptance_length(run.rounds)
    assert without["degenerate_prompts"] == with_loops["degenerate_prompts"] == 1


# -- rows and runs -----------------------------------------------------------------------------------------------


def test_speed_is_that_of_the_rows_shown_when_decoded_one_by_one() -> None:
    run, plain = (
        a_run(),
        a_run(method="plain", k=0, rounds=((Round(0, 0, 1),) * 10, (Round(0, 0, 1),) * 2, ()), batch_seconds=(5.0, 1.0, 0.5)),
    )
    row = row_of(run, plain, exclude_degenerate=True)
    assert row["tokens_per_second"] == pytest.approx(10 / 2.5)
    assert row["baseline_tokens_per_second"] == pytest.approx(10 / 5.5)
    assert row["speedup"] == pytest.approx(2.2)
    assert (row["token_identical"], row["near_ties"], row["degenerate_prompts"]) == (True, 1, 1)
    assert row_of(run, plain, exclude_degenerate=False)["tokens_per_second"] == pytest.approx(12 / 3.5)


def test_runs_survive_their_compact_form(tmp_path: Path) -> None:
    runs = [
        a_run(),
        a_run(k=7, temperature=1.0, identical=None, near_tie=None, batch_seconds=None),
        a_run(method="plain", k=0, rounds=((), (), ())),
    ]
    assert [from_json(to_json(run)) for run in runs] == runs
    save_runs(runs, tmp_path / "runs.json")
    assert load_runs(tmp_path / "runs.json") == runs
    assert to_json(a_run())["accepted"] == ["2032", "1", ""]
    assert to_json(a_run())["proposed"] == ["2", "", ""], "leading rounds that proposed K are not stored"


def test_a_damaged_or_missing_runs_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        load_runs(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text('{"runs": [{"method": "x"}]}')
    with pytest.raises(DataError, match="does not hold evaluation runs"):
        load_runs(tmp_path / "bad.json")


def test_real_runs_survive_their_compact_form(verifier: Verifier, prompts: PromptSet) -> None:
    evaluation = evaluate(verifier, {"table": BlockTable(64)}, prompts, EvaluationSettings(max_new_tokens=20, num_draft_tokens=5))
    for run in evaluation.runs:
        assert from_json(to_json(run)).rounds == run.rounds


# -- reports -----------------------------------------------------------------------------------------------------


def lookup_of(run: Run, accepted: int) -> Run:
    return replace(run, method="prompt_lookup", checkpoint=None, parameters=0, rounds=((Round(3, accepted, accepted + 1),), (), ()))


def test_a_drafter_that_does_not_beat_prompt_lookup_is_reported_as_failing() -> None:
    rows: list[Row] = [row_of(run, None, exclude_degenerate=False) for run in (a_run(), lookup_of(a_run(), 2))]
    assert [row["method"] for row in below_prompt_lookup(rows)] == ["dspark"]
    assert any("dspark does not beat prompt lookup on gsm8k, all prompts" in sentence for sentence in remarks(rows))
    rows[1] = row_of(lookup_of(a_run(), 0), None, exclude_degenerate=False)
    assert below_prompt_lookup(rows) == []


def test_the_result_document_compares_methods_and_counts_what_was_left_out() -> None:
    def with_length(method: str, accepted: int, **changes: object) -> Run:
        return a_run(method=method, rounds=((Round(3, accepted, accepted + 1),), (Round(3, 3, 4),), ()), batch_seconds=None, **changes)

    runs = []
    for temperature in (0.0, 1.0):
        changes = {"temperature": temperature} | ({"identical": None, "near_tie": None} if temperature else {})
        for method, accepted in (("dspark", 2), ("dflash", 1), ("peagle", 1), ("eagle3", 0)):
            runs += [with_length(method, accepted, **changes), with_length(method, accepted, prompts="math500", **changes)]
        runs += [replace(lookup_of(run, 1), prompts=run.prompts) for run in runs[-8:-6]]
    text = document(runs)
    assert "| dspark against dflash | 0 | 3 | 3.00 | 2.00 | +50.0% |" in text
    assert "| peagle against eagle3 | 1 | 3 | 2.00 | 1.00 | +100.0% |" in text
    assert "| gsm8k | 3 | 1 |" in text, "three prompts, one of them looping"
    assert "| dspark | 3 | 3.00 | 3.00 | 3.00 |" in text and "| dflash | 3 | 2.00 * | 2.00 * | 2.00 |" in text
    assert "| dspark | 3 | 6 | 6 | 2 |" in text, "identity: six outputs, all identical, two near ties"
    assert "Sampled, T = 1" in text
    assert document(runs, "## Notes\n\nBy hand.\n").endswith("## Notes\n\nBy hand.\n")


def test_a_folder_without_runs_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no runs in"):
        load_folder(tmp_path)
