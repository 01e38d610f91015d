"""Which drafts stay, and which token follows them: the step that keeps the verifier's distribution exact.

Speculative sampling (Leviathan et al. 2023; Chen et al. 2023). A draft x drawn from q is accepted with probability
min(1, p(x) / q(x)), p being the verifier's distribution. At the first rejection the token is drawn from the residual
max(p - q, 0), normalised; if every draft is accepted, one more token is drawn from p: the bonus token. Either way each
token is distributed as p. A deterministic draft is the case of q a point mass: it is accepted with probability p(x), and
the residual is p without x.

Block verification (Sun et al. 2024, "Block Verification Accelerates Speculative Decoding") decides about the block as a whole
instead: it keeps the same distribution and accepts at least as many drafts on average. With

    w_0 = 1,  w_i = min(1, w_{i-1} p(x_i) / q(x_i)),  s_i = sum_x max(w_i p_i(x) - q_i(x), 0),

p_i and q_i being the distributions after i drafts, it keeps the longest prefix i whose own uniform number is below
h_i = s_i / (s_i + 1 - w_i), or below w_n for the whole block of n drafts, and draws what follows from max(w_i p_i - q_i, 0).
A row's block may end anywhere, as long as that does not depend on drafts beyond the end: it is as if the drafter had gone on
with the verifier's own distribution.
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
    return acceptance_ratio(p_token, q_token).clamp(max=1.0)


def acceptance_ratio(p_token: Tensor, q_token: Tensor | None) -> Tensor:
    """p(x) / q(x) in float64; arguments as in `acceptance_probability`."""
    p_token = p_token.double()
    return p_token if q_token is None else p_token / q_token.double()


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
    remaining = remainder(p, q, token)
    mass = remaining.sum(-1, keepdim=True)
    return torch.where(mass > 0, remaining / mass, p.double())


def remainder(p: Tensor, q: Tensor | None, token: Tensor, weight: Tensor | None = None) -> Tensor:
    """max(w p - q, 0) in float64, not normalised.

    Args:
        p: [..., vocabulary], the verifier's distributions.
        q: [..., vocabulary], the drafter's; None for point masses.
        token: [...] int64, the drafts.
        weight: [...] float64, w; 1 when None.
    """
    p = p.double() if weight is None else p.double() * weight[..., None]
    return p.scatter(-1, token[..., None], 0.0) if q is None else (p - q.double()).clamp(min=0.0)


def prefix_weights(p_token: Tensor, q_token: Tensor | None) -> Tensor:
    """w_0 .. w_K of block verification in float64: [rows, K] each -> [rows, K + 1]."""
    weights = [p_token.new_ones(p_token.shape[0], dtype=torch.float64)]
    for ratio in acceptance_ratio(p_token, q_token).unbind(1):
        weights.append((weights[-1] * ratio).clamp(max=1.0))
    return torch.stack(weights, dim=1)


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


def accept_block(
    token_ids: Tensor, lengths: Tensor, q: Tensor | None, p: Tensor, accept_uniforms: Tensor, correct_uniforms: Tensor
) -> Acceptance:
    """Accept drafts by block verification and draw the token after them. Arguments as in `accept_sampled`."""
    rows, width = token_ids.shape
    if width == 0:
        return accept_sampled(token_ids, lengths, q, p, accept_uniforms, correct_uniforms)
    p_token = p[:, :-1].gather(-1, token_ids[..., None])[..., 0]
    weights = prefix_weights(p_token, None if q is None else q.gather(-1, token_ids[..., None])[..., 0])
    remaining = remainder(p[:, :-1], q, token_ids, weights[:, :-1])
    mass = remaining.sum(-1)
    stay = mass / (mass + 1 - weights[:, :-1]).clamp(min=torch.finfo(torch.float64).tiny)
    ends = torch.arange(1, width + 1, device=p.device) == lengths[:, None]
    stay = torch.where(ends, weights[:, 1:], torch.nn.functional.pad(stay[:, 1:], (0, 1)))
    prefix = torch.arange(1, width + 1, device=p.device)
    kept = (accept_uniforms < stay) & (prefix <= lengths[:, None])
    accepted = (prefix * kept).amax(1)

    row = torch.arange(rows, device=p.device)
    after = p[row, accepted].double()
    corrected = remaining[row, accepted.clamp(max=width - 1)]
    inside = (accepted < lengths) & (corrected.sum(-1) > 0)
    return Acceptance(accepted, draw(torch.where(inside[:, None], corrected, after), correct_uniforms))


def _leading(good: Tensor, lengths: Tensor) -> Tensor:
    """[rows]: how many leading columns are True, of the first `lengths` columns."""
    inside = torch.arange(good.shape[1], device=good.device) < lengths[:, None]
    return (good & inside).long().cumprod(1).sum(1)
