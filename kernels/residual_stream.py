"""The residual stream of a decoding step: which of its additions and norms ride along with a matrix product.

A pre-norm layer adds what a sublayer gives to the stream and norms the sum before the next product reads it. Where `skinny_linear` runs
the products, the first begins with the stream, and the second norms what it reads: neither takes a launch of its own. Elsewhere one
launch does both, `add_rms_norm`. Drafters and fused verifier layers go through the same stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from speculators.kernels.residual_norm import add_rms_norm
from speculators.kernels.skinny_linear import Normed, runs_in_kernel, skinny_linear

__all__ = ["ResidualStream"]


@dataclass
class ResidualStream:
    """What has been added up so far, and the newest summand where that is still to be added.

    Attributes:
        x: [..., hidden].
        update: [..., hidden] or None.
    """

    x: Tensor
    update: Tensor | None = None

    def add_product(self, inner: Tensor, projection: nn.Linear, *, overwrite: bool = False) -> None:
        """Add projection(inner), [..., hidden], the output of a sublayer.

        Args:
            inner: [..., in].
            projection: of the sublayer's end.
            overwrite: whether x may be changed in place, where nobody else has it.
        """
        weight, alone = projection.weight, projection.bias is None
        if alone and runs_in_kernel(inner, weight):
            self.x = skinny_linear(inner, weight, plus=self.value())
        elif alone and overwrite and not torch.is_grad_enabled():
            self.value().view(-1, len(weight)).addmm_(inner.reshape(-1, inner.shape[-1]), weight.t())
        else:
            self.x, self.update = self.value(), projection(inner)

    def normed(self, norm: Any, epsilon: float) -> Tensor:
        """The norm of the sum, [..., hidden].

        Args:
            norm: the module, whose weight is [hidden]; it is called where there is nothing to add.
            epsilon: of the norm.
        """
        if self.update is None:
            out: Tensor = norm(self.x)
            return out
        (self.x, out), self.update = add_rms_norm(self.x, self.update, norm.weight, epsilon), None
        return out

    def to_norm(self, norm: Any, epsilon: float) -> Tensor | Normed:
        """The norm of the sum, for a product that may apply it itself."""
        if self.update is None and not torch.is_grad_enabled():
            return Normed(self.x, norm.weight, epsilon)
        return self.normed(norm, epsilon)

    def value(self) -> Tensor:
        """[..., hidden], the summand included."""
        if self.update is not None:
            self.x, self.update = self.x + self.update, None
        return self.x
