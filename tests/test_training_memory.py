"""Memory that runs out in the middle of training: one sentence, the setting to change, and the saved state intact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import tiny_verifier
from tiny_training import packed_rows, tiny_config

from speculators.errors import ConfigError
from speculators.training.memory import ran_out_of_memory
from speculators.training.step import TrainingStep
from speculators.training.trainer import train
from speculators.verifier import Verifier


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    return tiny_verifier(seed=3)


def test_the_allocators_of_torch_and_numpy_are_understood_and_other_errors_pass() -> None:
    with pytest.raises(RuntimeError) as host:
        torch.empty(2**58)
    assert ran_out_of_memory(host.value) and ran_out_of_memory(MemoryError())
    assert ran_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert not ran_out_of_memory(RuntimeError("size mismatch")) and not ran_out_of_memory(ValueError("out of memory"))


def test_memory_that_runs_out_is_one_sentence_and_the_saved_state_goes_on(
    verifier: Verifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(output=tmp_path / "run", steps=4, save_every=2, accumulation=2)
    real = TrainingStep.run

    def too_large(self: TrainingStep, step: int, rows: torch.Tensor, learning_rate: float) -> None:
        if step == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79 GiB.")
        real(self, step, rows, learning_rate)

    monkeypatch.setattr(TrainingStep, "run", too_large)
    with pytest.raises(ConfigError) as refused:
        train(verifier, packed_rows(), config)
    said = str(refused.value)
    assert said.startswith("host memory has no room for 2.50 GiB more: a micro-batch has 2 rows of row_length 1024")
    assert "raise accumulation" in said and said.endswith(f"the state of step 2 is in {tmp_path / 'run'}, and --resume goes on from it")
    monkeypatch.setattr(TrainingStep, "run", real)
    steps: list[int] = []
    train(verifier, packed_rows(), config, resume=True, on_record=lambda record: steps.append(record["step"]))
    assert steps == [3, 4]


def test_memory_that_runs_out_before_the_first_save_says_so(verifier: Verifier, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no room for 2,147,483,648.0 GiB more: .* lower rows_per_step .*; no state was saved yet"):
        train(verifier, packed_rows(), tiny_config(output=tmp_path / "run", rows_per_step=2**58))
