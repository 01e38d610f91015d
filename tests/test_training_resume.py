"""Interruptions: what is saved, what a resumed run does, what is refused."""

from __future__ import annotations

import errno
import json
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_models import tiny_model, tiny_verifier
from tiny_training import DRAFTERS, packed_rows, tiny_config

from speculators import checkpoint
from speculators.errors import CheckpointError, ConfigError, DataError, TrainingInterrupted
from speculators.speculator import Speculator
from speculators.training import checks
from speculators.training import resume as resume_module
from speculators.training.run_folder import STATE_FILE
from speculators.training.saving import RunState
from speculators.training.step import TrainingStep
from speculators.training.trainer import train
from speculators.verifier import Verifier


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    return tiny_verifier(seed=3)


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / "latest" / STATE_FILE, framework="pt") as stream:
        return {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118


def losses_of(folder: Path) -> list[tuple[int, float]]:
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [(record["step"], record["loss"]) for record in records if record["kind"] == "train"]


def interrupted_after(step: int, number: int = signal.SIGTERM) -> Any:
    """A log callback that sends this process a signal once `step` steps are done."""

    def on_record(record: dict[str, Any]) -> None:
        if record["kind"] == "train" and record["step"] == step:
            os.kill(os.getpid(), number)

    return on_record


def interrupt(verifier: Verifier, config: Any, step: int, **arguments: Any) -> TrainingInterrupted:
    with pytest.raises(TrainingInterrupted) as caught:
        train(verifier, packed_rows(), config, on_record=interrupted_after(step), **arguments)
    return caught.value


@pytest.mark.parametrize(("method", "optimizer"), [("dflash", "adamw"), ("dspark", "muon")])
def test_a_resumed_run_ends_bit_for_bit_as_the_uninterrupted_one(verifier: Verifier, tmp_path: Path, method: str, optimizer: str) -> None:
    fields = {"method": method, "options": DRAFTERS[method], "optimizer": optimizer, "steps": 9, "weight_decay": 0.1, "accumulation": 2}
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    held_out = packed_rows(3, seed=9)
    first = train(verifier, packed_rows(), tiny_config(output=whole, **fields), held_out=held_out)

    # 8 rows, 4 a step: step 5 is the first half of an epoch.
    interrupt(verifier, tiny_config(output=parted, **fields), 5, held_out=held_out)
    halfway = state_of(parted)
    assert any(value.any() for name, value in halfway.items() if name.endswith("exp_avg"))  # not two empty states
    assert any(value.any() for name, value in halfway.items() if name.startswith("optimizer.muon.")) == (optimizer == "muon")
    second = train(verifier, packed_rows(), tiny_config(output=parted, **fields), held_out=held_out, resume=True)

    expected, actual = state_of(whole), state_of(parted)
    assert expected.keys() == actual.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name
    assert all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())
    assert losses_of(whole) == losses_of(parted) and len(losses_of(whole)) == 9


def test_a_resumed_run_goes_on_with_the_next_rows(verifier: Verifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    real = TrainingStep.run

    def watch(self: TrainingStep, step: int, rows: torch.Tensor, learning_rate: float) -> None:
        seen.append(rows.tolist())
        real(self, step, rows, learning_rate)

    monkeypatch.setattr(TrainingStep, "run", watch)
    config = tiny_config(output=tmp_path / "run", rows_per_step=1, steps=16)
    interrupt(verifier, config, 5)
    assert len(seen) == 5
    train(verifier, packed_rows(), config, resume=True)
    visited = [row for rows in seen for row in rows]
    assert sorted(visited[:8]) == sorted(visited[8:]) == list(range(8))


def test_a_crash_after_a_save_repeats_the_lost_steps_and_logs_them_once(verifier: Verifier, tmp_path: Path) -> None:
    def crash(record: dict[str, Any]) -> None:
        if record["step"] == 5:
            raise RuntimeError("power cut")

    config = tiny_config(output=tmp_path / "run", save_every=3)
    with pytest.raises(RuntimeError, match="power cut"):
        train(verifier, packed_rows(), config, on_record=crash)
    steps: list[int] = []
    train(verifier, packed_rows(), config, resume=True, on_record=lambda record: steps.append(record["step"]))
    assert steps == [4, 5, 6]
    assert [json.loads(line)["step"] for line in (tmp_path / "run" / "log.jsonl").open()] == [1, 2, 3, 4, 5, 6]


def test_sigint_stops_too_and_the_handlers_are_put_back(verifier: Verifier, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(TrainingInterrupted, match=r"stopped by SIGINT after step 2: the state is in .*; resume=True continues") as caught:
        train(verifier, packed_rows(), tiny_config(output=tmp_path / "run"), on_record=interrupted_after(2, signal.SIGINT))
    assert caught.value.exit_code == 130
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("owner", "name"), [(TrainingStep, "evaluate"), (RunState, "write"), (RunState, "finish")])
def test_a_signal_after_the_last_step_loses_nothing(
    verifier: Verifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, owner: type, name: str
) -> None:
    handlers, real = (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)), getattr(owner, name)
    records: list[dict[str, Any]] = []

    def at_the_end(self: Any, *arguments: Any) -> Any:
        if records and records[-1]["step"] == 2:
            os.kill(os.getpid(), number)
        return real(self, *arguments)

    monkeypatch.setattr(owner, name, at_the_end)
    # The clock ends this run, so that its last evaluation comes after the loop of steps.
    config = tiny_config(output=tmp_path / "run", steps=None, time_budget_seconds=150.0, warmup=0.0)
    arguments: dict[str, Any] = {"held_out": packed_rows(2), "clock": lambda: 100.0 * sum(each["kind"] == "train" for each in records)}
    with nullcontext() if name == "finish" else pytest.raises(TrainingInterrupted, match="after step 2: the state is in"):
        train(verifier, packed_rows(), config, on_record=records.append, **arguments)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert os.readlink(tmp_path / "run" / "latest") == "checkpoints/step-00000002"
    monkeypatch.undo()
    train(verifier, packed_rows(), config, resume=True, **arguments)
    assert [(each["kind"], each["step"]) for each in records] == [("teacher-forced", 0), ("train", 1), ("train", 2), ("teacher-forced", 2)]
    assert checkpoint.load(tmp_path / "run", verifier.weights).method == "toy"


def test_a_finished_run_resumes_to_what_it_was(verifier: Verifier, tmp_path: Path) -> None:
    config = tiny_config(output=tmp_path / "run")
    first = train(verifier, packed_rows(), config)
    again = train(verifier, packed_rows(), config, resume=True)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in first.state_dict().items())
    loaded = checkpoint.load(tmp_path / "run", verifier.weights)
    for name, value in loaded.state_dict().items():
        torch.testing.assert_close(value.float(), first.state_dict()[name], rtol=2**-8, atol=0)  # stored in bfloat16


def test_a_run_is_never_overwritten_unasked(verifier: Verifier, tmp_path: Path) -> None:
    config = tiny_config(output=tmp_path / "run", steps=1)
    train(verifier, packed_rows(), config)
    before = (tmp_path / "run" / "latest" / STATE_FILE).read_bytes()
    with pytest.raises(ConfigError, match=r"already holds a training run; pass resume=True"):
        train(verifier, packed_rows(), config)
    assert (tmp_path / "run" / "latest" / STATE_FILE).read_bytes() == before


@pytest.mark.parametrize(
    ("fields", "rows_seed", "said"),
    [
        ({"seed": 1}, 0, r"a run with seed = 0, not 1"),
        ({"rows_per_step": 2}, 0, r"a run with rows_per_step = 4, not 2"),
        ({"optimizer": "muon"}, 0, r"a run with optimizer = 'adamw', not 'muon'"),
        ({"best_by": "loss"}, 0, r"a run with best_by = None, not 'loss'"),
        ({"options": {"tap": 2}}, 0, r"a run with options = {}, not {'tap': 2}"),
        ({}, 4, r"a run on other training rows"),
    ],
)
def test_another_run_cannot_resume_this_one(verifier: Verifier, tmp_path: Path, fields: dict[str, Any], rows_seed: int, said: str) -> None:
    train(verifier, packed_rows(), tiny_config(output=tmp_path / "run", steps=1))
    with pytest.raises(ConfigError, match=said):
        train(verifier, packed_rows(seed=rows_seed), tiny_config(output=tmp_path / "run", **fields), resume=True)


def test_another_verifier_of_the_same_shape_cannot_resume_a_run(
    verifier: Verifier, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def go(folder: str, of: Verifier, steps: int) -> str:
        caplog.clear()
        train(of, packed_rows(), tiny_config(output=tmp_path / folder, steps=steps), resume=True)
        return caplog.text

    other, same = tiny_verifier(seed=4), Verifier(tiny_model("llama", 3), name_or_path="moved/elsewhere")
    go("run", verifier, 1)
    with pytest.raises(ConfigError, match=r"belongs to a run with another verifier than '.*' \(their embeddings or heads differ\)"):
        go("run", other, 2)
    assert other.weights.head is not other.weights.embedding
    with torch.no_grad():
        other.weights.embedding.copy_(verifier.weights.embedding)
    with pytest.raises(ConfigError, match="belongs to a run with another verifier"):
        go("run", other, 2)

    assert "name of the verifier moved/elsewhere instead of" in go("run", same, 2)
    # float16 holds not every value of float32, so that the same verifier looks like another one.
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        steps = 3 + [torch.bfloat16, torch.float16, torch.float32].index(dtype)
        assert "dtype of the verifier" in go("run", tiny_verifier(seed=3, dtype=dtype), steps)

    def as_before(*arguments: Any) -> dict[str, Any]:
        settings, recorded = resume_module.run_settings(*arguments), ("name of the verifier", resume_module._VERIFIER)
        return {key: value for key, value in settings.items() if key not in recorded}

    with monkeypatch.context() as patched:
        patched.setattr(checks, "run_settings", as_before)
        go("old", verifier, 1)
    assert "other settings than it had: steps 2 instead of 1\n" in go("old", verifier, 2), "a run of before verifiers were compared"
    with pytest.raises(ConfigError, match="belongs to a run with another verifier"):
        go("old", other, 3)


def test_a_resume_says_which_settings_of_the_rest_are_new(verifier: Verifier, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def resumed(**fields: Any) -> str:
        caplog.clear()
        train(verifier, packed_rows(), tiny_config(output=tmp_path / "run", **fields), resume=True)
        return caplog.text

    train(verifier, packed_rows(), tiny_config(output=tmp_path / "run", steps=1))
    said = resumed(steps=2, learning_rate=1e-3, precision="bfloat16", log_every=2, save_every=1)
    changes = "steps 2 instead of 1; learning_rate 0.001 instead of 0.003; precision bfloat16 instead of float32"
    assert f"the run in {tmp_path / 'run'} goes on with other settings than it had: {changes}\n" in said
    assert "other settings" not in resumed(steps=2, learning_rate=1e-3, precision="bfloat16"), "compared with the last resume"


def test_a_run_can_be_made_longer(verifier: Verifier, tmp_path: Path) -> None:
    train(verifier, packed_rows(), tiny_config(output=tmp_path / "run", steps=2))
    steps: list[int] = []
    train(verifier, packed_rows(), tiny_config(output=tmp_path / "run", steps=4), resume=True, on_record=lambda r: steps.append(r["step"]))
    assert steps == [3, 4]


def test_a_damaged_state_is_refused(verifier: Verifier, tmp_path: Path) -> None:
    config = tiny_config(output=tmp_path / "run", steps=1)
    train(verifier, packed_rows(), config)
    state = tmp_path / "run" / "latest" / STATE_FILE
    state.write_bytes(state.read_bytes()[:200])
    with pytest.raises(CheckpointError, match="cannot read the training state"):
        train(verifier, packed_rows(), config, resume=True)


def edit_state(path: Path, point: dict[str, Any], metadata: dict[str, str], tensors: dict[str, torch.Tensor | None]) -> None:
    """Change a stored state by hand; None takes a tensor away."""
    with safe_open(path, framework="pt") as stream:
        written = stream.metadata()
        stored = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
    written |= {"point": json.dumps(json.loads(written["point"]) | point)} | metadata
    save_file({name: value for name, value in (stored | tensors).items() if value is not None}, path, metadata=written)


WEIGHT = "slots.0.weight"


@pytest.mark.parametrize(
    ("point", "metadata", "tensors", "said"),
    [
        ({"settings": []}, {}, {}, r"its point\.settings is not right \(Input should be an object\)"),
        ({"step": "4"}, {}, {}, r"its point\.step is not right \(Input should be a valid integer\)"),
        ({"step": 3}, {}, {}, r"it is the state of step 3"),
        ({"best": None}, {}, {}, r"its point\.best is not right"),
        ({}, {"point": "[]"}, {}, r"its point is not right"),
        ({}, {"speculator": "[]"}, {}, r"it has no configuration of a speculator"),
        ({}, {}, {f"speculator.{WEIGHT}": None}, rf"speculator\.{WEIGHT} is missing, shape \(32, 64\) is expected"),
        ({}, {}, {"speculator.more": torch.ones(2)}, r"speculator\.more has shape \(2,\), none is expected"),
        ({}, {}, {f"average.{WEIGHT}": None}, rf"average\.{WEIGHT} is missing, shape \(32, 64\) is expected"),
        ({}, {}, {f"average.{WEIGHT}": torch.ones(2, 3)}, rf"average\.{WEIGHT} has shape \(2, 3\), shape \(32, 64\) is expected"),
        ({}, {}, {f"optimizer.adamw.{WEIGHT}.exp_avg": None}, rf"optimizer\.adamw\.{WEIGHT}\.exp_avg is missing, shape \(32, 64\)"),
        ({}, {}, {"meters.loss.denominator": torch.ones(2)}, r"the sums of the log under meters\. are incomplete"),
    ],
)
def test_a_state_edited_by_hand_is_refused_in_a_sentence_that_names_the_one_before_it(
    verifier: Verifier,
    tmp_path: Path,
    point: dict[str, Any],
    metadata: dict[str, str],
    tensors: dict[str, torch.Tensor | None],
    said: str,
) -> None:
    run = tmp_path / "run"
    config = tiny_config(output=run, steps=4, save_every=2, keep_checkpoints=2, ema_decay=0.9, log_every=3)
    train(verifier, packed_rows(), config)
    newest = run / "checkpoints" / "step-00000004"
    edit_state(newest / STATE_FILE, point, metadata, tensors)
    way_out = rf"move {newest} away to resume from the checkpoint of step 2$"
    with pytest.raises(CheckpointError, match=rf"^cannot read the training state {newest / STATE_FILE}: {said}[^\n]*; {way_out}"):
        train(verifier, packed_rows(), config, resume=True)
    newest.rename(tmp_path / "away")
    steps: list[int] = []
    train(verifier, packed_rows(), config, resume=True, on_record=lambda record: steps.append(record["step"]))
    assert steps == [3, 4]


def test_a_state_that_is_no_file_is_refused(verifier: Verifier, tmp_path: Path) -> None:
    config = tiny_config(output=tmp_path / "run", steps=1)
    train(verifier, packed_rows(), config)
    state = tmp_path / "run" / "checkpoints" / "step-00000001" / STATE_FILE
    state.unlink()
    state.symlink_to("nowhere")
    with pytest.raises(ConfigError, match=rf"step-00000001 lies where a checkpoint would be written and holds no {STATE_FILE}"):
        train(verifier, packed_rows(), config, resume=True)
    state.unlink()
    state.mkdir()
    with pytest.raises(CheckpointError, match=r"cannot read the training state .*; move .* away and start again, there is no checkpoint"):
        train(verifier, packed_rows(), config, resume=True)


def test_a_save_that_fails_leaves_the_earlier_state_whole(verifier: Verifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(output=tmp_path / "run", save_every=2)
    real, calls = resume_module.save_file, []

    def full_disk(tensors: dict[str, torch.Tensor], path: Path, **more: Any) -> None:
        calls.append(path)
        if len(calls) == 2:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        real(tensors, path, **more)

    monkeypatch.setattr(resume_module, "save_file", full_disk)
    with pytest.raises(DataError, match=r"cannot write the checkpoint of step 4 .*\(No space left on device\).* make room and resume"):
        train(verifier, packed_rows(), config)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]
    steps: list[int] = []
    train(verifier, packed_rows(), config, resume=True, on_record=lambda record: steps.append(record["step"]))
    assert steps == [3, 4, 5, 6]


def test_starting_from_a_drafter_is_step_zero_and_leaves_that_drafter_alone(verifier: Verifier, tmp_path: Path) -> None:
    first = train(verifier, packed_rows(), tiny_config(options={"tap": 2}, output=tmp_path / "first"))
    before = {name: value.clone() for name, value in first.state_dict().items()}
    steps: list[int] = []
    config = tiny_config(steps=2, learning_rate=1e-30)
    from_object = train(verifier, packed_rows(seed=5), config, init_from=first, on_record=lambda r: steps.append(r["step"]))
    from_folder = train(verifier, packed_rows(seed=5), config, init_from=tmp_path / "first")
    assert steps == [1, 2]
    assert from_object.aux_hidden_state_layer_ids == from_folder.aux_hidden_state_layer_ids == (2,)  # its own taps, not the default
    for name, value in before.items():
        assert torch.equal(first.state_dict()[name], value)
        torch.testing.assert_close(from_object.state_dict()[name], value)
        torch.testing.assert_close(from_folder.state_dict()[name], value, rtol=2**-8, atol=0)


def test_starting_from_a_drafter_keeps_its_draft_vocabulary(verifier: Verifier) -> None:
    config = tiny_config(method="dflash", options={**DRAFTERS["dflash"], "draft_vocab_size": 16}, steps=1)
    first = train(verifier, packed_rows(), config)
    tuned = train(verifier, packed_rows(seed=77), tiny_config(method="dflash", steps=1), init_from=first)
    assert torch.equal(tuned.draft_token_ids(), first.draft_token_ids())


def test_a_drafter_of_another_method_or_with_options_is_no_start(verifier: Verifier) -> None:
    toy = train(verifier, packed_rows(), tiny_config(steps=1))
    with pytest.raises(ConfigError, match="training dflash cannot start from a toy drafter"):
        train(verifier, packed_rows(), tiny_config(method="dflash"), init_from=toy)
    with pytest.raises(ConfigError, match=r"options \['tap'\] cannot change a drafter"):
        train(verifier, packed_rows(), tiny_config(options={"tap": 2}), init_from=toy)


def test_resume_wins_over_a_start_once_there_is_something_to_resume(verifier: Verifier, tmp_path: Path) -> None:
    start = train(verifier, packed_rows(), tiny_config(seed=4, steps=1))
    config = tiny_config(output=tmp_path / "run", learning_rate=1e-30, steps=2)
    first = train(verifier, packed_rows(), config, init_from=start, resume=True)
    torch.testing.assert_close(first.state_dict(), start.state_dict())
    other = train(verifier, packed_rows(), tiny_config(seed=5, steps=1))
    again: Speculator = train(verifier, packed_rows(), config, init_from=other, resume=True)
    torch.testing.assert_close(again.state_dict(), start.state_dict())


def test_resume_without_a_folder_is_refused(verifier: Verifier) -> None:
    with pytest.raises(ConfigError, match="resume needs an output folder"):
        train(verifier, packed_rows(), tiny_config(), resume=True)
