"""Muon: momentum whose step is orthogonalised, for matrices (K. Jordan, 2024; scaled as Moonlight, arXiv 2502.16982).

torch.optim.Muon launches some thirty kernels a matrix and reads its learning rate on the host. Here matrices of one
shape go through the iteration as one batch, and nothing needs the host, so a step can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from speculators.training.sharding import Sharding
from speculators.training.world import World

# The quintic of Newton-Schulz, steepest at zero: singular values end between about 0.7 and 1.2 after five steps.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5


def orthogonalise(matrices: Tensor) -> Tensor:
    """Replace every singular value of [n, rows, columns] matrices by a value near 1 (U V' of the SVD U S V', roughly).

    X <- a X + (b A + c A^2) X with A = X X', five times from X = G / |G|; bfloat16 on CUDA, where it is accurate enough.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / x.flatten(1).norm(dim=1).clamp_min(1e-7)[:, None, None]
    x = x.to(torch.bfloat16 if x.is_cuda else torch.float32)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.float()
    return x.mT if tall else x


@dataclass
class MatrixGroup:
    """Matrices that share shape and settings.

    Attributes:
        names: of the parameters.
        parameters: [own rows, columns] each, of this process.
        rows: of the full matrices.
        learning_rate_scale: factor on the learning rate.
        weight_decay: decoupled.
        momentum: [n, own rows, columns] float32, the running mean of gradients.
    """

    names: list[str]
    parameters: list[nn.Parameter]
    rows: int
    learning_rate_scale: float
    weight_decay: float
    momentum: Tensor


class Muon:
    """Nesterov momentum m <- mu m + (1 - mu) g, update u = orthogonalise((1 - mu) g + mu m), step 0.2 sqrt(max(rows, columns)) u.

    That factor gives the step AdamW's usual root mean square, so one learning rate serves both. Orthogonalising is most of the
    work and needs whole matrices: where processes hold rows, they gather them; then each orthogonalises its share of the
    matrices and gives the result to the others.

    Args:
        groups: the matrices.
        momentum: mu.
        sharding: how their rows are spread.
        world: the processes that share the work.
    """

    def __init__(
        self, groups: Sequence[MatrixGroup], momentum: float, sharding: Sharding | None = None, world: World | None = None
    ) -> None:
        self.groups = list(groups)
        self.momentum = momentum
        self._sharding, self._work = sharding or Sharding(), Sharding(world or World())

    @torch.no_grad()
    def step(self, learning_rate: Tensor, skip: Tensor, scale: Tensor) -> None:
        """Update every matrix from its gradient, which all of them must have.

        Args:
            learning_rate: scalar on the device.
            skip: scalar float32 on the device, 1.0 leaves parameters and momentum as they are.
            scale: scalar float32 on the device, a factor on the gradients.
        """
        keep = 1.0 - skip
        for group in self.groups:
            gradients = torch.stack([parameter.grad for parameter in group.parameters if parameter.grad is not None])
            gradients = torch.where(skip > 0, 0.0, gradients * scale)  # skipped ones may be NaN
            group.momentum.lerp_(gradients, keep * (1.0 - self.momentum))
            whole = self._sharding.gather(gradients.lerp(group.momentum, self.momentum), group.rows, dim=1)
            mine = orthogonalise(whole[self._work.share(len(whole))])
            updates = self._work.gather(mine, len(whole))[:, self._sharding.share(group.rows)]
            rate = keep * learning_rate * group.learning_rate_scale
            size = 0.2 * max(whole.shape[1:]) ** 0.5
            weights: list[Tensor] = list(group.parameters)
            torch._foreach_mul_(weights, 1.0 - rate * group.weight_decay)
            torch._foreach_sub_(weights, list((updates * (rate * size)).unbind()))
