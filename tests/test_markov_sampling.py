"""Markov sampling: the printed case, the distribution drawn from, and the kernels against the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from goodness_of_fit import chi_square_p_value
from torch import Tensor

from speculators.algorithms.heads import MarkovHead
from speculators.decoding.randomness import Purpose, gumbel
from speculators.kernels import markov_sampling as operation
from speculators.kernels.counter_random import as_gumbel
from speculators.kernels.markov_sampling import MarkovChain, MarkovDrafts, Randomness, TableFactors, markov_sampling

pytestmark = pytest.mark.usefixtures("garbage_in_new_memory")  # no result may depend on what memory held

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IMPLEMENTATIONS = ["reference", "triton"]


def through(head: MarkovHead, logits: Tensor, hidden: Tensor, anchor: Tensor, ids: Tensor | None = None, **options: Any) -> MarkovDrafts:
    """The head's own steps as `factors`."""
    with torch.no_grad():
        return markov_sampling(
            MarkovChain(logits, head.markov_w2.weight, anchor, head.chain(hidden, head.initial_state(anchor)), ids), **options
        )


def random_head(kind: str, vocabulary: int, rank: int, draft_vocabulary: int | None = None, hidden: int = 6) -> MarkovHead:
    torch.manual_seed(0)
    head = MarkovHead(kind, vocabulary, draft_vocabulary or vocabulary, hidden, rank)  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return head.to(DEVICE)  # the same weights on every device


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_c8_the_printed_greedy_chain(implementation: str) -> None:
    head = random_head("vanilla", 3, 2)
    with torch.no_grad():
        head.markov_w1.weight.copy_(torch.tensor([[1.0, 0], [0, 1], [1, 1]]))
        head.markov_w2.weight.copy_(torch.tensor([[2.0, -1], [0, 1], [-1, 0.5]]))
    logits = torch.tensor([[[0.2, 0.1, 0], [0, 0.3, 0.1], [0.5, 0.4, 0.45]]], device=DEVICE)
    drafts = through(head, logits, logits, torch.tensor([1], device=DEVICE), implementation=implementation)
    assert drafts.token_ids.tolist() == [[1, 1, 1]]  # independent argmaxes would be 0, 1, 0
    corrected = torch.tensor([[-0.8, 1.1, 0.5], [-1, 1.3, 0.6], [-0.5, 1.4, 0.95]], device=DEVICE)
    torch.testing.assert_close(drafts.largest[0], corrected.amax(-1))
    torch.testing.assert_close(drafts.largest[0] + drafts.log_normaliser[0], corrected.logsumexp(-1))
    torch.testing.assert_close(drafts.log_probability[0], corrected.log_softmax(-1)[:, 1])


@pytest.mark.parametrize("top_k", [0, 5])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("kind", "rows", "vocabulary", "rank"),
    [("vanilla", 1, 600, 3), ("gated", 3, 129, 16), ("rnn", 17, 40, 5)],
    ids=["vanilla", "gated", "rnn"],
)
def test_the_kernels_draw_as_the_definition(
    kind: str, rows: int, vocabulary: int, rank: int, sampled: bool, top_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operation, "_PROGRAMS", 3)  # so that the largest vocabulary takes three programs of two tiles
    head = random_head(kind, vocabulary + 7, rank, vocabulary)  # a reduced draft vocabulary: ids 3 .. V + 2
    generator = torch.Generator().manual_seed(1)
    logits, hidden = (torch.randn(rows, 3, size, generator=generator).to(DEVICE) for size in (vocabulary, 6))
    anchor = torch.randint(vocabulary, (rows,), generator=generator).to(DEVICE)
    draw = Randomness(0.7, 11, torch.arange(rows, device=DEVICE), torch.tensor(2, device=DEVICE)) if sampled else None
    ids = torch.arange(vocabulary, device=DEVICE) + 3
    expected, actual = (
        through(head, logits, hidden, anchor, draw=draw, top_k=top_k, ids=ids, implementation=implementation)
        for implementation in IMPLEMENTATIONS
    )
    assert torch.equal(actual.token_ids, expected.token_ids)
    for name in ("factors", "largest", "log_normaliser", "log_probability"):
        torch.testing.assert_close(getattr(actual, name), getattr(expected, name), rtol=1e-4, atol=1e-4)
    if top_k:
        likeliest = logits.topk(top_k).indices
        assert (likeliest == actual.token_ids[..., None]).any(-1).all()


@pytest.mark.parametrize("top_k", [0, 40])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_at_a_low_temperature_logits_of_ten_thousand_are_drawn_from_as_in_float64(
    implementation: str, top_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operation, "_PROGRAMS", 3)
    temperature, rows, slots, vocabulary, rank = 0.01, 30, 3, 600, 2
    generator = torch.Generator().manual_seed(0)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator).to(DEVICE, torch.float32)

    # All of z are multiples of 2^-10 below 2^14, which float32 holds; those of the other columns are far below.
    logits = torch.where(integers(0, 6, rows, slots, vocabulary) == 0, 9990.0, -9990.0) + integers(-30, 30, rows, slots, vocabulary) / 1024
    table, bias_head = integers(-2, 3, vocabulary, rank), integers(-8, 9, vocabulary, rank) / 1024
    anchor, numbers, round_index = integers(0, vocabulary, rows).long(), torch.arange(rows, device=DEVICE), torch.tensor(2, device=DEVICE)
    drafts = markov_sampling(
        MarkovChain(logits, bias_head, anchor, TableFactors(table)),
        draw=Randomness(temperature, 11, numbers, round_index),
        top_k=top_k,
        implementation=implementation,  # type: ignore[arg-type]
    )
    before = torch.cat([anchor[:, None], drafts.token_ids[:, :-1]], dim=1)
    z = logits.double() + table.double()[before] @ bias_head.double().T
    if drafts.shortlist is not None:
        z = torch.full_like(z, float("-inf")).scatter(-1, drafts.shortlist, z.gather(-1, drafts.shortlist))
    at = torch.arange(slots, device=DEVICE)[:, None], torch.arange(vocabulary, device=DEVICE)
    noise = gumbel(11, Purpose.DRAFT, numbers[:, None, None], round_index, *at)
    assert torch.equal(drafts.token_ids, (z / temperature + noise).argmax(-1))
    expected = (z / temperature).log_softmax(-1)
    rebuilt = ((z - drafts.largest[..., None]) / temperature - drafts.log_normaliser[..., None]).exp()
    torch.testing.assert_close(rebuilt, expected.exp(), rtol=1e-5, atol=0)
    of_drafts = expected.gather(-1, drafts.token_ids[..., None])[..., 0]
    torch.testing.assert_close(drafts.log_probability.double(), of_drafts, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("implementation", "trials", "top_k"), [("reference", 100_000, 0), ("reference", 100_000, 3), ("triton", 2_000, 0)]
)
def test_tokens_follow_the_distribution_that_verification_is_told(implementation: str, trials: int, top_k: int) -> None:
    vocabulary = 6
    head = random_head("vanilla", vocabulary, 2)
    logits = torch.randn(2, vocabulary, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    rows = torch.arange(trials, device=DEVICE)
    drafts = through(
        head,
        logits.expand(trials, 2, vocabulary),
        logits.new_zeros(trials, 2, 6),
        rows * 0 + 4,
        draw=Randomness(1.3, 0, rows, torch.tensor(1, device=DEVICE)),
        top_k=top_k,
        implementation=implementation,
    )
    for k in range(2):  # slot 1 among the rows in which slot 0 drew token 2, or its likeliest where that is cut
        first = int(logits[0].argmax())
        chosen = torch.ones_like(rows, dtype=torch.bool) if k == 0 else drafts.token_ids[:, 0] == first
        with torch.no_grad():
            scores = (logits[k] + head.bias(drafts.factors[chosen][0, k])) / 1.3
        if top_k:
            scores = scores.masked_fill(logits[k] < logits[k].topk(top_k).values[-1], float("-inf"))
        tokens = drafts.token_ids[chosen, k]
        assert chi_square_p_value(tokens.bincount(minlength=vocabulary).cpu(), scores.softmax(-1).detach().cpu()) > 1e-3
        torch.testing.assert_close(drafts.log_probability[chosen, k], scores.log_softmax(-1).detach()[tokens], rtol=1e-4, atol=1e-5)


@triton.jit  # type: ignore[untyped-decorator]
def gumbel_kernel(states, out, count, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.store(out + at, as_gumbel(tl.load(states + at, mask=at < count)), mask=at < count)


def test_gumbel_numbers_in_float32_are_those_of_the_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    some = torch.randint(1 << 53, (4000,), generator=generator)
    powers = 2 ** torch.arange(53)
    bits = torch.cat([some, some >> 20, (1 << 53) - 1 - (some >> 20), powers, (1 << 53) - powers, torch.tensor([0, (1 << 53) // 16 * 15])])
    states = (bits << 11 | 5).to(DEVICE)
    actual = torch.empty(len(states), device=DEVICE)
    gumbel_kernel[(1,)](states, actual, len(states), BLOCK=1 << len(states).bit_length())
    u = bits.double() * 2.0**-53 + 2.0**-54
    expected = -torch.where(u < 0.5, -u.log(), -torch.log1p(-(((1 << 53) - 1 - bits).double() * 2.0**-53 + 2.0**-54))).log()
    torch.testing.assert_close(actual.cpu().double(), expected, rtol=0, atol=2e-6)
