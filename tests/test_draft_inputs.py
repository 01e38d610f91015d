"""Draft inputs: the slots that the paper and the engine's own padded layout demand, and the kernel against the definition."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from speculators.kernels.draft_inputs import DraftInputs, draft_inputs

pytestmark = pytest.mark.usefixtures("garbage_in_new_memory")  # no result may depend on what memory held

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IMPLEMENTATIONS = ["reference", "triton"]  # without a GPU the kernel runs in Triton's interpreter
MASK = 99


def expand(
    lengths: list[int], kept: list[int], mask_slots: int, page_size: int = 64, implementation: str = "reference", padded: int | None = None
) -> DraftInputs:
    """Row r verified tokens 100 * r + 1, 2, ... from position 10 + r on; its next token is 100 * r + 50."""
    rows = len(lengths)
    tokens = [100 * r + 1 + i for r, length in enumerate(lengths) for i in range(length)]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    pages = 200 // page_size + 1
    table = torch.randperm(rows * pages, generator=torch.Generator().manual_seed(0)).view(rows, pages)
    arguments = (
        torch.tensor(tokens, dtype=torch.int64),
        starts,
        torch.tensor(kept),
        100 * torch.arange(rows) + 50,
        10 + torch.arange(rows),
        table,
    )
    return draft_inputs(
        *(argument.to(DEVICE) for argument in arguments),
        mask_slots=mask_slots,
        mask_token_id=MASK,
        page_size=page_size,
        padded_slots=padded,
        implementation=implementation,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_ragged_batch_expands_as_p_eagle_prescribes(implementation: str) -> None:
    # Row 0 verified 4 tokens and kept 2, row 1 verified 1, row 2 takes no part; 3 draft tokens each; a contiguous cache of 64 slots a row.
    out = draft_inputs(
        torch.tensor([7, 8, 9, 10, 20, 30, 31], device=DEVICE),
        torch.tensor([0, 4, 5, 7], device=DEVICE),
        torch.tensor([2, 1, 0], device=DEVICE),
        torch.tensor([11, 21, 32], device=DEVICE),
        torch.tensor([5, 40, 9], device=DEVICE),
        torch.arange(3, device=DEVICE)[:, None],
        mask_slots=2,
        mask_token_id=MASK,
        page_size=64,
        padded_slots=15,
        implementation=implementation,  # type: ignore[arg-type]
    )
    assert out.input_ids.tolist() == [8, 11, 99, 99, 0, 0, 21, 99, 99, 0, 0, 0, 0, 0, 0]
    assert out.positions.tolist() == [5, 6, 7, 8, 0, 0, 40, 41, 42, 0, 0, 0, 0, 0, 0]
    assert out.masked.tolist() == [False, False, True, True, False, False, False, True, True, *[False] * 6]
    assert out.rejected.tolist() == [False] * 4 + [True] * 2 + [False] * 3 + [True] * 6
    assert out.hidden_rows.tolist() == [0, 1, -1, -1, -1, -1, 4, -1, -1, *[-1] * 6]
    assert out.slot_mapping.tolist() == [5, 6, 7, 8, -1, -1, 104, 105, 106, *[-1] * 6]
    assert out.sample_indices.tolist() == [[1, 2, 3], [6, 7, 8], [9, 10, 11]]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_block_of_dflash_is_the_anchor_and_mask_slots_that_follow_it(implementation: str) -> None:
    out = expand([1, 1], [1, 1], mask_slots=3, implementation=implementation)
    assert out.input_ids.view(2, 4).tolist() == [[50, MASK, MASK, MASK], [150, MASK, MASK, MASK]]
    assert out.positions.view(2, 4).tolist() == [[10, 11, 12, 13], [11, 12, 13, 14]]
    assert out.sample_indices.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_slots_follow_the_page_table_across_a_page_border(implementation: str) -> None:
    out = draft_inputs(
        torch.tensor([1, 2, 3], device=DEVICE),
        torch.tensor([0, 3], device=DEVICE),
        torch.tensor([3], device=DEVICE),
        torch.tensor([4], device=DEVICE),
        torch.tensor([14], device=DEVICE),
        torch.tensor([[5, 2, 9]], device=DEVICE),
        mask_slots=1,
        mask_token_id=MASK,
        page_size=8,
        implementation=implementation,  # type: ignore[arg-type]
    )
    assert out.slot_mapping.tolist() == [2 * 8 + 6, 2 * 8 + 7, 9 * 8 + 0, 9 * 8 + 1]


def ragged(rows: int) -> tuple[list[int], list[int]]:
    """Random verified lengths 1 to 9, and how many of each were kept, 0 included."""
    generator = torch.Generator().manual_seed(rows)
    lengths = torch.randint(1, 10, (rows,), generator=generator)
    kept = (torch.rand(rows, generator=generator) * (lengths + 1)).long()
    return lengths.tolist(), kept.tolist()


@pytest.mark.parametrize(("rows", "mask_slots", "page_size", "padding"), [(1, 0, 16, 0), (3, 7, 16, 5), (64, 7, 1, 0), (65, 3, 60, 129)])
def test_the_kernel_equals_the_definition(rows: int, mask_slots: int, page_size: int, padding: int) -> None:
    lengths, kept = ragged(rows)
    padded = sum(lengths) + rows * mask_slots + padding
    expected, actual = (expand(lengths, kept, mask_slots, page_size, implementation, padded) for implementation in IMPLEMENTATIONS)
    for field in fields(DraftInputs):
        assert torch.equal(getattr(actual, field.name), getattr(expected, field.name)), field.name


def test_rejected_tokens_and_padding_never_reach_the_cache() -> None:
    lengths, kept = ragged(20)
    out = expand(lengths, kept, 4, padded=sum(lengths) + 20 * 4 + 30)
    assert torch.equal(out.slot_mapping == -1, out.rejected)
    written: Tensor = out.slot_mapping[~out.rejected]
    assert written.unique().numel() == written.numel() == sum(count + 4 for count in kept if count)


def test_too_few_padded_slots_are_refused() -> None:
    with pytest.raises(ValueError, match="padded_slots 5 must be at least 6"):
        expand([1, 1], [1, 1], mask_slots=2, padded=5)
