"""Rejection sampling: the exact values of small cases, and the output distribution in closed form and by simulation."""

import pytest
import torch
from goodness_of_fit import chi_square_p_value
from torch import Tensor

from speculators.decoding.randomness import Purpose, uniform
from speculators.decoding.rejection import (
    accept_block,
    accept_greedy,
    accept_sampled,
    acceptance_probability,
    prefix_weights,
    remainder,
    residual,
)
from speculators.decoding.sampling import draw

P = torch.tensor([0.7, 0.2, 0.1])
Q = torch.tensor([0.2, 0.5, 0.3])


def output_distribution(p: Tensor, q: Tensor) -> Tensor:
    """Of one token: sum over drafts of q(x) * (accepted as x, or drawn from the residual)."""
    accept = acceptance_probability(p, q)
    rejected = (q * (1 - accept)).sum()
    return q * accept + rejected * residual(p[None], q[None], torch.tensor([0]))[0]


def test_three_token_case_has_its_exact_values() -> None:
    accept = acceptance_probability(P, Q)
    torch.testing.assert_close(accept, torch.tensor([1, 0.4, 1 / 3], dtype=torch.float64), rtol=1e-6, atol=0)
    assert (Q * accept).sum().item() == pytest.approx(0.5, abs=1e-7)  # = 1 - total variation
    assert (Q * accept).sum().item() == pytest.approx(1 - 0.5 * (P - Q).abs().sum().item(), abs=1e-7)
    assert residual(P[None], Q[None], torch.tensor([1])).tolist() == [[1.0, 0.0, 0.0]]
    torch.testing.assert_close(output_distribution(P, Q), P.double(), rtol=1e-6, atol=0)


def test_two_token_case_of_the_paper() -> None:
    p, q = torch.tensor([0.7, 0.3]), torch.tensor([0.5, 0.5])
    assert (q * acceptance_probability(p, q)).sum().item() == pytest.approx(0.8, abs=1e-7)
    torch.testing.assert_close(output_distribution(p, q), p.double(), rtol=1e-6, atol=0)


def test_point_mass_on_token_one_is_accepted_with_its_probability_and_leaves_the_output_unchanged() -> None:
    token = torch.tensor([1])
    accept = acceptance_probability(P[token], None)
    assert accept.item() == pytest.approx(0.2, abs=1e-7)
    rest = residual(P[None], None, token)[0]
    torch.testing.assert_close(rest, torch.tensor([0.875, 0, 0.125], dtype=torch.float64), rtol=1e-6, atol=0)
    output = (1 - accept) * rest
    output[1] += accept[0]
    torch.testing.assert_close(output, P.double(), rtol=1e-6, atol=0)


def test_point_mass_equals_an_explicit_one_hot_draft_distribution() -> None:
    one_hot, token = torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([1])
    assert torch.equal(acceptance_probability(P[token], one_hot[0, token]), acceptance_probability(P[token], None))
    torch.testing.assert_close(residual(P[None], one_hot, token), residual(P[None], None, token))


def test_residual_falls_back_to_the_verifier_where_nothing_remains() -> None:
    assert torch.equal(residual(P[None], P[None], torch.tensor([0])), P.double()[None])
    certain = torch.tensor([[0.0, 1.0, 0.0]])
    assert torch.equal(residual(certain, None, torch.tensor([1])), certain.double())


def test_a_draft_the_verifier_cannot_produce_is_never_accepted() -> None:
    p, q = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]), torch.tensor([[[0.5, 0.5]]])
    for q_or_none in (q, None):
        result = accept_sampled(
            torch.tensor([[1]]), torch.tensor([1]), q_or_none, p, torch.zeros(1, 1).double(), torch.tensor([0.99]).double()
        )
        assert (result.accepted.item(), result.next_token.item()) == (0, 0)


def test_ragged_rows_take_the_bonus_token_from_the_distribution_after_their_own_last_draft() -> None:
    # Row b proposes b drafts, all certain to be accepted; distribution k is certain to give token k.
    p = torch.eye(4).expand(4, -1, -1)
    drafts, lengths = torch.arange(3).expand(4, -1), torch.arange(4)
    result = accept_sampled(drafts, lengths, None, p, torch.full((4, 3), 0.999).double(), torch.full((4,), 0.5).double())
    assert result.accepted.tolist() == [0, 1, 2, 3]
    assert result.next_token.tolist() == [0, 1, 2, 3]


def test_greedy_accepts_the_longest_prefix_that_equals_the_verifiers_choice() -> None:
    most_likely = torch.tensor([[5, 6, 7, 8]] * 5)
    drafts = torch.tensor([[5, 6, 7], [5, 0, 7], [0, 6, 7], [5, 6, 7], [5, 6, 7]])
    result = accept_greedy(drafts, torch.tensor([3, 3, 3, 1, 0]), most_likely)
    assert result.accepted.tolist() == [3, 1, 0, 1, 0]
    assert result.next_token.tolist() == [8, 6, 5, 6, 5]


def test_without_drafts_the_token_comes_from_the_verifier() -> None:
    empty, none = torch.empty(2, 0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    assert accept_greedy(empty, none, torch.tensor([[3], [4]])).next_token.tolist() == [3, 4]
    p = torch.eye(3)[[1, 2]][:, None]
    assert accept_sampled(empty, none, None, p, empty.double(), torch.tensor([0.5, 0.5]).double()).next_token.tolist() == [1, 2]


@pytest.mark.parametrize("sampled", [True, False], ids=["sampled draft", "point-mass draft"])
def test_emitted_tokens_follow_the_verifier_in_200000_trials(sampled: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    p = torch.randn(3, 8, generator=generator).mul(1.5).softmax(-1)
    q = torch.randn(2, 8, generator=generator).mul(1.5).softmax(-1)
    rows, round_index, slots = torch.arange(200_000), torch.tensor(1), torch.arange(2)
    trials = len(rows)
    if sampled:
        drafts = draw(q.expand(trials, -1, -1), uniform(0, Purpose.DRAFT, rows[:, None], round_index, slots))
    else:
        drafts = q.argmax(-1).expand(trials, -1)
    result = accept_sampled(
        drafts,
        torch.full((trials,), 2),
        q.expand(trials, -1, -1) if sampled else None,
        p.expand(trials, -1, -1),
        uniform(0, Purpose.ACCEPT, rows[:, None], round_index, slots),
        uniform(0, Purpose.CORRECT, rows, round_index, torch.tensor(0)),
    )
    tokens = torch.cat([drafts, result.next_token[:, None]], dim=1).scatter(1, result.accepted[:, None], result.next_token[:, None])
    for k in range(3):  # position k, among trials that reach it
        reached = result.accepted >= k
        assert chi_square_p_value(tokens[reached, k].bincount(minlength=8), p[k]) > 1e-3
    alpha = torch.minimum(p[:2], q).sum(-1) if sampled else p[:2].gather(-1, q.argmax(-1)[:, None])[:, 0]
    expected = torch.stack([1 - alpha[0], alpha[0] * (1 - alpha[1]), alpha[0] * alpha[1]])
    assert chi_square_p_value(result.accepted.bincount(minlength=3), expected) > 1e-3


def test_equality_with_a_verifier_sample_accepts_as_often_as_one_hot_rejection() -> None:
    # The rule "keep the draft if the verifier happens to sample it" is rejection sampling with a point mass.
    rows = torch.arange(100_000)
    p, token = torch.tensor([0.45, 0.25, 0.2, 0.1]), 1
    sample = draw(p.expand(len(rows), -1), uniform(0, Purpose.CORRECT, rows, torch.tensor(1), torch.tensor(0)))
    uniforms = uniform(0, Purpose.ACCEPT, rows, torch.tensor(1), torch.tensor(0))
    by_equality = (sample == token).double().mean().item()
    by_rejection = (uniforms < acceptance_probability(p[token], None)).double().mean().item()
    standard_error = (0.25 * 0.75 / len(rows)) ** 0.5
    assert by_equality == pytest.approx(0.25, abs=4 * standard_error)
    assert by_rejection == pytest.approx(0.25, abs=4 * standard_error)


# -- block verification --------------------------------------------------------------------------------------

CERTAIN = torch.tensor([[1.0, 0.0, 0.0]])


def test_block_verification_of_one_draft_is_standard_verification() -> None:
    rows = torch.arange(1000)
    drafts = draw(Q.expand(len(rows), 1, -1), uniform(0, Purpose.DRAFT, rows[:, None], torch.tensor(1), torch.arange(1)))
    numbers = [uniform(0, Purpose.ACCEPT, rows[:, None], torch.tensor(1), torch.arange(1))]
    numbers.append(uniform(0, Purpose.CORRECT, rows, torch.tensor(1), torch.tensor(0)))
    for lengths in (torch.ones_like(rows), torch.zeros_like(rows)):
        arguments = (drafts, lengths, Q.expand(len(rows), 1, -1), P.expand(len(rows), 2, -1), *numbers)
        standard, block = accept_sampled(*arguments), accept_block(*arguments)
        assert torch.equal(block.accepted, standard.accepted)
        assert torch.equal(block.next_token, standard.next_token)


def test_prefix_weights_let_a_good_draft_pay_for_a_bad_one() -> None:
    # Ratios 4, 1/4, 3: the weight never exceeds one, so a surplus is lost where it arises and a deficit stays.
    weights = prefix_weights(torch.tensor([[0.8, 0.2, 0.6]]), torch.tensor([[0.2, 0.8, 0.2]]))
    torch.testing.assert_close(weights, torch.tensor([[1, 1, 0.25, 0.75]], dtype=torch.float64))


def test_block_verification_of_the_papers_example_accepts_11_ninths_where_standard_accepts_10() -> None:
    """Two tokens, p = (1/3, 2/3), q = (2/3, 1/3) at every position, two drafts: section 2 of Sun et al. 2024."""
    p, q = torch.tensor([1 / 3, 2 / 3]), torch.tensor([2 / 3, 1 / 3])
    blocks = torch.cartesian_prod(torch.arange(2), torch.arange(2))
    likely = q[blocks].double().prod(1)
    weights = prefix_weights(p[blocks], q[blocks])
    one = remainder(p.expand(4, -1), q.expand(4, -1), blocks[:, 1], weights[:, 1]).sum(-1)
    h_one, h_two = one / (one + 1 - weights[:, 1]), weights[:, 2]
    at_least_one = 1 - (1 - h_one) * (1 - h_two)
    assert (likely * (at_least_one + h_two)).sum().item() == pytest.approx(11 / 9, abs=1e-6)
    standard = acceptance_probability(p[blocks], q[blocks])
    assert (likely * (standard[:, 0] + standard.prod(1))).sum().item() == pytest.approx(10 / 9, abs=1e-6)


@pytest.mark.parametrize("sampled", [True, False], ids=["sampled draft", "point-mass draft"])
def test_block_verification_emits_the_verifiers_joint_distribution_in_rows_of_unequal_length(sampled: bool) -> None:
    """Two drafts and what follows, where the verifier's and the drafter's distributions depend on the tokens before."""
    generator = torch.Generator().manual_seed(5)
    size, trials = 3, 200_000
    first_p, first_q = (torch.randn(size, generator=generator).softmax(-1) for _ in range(2))
    second_p, second_q = (torch.randn(size, size, generator=generator).softmax(-1) for _ in range(2))
    third_p = torch.randn(size, size, size, generator=generator).softmax(-1)
    if not sampled:
        first_q, second_q = torch.eye(size)[0], torch.eye(size)[[1, 2, 0]]
    rows, round_index = torch.arange(trials), torch.tensor(1)
    numbers = uniform(0, Purpose.DRAFT, rows[:, None], round_index, torch.arange(2))
    one = draw(first_q.expand(trials, -1), numbers[:, 0])
    two = draw(second_q[one], numbers[:, 1])
    drafts, lengths = torch.stack([one, two], dim=1), rows % 3  # a third of the rows each drafts 0, 1 and 2 tokens
    result = accept_block(
        drafts,
        lengths,
        torch.stack([first_q.expand(trials, -1), second_q[one]], dim=1) if sampled else None,
        torch.stack([first_p.expand(trials, -1), second_p[one], third_p[one, two]], dim=1),
        uniform(0, Purpose.ACCEPT, rows[:, None], round_index, torch.arange(2)),
        uniform(0, Purpose.CORRECT, rows, round_index, torch.tensor(0)),
    )
    assert (result.accepted <= lengths).all()
    # Rows that emit fewer than three tokens go on with the verifier's own draws, as later rounds would.
    tokens = torch.cat([drafts, drafts[:, :1]], dim=1).scatter(1, result.accepted[:, None], result.next_token[:, None])
    later = uniform(0, Purpose.GENERATE, rows[:, None], round_index, torch.arange(2))
    second = draw(second_p[tokens[:, 0]], later[:, 0])
    tokens[:, 1] = torch.where(result.accepted >= 1, tokens[:, 1], second)
    third = draw(third_p[tokens[:, 0], tokens[:, 1]], later[:, 1])
    tokens[:, 2] = torch.where(result.accepted >= 2, tokens[:, 2], third)
    joint = torch.einsum("a,ab,abc->abc", first_p, second_p, third_p).flatten()
    for length in range(3):
        cells = (tokens[lengths == length] * torch.tensor([size * size, size, 1])).sum(1)
        assert chi_square_p_value(cells.bincount(minlength=size**3), joint) > 1e-3


def test_block_verification_keeps_what_is_certain_and_rejects_what_cannot_be() -> None:
    high, low = torch.full((1, 2), 1 - 2.0**-53, dtype=torch.float64), torch.zeros(1, 2, dtype=torch.float64)
    same = accept_block(
        torch.zeros(1, 2, dtype=torch.int64), torch.tensor([2]), CERTAIN[None].expand(1, 2, -1), CERTAIN.expand(1, 3, -1), high, high[:, 0]
    )
    assert (same.accepted.item(), same.next_token.item()) == (2, 0)
    impossible = accept_block(torch.ones(1, 2, dtype=torch.int64), torch.tensor([2]), None, CERTAIN.expand(1, 3, -1), low, low[:, 0])
    assert (impossible.accepted.item(), impossible.next_token.item()) == (0, 0)
