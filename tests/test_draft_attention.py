"""Draft attention: the kernels against a float64 definition, over chunks, groups of heads, windows and ragged lengths."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from speculators.kernels import draft_attention as operation
from speculators.kernels.block_attention import block_attention
from speculators.kernels.draft_attention import draft_attention
from speculators.kernels.visible_keys import visible_blocks

pytestmark = pytest.mark.usefixtures("garbage_in_new_memory")  # no result may depend on what memory held

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def inputs(rows: int, slots: int, context: int, heads: tuple[int, int], size: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(rows, slots, heads[0], size), *[(rows, slots, heads[1], size)] * 2, *[(rows, context, heads[1], size)] * 2]
    return [torch.randn(*shape, generator=generator).to(DEVICE, dtype) for shape in shapes]


@pytest.fixture(params=[True, False], ids=["split", "whole"])
def split(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts in chunks, however short, or each in one."""
    monkeypatch.setattr(operation, "_WHOLE", 0 if request.param else 4096)
    monkeypatch.setattr(operation, "_FULL", 1)


@pytest.mark.usefixtures("split")
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize(
    ("slots", "context", "ends", "heads", "size", "window", "dtype"),
    [
        (1, 70, [70], (2, 2), 16, None, torch.float32),
        (8, 300, [0, 300, 257], (4, 2), 12, None, torch.float32),
        (17, 130, [129, 64], (8, 1), 8, 40, torch.float32),  # more queries than one program takes
        (5, 129, [129, 3], (3, 1), 16, None, torch.bfloat16),
    ],
)
def test_the_kernels_equal_the_definition(
    slots: int, context: int, ends: list[int], heads: tuple[int, int], size: int, window: int | None, dtype: torch.dtype, causal: bool
) -> None:
    tensors = inputs(len(ends), slots, context, heads, size, dtype)
    end = torch.tensor(ends, device=DEVICE)[:, None]
    start = torch.minimum(torch.tensor([[5]], device=DEVICE), end)
    visible = visible_blocks(start, end, block_queries=slots, block_keys=slots, causal=causal, window=window)
    expected = draft_attention(*(x.double() for x in tensors), visible, scale=0.3, implementation="reference")
    actual = draft_attention(*tensors, visible, scale=0.3)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def test_the_definition_is_block_attentions() -> None:
    query, *others = inputs(3, 4, 50, (4, 2), 8, torch.float64)
    end = torch.tensor([[0], [50], [17]], device=DEVICE)
    visible = visible_blocks(torch.zeros_like(end), end, block_queries=4, block_keys=4, causal=True)
    block_key, block_value, context_key, context_value = others
    expected = block_attention(
        query[:, None], block_key[:, None], block_value[:, None], context_key, context_value, torch.zeros_like(end), end, causal=True
    )[:, 0]
    actual = draft_attention(query, block_key, block_value, context_key, context_value, visible, scale=8**-0.5, implementation="reference")
    torch.testing.assert_close(actual, expected)


@pytest.mark.usefixtures("split")
def test_what_lies_beyond_a_rows_length_is_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operation, "_CHUNK", 64)
    tensors = inputs(1, 2, 400, (2, 1), 8, torch.float32)
    end = torch.tensor([[65]], device=DEVICE)
    visible = visible_blocks(torch.zeros_like(end), end, block_queries=2, block_keys=2, causal=False)
    expected = draft_attention(*tensors, visible, scale=0.3, implementation="reference")
    for cached in tensors[3:]:
        cached[:, 65:] = float("nan")
    torch.testing.assert_close(draft_attention(*tensors, visible, scale=0.3), expected)


@pytest.mark.usefixtures("split")
def test_a_query_that_sees_nothing_gets_zero() -> None:
    tensors = inputs(2, 3, 20, (2, 1), 8, torch.float32)
    end = torch.tensor([[20], [20]], device=DEVICE)
    valid = torch.tensor([[True], [False]], device=DEVICE)
    visible = visible_blocks(torch.zeros_like(end), end, block_queries=3, block_keys=3, causal=False, block_valid=valid)
    out = draft_attention(*tensors, visible, scale=0.3)
    assert out[0].abs().min() > 0
    assert torch.equal(out[1], torch.zeros_like(out[1]))


@pytest.mark.usefixtures("split")
def test_what_chunks_leave_out_is_never_read() -> None:
    tensors = inputs(2, 3, 700, (4, 2), 8, torch.float32)
    end = torch.tensor([[650], [5]], device=DEVICE)  # the second row sees one chunk of six
    visible = visible_blocks(torch.zeros_like(end), end, block_queries=3, block_keys=3, causal=True)
    expected = draft_attention(*tensors, visible, scale=0.3, implementation="reference")
    torch.testing.assert_close(draft_attention(*tensors, visible, scale=0.3), expected)
