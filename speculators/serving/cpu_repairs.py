"""Where vLLM's CPU build computes something else than its GPU build. Each repair is applied only where a probe shows the fault.

Both faults were seen in 0.32.0:

- DFlash and DSpark drafters norm the keys that they inject into all layers in one call, with one row of weights a layer. The CPU
  kernel takes the first layer's row for all: acceptance of a trained drafter of several layers falls, silently.
- Without Triton, the V1 runner's rejection sampler spreads each request's temperature, top-k and top-p over its draft tokens
  with a kernel that writes into a copy: at temperature above 0 the logits are divided by uninitialised memory, and the replies
  are no longer distributed as the verifier's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_EXPAND = "vllm.v1.sample.rejection_sampler.expand_kernel"


def repair_cpu() -> None:
    """Repair the vLLM of this process, if it is a CPU build."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _repair_norms()
        _repair_expansion()


def _repair_norms() -> None:
    from vllm import _custom_ops as ops

    x = torch.ones(2, 1, 1, 32)
    out, weight = torch.empty_like(x), torch.tensor([[1.0], [2.0]]).expand(2, 32).contiguous()
    ops.rms_norm(out, x, weight, 1e-6)
    if out[1, 0, 0, 0] > 1.5:  # the second layer got its own weights
        return
    whole = ops.rms_norm

    def rms_norm(out: Tensor, x: Tensor, weight: Tensor | None, epsilon: float) -> None:
        if weight is None or weight.dim() == 1:
            whole(out, x, weight, epsilon)
            return
        for layer in range(len(weight)):
            whole(out[layer], x[layer], weight[layer], epsilon)

    ops.rms_norm = rms_norm


def _repair_expansion() -> None:
    from vllm.triton_utils import HAS_TRITON

    if HAS_TRITON:
        return  # Triton's own kernel is right
    from vllm.triton_utils import dispatcher
    from vllm.utils import cpu_triton_utils as kernels

    out = torch.zeros(2)
    kernels._expand_kernel_impl(out, torch.tensor([0.5]), torch.tensor([2]), 0, 1)
    if out[1] == 0.5:
        return
    kernels._expand_kernel_impl = _expand
    if _EXPAND in dispatcher._registry:  # vLLM has handed the faulty one out already
        dispatcher.register_kernels({_EXPAND: _expand})


def _expand(
    output: Tensor, values: Tensor, cumulative_counts: Tensor, replace_from: float, replace_to: float, MAX_NUM_TOKENS: Any = None
) -> None:
    """Repeat every request's value as often as it has draft tokens; `replace_from` becomes `replace_to`.

    Args:
        output: [tokens], written.
        values: [requests].
        cumulative_counts: [requests], draft tokens up to and with each request.
        replace_from: a value that stands for another.
        replace_to: that other value.
        MAX_NUM_TOKENS: of vLLM's kernel; not used.
    """
    counts = cumulative_counts.diff(prepend=cumulative_counts.new_zeros(1))
    repeated = torch.where(values == replace_from, replace_to, values).repeat_interleave(counts)
    output[: len(repeated)].copy_(repeated)
