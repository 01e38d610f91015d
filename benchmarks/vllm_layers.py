"""vLLM's counterparts of what a layer does between its products; see `vllm_operations`."""

from __future__ import annotations

import torch
from torch import Tensor
from vllm_counterparts import PAGE, Counterpart, close


def rms_norm(x: Tensor, weight: Tensor) -> list[Counterpart]:
    """The norm alone."""
    from vllm import _custom_ops as operations

    out = torch.empty_like(x)

    def run() -> Tensor:
        operations.rms_norm(out, x, weight, 1e-6)
        return out

    return [Counterpart("vLLM rms_norm", run, lambda ours: close((ours, out)))]


def add_rms_norm(x: Tensor, update: Tensor, weight: Tensor) -> list[Counterpart]:
    """In place there: the residual grows from call to call."""
    from vllm import _custom_ops as operations

    states, residual = update.clone(), x.clone()

    def run() -> Tensor:
        operations.fused_add_rms_norm(states, residual, weight, 1e-6)
        return states

    return [Counterpart("vLLM fused_add_rms_norm", run, lambda ours: "in place: not compared")]


def gated_halves(states: Tensor) -> list[Counterpart]:
    """SwiGLU's gate."""
    import vllm._custom_ops  # noqa: F401  (registers the operations)

    out = states.new_empty(*states.shape[:-1], states.shape[-1] // 2)

    def run() -> Tensor:
        torch.ops._C.silu_and_mul(out, states)
        return out

    return [Counterpart("vLLM silu_and_mul", run, lambda ours: close((ours, out)))]


def attention_heads(projected: Tensor, key_heads: int, query_norm: Tensor, key_norm: Tensor) -> list[Counterpart]:
    """Norms and rotation in one launch, the write to a paged cache in another."""
    from vllm import _custom_ops as operations

    rows, width, heads, size = projected.shape
    states, tokens = torch.empty_like(projected).view(rows * width, heads * size), rows * width
    table = torch.rand(4 * width, size, device=projected.device).to(projected.dtype)
    positions = torch.arange(width, device=projected.device).repeat(rows)
    pages = torch.zeros(2, -(-tokens // PAGE), PAGE, key_heads, size, dtype=projected.dtype, device=projected.device)
    slots, one = torch.arange(tokens, device=projected.device), torch.ones((), device=projected.device)
    key, value = states.view(tokens, heads, size)[:, -2 * key_heads :].chunk(2, dim=1)

    def run() -> None:
        states.copy_(projected.view_as(states))
        operations.fused_qk_norm_rope(
            states, heads - 2 * key_heads, key_heads, key_heads, size, 1e-6, query_norm, key_norm, table, True, positions
        )
        operations.reshape_and_cache_flash(key, value, pages[0], pages[1], slots, "auto", one, one)

    return [Counterpart("vLLM fused_qk_norm_rope, reshape_and_cache_flash", run, lambda ours: "other angles: not compared")]
