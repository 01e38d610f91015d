"""Block attention: who sees whom, exactly, and values and gradients against a loop over single queries in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from speculators.kernels import block_attention as module
from speculators.kernels.block_attention import Tiles, attention, block_attention, block_attention_table
from speculators.kernels.visible_keys import VisibleKeys, visible_blocks, visible_documents

pytestmark = pytest.mark.usefixtures("garbage_in_new_memory")  # no result may depend on what memory held

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def table_rows(table: Tensor) -> list[str]:
    return ["".join("1" if seen else "0" for seen in row) for row in table.tolist()]


def random_inputs(
    rows: int, blocks: int, queries: int, keys: int, heads: int, key_heads: int, dim: int, context: int, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """query, block_key, block_value, context_key, context_value."""
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (rows, blocks, queries, heads, dim),
        (rows, blocks, keys, key_heads, dim),
        (rows, blocks, keys, key_heads, dim),
        (rows, context, key_heads, dim),
        (rows, context, key_heads, dim),
    ]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def attention_by_definition(
    query: Tensor,
    block_key: Tensor,
    block_value: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    start: Tensor,
    end: Tensor,
    *,
    causal: bool,
    window: int | None = None,
    block_valid: Tensor | None = None,
) -> Tensor:
    """One query at a time, one list of positions and keys at a time."""
    rows, blocks, queries, heads, dim = query.shape
    keys, key_heads = block_key.shape[2:4]
    outputs = []
    for r in range(rows):
        for n in range(blocks):
            first, last = int(start[r, n]), int(end[r, n])
            for i in range(queries):
                position = last + keys - queries + i
                for h in range(heads):
                    g = h * key_heads // heads
                    if block_valid is not None and not block_valid[r, n]:
                        outputs.append(torch.zeros(dim, dtype=query.dtype))
                        continue
                    seen = [(c, context_key[r, c, g], context_value[r, c, g]) for c in range(first, last)]
                    seen += [(last + j, block_key[r, n, j, g], block_value[r, n, j, g]) for j in range(keys)]
                    if causal:
                        seen = [entry for entry in seen if entry[0] <= position]
                    if window is not None:
                        seen = [entry for entry in seen if entry[0] > position - window]
                    key, value = torch.stack([k for _, k, _ in seen]), torch.stack([v for _, _, v in seen])
                    outputs.append(torch.softmax(key @ query[r, n, i, h] / math.sqrt(dim), dim=0) @ value)
    return torch.stack(outputs).view(query.shape)


# -- tables ------------------------------------------------------------------------------------------------------


def test_dflash_blocks_see_the_context_before_their_anchor_and_themselves() -> None:
    # Six context slots, anchors 1 and 3, two draft slots: columns are 6 context keys, then 4 block keys.
    table = block_attention_table(
        torch.zeros(1, 2, dtype=torch.int64), torch.tensor([[1, 3]]), context_length=6, block_queries=2, block_keys=2, causal=False
    )
    assert table_rows(table[0]) == ["1000001100", "1000001100", "1110000011", "1110000011"]


def test_an_invalid_block_sees_nothing_in_the_table() -> None:
    table = block_attention_table(
        torch.zeros(1, 2, dtype=torch.int64),
        torch.tensor([[1, 3]]),
        context_length=6,
        block_queries=2,
        block_keys=2,
        causal=False,
        block_valid=torch.tensor([[True, False]]),
    )
    assert table_rows(table[0]) == ["1000001100", "1000001100", "0000000000", "0000000000"]


def test_peagle_chains_are_causal_blocks_over_a_prefix_of_depth_zero() -> None:
    # Four positions, three depths. Chain of anchor a holds (a + 1, 1), (a + 2, 2) and sees depth 0 up to a.
    elements = [(0, 0), (1, 0), (2, 0), (3, 0), (1, 1), (2, 1), (3, 1), (2, 2), (3, 2)]
    expected = ["100000000", "110000000", "111000000", "111100000", "100010000", "110001000", "111000100", "100010010", "110001001"]
    nothing = torch.zeros(1, 1, dtype=torch.int64)
    depth_zero = block_attention_table(nothing, nothing, context_length=0, block_queries=4, block_keys=4, causal=True)[0]
    assert table_rows(depth_zero) == [row[:4] for row in expected[:4]]

    chains = block_attention_table(
        torch.zeros(1, 3, dtype=torch.int64), torch.tensor([[1, 2, 3]]), context_length=4, block_queries=2, block_keys=2, causal=True
    )[0]
    slot = {(p, d): 2 * (p - d) + d - 1 for p, d in elements[4:]}  # (a = 2, depth 2) is not among the elements
    for element, row in zip(elements[4:], expected[4:], strict=True):
        columns = [*range(4), *(4 + slot[other] for other in elements[4:])]
        assert table_rows(chains[slot[element]][None, columns]) == [row]


def test_the_table_of_fewer_blocks_is_a_slice_of_the_larger_one() -> None:
    def table(ends: list[int], context: int) -> Tensor:
        end = torch.tensor([ends])
        return block_attention_table(torch.zeros_like(end), end, context_length=context, block_queries=2, block_keys=2, causal=True)[0]

    small, large = table([1, 2], 3), table([1, 2, 4], 5)
    assert torch.equal(small, large[:4, [0, 1, 2, 5, 6, 7, 8]])


def test_queries_are_the_last_slots_of_a_longer_block() -> None:
    zero = torch.zeros(1, 1, dtype=torch.int64)
    table = block_attention_table(zero, zero, context_length=1, block_queries=2, block_keys=4, causal=True)
    assert table_rows(table[0]) == ["01110", "01111"]


@pytest.mark.parametrize("causal", [True, False])
def test_a_window_of_four_shows_the_query_and_the_three_before_it(causal: bool) -> None:
    # Positions 0 to 6 are context and 7 to 10 the block; everything after the query in its block stays visible
    # where the block is bidirectional.
    end = torch.tensor([[7]])
    table = block_attention_table(torch.zeros_like(end), end, context_length=9, block_queries=4, block_keys=4, causal=causal, window=4)[0]
    positions = [*range(7), None, None, 7, 8, 9, 10]  # context slots 7 and 8 lie beyond the end
    for slot, row in enumerate(table.tolist()):
        i = 7 + slot
        seen = [p for p, visible in zip(positions, row, strict=True) if visible]
        assert seen == [*range(i - 3, i + 1), *([] if causal else range(i + 1, 11))]


def test_a_context_starts_where_its_document_starts() -> None:
    table = block_attention_table(
        torch.tensor([[2, 4]]), torch.tensor([[5, 4]]), context_length=6, block_queries=1, block_keys=1, causal=False
    )
    assert table_rows(table[0]) == ["00111010", "00000001"]


# -- values and gradients ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("blocks", "queries", "keys", "heads", "key_heads", "dim", "context"),
    [(5, 3, 5, 6, 2, 5, 13), (1, 7, 7, 9, 3, 8, 31), (1, 2, 3, 4, 1, 8, 0), (2, 1, 1, 2, 1, 4, 7)],
    ids=lambda value: str(value),
)
@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 4), (False, 3)])
def test_values_and_gradients_equal_a_loop_over_single_queries(
    blocks: int, queries: int, keys: int, heads: int, key_heads: int, dim: int, context: int, causal: bool, window: int | None
) -> None:
    inputs = [x.requires_grad_() for x in random_inputs(2, blocks, queries, keys, heads, key_heads, dim, context)]
    generator = torch.Generator().manual_seed(1)
    end = torch.randint(0, context + 1, (2, blocks), generator=generator)
    start = (torch.rand(2, blocks, generator=generator) * (end + 1)).long()
    actual = block_attention(*inputs, start, end, causal=causal, window=window)
    expected = attention_by_definition(*inputs, start, end, causal=causal, window=window)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    upstream = torch.randn(actual.shape, generator=generator, dtype=torch.float64)
    for ours, theirs in zip(
        torch.autograd.grad(actual, inputs, upstream),
        torch.autograd.grad(expected, inputs, upstream, materialize_grads=True, allow_unused=True),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("context", [60, 129])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_odd_sizes_in_training_dtypes_agree_with_float64(context: int, dtype: torch.dtype) -> None:
    inputs = random_inputs(1, 3, 5, 7, 6, 2, 16, context, dtype)
    start, end = torch.tensor([[0, 3, 0]]), torch.tensor([[context, context - 1, 1]])
    actual = block_attention(*inputs, start, end, causal=True)
    expected = attention_by_definition(*(x.double() for x in inputs), start, end, causal=True)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("blocks", [1, 3])
def test_grouped_heads_equal_repeated_key_heads(blocks: int) -> None:
    query, *keys_and_values = random_inputs(2, blocks, 4, 4, 6, 2, 8, 10)
    end = torch.randint(0, 11, (2, blocks), generator=torch.Generator().manual_seed(3))
    start = torch.zeros_like(end)
    grouped = block_attention(query, *keys_and_values, start, end, causal=False)
    repeated = block_attention(query, *(x.repeat_interleave(3, dim=-2) for x in keys_and_values), start, end, causal=False)
    torch.testing.assert_close(grouped, repeated, rtol=1e-12, atol=1e-12)


def test_scale_replaces_the_square_root_of_the_head_size() -> None:
    query, *others = random_inputs(1, 2, 3, 3, 2, 2, 16, 5)
    end = torch.tensor([[2, 5]])
    start = torch.zeros_like(end)
    scaled = block_attention(query, *others, start, end, causal=False, scale=1.0)
    torch.testing.assert_close(scaled, block_attention(query * 4, *others, start, end, causal=False), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("blocks", [1, 3])
def test_visible_keys_made_once_give_the_same_output(blocks: int) -> None:
    inputs = random_inputs(2, blocks, 3, 4, 4, 2, 8, 9, torch.float32)
    end = torch.randint(0, 10, (2, blocks), generator=torch.Generator().manual_seed(3))
    start, valid = torch.zeros_like(end), torch.arange(2 * blocks).view(2, blocks) % 3 != 1
    visible = visible_blocks(start, end, block_queries=3, block_keys=4, causal=True, window=5, block_valid=valid)
    direct = block_attention(*inputs, start, end, causal=True, window=5, block_valid=valid)
    assert torch.equal(block_attention(*inputs, start, end, causal=True, visible=visible), direct)


def test_documents_are_ordinary_causal_attention_over_the_row_itself() -> None:
    position = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    assert table_rows(visible_documents(position).table(7, 0)[0]) == [
        "1000000",
        "1100000",
        "1110000",
        "0001000",
        "0001100",
        "0001110",
        "0001111",
    ]
    windowed = visible_documents(position, window=2).table(7, 0)[0]
    assert table_rows(windowed) == ["1000000", "1100000", "0110000", "0001000", "0001100", "0000110", "0000011"]


# -- the kernel --------------------------------------------------------------------------------------------------


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 in the interpreter, so that a small case has several in each direction."""
    if DEVICE == "cpu":
        monkeypatch.setattr(module, "_tiles", lambda *_: (Tiles(16, 16, 4, 1),) * 3)


def assert_kernel_agrees(inputs: list[Tensor | None], visible: VisibleKeys, tolerance: float) -> None:
    """Output and all gradients of the kernel against the reference in float64, by the norm of the difference."""
    ours = [None if x is None else x.to(DEVICE).requires_grad_() for x in inputs]
    exact = [None if x is None else x.double().requires_grad_() for x in inputs]
    on_device = VisibleKeys(
        visible.context_start.to(DEVICE),
        visible.context_end.to(DEVICE),
        visible.block_start.to(DEVICE),
        visible.block_end.to(DEVICE),
        visible.reach,
        None if visible.valid is None else visible.valid.to(DEVICE),
    )
    output = attention(*ours, on_device, implementation="triton")  # type: ignore[arg-type]
    expected = attention(*exact, visible, implementation="reference")  # type: ignore[arg-type]
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(output.dtype)
    leaves, references = [x for x in ours if x is not None], [x for x in exact if x is not None]
    gradients = torch.autograd.grad(output, leaves, upstream.to(DEVICE))
    references = torch.autograd.grad(expected, references, upstream.double(), allow_unused=True, materialize_grads=True)
    assert output.dtype == leaves[0].dtype
    for found, right in zip([output, *gradients], [expected, *references], strict=True):
        difference = (found.detach().double().cpu() - right.detach()).norm()
        assert found.isfinite().all() and float(difference) <= tolerance * float(right.detach().norm()), (difference, right.norm())


def flat(inputs: list[Tensor]) -> list[Tensor | None]:
    """Blocks' queries, keys and values [R, N, B, ...] as [R, N * B, ...]."""
    return [*(x.flatten(1, 2) for x in inputs[:3]), *inputs[3:]]


KERNEL_CASES = [
    # rows, blocks, queries, keys, heads, key heads, head size, context, causal, window, sorted, invalid block
    pytest.param(1, 4, 5, 5, 6, 2, 16, 60, True, None, True, False, id="groups-of-three-over-documents"),
    pytest.param(2, 4, 3, 5, 4, 2, 20, 33, False, None, False, True, id="longer-blocks-unsorted-padded-heads-one-invalid"),
    pytest.param(1, 3, 7, 7, 2, 1, 16, 129, True, 9, True, False, id="window-causal"),
    pytest.param(1, 3, 5, 5, 3, 1, 16, 40, False, 4, True, False, id="window-bidirectional"),
    pytest.param(1, 3, 6, 6, 4, 2, 16, 0, True, None, True, False, id="no-context"),
]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("rows", "blocks", "queries", "keys", "heads", "key_heads", "dim", "context", "causal", "window", "ordered", "invalid"), KERNEL_CASES
)
def test_the_kernel_equals_the_float64_reference(
    rows: int,
    blocks: int,
    queries: int,
    keys: int,
    heads: int,
    key_heads: int,
    dim: int,
    context: int,
    causal: bool,
    window: int | None,
    ordered: bool,
    invalid: bool,
) -> None:
    inputs = random_inputs(rows, blocks, queries, keys, heads, key_heads, dim, context, torch.float32)
    generator = torch.Generator().manual_seed(1)
    end = torch.randint(0, context + 1, (rows, blocks), generator=generator)
    end[:, -1] = context  # the last tile of keys is cut short
    if ordered:
        end = end.sort(dim=1).values
    start = (torch.rand(rows, blocks, generator=generator) * (end + 1)).long()
    start[:, ::2] = 0
    valid = torch.arange(blocks).expand(rows, -1) != 1 if invalid else None
    visible = visible_blocks(start, end, block_queries=queries, block_keys=keys, causal=causal, window=window, block_valid=valid)
    assert_kernel_agrees(flat(inputs), visible, 1e-5)


@pytest.mark.usefixtures("small_tiles")
def test_the_kernel_in_bfloat16_stays_near_float64() -> None:
    inputs = random_inputs(1, 4, 5, 5, 6, 2, 16, 60, torch.bfloat16)
    end = torch.tensor([[7, 30, 44, 60]])
    assert_kernel_agrees(flat(inputs), visible_blocks(torch.zeros_like(end), end, block_queries=5, block_keys=5, causal=False), 1e-2)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("window", [None, 11])
def test_the_kernel_computes_causal_attention_of_documents(window: int | None) -> None:
    query, _, _, key, value = random_inputs(1, 1, 61, 1, 4, 2, 16, 61, torch.float32)
    position = torch.cat([torch.arange(length) for length in (20, 40, 1)])[None]
    visible = visible_documents(position, window=window)
    assert_kernel_agrees([query[:, 0], None, None, key, value], visible, 1e-5)
    causal = torch.nn.functional.scaled_dot_product_attention(
        *(x[0, :20].transpose(0, 1)[None] for x in (query[:, 0], key, value)), is_causal=True, enable_gqa=True
    )
    if window is None:
        first = attention(query[:, 0], None, None, key, value, visible)[:, :20]
        torch.testing.assert_close(first, causal.transpose(1, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("small_tiles")
def test_chains_of_unequal_length_are_ranges_too() -> None:
    lengths, anchors = torch.tensor([3, 1, 4, 2]), torch.tensor([2, 9, 20, 30])
    first = lengths.cumsum(0) - lengths
    chain = torch.repeat_interleave(torch.arange(4), lengths)
    slot = torch.arange(int(lengths.sum())) - first[chain]
    end = anchors[chain][None]
    visible = VisibleKeys.of_queries(
        torch.zeros_like(end), end, first[chain][None], lengths[chain][None], slot[None], causal=True, window=None, reach=4
    )
    query, key, value, context_key, context_value = random_inputs(1, 1, 10, 10, 4, 2, 16, 33, torch.float32)
    inputs = [query[:, 0], key[:, 0], value[:, 0], context_key, context_value]
    output = attention(*inputs, visible)
    assert_kernel_agrees(inputs, visible, 1e-5)
    for number, (begin, length) in enumerate(zip(first.tolist(), lengths.tolist(), strict=True)):
        part = slice(begin, begin + length)
        alone = block_attention(
            *(x[:, None, part] for x in inputs[:3]),
            context_key,
            context_value,
            torch.zeros(1, 1, dtype=torch.int64),
            anchors[None, number : number + 1],
            causal=True,
        )
        torch.testing.assert_close(output[:, part], alone[:, 0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("group", [1, 3, 4])
def test_a_key_tile_meets_every_query_that_sees_it_and_is_masked_where_one_does_not(group: int) -> None:
    generator = torch.Generator().manual_seed(group)
    queries, keys, tiles = 50, 75, Tiles(16, 16, 4, 1)
    for ordered in (True, False):
        end = torch.randint(0, keys + 1, (2, queries), generator=generator)
        end = end.sort(dim=1).values if ordered else end
        start = (torch.rand(2, queries, generator=generator) * end).long() // 20 * 20
        schedule = module._key_schedule(start, end, keys, group, tiles)
        for row in range(2):
            for tile, (low, first, last, high) in enumerate(schedule[row].tolist()):
                begin, stop = tile * 16, min(tile * 16 + 16, keys)
                assert low <= first <= last <= high
                for query in range(queries):
                    own = range(query * group // 16, (query * group + group - 1) // 16 + 1)
                    sees = max(int(start[row, query]), begin) < min(int(end[row, query]), stop)
                    whole = int(start[row, query]) <= begin and int(end[row, query]) >= stop
                    assert not sees or all(low <= number < high for number in own)
                    assert whole or not any(first <= number < last for number in own)


# -- isolation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
def test_block_cannot_see_context_after_its_anchor_or_another_block(causal: bool, dtype: torch.dtype) -> None:
    names = ("query", "block_key", "block_value", "context_key", "context_value")
    tensors = dict(zip(names, random_inputs(1, 2, 4, 4, 2, 1, 8, 12, dtype), strict=True))
    start, end = torch.tensor([[0, 2]]), torch.tensor([[5, 8]])
    noise = torch.Generator().manual_seed(7)

    def block_zero(name: str = "query", where: tuple[slice | int, ...] = (0, 0, 0, 0, slice(0))) -> Tensor:
        """Output of block 0 after replacing part of one tensor by noise; nothing of the default part exists."""
        changed = {name: x.clone() for name, x in tensors.items()}
        changed[name][where] = 100 * torch.randn(changed[name][where].shape, generator=noise).to(dtype)
        return block_attention(*changed.values(), start, end, causal=causal)[:, 0]

    everything = slice(None)
    before = block_zero()
    assert torch.equal(block_zero("query", (everything, 1)), before)
    for kind in ("key", "value"):
        assert torch.equal(block_zero(f"context_{kind}", (everything, slice(5, None))), before)
        assert torch.equal(block_zero(f"block_{kind}", (everything, 1)), before)
        assert not torch.equal(block_zero(f"context_{kind}", (everything, 4)), before)
        assert not torch.equal(block_zero(f"block_{kind}", (everything, 0, 0)), before)


def test_a_causal_query_ignores_later_block_slots_and_a_bidirectional_one_sees_them() -> None:
    inputs = random_inputs(1, 2, 4, 4, 2, 2, 8, 6, torch.float32)
    end = torch.tensor([[2, 6]])
    changed = [x.clone() for x in inputs]
    changed[1][:, :, 3] += 1.0
    for causal in (True, False):
        first, second = (block_attention(*x, torch.zeros_like(end), end, causal=causal) for x in (inputs, changed))
        assert torch.equal(first[:, :, :3], second[:, :, :3]) == causal
        assert not torch.equal(first[:, :, 3], second[:, :, 3])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_an_invalid_block_gives_exact_zeros_and_no_gradient(dtype: torch.dtype) -> None:
    inputs = [x.requires_grad_() for x in random_inputs(1, 2, 2, 2, 2, 1, 8, 6, dtype)]
    end, valid = torch.tensor([[1, 3]]), torch.tensor([[True, False]])
    output = block_attention(*inputs, torch.zeros_like(end), end, causal=False, block_valid=valid)
    assert torch.equal(output[:, 1], torch.zeros_like(output[:, 1]))
    assert output[:, 0].ne(0).all()
    gradients = torch.autograd.grad(output.sum(), inputs)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert all(gradient[:, 1].eq(0).all() for gradient in gradients[:3])
    assert gradients[4][:, 1:].eq(0).all() and gradients[4][:, 0].ne(0).any()


def test_a_block_without_context_attends_to_itself_alone() -> None:
    query, block_key, block_value, context_key, context_value = random_inputs(1, 2, 3, 3, 2, 2, 8, 4)
    end = torch.tensor([[2, 2]])
    output = block_attention(query, block_key, block_value, context_key, context_value, end, end, causal=False)
    scores = torch.einsum("rnihd,rnjhd->rnhij", query, block_key) / math.sqrt(8)
    torch.testing.assert_close(output, torch.einsum("rnhij,rnjhd->rnihd", scores.softmax(-1), block_value), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("blocks", [1, 37, 75])
def test_blocks_in_several_groups_attend_as_in_one(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than 256 queries a row go through in groups; what a block sees does not depend on its group."""
    generator = torch.Generator().manual_seed(blocks)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    query, key, value = normal(2, blocks, 7, 4, 8), normal(2, blocks, 7, 2, 8), normal(2, blocks, 7, 2, 8)
    context_key, context_value = normal(2, 40, 2, 8), normal(2, 40, 2, 8)
    end = torch.randint(0, 41, (2, blocks), generator=generator)
    arguments = (query, key, value, context_key, context_value, torch.zeros_like(end), end)
    grouped = module.block_attention(*arguments, causal=False)
    monkeypatch.setattr(module, "_GROUP_QUERIES", 10**6)
    torch.testing.assert_close(grouped, module.block_attention(*arguments, causal=False), atol=1e-12, rtol=1e-12)


# -- CUDA --------------------------------------------------------------------------------------------------------

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="kernels and graphs of CUDA")


@on_cuda
@pytest.mark.parametrize("only", [True, False], ids=["memory-efficient", "default"])
@pytest.mark.parametrize("blocks", [1, 5])
def test_cuda_backends_of_the_reference_take_the_mask_and_agree_with_float64(blocks: int, only: bool) -> None:
    inputs = random_inputs(2, blocks, 7, 7, 6, 2, 64, 61, torch.bfloat16)
    end = torch.randint(1, 62, (2, blocks), generator=torch.Generator().manual_seed(3))
    start = torch.zeros_like(end)
    exact = [x.double().requires_grad_() for x in inputs]
    expected = attention_by_definition(*exact, start, end, causal=False)
    leaves = [x.cuda().requires_grad_() for x in inputs]
    backends = [SDPBackend.EFFICIENT_ATTENTION] if only else [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    with sdpa_kernel(backends):
        actual = block_attention(*leaves, start.cuda(), end.cuda(), causal=False, implementation="reference")
        gradients = torch.autograd.grad(actual.float().square().sum(), leaves)
    torch.testing.assert_close(actual.double().cpu(), expected, rtol=2e-2, atol=2e-2)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected.square().sum(), exact), strict=True):
        assert float((ours.double().cpu() - theirs).norm() / theirs.norm()) < 3e-2


def cuda_case(blocks: int, context: int, dim: int = 128, heads: int = 8, key_heads: int = 2) -> tuple[list[Tensor], Tensor]:
    """bfloat16 leaves of one row of blocks of 16, and their ascending context ends."""
    inputs = [x.cuda().requires_grad_() for x in random_inputs(1, blocks, 16, 16, heads, key_heads, dim, context, torch.bfloat16)]
    end = torch.randint(1, context + 1, (1, blocks), generator=torch.Generator().manual_seed(3)).sort(dim=1).values
    return inputs, end.cuda()


@on_cuda
@pytest.mark.parametrize(("dim", "heads", "key_heads"), [(64, 9, 3), (96, 8, 2), (128, 32, 8), (256, 4, 1)])
def test_every_head_size_agrees_with_float64_at_real_tile_sizes(dim: int, heads: int, key_heads: int) -> None:
    inputs, end = cuda_case(37, 777, dim, heads, key_heads)
    visible = visible_blocks(torch.zeros_like(end).cpu(), end.cpu(), block_queries=16, block_keys=16, causal=False)
    assert_kernel_agrees(flat([x.detach().cpu() for x in inputs]), visible, 1e-2)


@on_cuda
def test_gradients_have_the_same_bits_every_time() -> None:
    inputs, end = cuda_case(150, 3000)

    def gradients() -> tuple[Tensor, ...]:
        output = block_attention(*inputs, torch.zeros_like(end), end, causal=True)
        return torch.autograd.grad(output.float().square().sum(), inputs)

    for first, second in zip(gradients(), gradients(), strict=True):
        assert torch.equal(first, second)


@on_cuda
def test_nothing_is_compiled_for_another_number_of_blocks() -> None:
    from triton import knobs

    def step(blocks: int, context: int) -> None:
        inputs, end = cuda_case(blocks, context)
        torch.autograd.grad(block_attention(*inputs, torch.zeros_like(end), end, causal=False).sum(), inputs)

    step(40, 512)
    compiled: list[object] = []
    knobs.runtime.jit_post_compile_hook = lambda **found: compiled.append(found)
    try:
        step(41, 513)
        step(128, 2048)
    finally:
        knobs.runtime.jit_post_compile_hook = None
    assert not compiled


@on_cuda
@pytest.mark.parametrize("blocks", [1, 5])
def test_block_attention_replays_as_a_cuda_graph(blocks: int) -> None:
    inputs, end = cuda_case(blocks, 61)
    start = torch.zeros_like(end)

    def step() -> tuple[Tensor, ...]:
        output = block_attention(*inputs, start, end, causal=True)
        return output, *torch.autograd.grad(output.float().square().sum(), inputs)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step()
    end.fill_(60)
    graph.replay()
    for ours, eager in zip(replayed, step(), strict=True):
        torch.testing.assert_close(ours, eager)
