"""The distillation loss: printed values, a dense float64 definition, and the kernel against the reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from speculators.algorithms.objective import dpace_weights
from speculators.kernels import linear_cross_entropy
from speculators.kernels import row_chunks as chunking
from speculators.kernels.distillation_loss import DistillationOutput, distillation_loss
from speculators.kernels.frozen_head import FrozenHead
from speculators.kernels.row_chunks import row_chunks

pytestmark = pytest.mark.usefixtures("garbage_in_new_memory")  # no result may depend on what memory held

# Without a GPU the kernel runs in Triton's interpreter, on CPU tensors.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLEMENTATIONS = ["reference", "triton"]


def from_logits(
    draft: list[list[float]], teacher: list[list[float]], labels: list[int], dtype: torch.dtype = torch.float64, **options: Any
) -> Any:
    """The loss of given logits (the head is the identity) under unit weights, and its gradient on the draft logits."""
    hidden = torch.tensor(draft, dtype=dtype, device=DEVICE, requires_grad=True)
    head = torch.eye(hidden.shape[1], dtype=dtype, device=DEVICE)
    coefficients = {"cross_entropy": 0.0, "l1": 0.0, "kl": 0.0} | options
    output = distillation_loss(
        hidden,
        head,
        torch.tensor(teacher, dtype=dtype, device=DEVICE),
        torch.tensor(labels, device=DEVICE),
        torch.ones(len(labels), device=DEVICE),
        **coefficients,
    )
    (gradient,) = torch.autograd.grad(output.loss, hidden)
    return output, gradient


def random_problem(
    rows: int = 9, vocabulary: int = 37, hidden: int = 8, rank: int = 0, dtype: torch.dtype = torch.float64, seed: int = 0, **options: Any
) -> dict[str, Any]:
    """Arguments of `distillation_loss`; options "softcap", "scale", "head_bias", "reduced" switch those parts on."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)

    problem: dict[str, Any] = {
        "hidden": normal(rows, hidden),
        "head": normal(vocabulary, hidden),
        "teacher_hidden": normal(rows, hidden),
        "labels": torch.randint(vocabulary, (rows,), generator=generator).to(DEVICE),
        "weights": torch.rand(rows, generator=generator).to(DEVICE),
        "cross_entropy": 0.1,
        "l1": 0.9,
        "kl": 0.5,
    }
    draft_vocabulary = vocabulary
    if options.get("reduced"):
        draft_vocabulary = vocabulary // 3
        problem["draft_rows"] = torch.randperm(vocabulary, generator=generator)[:draft_vocabulary].sort().values.to(DEVICE)
    if rank:
        problem |= {"bias_factors": normal(rows, rank), "bias_head": normal(draft_vocabulary, rank)}
    if options.get("softcap"):
        problem["logit_softcap"] = 3.0
    if options.get("scale"):
        problem["logit_scale"] = 0.6
    if options.get("head_bias"):
        problem["head_bias"] = normal(vocabulary)
    return problem


def loss_and_gradients(problem: dict[str, Any], **options: Any) -> tuple[DistillationOutput, list[Tensor]]:
    names = [name for name in ("hidden", "bias_factors", "bias_head") if name in problem]
    leaves = {name: problem[name].detach().clone().requires_grad_() for name in names}
    output = distillation_loss(**(problem | leaves | options))
    return output, list(torch.autograd.grad(output.loss, list(leaves.values())))


def dense_definition(problem: dict[str, Any]) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Everything over the verifier's whole vocabulary in float64, from probabilities and not from logarithms."""
    exact = {name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value for name, value in problem.items()}
    names = [name for name in ("hidden", "bias_factors", "bias_head") if name in problem]
    for name in names:
        exact[name] = exact[name].clone().requires_grad_()
    cap, scale = exact.get("logit_softcap"), exact.get("logit_scale", 1.0)

    def head_logits(hidden: Tensor) -> Tensor:
        logits = scale * torch.einsum("mh,vh->mv", hidden, exact["head"]) + exact.get("head_bias", 0.0)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    vocabulary = len(exact["head"])
    kept = exact.get("draft_rows", torch.arange(vocabulary, device=DEVICE))
    can_propose = torch.zeros(vocabulary, dtype=torch.bool, device=DEVICE).index_fill(0, kept, True)
    logits = head_logits(exact["hidden"])
    if "bias_factors" in exact:
        bias = torch.zeros_like(logits).index_copy(1, kept, torch.einsum("mr,vr->mv", exact["bias_factors"], exact["bias_head"]))
        logits = logits + bias
    unnormalised = logits.exp() * can_propose
    p = unnormalised / unnormalised.sum(1, keepdim=True)
    q = head_logits(exact["teacher_hidden"]).exp()
    q = q / q.sum(1, keepdim=True)
    q_kept = (q * can_propose) / (q * can_propose).sum(1, keepdim=True)

    rows = {name: torch.zeros(len(p), dtype=torch.float64, device=DEVICE) for name in ("cross_entropy", "l1", "kl", "acceptance")}
    rows["l1"] = (p - q).abs().sum(1)
    rows["acceptance"] = torch.minimum(p, q).sum(1)
    rows["kl"] = (q_kept[:, kept] * (q_kept[:, kept] / p[:, kept]).log()).sum(1)
    rows["cross_entropy"] = torch.stack(
        [-p[i, y].log() if can_propose[y] else p.new_zeros(()) for i, y in enumerate(exact["labels"].tolist())]
    )
    per_row = sum(exact[name] * rows[name] for name in ("cross_entropy", "l1", "kl"))
    loss = (exact["weights"] * per_row).sum()
    gradients = torch.autograd.grad(loss, [exact[name] for name in names])
    return {"loss": loss.detach(), "matches": p.argmax(1) == q.argmax(1)} | {k: v.detach() for k, v in rows.items()}, list(gradients)


def assert_agrees(
    output: DistillationOutput, gradients: list[Tensor], expected: dict[str, Tensor], exact: list[Tensor], tolerance: float
) -> None:
    for name, value in expected.items():
        actual = getattr(output, name)
        if value.dtype == torch.bool:
            assert torch.equal(actual, value), name
        else:
            torch.testing.assert_close(
                actual.double(), value, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
            )
    for ours, theirs in zip(gradients, exact, strict=True):
        scale = float(theirs.abs().max())
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=tolerance * scale)


# -- printed values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_loss_of_three_logits_has_the_published_values(implementation: str) -> None:
    draft, teacher = [[1.0, 0.0, -1.0]], [[0.5, 0.5, -2.0]]
    options = {"dtype": torch.float32, "implementation": implementation}
    output, cross_entropy_gradient = from_logits(draft, teacher, [0], cross_entropy=1.0, **options)
    assert output.cross_entropy.item() == pytest.approx(0.40761, abs=6e-6)
    assert output.l1.item() == pytest.approx(0.47112, abs=6e-6)
    assert output.acceptance.item() == pytest.approx(0.76444, abs=6e-6)
    assert cross_entropy_gradient[0].tolist() == pytest.approx([-0.3348, 0.2447, 0.0900], abs=6e-5)
    _, l1_gradient = from_logits(draft, teacher, [0], l1=1.0, **options)
    assert l1_gradient[0].tolist() == pytest.approx([0.3256, -0.3697, 0.0441], abs=6e-5)
    mixed, _ = from_logits(draft, teacher, [0], cross_entropy=0.1, l1=0.9, **options)
    confidence_loss = 0.54647  # the binary cross-entropy at confidence 0.75 of the same check
    assert mixed.loss.item() + confidence_loss == pytest.approx(1.01124, abs=1.2e-5)


@pytest.mark.parametrize("coefficient", ["cross_entropy", "l1", "kl"])
def test_gradients_of_the_published_case_equal_finite_differences(coefficient: str) -> None:
    teacher, step = [[0.5, 0.5, -2.0]], 1e-6
    _, gradient = from_logits([[1.0, 0.0, -1.0]], teacher, [0], **{coefficient: 1.0})
    for v in range(3):
        above, below = [1.0, 0.0, -1.0], [1.0, 0.0, -1.0]
        above[v] += step
        below[v] -= step
        losses = [from_logits([z], teacher, [0], **{coefficient: 1.0})[0].loss.item() for z in (above, below)]
        assert gradient[0, v].item() == pytest.approx((losses[0] - losses[1]) / (2 * step), abs=1e-8)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_disjoint_distributions_have_an_l1_of_two_and_no_acceptance(implementation: str) -> None:
    output, _ = from_logits([[200.0, 0.0]], [[0.0, 200.0]], [0], l1=1.0, dtype=torch.float32, implementation=implementation)
    assert (output.l1.item(), output.loss.item(), output.acceptance.item(), output.matches.item()) == (2.0, 2.0, 0.0, False)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_equal_distributions_lose_nothing_and_pull_nowhere(implementation: str) -> None:
    logits = [[0.3, -1.0, 2.0, 0.1]]
    output, gradient = from_logits(logits, logits, [2], l1=1.0, kl=1.0, dtype=torch.float32, implementation=implementation)
    assert output.loss.item() == pytest.approx(0.0, abs=1e-6)
    assert output.acceptance.item() == pytest.approx(1.0, abs=1e-6)
    assert output.matches.item()
    assert gradient.abs().max().item() < 1e-6


# -- against the dense definition --------------------------------------------------------------------------------

VARIANTS = [
    {},
    {"rank": 3},
    {"rank": 3, "softcap": True},
    {"softcap": True, "scale": True, "head_bias": True},
    {"rank": 2, "scale": True},
    {"rank": 3, "reduced": True},
    {"reduced": True, "softcap": True, "head_bias": True, "rank": 2},
]


def variant_name(variant: dict[str, Any]) -> str:
    return "+".join(variant) or "plain"


@pytest.mark.parametrize("variant", VARIANTS, ids=variant_name)
def test_the_reference_equals_the_dense_definition(variant: dict[str, Any]) -> None:
    problem = random_problem(**variant)
    output, gradients = loss_and_gradients(problem, chunk_rows=4)
    assert_agrees(output, gradients, *dense_definition(problem), tolerance=1e-7 if variant.get("reduced") else 1e-10)


@pytest.mark.parametrize("vocabulary", [129, 4097])
@pytest.mark.parametrize("variant", VARIANTS, ids=variant_name)
def test_the_kernel_equals_the_dense_definition(variant: dict[str, Any], vocabulary: int) -> None:
    problem = random_problem(rows=5, vocabulary=vocabulary, dtype=torch.float32, **variant)
    output, gradients = loss_and_gradients(problem, chunk_rows=2, implementation="triton")
    assert_agrees(output, gradients, *dense_definition(problem), tolerance=2e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("variant", VARIANTS, ids=variant_name)
def test_bfloat16_inputs_stay_near_the_exact_loss(variant: dict[str, Any], implementation: str) -> None:
    problem = random_problem(rows=6, vocabulary=129, dtype=torch.bfloat16, **variant)
    output, gradients = loss_and_gradients(problem, implementation=implementation)
    expected, exact = dense_definition(problem)
    del expected["matches"]  # two logits may round to one bfloat16
    assert_agrees(output, [], expected, [], tolerance=3e-2)
    for ours, theirs in zip(gradients, exact, strict=True):
        # As a whole: where p and q nearly meet, rounding turns the sign in the L1 gradient of single tokens.
        assert ours.dtype == torch.bfloat16
        assert float((ours.double() - theirs).norm() / theirs.norm()) < 5e-2


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("coefficient", ["cross_entropy", "l1", "kl"])
def test_each_loss_alone_has_its_own_gradient(coefficient: str, implementation: str) -> None:
    problem = random_problem(rank=2, dtype=torch.float32) | {"cross_entropy": 0.0, "l1": 0.0, "kl": 0.0, coefficient: 1.5}
    output, gradients = loss_and_gradients(problem, implementation=implementation)
    assert_agrees(output, gradients, *dense_definition(problem), tolerance=2e-5)


# -- chunks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("chunk_rows", [1, 4, 9, 100])
def test_chunked_equals_unchunked(chunk_rows: int, implementation: str) -> None:
    problem = random_problem(rows=10, rank=3, dtype=torch.float32)
    whole, whole_gradients = loss_and_gradients(problem, chunk_rows=10, implementation=implementation)
    output, gradients = loss_and_gradients(problem, chunk_rows=chunk_rows, implementation=implementation)
    torch.testing.assert_close(output.loss, whole.loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(output.acceptance, whole.acceptance, rtol=1e-6, atol=1e-6)
    for ours, theirs in zip(gradients, whole_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


class LargestTensor(TorchDispatchMode):
    """Records the bytes of the largest tensor made inside."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor):
                self.size = max(self.size, tensor.nbytes)
        return result


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_tensor_of_all_rows_by_the_vocabulary_exists(implementation: str) -> None:
    """The kernel's chunk has the drafter's logits and the teacher's in one tensor."""
    vocabulary, float_size, kinds = 600, 4, {"reference": 1, "triton": 2}
    problem = random_problem(rows=40, vocabulary=vocabulary, hidden=4, rank=2, dtype=torch.float32)
    for chunk_rows in (4, 8):
        with LargestTensor() as recorder:
            loss_and_gradients(problem, chunk_rows=chunk_rows, implementation=implementation)
        assert recorder.size == kinds[implementation] * chunk_rows * vocabulary * float_size


STRIDED = {
    "transposed": lambda x: x.T.contiguous().T if x.ndim == 2 else x,
    "every second column": lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
    "part of wider rows": lambda x: torch.cat([x, x], dim=-1)[..., : x.shape[-1]],
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("with_teacher", [False, True])
@pytest.mark.parametrize("variant", [{}, {"rank": 3}, {"reduced": True, "head_bias": True, "softcap": True}], ids=variant_name)
@pytest.mark.parametrize("layout", STRIDED)
def test_how_tensors_lie_in_memory_changes_nothing(layout: str, variant: dict[str, Any], with_teacher: bool, implementation: str) -> None:
    """Views of any strides, of every tensor at once."""
    problem = random_problem(rows=7, dtype=torch.float32, **variant)
    if not with_teacher:
        problem |= {**LABELS_ALONE, "teacher_hidden": None}
    expected = loss_and_gradients(problem, implementation=implementation, chunk_rows=3)
    strided = {name: STRIDED[layout](value) if isinstance(value, Tensor) else value for name, value in problem.items()}
    names = [name for name in ("hidden", "bias_factors", "bias_head") if name in problem]
    leaves = {name: strided[name].detach().requires_grad_() for name in names}
    output = distillation_loss(**(strided | leaves), implementation=implementation, chunk_rows=3)  # type: ignore[arg-type]
    torch.testing.assert_close(output.loss, expected[0].loss)
    for ours, theirs in zip(torch.autograd.grad(output.loss, list(leaves.values())), expected[1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kl", [0.0, 0.5])
def test_a_token_that_the_heads_bias_masks_takes_no_part(kl: float, implementation: str) -> None:
    problem = random_problem(rows=5, dtype=torch.float32, head_bias=True) | {"kl": kl}
    problem["head_bias"][20] = float("-inf")
    problem["labels"] = torch.where(problem["labels"] == 20, 21, problem["labels"])
    kept = torch.arange(37, device=DEVICE) != 20
    without = problem | {"head": problem["head"][kept], "head_bias": problem["head_bias"][kept]}
    without["labels"] = problem["labels"] - (problem["labels"] > 20).long()
    output, (gradient,) = loss_and_gradients(problem, implementation=implementation)
    expected, (exact,) = loss_and_gradients(without, implementation=implementation)
    torch.testing.assert_close(output.loss, expected.loss)
    torch.testing.assert_close(output.kl, expected.kl, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradient, exact, rtol=1e-4, atol=1e-5)


def test_the_sweep_of_cross_entropy_alone_holds_a_tile_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_cross_entropy, "TILE", 64)
    problem = random_problem(rows=40, vocabulary=600, hidden=4, dtype=torch.float32) | LABELS_ALONE | {"teacher_hidden": None}
    with LargestTensor() as recorder:
        loss_and_gradients(problem, chunk_rows=16, implementation="triton")
    assert recorder.size <= max(16 * 64, 600 * 4) * 4


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_row_that_is_no_number_says_so_in_every_statistic(implementation: str) -> None:
    problem = random_problem(rows=3, dtype=torch.float32)
    problem["hidden"][1, 0] = float("nan")
    output, (gradient,) = loss_and_gradients(problem, implementation=implementation)
    for statistic in (output.cross_entropy, output.l1, output.kl, output.acceptance, gradient.sum(dim=1)):
        assert statistic is not None and statistic.isnan().tolist() == [False, True, False]


# -- rows that do not count --------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_row_of_weight_zero_changes_nothing_whatever_it_holds(implementation: str) -> None:
    problem = random_problem(rows=6, rank=3, dtype=torch.float32)
    kept = torch.tensor([0, 1, 3, 5], device=DEVICE)
    problem["weights"][[2, 4]] = 0.0
    for name in ("hidden", "teacher_hidden", "bias_factors"):
        problem[name][2] = math.nan
        problem[name][4] = math.inf
    problem["labels"][[2, 4]] = -100
    output, (hidden, factors, bias_head) = loss_and_gradients(problem, chunk_rows=4, implementation=implementation)
    smaller = {k: v[kept] if k in ("hidden", "teacher_hidden", "bias_factors", "labels", "weights") else v for k, v in problem.items()}
    expected, (kept_hidden, kept_factors, kept_bias_head) = loss_and_gradients(smaller, implementation=implementation)
    torch.testing.assert_close(output.loss, expected.loss)
    torch.testing.assert_close(hidden[kept], kept_hidden)
    torch.testing.assert_close(factors[kept], kept_factors)
    torch.testing.assert_close(bias_head, kept_bias_head)
    for skipped in (
        hidden[[2, 4]],
        factors[[2, 4]],
        output.l1[[2, 4]],
        output.acceptance[[2, 4]],
        output.cross_entropy[[2, 4]],
        output.kl[[2, 4]],
    ):
        assert torch.equal(skipped, torch.zeros_like(skipped))
    assert not output.matches[[2, 4]].any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("rows", [0, 5])
def test_without_a_supervised_row_the_loss_and_all_gradients_are_zero(rows: int, implementation: str) -> None:
    problem = random_problem(rows=rows, rank=3, dtype=torch.float32)
    problem["weights"].zero_()
    output, gradients = loss_and_gradients(problem, implementation=implementation)
    assert output.loss.item() == 0.0
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in gradients)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_label_the_drafter_cannot_propose_adds_no_cross_entropy_but_costs_acceptance(implementation: str) -> None:
    # The verifier puts nearly everything on token 2, which the drafter cannot propose.
    hidden = torch.tensor([[1.0, 0.0, 5.0]], device=DEVICE, requires_grad=True)
    teacher = torch.tensor([[0.0, 0.0, 30.0]], device=DEVICE)
    output = distillation_loss(
        hidden,
        torch.eye(3, device=DEVICE),
        teacher,
        torch.tensor([2], device=DEVICE),
        torch.ones(1, device=DEVICE),
        cross_entropy=1.0,
        l1=0.0,
        kl=0.0,
        draft_rows=torch.tensor([0, 1], device=DEVICE),
        implementation=implementation,
    )
    (gradient,) = torch.autograd.grad(output.loss, hidden)
    assert output.loss.item() == 0.0 and torch.equal(gradient, torch.zeros_like(gradient))
    assert output.acceptance.item() == pytest.approx(0.0, abs=1e-6)
    assert output.l1.item() == pytest.approx(2.0, abs=1e-6)
    assert not output.matches.item()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_reduced_vocabulary_of_every_token_changes_nothing(implementation: str) -> None:
    problem = random_problem(rank=3, dtype=torch.float32)
    plain, plain_gradients = loss_and_gradients(problem, implementation=implementation)
    every = torch.arange(37, device=DEVICE)
    output, gradients = loss_and_gradients(problem | {"draft_rows": every}, implementation=implementation)
    torch.testing.assert_close(output.loss, plain.loss)
    for ours, theirs in zip(gradients, plain_gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


# -- autograd ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_upstream_gradient_scales_every_gradient(implementation: str) -> None:
    problem = random_problem(rank=3, dtype=torch.float32)
    hidden, bias_head = problem["hidden"].requires_grad_(), problem["bias_head"].requires_grad_()
    once = torch.autograd.grad(distillation_loss(**problem, implementation=implementation).loss, [hidden, bias_head])
    scaled = torch.autograd.grad(distillation_loss(**problem, implementation=implementation).loss * -2.5, [hidden, bias_head])
    for ours, theirs in zip(scaled, once, strict=True):
        torch.testing.assert_close(ours, -2.5 * theirs)


def test_only_the_loss_carries_a_gradient_and_the_head_stays_frozen() -> None:
    problem = random_problem()
    for name in ("hidden", "head", "teacher_hidden"):
        problem[name].requires_grad_()
    output = distillation_loss(**problem)
    assert not any(x.requires_grad for x in (output.cross_entropy, output.l1, output.kl, output.acceptance))
    output.loss.backward()
    assert problem["hidden"].grad is not None
    assert problem["head"].grad is None and problem["teacher_hidden"].grad is None


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_without_autograd_the_values_are_the_same(implementation: str) -> None:
    problem = random_problem(rank=3, dtype=torch.float32)
    with torch.no_grad():
        quiet = distillation_loss(**problem, implementation=implementation)
    output, _ = loss_and_gradients(problem, implementation=implementation)
    assert not quiet.loss.requires_grad
    torch.testing.assert_close(quiet.loss, output.loss.detach())
    torch.testing.assert_close(quiet.acceptance, output.acceptance, rtol=1e-6, atol=1e-6)  # compiled apart on a GPU


def test_bias_factors_without_a_bias_head_are_refused() -> None:
    problem = random_problem(rank=3)
    del problem["bias_head"]
    with pytest.raises(ValueError, match="bias_factors and bias_head together"):
        distillation_loss(**problem)


# -- teacher rows that serve several draft rows ------------------------------------------------------------------


def test_a_chunk_computes_each_teacher_row_once_and_leaves_out_rows_without_weight() -> None:
    used = torch.tensor([True, False, True, True, True, True, False, True])
    teacher_rows = torch.tensor([5, 0, 2, 5, 2, 7, 1, 3])
    chunks = row_chunks(used, teacher_rows, chunk_rows=4)
    assert [chunk.rows.tolist() for chunk in chunks] == [[2, 4, 7, 0], [3, 5]]
    assert [chunk.teacher_rows.tolist() for chunk in chunks] == [[2, 3, 5], [5, 7]]
    assert [chunk.positions.tolist() for chunk in chunks] == [[0, 0, 1, 2], [0, 1]]
    assert row_chunks(torch.zeros_like(used), teacher_rows, chunk_rows=4) == []


@pytest.mark.parametrize("chunk_rows", [1, 3, 4, 100])
def test_no_chunk_cuts_a_block(chunk_rows: int) -> None:
    used = torch.tensor([1, 0, 1, 0, 0, 0, 1, 1, 1, 0, 0, 1], dtype=torch.bool)
    chunks = row_chunks(used, torch.arange(12) // 2, chunk_rows=chunk_rows, block_rows=3)
    assert torch.cat([chunk.rows for chunk in chunks]).tolist() == used.nonzero()[:, 0].tolist()
    blocks = [set((chunk.rows // 3).tolist()) for chunk in chunks]
    assert sum(len(block) for block in blocks) == len(set().union(*blocks)) == 3
    assert all(len(chunk.rows) <= chunk_rows or len(block) == 1 for chunk, block in zip(chunks, blocks, strict=True))
    for chunk in chunks:
        assert torch.equal(chunk.teacher_rows[chunk.positions], chunk.rows // 2)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("captured", [False, True])
def test_shared_teacher_rows_equal_repeated_ones(implementation: str, captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order and also as while a graph is captured, where rows without weight take part."""
    problem = random_problem(rows=9, rank=2, dtype=torch.float32)
    rows = torch.tensor([3, 1, 1, 0, 4, 4, 4, 2, 0], device=DEVICE)
    problem["weights"][[2, 6]] = 0.0
    problem["hidden"][2] = math.nan
    expected, exact = dense_definition(
        {k: torch.nan_to_num(v) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in problem.items()}
        | {"teacher_hidden": problem["teacher_hidden"][rows]}
    )
    if captured:
        monkeypatch.setattr(chunking, "_used_rows", chunking._all_rows)
    output, gradients = loss_and_gradients(problem | {"teacher_rows": rows}, chunk_rows=4, implementation=implementation)
    kept = problem["weights"] != 0
    expected = {name: value if value.ndim == 0 else torch.where(kept, value, 0).to(value.dtype) for name, value in expected.items()}
    assert_agrees(output, gradients, expected, exact, tolerance=2e-5)


# -- without a teacher -------------------------------------------------------------------------------------------

LABELS_ALONE: dict[str, Any] = {"cross_entropy": 0.7, "l1": 0.0, "kl": 0.0}
PRECISIONS = [("reference", torch.float64, 1e-10), ("triton", torch.float32, 2e-5)]


@pytest.mark.parametrize(("implementation", "dtype", "tolerance"), PRECISIONS, ids=IMPLEMENTATIONS)
@pytest.mark.parametrize("variant", VARIANTS, ids=variant_name)
def test_cross_entropy_against_labels_alone_is_the_same_without_a_teacher(
    variant: dict[str, Any], implementation: Any, dtype: torch.dtype, tolerance: float
) -> None:
    problem = random_problem(rows=9, vocabulary=129, dtype=dtype, **variant) | LABELS_ALONE
    problem["weights"] = problem["weights"].to(dtype)
    output, gradients = loss_and_gradients(problem | {"teacher_hidden": None}, chunk_rows=4, implementation=implementation)
    assert output.l1 is output.kl is output.acceptance is None
    definition, exact = dense_definition(problem)
    assert_agrees(output, gradients, {name: definition[name] for name in ("loss", "cross_entropy")}, exact, tolerance)
    asked, asked_gradients = loss_and_gradients(problem, chunk_rows=4, implementation=implementation)
    torch.testing.assert_close([output.loss, output.cross_entropy, *gradients], [asked.loss, asked.cross_entropy, *asked_gradients])


@pytest.mark.parametrize(("implementation", "dtype", "tolerance"), PRECISIONS, ids=IMPLEMENTATIONS)
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(
    "variant",
    [{}, {"reduced": True, "softcap": True}, {"rank": 2}, {"reduced": True, "softcap": True, "head_bias": True, "rank": 2}],
    ids=variant_name,
)
def test_dpace_goes_without_a_teacher_and_rows_without_weight_may_hold_anything(
    variant: dict[str, Any], captured: bool, implementation: Any, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also as while a graph is captured, where rows without weight take part."""
    problem = random_problem(rows=12, dtype=dtype, **variant) | LABELS_ALONE
    mask = torch.tensor([1, 1, 1, 1, 1, 1, 0, 0, 1, 0, 0, 0], dtype=torch.bool, device=DEVICE)
    problem["weights"] = mask.to(dtype)

    def reweigh(log_probability: Tensor, rows: Tensor) -> Tensor:
        full = torch.zeros(12, dtype=dtype, device=DEVICE).index_put((rows,), log_probability)
        return dpace_weights(full.view(3, 4), mask.view(3, 4), 0.5).flatten()[rows]

    options = {"reweigh": reweigh, "block_rows": 4, "chunk_rows": 5, "implementation": implementation}
    asked, _ = loss_and_gradients(problem, **options)
    definition, exact = dense_definition(problem | {"weights": asked.weights})
    for name in {"hidden", "bias_factors"} & problem.keys():
        problem[name][~mask] = math.nan
    problem["labels"][~mask] = -100
    if captured:
        monkeypatch.setattr(chunking, "_used_rows", chunking._all_rows)
    output, gradients = loss_and_gradients(problem | {"teacher_hidden": None}, **options)
    assert output.weights[mask].count_nonzero() == mask.sum() and not output.weights[~mask].any()
    torch.testing.assert_close(output.weights, asked.weights)
    definition["cross_entropy"][~mask] = 0.0
    assert_agrees(output, gradients, {name: definition[name] for name in ("loss", "cross_entropy")}, exact, tolerance)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_without_a_teacher_a_match_is_the_label(implementation: str) -> None:
    hidden = torch.tensor([[0.0, 9.0, 1.0], [0.0, 9.0, 1.0], [0.0, 9.0, 1.0], [0.0, 9.0, 1.0]], device=DEVICE)
    labels, weights = torch.tensor([1, 2, -1, 1], device=DEVICE), torch.tensor([1.0, 1.0, 1.0, 0.0], device=DEVICE)

    def matches(**options: Any) -> list[bool]:
        output = distillation_loss(
            hidden, torch.eye(3, device=DEVICE), None, labels, weights, **LABELS_ALONE, implementation=implementation, **options
        )
        found: list[bool] = output.matches.tolist()
        return found

    assert matches() == [True, False, False, False]
    # What the drafter cannot propose is neither its choice nor matched.
    assert matches(draft_rows=torch.tensor([0, 2], device=DEVICE)) == [False, True, False, False]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_teacher_is_a_third_of_the_arithmetic_and_half_of_a_default_chunk(implementation: str) -> None:
    rows, vocabulary, size = 6, 37, 8
    problem = random_problem(rows=rows, vocabulary=vocabulary, hidden=size, dtype=torch.float32) | LABELS_ALONE
    for teacher, products in ((problem["teacher_hidden"], 3), (None, 2)):
        with FlopCounterMode(display=False) as counter:
            loss_and_gradients(problem | {"teacher_hidden": teacher}, implementation=implementation)
        assert counter.get_total_flops() == products * 2 * rows * vocabulary * size
    head = FrozenHead(torch.zeros(4096, 8, device=DEVICE), None, 1.0, None)
    assert head.default_chunk_rows(4096) == 2 * head.default_chunk_rows(2 * 4096) > 0


@pytest.mark.parametrize("change", [{"labels": None}, {"l1": 0.9}, {"kl": 0.5}, {"confidence_logits": torch.zeros(9)}], ids=variant_name)
def test_what_depends_on_the_verifier_is_refused_without_a_teacher(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"without teacher_hidden .* needs labels, l1 = kl = 0 .* and no confidence_logits"):
        distillation_loss(**(random_problem() | LABELS_ALONE | {"teacher_hidden": None} | change))


def test_rows_that_all_count_are_taken_without_a_copy() -> None:
    values, used = torch.randn(10, 3), torch.ones(10, dtype=torch.bool)
    chunks = row_chunks(used, None, chunk_rows=4)
    assert [chunk.row_numbers().tolist() for chunk in chunks] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    for chunk in chunks:
        rows = chunk.row_numbers()
        assert chunk.take(values).data_ptr() == chunk.take_teacher(values).data_ptr() == values[int(rows[0])].data_ptr()
        assert torch.equal(chunk.take(values), values[rows])
        assert torch.equal(chunk.take_teacher(values)[chunk.positions], values[rows])
    used[2] = False
    chunks = row_chunks(used, None, chunk_rows=4)
    assert [chunk.row_numbers().tolist() for chunk in chunks] == [[0, 1, 3, 4], [5, 6, 7, 8], [9]]
    assert all(torch.equal(chunk.take(values), values[chunk.rows]) for chunk in chunks)


# -- labels, weights that depend on the drafter, confidence ------------------------------------------------------


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("reduced", [False, True])
def test_without_labels_cross_entropy_is_against_the_verifiers_likeliest_token(implementation: str, reduced: bool) -> None:
    problem = random_problem(rows=12, dtype=torch.float32, reduced=reduced, head_bias=True)
    likeliest = (problem["teacher_hidden"] @ problem["head"].T + problem["head_bias"]).argmax(1)
    output, gradients = loss_and_gradients(problem | {"labels": None}, implementation=implementation)
    assert_agrees(output, gradients, *dense_definition(problem | {"labels": likeliest}), tolerance=2e-5)
    if reduced:  # what it cannot propose adds no cross-entropy
        outside = ~torch.isin(likeliest, problem["draft_rows"])
        assert outside.any() and torch.equal(output.cross_entropy == 0, outside)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_dpace_weights_come_from_the_same_logits_and_carry_no_gradient(implementation: str) -> None:
    """Three blocks of four in chunks of one block: w_k = sum over j >= k of P_j, worked out in float64 (arXiv 2605.18810)."""
    problem = random_problem(rows=12, dtype=torch.float32, rank=2)
    mask = torch.tensor([1, 1, 1, 1, 1, 1, 0, 0, 1, 0, 0, 0], dtype=torch.bool, device=DEVICE).view(3, 4)
    seen: list[int] = []

    def reweigh(log_probability: Tensor, rows: Tensor) -> Tensor:
        seen.extend(rows.tolist())
        full = torch.zeros(12, device=DEVICE).index_put((rows,), log_probability.float())
        return dpace_weights(full.view(3, 4), mask, 0.5).flatten()[rows]

    problem["weights"] = mask.flatten().float()
    output, gradients = loss_and_gradients(problem, chunk_rows=5, block_rows=4, reweigh=reweigh, implementation=implementation)
    cross_entropy = dense_definition(problem)[0]["cross_entropy"].view(3, 4)
    expected = torch.zeros(3, 4, dtype=torch.float64)
    for block in range(3):
        for k in range(int(mask[block].sum())):
            reach = [math.prod(0.5 * math.exp(-cross_entropy[block, i]) + 0.5 for i in range(j + 1)) for j in range(int(mask[block].sum()))]
            expected[block, k] = sum(reach[k:])
    assert sorted(seen) == mask.flatten().nonzero()[:, 0].tolist()
    torch.testing.assert_close(output.weights.cpu().double(), expected.flatten(), rtol=1e-5, atol=1e-6)
    right, exact = dense_definition(problem | {"weights": output.weights})
    torch.testing.assert_close(output.loss.double(), right["loss"], rtol=2e-5, atol=2e-5)
    assert_agrees(output, gradients, {}, exact, tolerance=2e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_confidence_is_scored_against_the_acceptance_and_pulls_only_itself(implementation: str) -> None:
    """At confidence 0.75 the published case has BCE 0.54647 and dBCE/dlogit -0.01444."""
    hidden = torch.tensor([[1.0, 0.0, -1.0], [3.0, 0.0, 0.0]], device=DEVICE, requires_grad=True)
    logits = torch.tensor([math.log(3.0), math.nan], device=DEVICE, requires_grad=True)
    output = distillation_loss(
        hidden,
        torch.eye(3, device=DEVICE),
        torch.tensor([[0.5, 0.5, -2.0], [0.0, 0.0, 0.0]], device=DEVICE),
        torch.tensor([0, 0], device=DEVICE),
        torch.tensor([1.0, 0.0], device=DEVICE),
        confidence_logits=logits,
        confidence=1.0,
        cross_entropy=0.0,
        l1=0.0,
        kl=0.0,
        implementation=implementation,
    )
    assert output.confidence_cross_entropy is not None
    assert output.loss.item() == pytest.approx(0.54647, abs=6e-6)
    assert output.confidence_cross_entropy.tolist() == pytest.approx([0.54647, 0.0], abs=6e-6)
    gradient, pull = torch.autograd.grad(output.loss, [logits, hidden])
    assert gradient.tolist() == pytest.approx([-0.01444, 0.0], abs=6e-6)
    assert torch.equal(pull, torch.zeros_like(pull))


# -- CUDA --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs exist on CUDA only")
@pytest.mark.parametrize("teacher", [True, False])
def test_loss_and_gradients_replay_as_a_cuda_graph(teacher: bool) -> None:
    problem = random_problem(rows=300, vocabulary=4096, hidden=64, rank=8, dtype=torch.bfloat16)
    if not teacher:
        problem |= {**LABELS_ALONE, "teacher_hidden": None}
    leaves = {name: problem[name].requires_grad_() for name in ("hidden", "bias_factors", "bias_head")}

    def step() -> tuple[Tensor, ...]:
        output = distillation_loss(**problem, chunk_rows=128)
        return output.loss, *torch.autograd.grad(output.loss, list(leaves.values()))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step()
    with torch.no_grad():
        problem["hidden"].copy_(torch.randn_like(problem["hidden"]))
    graph.replay()
    for ours, eager in zip(replayed, step(), strict=True):
        torch.testing.assert_close(ours, eager)
