"""Decoder layers of a verifier in ten launches a step instead of more than forty, where they are of the common kind.

A step of a small model costs what its launches cost: the layers of transformers make each arithmetic operation one. The common
kind is pre-norm, with grouped rotary attention, optional norms of query and key heads (Qwen3), and SwiGLU. Such a layer runs its
steps on the kernels that drafters run on; prompts, training features and anything else go through the model's own code.

Nothing is taken from a layer's name. It must have exactly those parts, and compute what its own code computes. A fused model saves,
loads, moves and copies as before; as a whole it cannot be pickled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from speculators.decoding.cache import KeyValueCache, cache_argument
from speculators.kernels.attention_heads import CacheSlots, attention_heads
from speculators.kernels.block_attention import attention
from speculators.kernels.gated_halves import gated_halves
from speculators.kernels.joined_projections import joined, lay_together
from speculators.kernels.packed_linear import PackedLinear
from speculators.kernels.residual_norm import add_rms_norm, rms_norm
from speculators.kernels.skinny_linear import skinny_gated_linear, skinny_linear

__all__ = ["fuse_final_norm", "fuse_layers"]

# Tokens of a row in one step; what is wider is bound by arithmetic, not by launches.
_WIDEST_STEP = 32
# How far an update of the residual stream may be from the model's own, relative: rounding, never another computation.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.01, torch.bfloat16: 0.05}

_fused_classes: dict[type, type] = {}

_LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP_PARTS = {"gate_proj", "up_proj", "down_proj"}


def fuse_layers(decoder: nn.Module, layers: nn.ModuleList, kinds: dict[str, int | None]) -> int:
    """Let the layers of the common kind run their decoding steps fused; the model, its names and its weights stay what they are.

    Args:
        decoder: the transformers decoder, for its rotary embedding.
        layers: its layers.
        kinds: the kinds of attention in it, see `AttentionMasks`: any but full attention leaves all layers as they are.

    Returns:
        How many layers now run fused steps.
    """
    rotary = getattr(decoder, "rotary_emb", None)
    if rotary is None or kinds != {"full_attention": None}:
        return 0
    return sum(_fuse(layer, rotary, cache_argument(decoder)) for layer in layers)


@torch.no_grad()
def fuse_final_norm(norm: Any) -> bool:
    """Let an RMS norm run as one operation instead of eight; whether it does. Any other norm stays as it is."""
    if isinstance(norm, FusedNorm):
        return True
    weight = getattr(norm, "weight", None)
    if weight is None or not (hasattr(norm, "variance_epsilon") or hasattr(norm, "eps")) or "forward" in vars(norm) or _children(norm):
        return False
    x = torch.randn(4, len(weight), generator=torch.Generator().manual_seed(0)).to(weight)
    expected, actual = norm(x).double(), FusedNorm.forward(norm, x).double()
    if (actual - expected).norm() > _TOLERANCE.get(weight.dtype, 0.0) * expected.norm():
        return False
    norm.__class__ = type(type(norm).__name__, (FusedNorm, type(norm)), {})
    return True


class FusedNorm:
    """Mixed into the class of an RMS norm."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        return rms_norm(hidden_states, self.weight, _epsilon(self))


class FusedSteps:
    """Mixed into a layer's class: decoding steps run fused, everything else as in the class itself."""

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """One layer; arguments and result are those of the layer's own class."""
        cache: Any = kwargs.get("cache", kwargs.get("past_key_values"))  # see `cache_argument`
        embeddings: Any = kwargs.get("position_embeddings")
        known = isinstance(cache, KeyValueCache) and embeddings is not None and not args
        if not known or hidden_states.shape[1] > _WIDEST_STEP or torch.is_grad_enabled():
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
        if not cache.layers[self.self_attn.layer_idx].is_initialized:  # by the first write, which knows its memory's shape
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
        return _step(self, hidden_states, embeddings, cache)


def _step(layer: Any, x: Tensor, embeddings: tuple[Tensor, Tensor], cache: Any) -> Tensor:
    """[rows, width, hidden] -> the same, keys and values written to the cache."""
    own, mlp, first, second = layer.self_attn, layer.mlp, layer.input_layernorm, layer.post_attention_layernorm
    memory: Any = cache.layers[own.layer_idx]
    cosine, sine = (table[:, :, None] for table in embeddings)
    normed = rms_norm(x, first.weight, _epsilon(first))
    heads = _product(normed, own.q_proj, own.k_proj, own.v_proj).unflatten(-1, (-1, own.head_dim))
    norms = (own.q_norm, own.k_norm) if hasattr(own, "q_norm") else None
    query, _, _ = attention_heads(
        heads,
        memory.keys.shape[2],
        cosine,
        sine,
        None if norms is None else norms[0].weight,
        None if norms is None else norms[1].weight,
        0.0 if norms is None else _epsilon(norms[0]),
        CacheSlots(memory.keys, memory.values, cache.lengths),
    )
    keys, values = memory.keys[:, : cache.read_length], memory.values[:, : cache.read_length]
    attended = attention(query, None, None, keys, values, cache.visible(), scale=own.scaling)
    x, normed = add_rms_norm(x, skinny_linear(attended.flatten(-2), own.o_proj.weight, own.o_proj.bias), second.weight, _epsilon(second))
    weights = joined((mlp.gate_proj, mlp.up_proj))
    gated = gated_halves(_product(normed, mlp.gate_proj, mlp.up_proj)) if weights is None else skinny_gated_linear(normed, *weights)
    return skinny_linear(gated, mlp.down_proj.weight, mlp.down_proj.bias, onto=x)


def _product(x: Tensor, *projections: nn.Linear) -> Tensor:
    weights = joined(projections)
    if weights is None:  # they were moved since
        return torch.cat([projection(x) for projection in projections], dim=-1)
    return skinny_linear(x, *weights)


# -- whether a layer is of that kind -----------------------------------------------------------------------------


def _fuse(layer: Any, rotary: nn.Module, cache_name: str) -> bool:
    """Fuse a layer where that is exact, else leave it as it is. One that was fused before has its weights laid together again."""
    if not _has_the_parts(layer):
        return False
    lay_together((layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj))
    lay_together((layer.mlp.gate_proj, layer.mlp.up_proj))
    if not _computes_the_same(layer, rotary, cache_name):
        return False
    if not isinstance(layer, FusedSteps):
        layer.__class__ = _fused_class(type(layer))  # not a new forward of this object, which a copy would share
    return True


def _fused_class(own: type) -> type:
    """One class for all layers of a class."""
    return _fused_classes.setdefault(own, type(own.__name__, (FusedSteps, own), {}))


def _has_the_parts(layer: Any) -> bool:
    """Exactly the modules of the common kind, of ordinary linear layers, and nothing that wraps the layer."""
    if _children(layer) != _LAYER_PARTS or "forward" in vars(layer):
        return False
    own, mlp = layer.self_attn, layer.mlp
    if _children(own) not in (_ATTENTION_PARTS, _ATTENTION_PARTS | _HEAD_NORMS) or _children(mlp) - {"act_fn"} != _MLP_PARTS:
        return False
    linears = [getattr(part, name) for part, names in ((own, _ATTENTION_PARTS), (mlp, _MLP_PARTS)) for name in sorted(names)]
    settings = all(hasattr(own, name) for name in ("head_dim", "scaling", "layer_idx"))
    return settings and all(type(part) in (nn.Linear, PackedLinear) for part in linears)


@torch.no_grad()
def _computes_the_same(layer: Any, rotary: nn.Module, cache_name: str) -> bool:
    """Run a step both ways, over a cache that holds something, and compare what they add to the residual stream."""
    own, weight = layer.self_attn, layer.self_attn.q_proj.weight
    hidden = torch.randn(1, 6, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight)
    updates = []
    try:
        for fused in (False, True):
            cache, x = KeyValueCache(own.layer_idx + 1, 1, 8, weight.device), hidden[:, :3]
            for first in (0, 3):
                cache.lengths.fill_(first)
                positions, x = cache.begin(3, 8), hidden[:, first : first + 3]
                seen = torch.arange(8, device=weight.device) <= positions[:, :, None]
                options = {"attention_mask": seen[:, None], "position_embeddings": rotary(x, positions), cache_name: cache}
                step = fused and first > 0
                out = _step(layer, x, options["position_embeddings"], cache) if step else layer(x, position_ids=positions, **options)
            updates.append((out - x).double())
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return False
    return bool((updates[1] - updates[0]).norm() <= _TOLERANCE.get(weight.dtype, 0.0) * updates[0].norm())


def _children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _epsilon(norm: Any) -> float:
    """Of an RMS norm; families call it differently."""
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)
