"""The optimizer: which parameter goes where, exact updates, float32 state, skipped steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tiny_models import tiny_verifier
from tiny_training import DRAFTERS, packed_rows, tiny_config
from torch import Tensor

from speculators.errors import CheckpointError, ConfigError
from speculators.kernels.adamw import adamw_step
from speculators.registry import get_algorithm
from speculators.speculator import Speculator
from speculators.training.muon import orthogonalise
from speculators.training.optimizer import DrafterOptimizer, parameter_groups
from speculators.training.run_folder import STATE_FILE
from speculators.training.trainer import train

TINY: dict[str, dict[str, Any]] = {
    **DRAFTERS,
    "peagle": {"num_layers": 2, "num_draft_tokens": 3, "aux_hidden_state_layer_ids": [1, 2], "mask_token_id": 3},
    "eagle3": {"num_draft_tokens": 3, "aux_hidden_state_layer_ids": [1, 2]},
}


def drafter(method: str = "dspark", **options: Any) -> Speculator:
    torch.manual_seed(0)
    return get_algorithm(method).speculator_class.from_verifier(tiny_verifier().weights, **{**TINY[method], **options})


@pytest.mark.parametrize("method", list(TINY))
def test_muon_takes_the_matrices_and_adamw_tables_norms_biases_and_single_rows(method: str) -> None:
    speculator = drafter(method, **({"markov_head_type": "gated"} if method == "dspark" else {}))
    groups = parameter_groups(speculator, tiny_config(optimizer="muon", weight_decay=0.1))
    kinds = {name: group.kind for group in groups for name in group.parameters}
    decays = {name: group.weight_decay for group in groups for name in group.parameters}
    trainable = dict((name, p) for name, p in speculator.named_parameters() if p.requires_grad)
    assert kinds.keys() == trainable.keys()
    for name, parameter in trainable.items():
        table = any(part in name for part in ("markov_w1", "markov_w2", "embed_tokens", "lm_head"))
        single = parameter.ndim != 2 or 1 in parameter.shape  # norms, biases, the [1, n] confidence weight, mask_hidden
        assert kinds[name] == ("adamw" if table or single else "muon"), name
        assert decays[name] == (0.0 if single else 0.1), name
    if method == "dspark":
        assert {name.split(".")[-2] for name, kind in kinds.items() if kind == "adamw" and not name.endswith("norm.weight")} >= {
            "markov_w1",
            "markov_w2",
            "proj",
        }
        assert any("gate_proj" in name and kind == "muon" for name, kind in kinds.items())


def test_any_embedding_is_a_table() -> None:
    speculator = drafter("toy")
    speculator.extra = torch.nn.Embedding(5, 8)
    groups = parameter_groups(speculator, tiny_config(optimizer="muon"))
    assert {name: group.kind for group in groups for name in group.parameters}["extra.weight"] == "adamw"


def test_the_longest_matching_name_scales_the_learning_rate() -> None:
    speculator = drafter()
    groups = parameter_groups(speculator, tiny_config(learning_rate_scale={"layers": 0.5, "layers.0.mlp": 2.0}))
    scales = {name: group.learning_rate_scale for group in groups for name in group.parameters}
    assert scales["layers.0.mlp.down_proj.weight"] == 2.0
    assert scales["layers.0.self_attn.q_proj.weight"] == 0.5
    assert scales["fc.weight"] == 1.0


def test_a_scaled_learning_rate_scales_the_first_adamw_step() -> None:
    speculator = drafter("toy")
    optimizer = DrafterOptimizer(speculator, tiny_config(learning_rate_scale={"slots.1": 0.25}))
    before = {name: value.clone() for name, value in speculator.state_dict().items()}
    for parameter in optimizer.parameters:
        parameter.grad = torch.full_like(parameter, 3.0)
    optimizer.learning_rate.fill_(1e-2)
    optimizer.step(skip=torch.zeros(()))
    for name, value in speculator.state_dict().items():
        # AdamW's first step is the learning rate times the gradient's sign.
        expected = 0.25e-2 if name.startswith("slots.1") else 1e-2
        torch.testing.assert_close(before[name] - value, torch.full_like(value, expected), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_an_update_scales_the_gradient_counts_its_steps_and_equals_that_of_torch(implementation: Any) -> None:
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 700), (5,), (1, 1, 2)]
    ours = [torch.randn(shape, generator=generator).to(device) for shape in shapes]
    theirs = [torch.nn.Parameter(tensor.double()) for tensor in ours]
    expected = torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.3, betas=(0.8, 0.97))
    moments = [[torch.zeros_like(tensor) for tensor in ours] for _ in range(2)]
    steps = [torch.zeros((), device=device) for _ in ours]

    def update(gradients: list[Tensor], skip: float) -> None:
        adamw_step(
            *(ours, gradients, *moments, steps),
            learning_rate=torch.tensor(1e-2, device=device),
            weight_decay=0.3,
            betas=(0.8, 0.97),
            scale=torch.tensor(0.25, device=device),
            skip=torch.tensor(skip, device=device),
            implementation=implementation,
        )

    for _ in range(4):
        gradients = [torch.randn(shape, generator=generator).to(device) for shape in shapes]
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient.double() / 4
        update(gradients, skip=0.0)
        expected.step()
        update([torch.full_like(tensor, float("nan")) for tensor in ours], skip=1.0)
    assert [float(step) for step in steps] == [4.0] * 3
    for parameter, tensor in zip(theirs, ours, strict=True):
        torch.testing.assert_close(tensor.double(), parameter.detach(), rtol=1e-5, atol=2e-6)


def test_orthogonalised_matrices_keep_their_singular_vectors_and_lose_their_singular_values() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((3, 16, 40), (2, 40, 16), (1, 8, 8)):
        matrices = torch.randn(shape, generator=generator)
        result = orthogonalise(matrices)
        u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
        core = u.mT @ result @ vh.mT  # diagonal, if the singular vectors are kept
        diagonal = core.diagonal(dim1=1, dim2=2)
        torch.testing.assert_close(core, torch.diag_embed(diagonal), rtol=0, atol=1e-4)
        assert 0.6 < diagonal.min() and diagonal.max() < 1.3


def test_muon_steps_are_those_of_torch() -> None:
    speculator, reference = drafter("dspark"), drafter("dspark")
    config = tiny_config(optimizer="muon", weight_decay=0.1)
    optimizer = DrafterOptimizer(speculator, config)
    optimizer.learning_rate.fill_(1e-2)
    muon_names = [name for group in parameter_groups(speculator, config) if group.kind == "muon" for name in group.parameters]
    theirs = dict(reference.named_parameters())
    expected = torch.optim.Muon([theirs[name] for name in muon_names], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    start = {name: theirs[name].detach().clone() for name in muon_names}
    generator = torch.Generator().manual_seed(1)
    ours = dict(speculator.named_parameters())
    for _ in range(3):
        for name, parameter in ours.items():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            theirs[name].grad = parameter.grad.clone()
        optimizer.step(skip=torch.zeros(()))
        expected.step()
    for name in muon_names:
        moved = (theirs[name] - start[name]).norm()
        assert (ours[name] - theirs[name]).norm() < 0.02 * moved, name  # torch iterates in bfloat16


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_skipped_step_leaves_weights_and_state_although_the_gradient_is_nan(name: str) -> None:
    speculator = drafter()
    optimizer = DrafterOptimizer(speculator, tiny_config(optimizer=name, weight_decay=0.1))
    optimizer.learning_rate.fill_(1e-2)

    def step(gradient: float, skip: float) -> None:
        for parameter in optimizer.parameters:
            parameter.grad = torch.full_like(parameter, gradient)
        optimizer.step(skip=torch.tensor(skip))

    step(1.0, skip=0.0)
    weights = {key: value.clone() for key, value in speculator.state_dict().items()}
    state = {key: value.clone() for key, value in optimizer.state().items()}
    assert all(value.any() for value in state.values())
    step(float("nan"), skip=1.0)
    assert all(torch.equal(value, weights[key]) for key, value in speculator.state_dict().items())
    assert all(torch.equal(value, state[key]) for key, value in optimizer.state().items())
    step(1.0, skip=0.0)
    assert not all(torch.equal(value, weights[key]) for key, value in speculator.state_dict().items())


def test_a_bfloat16_drafter_trains_with_float32_weights_and_state_so_that_small_updates_add_up(tmp_path: Path) -> None:
    verifier = tiny_verifier(seed=3, dtype=torch.bfloat16)
    start = get_algorithm("toy").speculator_class.from_verifier(verifier.weights)
    with torch.no_grad():
        for parameter in start.parameters():
            parameter.fill_(1.0)
    start = start.to(torch.bfloat16)
    # AdamW moves a weight by about the learning rate: 1e-4 of each, while bfloat16 has no number between 1 and 1 - 1/256.
    config = tiny_config(output=tmp_path / "run", learning_rate=1e-4, warmup=0.0, learning_rate_floor=1.0, steps=8, gradient_clip=1e9)
    train(verifier, packed_rows(), config, init_from=start)
    with safe_open(tmp_path / "run" / "latest" / STATE_FILE, framework="pt") as stream:
        state = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
    kept = {name: value for name, value in state.items() if not name.startswith("meters.")}  # those are float64 sums
    assert {value.dtype for value in kept.values()} == {torch.float32}
    weight, second = state["speculator.slots.0.weight"], state["optimizer.adamw.slots.0.weight.exp_avg_sq"]
    used = second > 0
    assert used.float().mean() > 0.5
    moved = (weight[used] - 1.0).abs()
    assert moved.min() > 0 and moved.max() < 10e-4


def test_other_weights_than_float32_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"is torch.bfloat16: training needs float32 weights"):
        DrafterOptimizer(drafter("toy").to(torch.bfloat16), tiny_config())


def test_a_state_that_does_not_fit_is_refused() -> None:
    optimizer = DrafterOptimizer(drafter("toy"), tiny_config())
    other = DrafterOptimizer(drafter("toy", num_draft_tokens=2), tiny_config())
    with pytest.raises(CheckpointError, match=r"slots\.2\.weight\.step is missing"):
        optimizer.load_state(other.state())
