"""Several processes: the same step whatever their number and however weights are spread, uneven work, resuming, no waiting forever.

One job of two processes on the CPU does everything; the tests below are its claims.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import together
from safetensors import safe_open
from tiny_models import tiny_verifier
from tiny_training import DRAFTERS, packed_rows, tiny_config, without_supervision
from toy_algorithm import Toy

from speculators.errors import ConfigError, TrainingInterrupted
from speculators.registry import get_algorithm
from speculators.training import gradients
from speculators.training import trainer as trainer_module
from speculators.training.meters import Meters
from speculators.training.order import EpochOrder
from speculators.training.parallel import shard_verifier
from speculators.training.run_folder import STATE_FILE
from speculators.training.sharding import Sharding
from speculators.training.trainer import train
from speculators.training.world import World, process_group

Outcome = dict[str, Any]

# Rows with very different numbers of supervised tokens, some with none: a mean over processes of means would differ.
ROWS = without_supervision(packed_rows(7), 0, 3)
ROWS.loss_mask[1, :18] = False
HELD_OUT = packed_rows(3, seed=9)

# Evaluations between steps: what is gathered for them must not be trained on.
AVERAGED = {"method": "dspark", "options": DRAFTERS["dspark"], "optimizer": "muon", "ema_decay": 0.9, "evaluate_every": 2}

RUNS: dict[str, dict[str, Any]] = {
    "ddp-toy-adamw": {},
    "ddp-dspark-muon": AVERAGED,
    "fsdp-dspark-muon": {**AVERAGED, "parallel": "fsdp"},
    "fsdp-toy-adamw": {"parallel": "fsdp", "peak_tflops": 1e-6},
    "fsdp-dflash-sharded-verifier": {"parallel": "fsdp", "shard_verifier": True, "method": "dflash", "options": DRAFTERS["dflash"]},
}


def trained(output: Path | None = None, **fields: Any) -> Outcome:
    """A run's records and final weights as plain numbers."""
    records: list[dict[str, Any]] = []
    resume = fields.pop("resume", False)
    config = tiny_config(output=output, weight_decay=0.1, gradient_clip=0.5, **fields)
    speculator = train(tiny_verifier(seed=3), ROWS, config, held_out=HELD_OUT, resume=resume, on_record=records.append)
    weights = {name: value.flatten().tolist() for name, value in speculator.state_dict().items() if value.is_floating_point()}
    return {"records": records, "weights": weights}


# -- the job ---------------------------------------------------------------------------------------------------------


def everything(folder: Path) -> dict[str, Outcome]:
    """What each of the two processes does."""
    gradients.BUCKET_BYTES = 1 << 12  # several buckets, also for a tiny drafter
    with process_group() as world:
        outcomes = {name: trained(**fields) for name, fields in RUNS.items()}
        for strategy in ("ddp", "fsdp"):
            outcomes[f"{strategy}-head-unused-by-one"] = with_a_head_that_one_process_does_not_use(world, strategy)
            outcomes[f"{strategy}-interrupted"] = interrupted_and_resumed(world, folder / strategy, strategy)
        outcomes["no-supervision"] = nothing_supervised()
        outcomes["meters"] = one_tensor_under_two_names(world)
        outcomes["refused"] = {"said": refusal(lambda: trained(accumulation=4))}
        outcomes["gathered"] = {"rows": gathered_rows(world)}
    return outcomes


def with_a_head_that_one_process_does_not_use(world: World, strategy: str) -> Outcome:
    real = Toy.slot_hidden

    def last_slot_is_the_first(self: Toy, feature: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        hidden = real(self, feature, anchor)
        return torch.cat([hidden[..., :2, :], hidden[..., :1, :]], dim=-2)

    if world.rank == 1:
        Toy.slot_hidden = last_slot_is_the_first  # type: ignore[method-assign]
    try:
        return trained(parallel=strategy, steps=3)
    finally:
        Toy.slot_hidden = real  # type: ignore[method-assign]


def nothing_supervised() -> Outcome:
    """Two steps that have no labels, before a third that has."""
    records: list[dict[str, Any]] = []
    rows = without_supervision(packed_rows(12), *EpochOrder(12, seed=0).rows(0, 8).tolist())
    for strategy in ("ddp", "fsdp"):
        of_run: list[dict[str, Any]] = []
        train(tiny_verifier(seed=3), rows, tiny_config(parallel=strategy, steps=3), on_record=of_run.append)
        records += of_run[:2]
    return {"records": records}


def interrupted_and_resumed(world: World, folder: Path, strategy: str) -> Outcome:
    """The signal comes to the process that writes nothing; both must stop after the same step."""
    fields: dict[str, Any] = {
        "method": "dspark",
        "options": DRAFTERS["dspark"],
        "parallel": strategy,
        "optimizer": "muon",
        "ema_decay": 0.9,
    }
    whole = trained(folder / "whole", **fields)
    real = trainer_module.Trainer._log

    def log(self: Any) -> None:
        real(self)
        if self.step == 3 and world.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer_module.Trainer._log = log  # type: ignore[method-assign]
    said = refusal(lambda: trained(folder / "parted", **fields), TrainingInterrupted)
    trainer_module.Trainer._log = real  # type: ignore[method-assign]
    resumed = trained(folder / "parted", resume=True, **fields)
    return {"said": said, "whole": whole, "resumed": resumed}


def refusal(action: Callable[[], Any], kind: type[Exception] = ConfigError) -> str:
    with pytest.raises(kind) as caught:
        action()
    return str(caught.value)


def one_tensor_under_two_names(world: World) -> Outcome:
    readings = []
    for clone in (lambda value: value, torch.clone):
        meters = Meters()
        right, seen = torch.tensor([3.0, 1.0]), torch.tensor([4.0, 4.0])
        for name in ("accuracy", "acceptance"):
            meters.add(name, clone(right), clone(seen))
        readings.append(meters.read(world))
    return {"aliased": readings[0], "cloned": readings[1]}


def gathered_rows(world: World) -> list[bool]:
    """Sharing out and gathering are inverse for every number of rows, also fewer than there are processes."""
    sharding, same = Sharding(world), []
    for rows in (1, 2, 3, 7):
        full = torch.arange(rows * 6.0).view(rows, 6)
        same.append(torch.equal(sharding.gather(sharding.take(full), rows), full))
        stacked = full.expand(4, rows, 6)
        same.append(torch.equal(sharding.gather(stacked[:, sharding.share(rows)], rows, dim=1), stacked))
    return same


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Of rank 0, which alone has records; rank 1 ends with the same weights, which is checked here."""
    folder = tmp_path_factory.mktemp("runs")
    first, second = together(2, everything, folder)
    for name in RUNS:
        assert first[name]["weights"] == second[name]["weights"], name
        assert second[name]["records"] == []
    return {**first, "folder": {"path": folder}}


def train_records(outcome: Outcome) -> list[dict[str, Any]]:
    return [record for record in outcome["records"] if record["kind"] == "train"]


def without_gaps(reading: Any) -> list[float]:
    """-1 where nothing was counted."""
    return [-1.0 if value is None else value for value in (reading if isinstance(reading, list) else [reading])]


# -- claims ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(RUNS))
def test_two_processes_take_the_steps_that_one_takes_with_two_micro_batches(outcomes: dict[str, Outcome], name: str) -> None:
    fields = {key: value for key, value in RUNS[name].items() if key not in ("parallel", "shard_verifier")}
    alone, spread = trained(accumulation=2, **fields), outcomes[name]
    assert len(alone["records"]) == len(spread["records"]) == (10 if "evaluate_every" in fields else 8)
    for one, two in zip(alone["records"], spread["records"], strict=True):
        assert (two["kind"], two["step"]) == (one["kind"], one["step"])
        for key in ("loss", "gradient_norm", "acceptance", "greedy_acceptance"):
            assert without_gaps(two.get(key)) == pytest.approx(without_gaps(one.get(key)), rel=2e-4), key
        for count in ("tokens", "skipped_steps", "empty_batches", "damaged_rows"):
            assert two.get(count) == one.get(count), count
    assert max(record["gradient_norm"] for record in train_records(spread)) > 0.5  # clipping did happen
    assert [record.get("mfu", 1.0) > 0 for record in train_records(spread)] == [True] * 6
    for key, values in alone["weights"].items():
        assert spread["weights"][key] == pytest.approx(values, rel=1e-3, abs=1e-4), key


def test_every_ratio_of_several_processes_lies_between_zero_and_one(outcomes: dict[str, Outcome]) -> None:
    for name in RUNS:
        for record in outcomes[name]["records"]:
            for key in ("acceptance", "greedy_acceptance"):
                assert all(0.0 <= value <= 1.0 for value in record[key] if value is not None)


def test_a_tensor_under_two_names_is_summed_once(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["meters"]["aliased"] == outcomes["meters"]["cloned"] == {"accuracy": [0.75, 0.25], "acceptance": [0.75, 0.25]}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_head_that_one_process_did_not_use_keeps_nobody_waiting(outcomes: dict[str, Outcome], strategy: str) -> None:
    records = train_records(outcomes[f"{strategy}-head-unused-by-one"])
    assert [record["skipped_steps"] for record in records] == [0, 0, 0]
    torch.manual_seed(0)
    fresh = get_algorithm("toy").speculator_class.from_verifier(tiny_verifier(seed=3).weights)
    moved = outcomes[f"{strategy}-head-unused-by-one"]["weights"]["slots.2.weight"]
    assert moved != fresh.state_dict()["slots.2.weight"].flatten().tolist()  # the other process did use it


def test_batches_without_supervision_are_counted_and_keep_nobody_waiting(outcomes: dict[str, Outcome]) -> None:
    records = outcomes["no-supervision"]["records"]
    assert [(record["skipped_steps"], record["empty_batches"], record["loss"]) for record in records] == [(1, 2, None)] * 4


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_signal_to_one_process_stops_all_and_the_resumed_run_ends_bit_for_bit_the_same(
    outcomes: dict[str, Outcome], strategy: str
) -> None:
    outcome, folder = outcomes[f"{strategy}-interrupted"], outcomes["folder"]["path"] / strategy
    assert "stopped by SIGTERM after step 3" in outcome["said"]
    assert outcome["resumed"]["weights"] == outcome["whole"]["weights"]
    states = []
    for run in ("whole", "parted"):
        with safe_open(folder / run / "latest" / STATE_FILE, framework="pt") as stream:
            states.append({name: stream.get_tensor(name) for name in stream.keys()})  # noqa: SIM118
    whole, parted = states
    assert any(value.any() for name, value in whole.items() if name.startswith("optimizer.muon."))  # not two empty states
    assert whole.keys() == parted.keys() and all(torch.equal(whole[name], parted[name]) for name in whole)
    logs = [[json.loads(line) for line in (folder / run / "log.jsonl").read_text().splitlines()] for run in ("whole", "parted")]
    assert [record["loss"] for record in logs[0]] == [record["loss"] for record in logs[1]]


def test_the_state_of_a_spread_run_is_whole_so_that_any_number_of_processes_goes_on(outcomes: dict[str, Outcome]) -> None:
    folder = outcomes["folder"]["path"] / "fsdp" / "whole"
    longer = trained(folder, resume=True, accumulation=2, steps=8, **AVERAGED)
    assert [record["step"] for record in train_records(longer)] == [7, 8]
    assert all(record["skipped_steps"] == 0 for record in train_records(longer))


def test_a_step_that_cannot_be_shared_out_is_refused(outcomes: dict[str, Outcome]) -> None:
    assert "accumulation 4 times 2 processes must divide rows_per_step 4" in outcomes["refused"]["said"]
    with pytest.raises(ConfigError, match="there is one; start more with torchrun"):
        shard_verifier(tiny_verifier(), World(), torch.device("cpu"))


def test_rows_are_shared_out_and_gathered_whatever_their_number(outcomes: dict[str, Outcome]) -> None:
    assert all(outcomes["gathered"]["rows"])
