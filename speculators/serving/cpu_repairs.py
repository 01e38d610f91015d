"""Where vLLM's CPU build computes something else than its GPU build. Each repair is applied only where a probe shows the fault."""

from __future__ import annotations

import torch
from torch import Tensor


def repair_cpu() -> None:
    """Repair the vLLM of this process, if it is a CPU build.

    DFlash and DSpark drafters norm the keys that they inject into all layers in one call, with one row of weights a layer.
    The CPU kernel (seen in 0.32.0) takes the first layer's row for all of them: acceptance of a trained drafter of several
    layers falls, silently.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm import _custom_ops as ops

    if _norms_layer_by_layer(ops):
        return
    whole = ops.rms_norm

    def rms_norm(out: Tensor, x: Tensor, weight: Tensor | None, epsilon: float) -> None:
        if weight is None or weight.dim() == 1:
            whole(out, x, weight, epsilon)
            return
        for layer in range(len(weight)):
            whole(out[layer], x[layer], weight[layer], epsilon)

    ops.rms_norm = rms_norm


def _norms_layer_by_layer(ops: object) -> bool:
    """Whether `rms_norm` applies the second row of weights to the second layer."""
    x = torch.ones(2, 1, 1, 32)
    out, weight = torch.empty_like(x), torch.tensor([[1.0], [2.0]]).expand(2, 32).contiguous()
    ops.rms_norm(out, x, weight, 1e-6)  # type: ignore[attr-defined]
    return bool(out[1, 0, 0, 0] > 1.5)
