"""The rows of P-EAGLE's pass: what attention, the cache and the sampler must find where, whatever was accepted."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from speculators.kernels.draft_layout import PAD, Rows, Verified, lay_out, rows_needed

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # without a GPU the kernel runs in Triton's interpreter
K, LONGEST, PAGE, MASK = 4, 48, 16, 99
REQUESTS, ROWS, STATES = 6, 400, 9  # of the memory
Request = tuple[int, int, int]  # verified tokens, how many of them were kept, position of the first
ints = torch.int32
Implementation = Literal["reference", "triton"]
either = pytest.mark.parametrize("implementation", ["reference", "triton"])


def memory() -> tuple[Rows, Tensor]:
    """What a pass before left there."""

    def used(size: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.full((size,), 7, dtype=dtype, device=DEVICE)

    samples = REQUESTS * K
    rows = Rows(
        used(ROWS, ints), used(ROWS), used(ROWS), used(REQUESTS + 1, ints), used(REQUESTS, ints), used(samples), used(samples),
        used(samples), used(STATES, torch.float32), used(STATES),
    )  # fmt: skip
    return rows, used(ROWS)


def laid_out(requests: list[Request], rows: Tensor, implementation: Implementation) -> tuple[Rows, Tensor]:
    """Request r has state r + 2, verified tokens 100 r + 10 + i, the next one 100 r + 50, and pages 10 r + 1, 10 r + 2 ..."""
    out, slots = memory()
    states = torch.arange(len(requests)) + 2
    following = torch.zeros(STATES, dtype=torch.int64).index_copy(0, states, 100 * (states - 2) + 50)
    verified = Verified(
        token_ids=torch.cat([100 * r + 10 + torch.arange(n, dtype=ints) for r, (n, _, _) in enumerate(requests)]).to(ints),
        positions=torch.cat([position + torch.arange(n) for n, _, position in requests]),
        starts=torch.tensor([0, *(n for n, _, _ in requests)]).cumsum(0).to(ints),
        states=states,
        rejected=torch.tensor([n - kept for n, kept, _ in requests], dtype=ints),
        sampled=torch.arange(len(requests), dtype=ints) % 2,  # every other request continues a prompt
        last_sampled=torch.where(torch.arange(STATES) % 2 == 1, following, -5),
        next_prompt=torch.where(torch.arange(STATES) % 2 == 0, following, -5).to(ints),
        temperature=torch.arange(STATES) / 10,
        seeds=torch.arange(STATES),
    )
    pages = torch.stack([10 * r + 1 + torch.arange(LONGEST // PAGE, dtype=ints) for r in range(len(requests))])
    starts = torch.cat([rows.new_zeros(1), rows.cumsum(0)]).to(ints)
    lay_out(
        out,
        slots,
        Verified(*(tensor.to(DEVICE) for tensor in verified)),
        starts.to(DEVICE),
        pages.to(DEVICE),
        most_rows_of_one=int(rows.max()),
        block_size=PAGE,
        masks=K - 1,
        mask_token=MASK,
        longest=LONGEST,
        implementation=implementation,
    )
    return Rows(*(getattr(out, name).cpu() for name in Rows.__dataclass_fields__)), slots.cpu()


def requests_of(most_verified: int) -> st.SearchStrategy[list[Request]]:
    """Sequences that fit in the longest one."""

    def one(draw: st.DrawFn) -> Request:
        verified = draw(st.integers(1, most_verified))
        return verified, draw(st.integers(1, verified)), draw(st.integers(0, LONGEST - verified))

    return st.lists(st.composite(one)(), min_size=1, max_size=REQUESTS)


def check(requests: list[Request], rows: Tensor, implementation: Implementation) -> None:
    out, slots = laid_out(requests, rows, implementation)
    first_verified = first_row = 0
    for r, ((verified, kept, position), count) in enumerate(zip(requests, rows.tolist(), strict=True)):
        assert out.starts[r] == first_row and out.lengths[r] <= LONGEST
        first_position = int(out.lengths[r]) - count  # causal attention takes the last row for the last position it sees
        assert first_position >= 0
        end = min(position + kept + K - 1, LONGEST)
        assert out.lengths[r] >= end
        for row in range(count):
            at, index = first_position + row, first_position + row - position
            found = {name: int(getattr(out, name)[first_row + row]) for name in ("token_ids", "positions", "features")}
            slot = int(slots[first_row + row])
            if not position <= at < end:
                assert slot == PAD and 0 <= found["positions"] < LONGEST
                continue
            token = MASK if index >= kept else 100 * r + (50 if index == kept - 1 else 11 + index)
            assert found == {"token_ids": token, "positions": at, "features": first_verified + index if index < kept else PAD}
            assert slot == (10 * r + 1 + at // PAGE) * PAGE + at % PAGE
        for step in range(K):
            at = position + kept - 1 + step  # of the row that predicts
            place = r * K + step
            assert out.sample_positions[place] == at + 1 and out.sample_states[place] == r + 2
            assert out.sample_rows[place] == first_row + min(at - first_position, count - 1)
        assert out.temperature[r + 2] == torch.tensor((r + 2) / 10) and out.seeds[r + 2] == r + 2
        first_verified, first_row = first_verified + verified, first_row + count
    number = len(requests)
    assert (out.starts[number:] == first_row).all() and (out.lengths[number:] == 0).all()
    assert (out.sample_rows[number * K :] == 0).all() and (out.sample_states[number * K :] == PAD).all()
    assert (slots[first_row:] == PAD).all() and (out.features[first_row:] == PAD).all()


@either
@settings(max_examples=30, deadline=None)
@given(requests_of(K + 1))
def test_a_decode_round_has_2k_rows_a_request(implementation: Implementation, requests: list[Request]) -> None:
    check(requests, torch.full((len(requests),), 2 * K, dtype=ints), implementation)


@either
@settings(max_examples=30, deadline=None)
@given(requests_of(LONGEST))
def test_any_batch_has_the_rows_it_needs(implementation: Implementation, requests: list[Request]) -> None:
    rows = rows_needed(torch.tensor([n for n, _, _ in requests]), K - 1, LONGEST)
    assert rows.tolist() == [min(n + K - 1, LONGEST) for n, _, _ in requests]
    check(requests, rows, implementation)


@either
def test_rows_of_rejected_tokens_come_first_and_attention_sees_written_keys_only(implementation: Implementation) -> None:
    out, slots = laid_out([(K + 1, 2, 20)], torch.tensor([2 * K], dtype=ints), implementation)
    assert out.lengths[0] == 20 + 2 + K - 1
    assert (slots[: K - 1] == PAD).all() and (slots[K - 1 : 2 * K] != PAD).all()


@either
def test_a_page_that_is_nobodys_is_not_written(implementation: Implementation) -> None:
    """vLLM's table is 0 where a sequence has no page yet, or none any more; there the kernel would write into page 0."""
    out, slots = memory()
    zeros = torch.zeros(8, dtype=torch.int64, device=DEVICE)
    verified = Verified(
        zeros.to(ints), torch.arange(8, device=DEVICE), torch.tensor([0, 8], device=DEVICE).to(ints), zeros, zeros.to(ints),
        zeros.to(ints) + 1, zeros, zeros.to(ints), zeros.float(), zeros,
    )  # fmt: skip
    sizes: dict[str, Any] = {"most_rows_of_one": 11, "block_size": 8, "masks": K - 1, "mask_token": MASK, "longest": LONGEST}
    pages = torch.tensor([[3, 0]], dtype=ints, device=DEVICE)
    lay_out(out, slots, verified, torch.tensor([0, 11], dtype=ints, device=DEVICE), pages, **sizes, implementation=implementation)
    assert slots[:12].tolist() == [*range(24, 32), PAD, PAD, PAD, PAD]
