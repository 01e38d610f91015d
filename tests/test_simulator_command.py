"""`speculators simulate`: from files to rows and figures, all of kind simulated."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_cli import refused, run, succeed

from speculators.decoding.step_times import StepTimes
from speculators.serving.simulation_report import origin_of_times

CALIBRATION = {"temperature": 1.0, "domain": "all", "source": "head", "scaling": [1.0] * 3, "offset": [0.0] * 3, "acceptance": [0.8] * 3}


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """Step times, and a result of `speculators calibrate`."""
    times, report = tmp_path / "times.json", tmp_path / "calibration.json"
    StepTimes.affine(10e-3, 1e-3, draft_fixed=1e-3, max_rows=64, max_drafts=3).save(times)
    results = [
        {"calibration": {**CALIBRATION, "domain": "code"}, "sample": [[0.1] * 3]},
        {"calibration": CALIBRATION, "sample": [[0.95, 0.9, 0.9], [0.5, 0.4, 0.3]]},
        {"calibration": {**CALIBRATION, "temperature": 0.0}, "sample": []},
    ]
    report.write_text(json.dumps({"results": results}))
    return times, report


def test_loads_policies_and_drafters_become_rows(files: tuple[Path, Path], tmp_path: Path) -> None:
    times, report = files
    common = ("simulate", "--step-times", times, "--output-tokens", 40)
    result = succeed(
        *(*common, "--drafter", f"ours={report}", "--drafter", "other=0.9,0.5", "--users", 2, "--users", 8),
        *("--policy", "none", "--policy", "fixed:2", "--policy", "scheduler"),
        json_path=tmp_path / "out.json",
    )
    rows = result["rows"]
    assert [(r["drafter"], r["policy"], r["load"]) for r in rows] == [
        (drafter, policy, load) for drafter in ("ours", "other") for policy in ("none", "fixed:2", "scheduler") for load in (2, 8)
    ]
    assert {r["kind"] for r in rows} == {result["kind"]} == {"simulated"}
    plain = [r["tokens_per_second"] for r in rows if r["policy"] == "none" and r["drafter"] == "ours"]
    assert plain == pytest.approx([2 / 12e-3, 8 / 18e-3], rel=0.01)
    default = succeed(*common, "--drafter", "other=0.9,0.5", "--users", 1, json_path=tmp_path / "default.json")["rows"]
    assert [r["policy"] for r in default] == ["none", "fixed:1", "fixed:2", "scheduler", "auto"]
    long = ("--drafter", "long=" + ",".join(["0.9"] * 10), "--users", 1)
    default = succeed("simulate", "--step-times", times, "--output-tokens", 8, *long, json_path=tmp_path / "long.json")["rows"]
    assert [r["policy"] for r in default] == ["none", "fixed:1", "fixed:3", "fixed:10", "scheduler", "auto"]  # as numbers, not as text


def test_the_calibration_of_a_temperature_is_chosen_and_arrivals_replayed(files: tuple[Path, Path], tmp_path: Path) -> None:
    times, report = files
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps({"arrival": 0.2 * i, "output_tokens": 5 + i}) + "\n" for i in range(8)))
    common = ("simulate", "--step-times", f"ours={times}", "--drafter", f"ours={report}", "--policy", "fixed:3")
    loads = ("--arrivals", "poisson:5", "--arrivals", "burst:5:4", "--arrivals", trace)
    hot, greedy = (
        succeed(*common, *loads, "--temperature", t, "--requests", 1, "--output-tokens", 20, json_path=tmp_path / f"{t}.json")["rows"]
        for t in (1, 0)
    )
    assert [r["load"] for r in hot] == pytest.approx([5, 5, 8 / 1.4]) and not any(r["closed"] for r in hot)
    # 0.8 each: 2.95 tokens a round; the other has 2.4.
    assert all(g["tokens_per_second_a_user"] > h["tokens_per_second_a_user"] for g, h in zip(greedy, hot, strict=True))


def test_a_terminal_of_80_columns_shows_every_cell_whole(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    arguments = ("--drafter", "dspark=0.9,0.5", "--users", 64, "--output-tokens", 20, "--policy", "threshold:0.5", "--policy", "fixed:2")
    output = run("simulate", "--step-times", files[0], *arguments).output
    lines = [line.split() for line in output.splitlines() if line.strip().startswith("dspark")]
    assert [line[:4] for line in lines] == [["dspark", policy, "64", "users"] for policy in ("threshold:0.5", "fixed:2")]
    assert all(len(line) == 11 for line in lines) and "\N{HORIZONTAL ELLIPSIS}" not in output


def test_titles_say_whether_step_times_were_measured_and_on_what() -> None:
    measured, unnamed = (StepTimes((1,), (0, 1), ((0.0, 0.1),), ((0.1, 0.1),), machine) for machine in ("an H200", ""))
    assumed = StepTimes.affine(1.0, 1.0)
    assert origin_of_times([measured, measured]) == "step times measured on an H200"
    assert origin_of_times([measured, assumed]) == "step times measured on an H200; assumed step times (affine)"
    assert origin_of_times([unnamed]) == "step times measured on a machine that the file does not name"
    assert origin_of_times([replace(assumed, machine="")]) == "assumed step times"


def test_two_drafters_of_one_name_are_refused(files: tuple[Path, Path], tmp_path: Path) -> None:
    arguments = ("simulate", "--step-times", files[0], "--drafter", "ours=0.9", "--drafter", "ours=0.8")
    assert "two drafters are called 'ours'" in refused(tmp_path, *arguments)


def test_figures_say_that_they_are_simulated(files: tuple[Path, Path], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    times, report = files
    arguments = ("simulate", "--step-times", times, "--drafter", f"ours={report}", "--users", 1, "--users", 4, "--output-tokens", 20)
    assert run(*arguments, "--plots", tmp_path / "plots").exit_code == 0
    assert {file.name for file in (tmp_path / "plots").iterdir()} == {"frontier.png", "concurrency.png"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"--drafter": "ours"}, "form NAME=FILE"),
        ({"--drafter": "ours=high"}, "acceptances as 0.9,0.8"),
        ({"--drafter": "ours=nowhere.json"}, "cannot be read"),
        ({"--step-times": "nowhere.json"}, "does not exist"),
        ({"--step-times": "other=TIMES"}, "no step times"),
        ({"--policy": "fixed:9"}, "fixed:9"),
        ({"--arrivals": "poisson:fast"}, "poisson:RATE"),
        ({"--arrivals": "poisson:2", "--users": "3"}, "use one of them"),
        ({"--gpus": "0"}, "at least 1"),
    ],
)
def test_bad_simulations_are_one_sentence(changes: dict[str, str], words: str, files: tuple[Path, Path], tmp_path: Path) -> None:
    given = {"--drafter": "ours=0.9,0.8", "--step-times": "TIMES", **changes}
    arguments = [part.replace("TIMES", str(files[0])) for pair in given.items() for part in pair]
    assert words in refused(tmp_path, "simulate", *arguments)
