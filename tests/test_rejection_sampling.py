"""The rejection sampling kernels against their definition, which `test_rejection` holds to the papers by 200,000 trials."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from speculators.decoding.randomness import Purpose, uniform
from speculators.decoding.rejection import Acceptance
from speculators.decoding.sampling import draw
from speculators.kernels.greedy_verification import greedy_verification
from speculators.kernels.rejection_sampling import Distributions, rejection_sampling

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


def verify(case: dict[str, Any], kind: str, verification: str, implementation: str, seed: int = 5) -> Acceptance:
    """Drafts as logits at temperature 0.8, as probabilities, or as point masses; the verifier at temperature 0.7."""
    target, draft = Distributions(case["logits"], 0.7), Distributions(case["draft_logits"], 0.8)
    if kind == "probabilities":
        target, draft = Distributions(target.probabilities()), Distributions(draft.probabilities())
    return rejection_sampling(
        case["token_ids"],
        case["lengths"],
        target,
        None if kind == "point mass" else draft,
        seed=seed,
        rows=case["rows"],
        round_index=ROUND,
        verification=verification,  # type: ignore[arg-type]
        implementation=implementation,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("verification", ["standard", "block"])
@pytest.mark.parametrize("kind", ["logits", "probabilities", "point mass"])
@pytest.mark.parametrize(
    ("rows", "drafts", "vocabulary", "dtype"), [(9, 3, 61, torch.float32), (2, 7, 4099, torch.bfloat16), (2, 0, 129, torch.float32)]
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


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_greedy_verification_keeps_the_prefix_that_is_most_likely_and_breaks_ties_to_the_first(implementation: str) -> None:
    logits = torch.zeros(5, 4, 5000, device=DEVICE)
    for k, token in enumerate((5, 4999, 4096, 8)):
        logits[:, k, token] = 1.0
    logits[:, 2, 4098] = 1.0
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
