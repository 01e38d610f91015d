"""How many drafts of each request to verify: pure functions on arrays (DSpark, arXiv 2607.05147, section 3.3 and appendix A).

R requests propose up to g drafts each. Draft j of request r survives with probability a[r, j], the product of its first j
confidences. A step that verifies B tokens (one anchor a request, and the admitted drafts) runs at SPS(B) steps a second,
so lengths l_1 .. l_R are worth

    Theta(l) = (sum_r 1 + sum_{j <= l_r} a[r, j]) * SPS(sum_r 1 + l_r)   tokens a second.

**Losslessness.** Whether draft (r, k) is verified must not depend on its token. c[r, k] reads the tokens before slot k, so a[r, k]
is known before the token is; a[r, k + 1] is not. `threshold_lengths` reads c[r, 1 .. k] only. `prefix_schedule` and
`admit_most_likely` visit candidates by descending a and decide on (r, k) from candidates that come no later, of which
(r, k + 1) is none. Choosing the best of all lengths in hindsight (`best_capacity`) leaks the token, and is only allowed on
confidences of earlier steps.

All functions take tensors of any device and never make the host wait for it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def survival(confidence: Tensor, available: Tensor) -> Tensor:
    """a[r, j], the probability that drafts 1 .. j of request r are all accepted.

    Args:
        confidence: [R, g] in [0, 1], conditional acceptance of each draft.
        available: [R] int64, leading drafts of each request that may be verified.

    Returns:
        [R, g] float64, not increasing along a row; 0 beyond what is available.
    """
    column = torch.arange(confidence.shape[1], device=confidence.device)
    return (confidence.double() * (column < available[:, None])).cumprod(1)


def threshold_lengths(confidence: Tensor, threshold: float) -> Tensor:
    """[R] int64: the drafts before the first whose confidence [R, g] is below the threshold."""
    return (confidence >= threshold).long().cumprod(1).sum(1)


def throughput_path(a: Tensor, steps_per_second: Tensor, requests: Tensor | int) -> Tensor:
    """Theta after admitting 0, 1, .. R * g candidates, most likely first.

    Args:
        a: [R, g] from `survival`.
        steps_per_second: [n], entry B the rate of a step that verifies B tokens; the last entry holds beyond the table.
        requests: active ones, each with one anchor row; R where none has finished.

    Returns:
        [R * g + 1] float64.
    """
    ordered = a.T.flatten().sort(descending=True).values
    admitted = torch.arange(len(ordered) + 1, device=a.device)
    tokens = torch.cat([ordered.new_zeros(1), ordered.cumsum(0)]) + requests
    rate = steps_per_second.to(a).gather(0, (admitted + requests).clamp(max=len(steps_per_second) - 1))
    return tokens * rate


def prefix_schedule(a: Tensor, steps_per_second: Tensor, requests: Tensor | int | None = None) -> Tensor:
    """Hardware-aware prefix scheduler (Algorithm 1): admit candidates, most likely first, until one does not raise Theta.

    For an affine step time Theta is unimodal along the way, and the early stop loses nothing. For other step times a
    local maximum may end it; `best_capacity` on earlier confidences, then `admit_most_likely`, is not trapped so.

    Args:
        a: [R, g] from `survival`.
        steps_per_second, requests: as for `throughput_path`.

    Returns:
        [R] int64 lengths.
    """
    theta = throughput_path(a, steps_per_second, a.shape[0] if requests is None else requests)
    return admit_most_likely(a, (theta[1:] > theta[:-1]).long().cumprod(0).sum())


def best_capacity(a: Tensor, steps_per_second: Tensor, requests: Tensor | int | None = None) -> Tensor:
    """The number of candidates that maximises Theta over the whole way (the smallest, on ties): scalar int64.

    Not lossless on the confidences of the step that it is used for (module docstring): use earlier ones.
    """
    return throughput_path(a, steps_per_second, a.shape[0] if requests is None else requests).argmax()


def admit_most_likely(a: Tensor, capacity: Tensor | int) -> Tensor:
    """Lengths that admit the `capacity` most likely candidates of positive probability.

    Ties go to the smaller position, then to the smaller request: the sort key is (-a, j, r).

    Args:
        a: [R, g], not increasing along a row.
        capacity: how many candidates, chosen without looking at tokens of this step.

    Returns:
        [R] int64 lengths.
    """
    requests, positions = a.shape
    order = a.T.flatten().argsort(descending=True, stable=True)  # position-major, so that stability is the tie rule
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=a.device))
    admitted = (rank.view(positions, requests).T < capacity) & (a > 0)
    return admitted.sum(1)
