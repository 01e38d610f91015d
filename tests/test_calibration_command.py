"""Collecting rounds, and `speculators calibrate` from prompts to temperatures that decoding uses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_cli import refused, run, save_chat_model, succeed
from tiny_models import tiny_verifier
from toy_drafters import BlockTable, Oracle, RandomTokens, SequentialTable

from speculators.checkpoint import load
from speculators.data.rows import Conversation
from speculators.decoding.calibration import calibration_for
from speculators.decoding.engine import generate
from speculators.decoding.sampling import SamplingParams
from speculators.evaluation import calibration_records
from speculators.evaluation.calibration_records import CalibrationPrompt, Records, collect, collect_batch, prompts_of_conversations
from speculators.evaluation.calibration_report import calibrate
from speculators.registry import get_algorithm
from speculators.verifier import Verifier

VOCABULARY = 64
PROMPTS = [CalibrationPrompt(tokens, "toy") for tokens in ((11, 12, 13), (4, 5), (9, 8, 7, 6, 5), (40,))]
SAMPLING = SamplingParams(max_new_tokens=20)


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    return tiny_verifier("llama", vocab_size=VOCABULARY, layers=2)


# -- rounds ----------------------------------------------------------------------------------------------------


def test_rounds_hold_the_confidence_before_each_draft_and_what_was_accepted(verifier: Verifier) -> None:
    drafter = BlockTable(VOCABULARY, confidence=[0.9, 0.8, 0.7])
    records = collect_batch(verifier, drafter, PROMPTS, 10, 3, SAMPLING)
    rounds = generate(verifier, drafter, [p.token_ids for p in PROMPTS], SAMPLING, num_draft_tokens=3).rounds
    assert np.allclose(records.confidence, [0.9, 0.8, 0.7])
    counted = [r for row in rounds for r in row if r.proposed]
    assert records.accepted.tolist() == [r.accepted for r in counted]
    assert set(records.prompt.tolist()) == {10, 11, 12, 13}


def test_positions_behind_the_budget_or_a_drafted_stop_token_do_not_count(verifier: Verifier) -> None:
    prompts = [PROMPTS[0].token_ids]
    plain = generate(verifier, None, prompts, SamplingParams(max_new_tokens=40, ignore_eos=True)).token_ids
    perfect = Oracle(prompts, plain, VOCABULARY)
    budget = collect_batch(verifier, perfect, PROMPTS[:1], 0, 6, SamplingParams(max_new_tokens=10, ignore_eos=True))
    # One token from the prefill, seven from the first round; of the two that remain the last is the verifier's own.
    assert (budget.observed.tolist(), budget.accepted.tolist()) == ([6, 1], [6, 1])
    stop = plain[0][3]
    right = collect_batch(verifier, perfect, PROMPTS[:1], 0, 6, SamplingParams(max_new_tokens=20, stop_token_ids=(stop,)))
    assert (right.observed.tolist(), right.accepted.tolist()) == ([3], [3]), "accepted"
    wrong = Oracle(prompts, [[plain[0][0], plain[0][1], *[stop] * 40]], VOCABULARY)
    first = collect_batch(verifier, wrong, PROMPTS[:1], 0, 6, SamplingParams(max_new_tokens=20, stop_token_ids=(stop,)))
    assert (int(first.observed[0]), int(first.accepted[0])) == (2, 1), "rejected, and positions behind it do not count either"


@pytest.mark.parametrize("drafter", [RandomTokens(VOCABULARY), SequentialTable(VOCABULARY)])
def test_drafters_without_a_confidence_head_give_their_probabilities_or_none(drafter: Any, verifier: Verifier) -> None:
    records = collect_batch(verifier, drafter, PROMPTS, 0, 4, SAMPLING)
    known = np.isfinite(records.confidence)[np.arange(4) < records.observed[:, None]]
    assert known.all() if drafter.confidence_source == "probability" else not known.any()
    assert bool((records.accepted <= records.observed).all()) and bool((records.observed >= 1).all())


def test_an_interrupted_collection_goes_on_where_it_was(verifier: Verifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    original = calibration_records.collect_batch

    def interrupted(*arguments: Any) -> Records:
        decoded.append(arguments[3])
        if len(decoded) == 2:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(calibration_records, "collect_batch", interrupted)

    def again(identity: str = "a") -> Records:
        options: dict[str, Any] = {"num_draft_tokens": 3, "batch_size": 2, "folder": tmp_path, "fingerprint": identity}
        return collect(verifier, SequentialTable(VOCABULARY), PROMPTS, SAMPLING, **options)

    with pytest.raises(KeyboardInterrupt):
        again()
    resumed = again()
    assert decoded == [0, 2, 2], "the first batch is not decoded again"
    monkeypatch.setattr(calibration_records, "collect_batch", lambda *arguments: pytest.fail("decoded again"))
    np.testing.assert_array_equal(again().confidence, resumed.confidence)
    monkeypatch.setattr(calibration_records, "collect_batch", original)
    other = again("b")  # other weights: nothing is reused
    np.testing.assert_array_equal(other.accepted, resumed.accepted)
    assert len(list(tmp_path.iterdir())) == 4


def test_prompts_of_conversations_end_where_the_reply_begins() -> None:
    conversations = [Conversation([1, 2, 3, 4], [False, False, True, True], "code"), Conversation([1, 2], [False, False], "chat")]
    assert prompts_of_conversations(conversations) == [CalibrationPrompt((1, 2), "code")]


def made_up(rounds: int, seed: int = 0) -> tuple[Records, list[CalibrationPrompt]]:
    """Rounds of a drafter that is too sure of itself by a factor of two in the logit."""
    generator = np.random.default_rng(seed)
    prompts = [CalibrationPrompt((index,), "even" if index % 2 == 0 else "odd") for index in range(50)]
    logits = generator.normal(1, 1, (rounds, 3))
    accepted = (generator.random(logits.shape) < 1 / (1 + np.exp(-logits))).cumprod(axis=1).sum(axis=1)
    confidence = (1 / (1 + np.exp(-2 * logits))).astype(np.float32)
    return Records(confidence, accepted, np.full(rounds, 3), generator.integers(0, 50, rounds)), prompts


def test_calibration_halves_disjoint_prompts_and_removes_overconfidence() -> None:
    records, prompts = made_up(40_000)
    everything, even, odd = calibrate(records, prompts, "head", 1.0)
    assert [r.calibration.domain for r in (everything, even, odd)] == ["all", "even", "odd"]
    assert everything.fit_prompts + everything.validation_prompts == 50
    assert everything.calibration.rounds + everything.validation_rounds == 40_000
    assert everything.calibration.scaling == pytest.approx([2.0, 2.0, 2.0], rel=0.25)
    assert everything.calibration.offset == pytest.approx([0.0, 0.0, 0.0], abs=0.25)
    errors = everything.mean_ece
    assert max(errors["calibrated"], errors["temperatures_only"]) < 0.015 < 0.03 < errors["raw"]
    assert [raw.auc for raw in everything.raw] == pytest.approx([scaled.auc for scaled in everything.calibrated], abs=0.01)
    assert everything.to_json()["kind"] == "decode"
    few, _ = made_up(2_800)
    assert [r.calibration.domain for r in calibrate(few, prompts, "head", 1.0)] == ["all"], "a domain needs enough rounds of its own"


def test_a_drafter_without_confidence_is_calibrated_by_measured_acceptance() -> None:
    records, prompts = made_up(20_000)
    blind = Records(np.full_like(records.confidence, np.nan), records.accepted, records.observed, records.prompt)
    result = calibrate(blind, prompts, "none", 0.0, min_rounds=7_000)[0]
    assert result.calibration.scaling == result.calibration.offset == ()
    share = (records.accepted > 0).mean()
    assert result.calibration.acceptance[0] == pytest.approx(share, abs=0.02)
    assert all(quality.ece < 0.02 for quality in result.calibrated)


# -- the command -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A verifier with a chat template, and a prompt file."""
    root = tmp_path_factory.mktemp("calibrate")
    verifier = save_chat_model(root / "verifier", layers=4)
    prompts = root / "toy.jsonl"
    prompts.write_text("".join(json.dumps({"id": f"toy/{i}", "turns": [f"w{i} w{i + 1} w{2 * i}"]}) + "\n" for i in range(12)))
    return verifier, prompts


@pytest.fixture
def checkpoint(folders: tuple[Path, Path], tmp_path: Path) -> Callable[[str], Path]:
    def make(method: str) -> Path:
        loaded = Verifier.from_pretrained(folders[0], dtype="float32", device="cpu")
        options = {"num_layers": 1, "num_draft_tokens": 3, "aux_hidden_state_layer_ids": [1, 2, 4]}
        torch.manual_seed(0)
        get_algorithm(method).speculator_class.from_verifier(loaded.weights, **options).save_pretrained(tmp_path / method)
        return tmp_path / method

    return make


def command(checkpoint: object, prompts: Path, folder: Path, *more: object) -> tuple[object, ...]:
    common = ("--dtype", "float32", "--device", "cpu", "--max-new-tokens", 16, "--min-rounds", 10, "--rounds", folder / "rounds")
    return ("calibrate", checkpoint, "--prompts", prompts, *common, *more)


@pytest.mark.parametrize(("method", "source"), [("dspark", "head"), ("dflash", "probability")])
def test_temperatures_are_stored_with_the_checkpoint_and_used_at_decode(
    method: str, source: str, checkpoint: Callable[[str], Path], folders: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = checkpoint(method)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "unified_speculators": {"note": "kept"}, "foreign": [1]}))
    report = succeed(*command(folder, folders[1], tmp_path, "--temperature", 1, "--replies", 2), json_path=tmp_path / "out.json")
    assert [r["calibration"]["source"] for r in report["results"]] == [source] * len(report["results"])
    after = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert {name for name in after if after[name] != before.get(name)} == {"config.json", "README.md"}, "weights are not touched"
    stored = json.loads(after["config.json"])
    assert stored["foreign"] == [1] and stored["unified_speculators"]["note"] == "kept"

    verifier = Verifier.from_pretrained(folders[0], dtype="float32", device="cpu")
    drafter = load(folder, verifier.weights)
    found = calibration_for(drafter, 0.9)
    assert found is not None and list(found.scaling) == report["results"][0]["calibration"]["scaling"]
    assert calibration_for(drafter, 0.0) is None, "greedy requests need a greedy calibration"
    succeed(*command(folder, folders[1], tmp_path, "--temperature", 0), json_path=tmp_path / "greedy.json")
    again = load(folder, verifier.weights)
    assert calibration_for(again, 0.9) == found and calibration_for(again, 0.0) is not None, "the other temperature stays"
    again.save_pretrained(tmp_path / "copy")
    assert load(tmp_path / "copy", verifier.weights).calibrations == again.calibrations
    for card in (folder / "README.md", tmp_path / "copy" / "README.md"):
        sections = card.read_text().split("\n## ")
        assert [section.count("\n| ") for section in sections if section.startswith("Calibration\n")] == [2 + len(again.calibrations)]
    (folder / "README.md").write_text("My own words.")
    succeed(*command(folder, folders[1], tmp_path, "--temperature", 0), json_path=tmp_path / "greedy.json")
    assert (folder / "README.md").read_text() == "My own words."


def test_prompt_lookup_is_calibrated_without_a_checkpoint(folders: tuple[Path, Path], tmp_path: Path) -> None:
    options = ("--verifier", folders[0], "--temperature", 0, "--no-store", "--min-rounds", 1)
    report = succeed(*command("prompt_lookup", folders[1], tmp_path, *options), json_path=tmp_path / "out.json")
    kept = report["results"][0]["calibration"]
    assert kept["source"] == "none" and kept["scaling"] == [] and len(kept["acceptance"]) == 7


def test_bad_calibrations_are_one_sentence(checkpoint: Callable[[str], Path], folders: tuple[Path, Path], tmp_path: Path) -> None:
    folder = checkpoint("dflash")
    assert "pass --no-store" in refused(tmp_path, "calibrate", "prompt_lookup", "--prompts", folders[1])
    assert "where the prompts come from" in refused(tmp_path, "calibrate", folder)
    assert "--temperature -1" in refused(tmp_path, "calibrate", folder, "--prompts", folders[1], "--temperature", -1)
    assert "is none here" in refused(tmp_path, "calibrate", tmp_path / "nowhere", "--prompts", folders[1])
    unchanged = (folder / "config.json").read_bytes()
    result = run(*command(folder, folders[1], tmp_path, "--temperature", 0, "--min-rounds", 100_000))
    assert result.exit_code == 2 and "calibration needs 100000 of each" in result.stderr
    assert (folder / "config.json").read_bytes() == unchanged


# -- the committed result --------------------------------------------------------------------------------------

ROOT = Path(__file__).parent.parent


def test_the_committed_calibration_holds_on_prompts_it_was_not_fitted_to_and_is_what_the_checkpoint_carries() -> None:
    report = json.loads((ROOT / "docs" / "results" / "calibration" / "dspark.json").read_text())
    of_all_prompts = [result for result in report["results"] if result["calibration"]["domain"] == "all"]
    assert sorted(result["calibration"]["temperature"] for result in of_all_prompts) == [0, 1]
    for result in of_all_prompts:
        assert result["kind"] == "decode"
        assert result["calibration"]["rounds"] + result["validation_rounds"] >= 20_000
        assert len(result["calibrated"]) == 7 and all(position["ece"] <= 0.015 for position in result["calibrated"])
        assert result["mean_ece"]["calibrated"] < result["mean_ece"]["raw"]
    stored = json.loads((ROOT / report["checkpoint"] / "config.json").read_text())["unified_speculators"]["calibration"]
    kept = [r["calibration"] for r in report["results"] if r["calibration"]["domain"] == "all"]
    assert [entry for entry in stored if entry["domain"] == "all"] == kept
