"""What may be captured in a CUDA graph: no step reads a number on the host, has a shape that depends on data, or uploads anything."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import tiny_verifier
from tiny_training import DRAFTERS, packed_rows, tiny_config
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from speculators.kernels import distillation_loss, row_chunks
from speculators.training.build import build_speculator
from speculators.training.graph import Capture
from speculators.training.optimizer import DrafterOptimizer
from speculators.training.parallel import parallelise
from speculators.training.source import hidden_state_source
from speculators.training.step import TrainingStep
from speculators.training.world import World
from speculators.verifier import Verifier

# By method, and what is special about it.
METHODS: dict[str, dict[str, Any]] = {
    **DRAFTERS,
    "dflash": {**DRAFTERS["dflash"], "draft_vocab_size": 16, "training": {"anchors": 4, "position_weights": "dpace"}},
    "dflash, labels alone": {**DRAFTERS["dflash"], "training": {"anchors": 4, "acceptance_in_training": False}},
    "peagle": {"num_layers": 2, "num_draft_tokens": 3, "aux_hidden_state_layer_ids": [1, 2], "mask_token_id": 3},
    "eagle3": {"num_draft_tokens": 3, "aux_hidden_state_layer_ids": [1, 2]},
}

# Each of these waits for the device, or copies from the host's memory, on CUDA.
FORBIDDEN = {
    "_local_scalar_dense": "reads a number",
    "equal": "compares on the host",
    "is_nonzero": "reads a number",
    "lift_fresh": "builds a tensor from Python values",
    "masked_select": "has a shape that depends on data",
    "nonzero": "has a shape that depends on data",
    "_unique2": "has a shape that depends on data",
    "unique_dim": "has a shape that depends on data",
    "unique_consecutive": "has a shape that depends on data",
    "repeat_interleave": "has a shape that depends on data",
    "bincount": "has a shape that depends on data",
}


class NoHost(TorchDispatchMode):
    """Fails at the first operation that a CUDA graph could not hold; counts the others."""

    operations = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        name = operation._overloadpacket.__name__
        assert name not in FORBIDDEN, f"{name} {FORBIDDEN[name]}"
        if name in ("index", "index_put_", "index_put", "_index_put_impl_", "_unsafe_index"):
            masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
            assert not masks, f"{name} with a mask has a shape that depends on data"
        return operation(*args, **(kwargs or {}))


def captured_chunks(used: Tensor, teacher_rows: Tensor | None, *, chunk_rows: int, block_rows: int = 1) -> list[row_chunks.Chunk]:
    """The loss leaves rows without weight out, which takes the host, except inside a capture."""
    return row_chunks._all_rows(used, teacher_rows, chunk_rows, block_rows)


def training_step(
    method: str, verifier: Verifier, capture: Capture, *, cache_states: bool, optimizer: str
) -> tuple[TrainingStep, DrafterOptimizer]:
    rows = packed_rows()
    config = tiny_config(method=method.partition(",")[0], options=METHODS[method], optimizer=optimizer, weight_decay=0.1, ema_decay=0.9)
    speculator = build_speculator(config, verifier, rows, None)
    source = hidden_state_source(verifier, speculator.aux_hidden_state_layer_ids, rows, cache_states=cache_states)
    parallel, chosen = parallelise(speculator, World(), "ddp", torch.float32), DrafterOptimizer(speculator, config)
    return TrainingStep(parallel, source, source, chosen, config, torch.float32, capture), chosen


@pytest.mark.parametrize(
    ("method", "cache_states", "optimizer"),
    [*((method, False, "muon") for method in METHODS), ("dflash", True, "adamw"), ("toy", True, "adamw")],
)
def test_a_step_can_be_captured_whole(method: str, cache_states: bool, optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distillation_loss, "row_chunks", captured_chunks)
    verifier = tiny_verifier(seed=3)
    step, _ = training_step(method, verifier, Capture(verifier.device), cache_states=cache_states, optimizer=optimizer)
    step.run(0, torch.arange(4), 1e-3)  # warm-up: sums and tables are made at the first call
    step.evaluate()
    with NoHost() as host:
        step.first_micro_batch()
        step.micro_batch()
        step.update()
        step.evaluation_batch()
    assert host.operations > 100, "the whole step ran under the detector's eyes"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs exist on CUDA only")
@pytest.mark.parametrize("method", METHODS)
def test_a_captured_step_draws_and_learns_what_an_eager_one_does(method: str) -> None:
    device = torch.device("cuda")
    verifier = Verifier(tiny_verifier(seed=3).model.to(device), name_or_path="tiny-llama")
    learned: list[Tensor] = []
    for enabled in (False, True):
        step, optimizer = training_step(method, verifier, Capture(device, enabled=enabled), cache_states=True, optimizer="muon")
        before = torch.cat([parameter.detach().flatten() for parameter in optimizer.parameters])
        for number in range(3):
            step.run(number, torch.arange(4) + number, 1e-3)
        learned.append(torch.cat([parameter.detach().flatten() for parameter in optimizer.parameters]) - before)
    eager, captured = learned
    assert float(eager.norm()) > 0.0
    assert float((captured - eager).norm()) < 0.02 * float(eager.norm())  # rows without weight take part in sums, which rounds otherwise


def test_the_detector_sees_what_it_must() -> None:
    x = torch.arange(4.0)
    for forbidden in (lambda: x.sum().item(), lambda: x[x > 1], lambda: x.nonzero(), lambda: torch.tensor([1.0]), lambda: bool(x.any())):
        with pytest.raises(AssertionError), NoHost():
            forbidden()
