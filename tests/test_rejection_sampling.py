"""The rejection sampling kernels against their definition, which `test_rejection` holds to the papers by 200,000 trials."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from speculators.decoding.randomness import Purpose, uniform
from speculators.decoding.rejection import Acceptance, accept_block, accept_sampled
from speculators.decoding.sampling import draw
from speculators.kernels.greedy_verification import greedy_verification
from speculators.kernels.rejection_sampling import Distributions, rejection_sampling

pytestmark = pytest.mark.usefixtures("garbage_in_new_memory")  # no result may depend on what memory held

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROUND = torch.tensor(3, device=DEVICE)


def block(rows: int, drafts: int, vocabulary: int, dtype: torch.dtype = torch.float32, closeness: float = 1.0) -> dict[str, Any]:
    """Ragged rows whose drafts were drawn from logits that resemble the verifier's."""
    generator = torch.Generator().manual_seed(vocabulary + rows)
    logits = 2 * torch.randn(rows, drafts + 1, vocabulary, generator=generator)
    draft_logits = logits[:, :-1] + closeness * torch.randn(rows, drafts, vocabulary, generator=generator)
    logits, draft_logits = logits.to(DEVICE, dtype), draft_logits.to(DEVICE, dtype)
    numbers = torch.arange(rows, device=DEVICE) + 100
    slots = torch.arange(drafts, device=DEVICE)
    draft_distribution = (draft_logits.float() / 0.8).softmax(-1)
    return {
        "logits": logits,
        "draft_logits": draft_logits,
        "token_ids": draw(draft_distribution, uniform(5, Purpose.DRAFT, numbers[:, None], ROUND, slots))
        if drafts
        else slots.expand(rows, 0),
        "lengths": torch.randint(drafts + 1, (rows,), generator=generator).to(DEVICE),
        "rows": numbers,
    }


def verify(
    case: dict[str, Any], kind: str, verification: str, implementation: str, temperatures: tuple[float, float] = (0.7, 0.8)
) -> Acceptance:
    """Verifier and drafts at a temperature each, as logits or float32 probabilities; the drafts possibly as point masses."""
    target, draft = (Distributions(case[name], t) for name, t in zip(("logits", "draft_logits"), temperatures, strict=True))
    if kind != "logits":
        draft = Distributions(draft.probabilities())
    if kind == "probabilities":
        target = Distributions(target.probabilities())
    return rejection_sampling(
        case["token_ids"],
        case["lengths"],
        target,
        None if kind == "point mass" else draft,
        seed=5,
        rows=case["rows"],
        round_index=ROUND,
        verification=verification,  # type: ignore[arg-type]
        implementation=implementation,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("verification", ["standard", "block"])
@pytest.mark.parametrize("kind", ["logits", "probabilities", "logits beside probabilities", "point mass"])
@pytest.mark.parametrize(
    ("rows", "drafts", "vocabulary", "dtype"), [(9, 3, 61, torch.float32), (2, 7, 8200, torch.bfloat16), (2, 0, 129, torch.float32)]
)
def test_the_kernels_decide_and_draw_as_the_definition(
    rows: int, drafts: int, vocabulary: int, dtype: torch.dtype, kind: str, verification: str
) -> None:
    case = block(rows, drafts, vocabulary, dtype)
    expected, actual = (verify(case, kind, verification, implementation) for implementation in ("reference", "triton"))
    assert actual.accepted.tolist() == expected.accepted.tolist()
    assert actual.next_token.tolist() == expected.next_token.tolist()
    if rows == 9 and kind != "point mass":  # the case is worth comparing: some blocks are kept whole, others are cut
        assert 0 < int((actual.accepted == case["lengths"]).sum()) < rows


@pytest.mark.parametrize("verification", ["standard", "block"])
@pytest.mark.parametrize("kind", ["logits", "probabilities", "logits beside probabilities", "point mass"])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_a_verifier_whose_logits_are_no_numbers_gives_ids_of_the_vocabulary(
    implementation: str, drafts: int, kind: str, verification: str
) -> None:
    """Any other id would be an index out of bounds in the next round, which on a GPU ends the process."""
    case = block(9, drafts, 61)
    case["logits"][::2] = float("nan")
    case["lengths"].clamp_(max=max(0, drafts - 1))  # the last slot has no draft
    outcome = verify(case, kind, verification, implementation)
    assert bool(((outcome.next_token >= 0) & (outcome.next_token < 61)).all())
    assert bool(((outcome.accepted >= 0) & (outcome.accepted <= case["lengths"])).all())


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize(("verification", "definition"), [("standard", accept_sampled), ("block", accept_block)])
def test_at_a_low_temperature_logits_of_ten_thousand_are_verified_as_in_float64(
    verification: str, definition: Callable[..., Acceptance], implementation: str
) -> None:
    temperature, rows, drafts, vocabulary = 0.01, 100, 2, 4095
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    likely = torch.arange(vocabulary) % 100 == 0  # a few temperatures below the largest logit; all others cannot occur
    level = 9e3 + 1e3 * random(rows, drafts + 1, 1)
    near, far = 8 * temperature * random(rows, drafts + 1, vocabulary), 1.8e4 * random(rows, drafts + 1, vocabulary) - 1e4
    logits = torch.where(likely, level + near, far)
    draft_logits = torch.where(likely, logits + 4 * temperature * random(*logits.shape), far)[:, :-1]
    p, q = ((x.to(DEVICE).double() / temperature).softmax(-1) for x in (logits, draft_logits))
    numbers, slots = torch.arange(rows, device=DEVICE), torch.arange(drafts, device=DEVICE)
    case = {
        "logits": logits.to(DEVICE),
        "draft_logits": draft_logits.to(DEVICE),
        "token_ids": draw(q, uniform(5, Purpose.DRAFT, numbers[:, None], ROUND, slots)),
        "lengths": numbers % (drafts + 1),
        "rows": numbers,
    }
    accept_uniforms = uniform(5, Purpose.ACCEPT, numbers[:, None], ROUND, slots)
    correct_uniforms = uniform(5, Purpose.CORRECT, numbers, ROUND, torch.zeros_like(numbers))
    expected = definition(case["token_ids"], case["lengths"], q, p, accept_uniforms, correct_uniforms)
    actual = verify(case, "logits", verification, implementation, (temperature, temperature))
    assert actual.accepted.tolist() == expected.accepted.tolist()
    assert actual.next_token.tolist() == expected.next_token.tolist()
    assert expected.accepted.bincount(minlength=3).min() > 5 and len(expected.next_token.unique()) > 20


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_greedy_verification_keeps_the_prefix_that_is_most_likely_and_breaks_ties_to_the_first(implementation: str) -> None:
    logits = torch.zeros(5, 4, 9000, device=DEVICE)
    for k, token in enumerate((5, 4999, 4096, 8)):
        logits[:, k, token] = 1.0 + k  # no slot's largest is another's
    logits[:, 2, 4098] = 3.0
    drafts = torch.tensor([[5, 4999, 4096], [5, 0, 4096], [0, 4999, 4096], [5, 4999, 4098], [5, 4999, 4096]], device=DEVICE)
    lengths = torch.tensor([3, 3, 3, 3, 0], device=DEVICE)
    result = greedy_verification(drafts, lengths, logits, implementation=implementation)  # type: ignore[arg-type]
    assert result.accepted.tolist() == [3, 1, 0, 2, 0]
    assert result.next_token.tolist() == [8, 4999, 5, 4096, 5]


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_equal_distributions_accept_every_draft(implementation: str) -> None:
    case = block(3, 3, 300, closeness=0.0)
    case["lengths"] = torch.full_like(case["lengths"], 3)
    target, draft = Distributions(case["logits"], 0.8), Distributions(case["draft_logits"], 0.8)
    for verification in ("standard", "block"):
        result = rejection_sampling(
            case["token_ids"], case["lengths"], target, draft, seed=1, rows=case["rows"], round_index=ROUND,
            verification=verification, implementation=implementation,  # type: ignore[arg-type]
        )  # fmt: skip
        assert result.accepted.tolist() == [3] * 3
