"""Rejection sampling: the exact values of small cases, and the output distribution in closed form and by simulation."""

import pytest
import torch
from goodness_of_fit import chi_square_p_value
from torch import Tensor

from speculators.decoding.randomness import Purpose, uniform
from speculators.decoding.rejection import accept_greedy, accept_sampled, acceptance_probability, residual
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
