"""Memory of a step, and memory that runs out: one sentence, the setting to change, and the saved state intact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_drafters import HIDDEN, VOCABULARY, drafter, packed_batch
from tiny_models import tiny_verifier
from tiny_training import packed_rows, tiny_config
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from speculators.errors import ConfigError
from speculators.training.build import build_speculator
from speculators.training.gradients import FreshGradients
from speculators.training.graph import Capture
from speculators.training.memory import ran_out_of_memory
from speculators.training.optimizer import DrafterOptimizer
from speculators.training.parallel import parallelise
from speculators.training.source import hidden_state_source
from speculators.training.step import TrainingStep
from speculators.training.trainer import train
from speculators.training.world import World
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


def test_memory_that_runs_out_before_the_first_save_says_so(verifier: Verifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingStep, "run", lambda *arguments: torch.empty(2**58, dtype=torch.int64))
    with pytest.raises(ConfigError, match=r"has no room for 2,147,483,648.0 GiB more: .* lower rows_per_step .*; no state was saved yet"):
        train(verifier, packed_rows(), tiny_config(output=tmp_path / "run"))


# -- what a step holds -----------------------------------------------------------------------------------------------


class Alive(TorchDispatchMode):
    """The most tensors of some shape and dtype, made inside, that are alive at once. Views of one storage are one."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.most, self._like, self._alive = 0, (shape, dtype), dict[int, StorageWeakRef]()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {x.untyped_storage()._cdata for x in args if isinstance(x, Tensor)}
        result = operation(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, Tensor) and (tuple(x.shape), x.dtype) == self._like and x.untyped_storage()._cdata not in before:
                self._alive[x.untyped_storage()._cdata] = StorageWeakRef(x.untyped_storage())
        self._alive = {key: storage for key, storage in self._alive.items() if not storage.expired()}
        self.most = max(self.most, len(self._alive))
        return result


def step_of(verifier: Verifier, **fields: Any) -> tuple[TrainingStep, DrafterOptimizer]:
    rows, config = packed_rows(), tiny_config(**fields)
    speculator = build_speculator(config, verifier, rows, None)
    source = hidden_state_source(verifier, speculator.aux_hidden_state_layer_ids, rows, cache_states=True)
    optimizer = DrafterOptimizer(speculator, config)
    parallel = parallelise(speculator, World(), "ddp", torch.float32)
    return TrainingStep(parallel, source, None, optimizer, config, torch.float32, Capture(verifier.device)), optimizer


def test_p_eagle_makes_one_gradient_of_its_embedding() -> None:
    speculator = drafter("peagle", training={"anchors": 8})
    assert speculator.embed_tokens is not None
    with Alive((VOCABULARY, HIDDEN), torch.float32) as alive:
        speculator.training_loss(packed_batch([30])).loss.backward()
    gradient = speculator.embed_tokens.weight.grad
    assert gradient is not None and gradient[3].ne(0).any(), "the mask token's row is in it"
    assert alive.most == 1


def test_p_eagle_projects_its_mask_slots_into_the_first_layer_once() -> None:
    speculator = drafter("peagle", training={"anchors": 8})
    seen: list[torch.Size] = []
    for layer in speculator.layers:  # type: ignore[union-attr]
        layer.self_attn.q_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[:-1]))
    speculator.training_loss(packed_batch([30]))
    depth_zero, (first, second) = seen[:2], seen[2:]
    assert depth_zero == [(1, 30), (1, 30)] and first == (1, 1) and second[1] > 8


@pytest.mark.parametrize("accumulation", [1, 2])
def test_gradients_exist_from_the_backward_pass_to_the_update_only(verifier: Verifier, accumulation: int) -> None:
    step, optimizer = step_of(verifier, accumulation=accumulation)

    def none() -> bool:
        return all(parameter.grad is None for parameter in optimizer.parameters)

    assert none()
    updates: list[bool] = []
    real: Callable[..., None] = optimizer.step
    optimizer.step = lambda *args: (updates.append(none()), real(*args))[1]  # type: ignore[method-assign]
    step.run(0, torch.arange(4), 1e-3)
    assert updates == [False] and none()


def test_a_weight_that_the_loss_does_not_reach_decays_like_the_others(verifier: Verifier) -> None:
    step, optimizer = step_of(verifier, weight_decay=0.5)
    unreached = optimizer.parameters[0]
    real = step.micro_batch

    def without_it() -> None:
        real()
        unreached.grad = None

    step.micro_batch = without_it  # type: ignore[method-assign]
    before = unreached.detach().clone()
    step.run(0, torch.arange(4), 1e-1)
    torch.testing.assert_close(unreached.detach(), before * (1 - 1e-1 * 0.5), rtol=1e-6, atol=0)


def test_parameters_whose_sum_autograd_hands_one_gradient_still_add_up_each_by_itself() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(4)) for _ in range(2)]
    gradients = FreshGradients(parameters)
    gradients.begin()
    for micro_batch in range(2):
        sum(parameter.view(2, 2) for parameter in parameters).sum().mul(2.0).backward()  # type: ignore[union-attr]
        if micro_batch == 0:
            gradients.complete()
    assert all(torch.equal(parameter.grad, torch.full((4,), 4.0)) for parameter in parameters)  # type: ignore[arg-type]
