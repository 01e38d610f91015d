"""The benchmarks' harness: what it times, what a floor is, what it writes; and that the training benchmark runs on any machine."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def benchmark() -> Any:
    """Import from benchmarks/, which is no package."""
    folder = str(Path(__file__).parents[1] / "benchmarks")
    sys.path.insert(0, folder)
    try:
        yield importlib.import_module
    finally:
        sys.path.remove(folder)
        for name in ("harness", "scheduling", "training"):
            sys.modules.pop(name, None)


def test_setup_runs_before_each_call_and_warm_up_is_not_counted(benchmark: Any) -> None:
    calls: list[str] = []
    timing = benchmark("harness").measure(lambda: calls.append("call"), lambda: calls.append("setup"), device=CPU, repetitions=3, warmup=2)
    assert calls == ["setup", "call"] * 5
    assert timing.repetitions == 3 and timing.low <= timing.milliseconds <= timing.high
    assert timing.peak_bytes is None


def test_a_floor_is_the_slower_of_arithmetic_and_memory(benchmark: Any) -> None:
    harness = benchmark("harness")
    ceilings = harness.Ceilings(flops=1e12, bytes=1e9)
    assert harness.Work(flops=2e9, bytes=1e6).floor_milliseconds(ceilings) == pytest.approx(2.0)
    assert harness.Work(flops=2e9, bytes=5e6).floor_milliseconds(ceilings) == pytest.approx(5.0)


def test_a_report_is_json_and_a_table_with_the_machine(benchmark: Any, tmp_path: Path) -> None:
    harness = benchmark("harness")
    report = harness.Report("Products", CPU, harness.Ceilings(1e12, 1e9))
    report.add("small", harness.Timing(1.5, 1.0, 2.0, 7, None, None), work=harness.Work(flops=1e9), rows=3)
    report.add("missing", None, note="not installed")
    report.write(tmp_path / "deep" / "table")
    document = json.loads((tmp_path / "deep" / "table.json").read_text())
    assert document["machine"]["device"] == "CPU" and document["machine"]["versions"]["torch"] == torch.__version__
    assert document["measurements"][0]["floor_milliseconds"] == pytest.approx(1.0)
    lines = (tmp_path / "deep" / "table.md").read_text().splitlines()
    assert lines[0] == "# Products" and [line.count("|") for line in lines if line.startswith("|")] == [9, 9, 9, 9]


def test_a_row_says_how_many_other_processes_used_the_gpu(benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that nvidia-smi lists, this process and one that has ended do not count."""
    harness, parent = benchmark("harness"), os.getppid()
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '%s\\n' {os.getpid()} {parent} 4194305 '[N/A]'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="0"))
    report = harness.Report("Shared", torch.device("cuda"))
    timing = harness.Timing(1.5, 1.0, 2.0, 7, None, None)
    assert report.add("measured", timing)["other_processes"] == 1
    program.write_text("#!/bin/sh\nexit 9\n")
    assert "other_processes" not in report.add("measured", timing)
    assert "other_processes" not in harness.Report("Alone", CPU).add("measured", timing)


def test_batches_of_a_size_hold_different_prompts_and_each_the_same_mixture(benchmark: Any) -> None:
    module = benchmark("scheduling")
    files = [[f"{name}{number}" for number in range(count)] for name, count in (("a", 200), ("b", 100), ("c", 150), ("d", 50))]
    prompts = module.mixed(files)
    assert sorted(prompts) == sorted(prompt for file in files for prompt in file)
    for rows, count in ((1, 16), (2, 8), (16, 4), (64, 4), (256, 4)):
        batches = module.batches_of(prompts, rows, 4, 16)
        assert [len(batch) for batch in batches] == [rows] * count
        assert len({prompt for batch in batches for prompt in batch}) == min(500, rows * count), "they repeat only after the last"
        for batch in batches:
            for file in files:
                assert abs(sum(prompt in file for prompt in batch) - rows * len(file) / 500) < 2


def test_the_training_benchmark_runs_on_a_cpu(benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = benchmark("training")
    monkeypatch.setattr(module, "measured_ceilings", lambda *_: benchmark("harness").Ceilings(1e12, 1e9))
    peer = f"{sys.executable} -c \"print('trainable=10 of 30'); [print('loss 1', ms, 'ms peak 2.00 GiB') for ms in (9, 9, 9, 4, 5, 6)]\""
    arguments = ["step", "--methods", "peagle", "--peer", f"peagle={peer}", "--device", "cpu", "--output", str(tmp_path / "table")]
    monkeypatch.setattr(sys, "argv", ["training.py", *arguments])
    module.main()
    ours, theirs = json.loads((tmp_path / "table.json").read_text())["measurements"]
    assert ours["name"] == "peagle (ours)" and ours["flops"] > 0 and ours["loss_rows"] > 100
    assert (theirs["name"], theirs["milliseconds"]) == ("peagle (peer)", 5.0)
    assert theirs["above_states_bytes"] == 2 * 2**30 - 16 * 10 - 2 * 20
