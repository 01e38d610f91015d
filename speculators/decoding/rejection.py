"""Which drafts stay, and which token follows them: the step that keeps the verifier's distribution exact.

Speculative sampling (Leviathan et al. 2023; Chen et al. 2023). A draft x drawn from q is accepted with probability
min(1, p(x) / q(x)), p being the verifier's distribution. At the first rejection the token is drawn from the residual
max(p - q, 0), normalised; if every draft is accepted, one more token is drawn from p: the bonus token. Either way each
token is distributed as p. A deterministic draft is the case of q a point mass: it is accepted with probability p(x), and
the residual is p without x.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from speculators.decoding.sampling import draw


@dataclass(frozen=True)
class Acceptance:
    """Outcome of verifying one block a row.

    Attributes:
        accepted: [rows] int64, leading drafts that stay.
        next_token: [rows] int64, the token after them: the correction, or the bonus token. It is the next anchor.
    """

    accepted: Tensor
    next_token: Tensor


def acceptance_probability(p_token: Tensor, q_token: Tensor | None) -> Tensor:
    """min(1, p(x) / q(x)) in float64; p(x) for a point mass.

    Args:
        p_token: [...] the verifier's probability of each draft.
        q_token: [...] the probability it was drawn with, not 0; None for point masses.
    """
    p_token = p_token.double()
    return p_token if q_token is None else (p_token / q_token.double()).clamp(max=1.0)


def residual(p: Tensor, q: Tensor | None, token: Tensor) -> Tensor:
    """The distribution after a rejected draft: max(p - q, 0), normalised; p where nothing remains.

    Nothing remains only where p and q are equal up to rounding, and there a rejection has probability 0 up to rounding.

    Args:
        p: [rows, vocabulary], the verifier's distribution.
        q: [rows, vocabulary], the distribution the draft was drawn from; None for a point mass on `token`.
        token: [rows] int64, the rejected draft.

    Returns:
        [rows, vocabulary] float64.
    """
    p = p.double()
    remaining = p.scatter(-1, token[:, None], 0.0) if q is None else (p - q.double()).clamp(min=0.0)
    mass = remaining.sum(-1, keepdim=True)
    return torch.where(mass > 0, remaining / mass, p)


def accept_greedy(token_ids: Tensor, lengths: Tensor, most_likely: Tensor) -> Acceptance:
    """Accept the longest prefix of drafts that equals the verifier's most likely tokens.

    Args:
        token_ids: [rows, K] int64 drafts.
        lengths: [rows] int64, drafts of each row that count.
        most_likely: [rows, K + 1] int64, the verifier's choice after the anchor and after each draft.
    """
    accepted = _leading(token_ids == most_likely[:, :-1], lengths)
    return Acceptance(accepted, most_likely.gather(1, accepted[:, None])[:, 0])


def accept_sampled(
    token_ids: Tensor, lengths: Tensor, q: Tensor | None, p: Tensor, accept_uniforms: Tensor, correct_uniforms: Tensor
) -> Acceptance:
    """Accept drafts by rejection sampling and draw the token after them.

    Args:
        token_ids: [rows, K] int64 drafts.
        lengths: [rows] int64, drafts of each row that count.
        q: [rows, K, vocabulary] float32, the tensor the drafts were drawn from; None for point masses.
        p: [rows, K + 1, vocabulary] float32, the verifier's distributions after the anchor and after each draft.
        accept_uniforms: [rows, K] float64 in [0, 1).
        correct_uniforms: [rows] float64 in [0, 1).
    """
    row = torch.arange(token_ids.shape[0], device=token_ids.device)
    if token_ids.shape[1] == 0:
        return Acceptance(torch.zeros_like(lengths), draw(p[:, 0], correct_uniforms))
    p_token = p[:, :-1].gather(-1, token_ids[..., None])[..., 0]
    q_token = None if q is None else q.gather(-1, token_ids[..., None])[..., 0]
    accepted = _leading(accept_uniforms < acceptance_probability(p_token, q_token), lengths)

    after = p[row, accepted]
    slot = accepted.clamp(max=token_ids.shape[1] - 1)  # of the rejected draft; any slot where none was rejected
    corrected = residual(after, None if q is None else q[row, slot], token_ids[row, slot])
    distribution = torch.where((accepted < lengths)[:, None], corrected, after.double())
    return Acceptance(accepted, draw(distribution, correct_uniforms))


def _leading(good: Tensor, lengths: Tensor) -> Tensor:
    """[rows]: how many leading columns are True, of the first `lengths` columns."""
    inside = torch.arange(good.shape[1], device=good.device) < lengths[:, None]
    return (good & inside).long().cumprod(1).sum(1)
