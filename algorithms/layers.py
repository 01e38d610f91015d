"""Decoder layers that every drafter is built from, and their rotary embedding.

One layer serves all algorithms. What differs between them is the attention it is given: a layer computes
queries, keys and values of its own tokens and hands them to an `attend` function, which knows what context
they may see (see `speculators.kernels.block_attention`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.utils.checkpoint
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from speculators.config import LayerConfig
from speculators.errors import ConfigError
from speculators.kernels.attention_heads import CacheSlots, attention_heads, write_slots
from speculators.kernels.head_rotation import rotate_heads
from speculators.kernels.joined_projections import joined, lay_together
from speculators.kernels.projection import feed_forward, gated_projection, linear
from speculators.kernels.residual_norm import add_rms_norm, joined_norms, rms_norm
from speculators.kernels.skinny_linear import skinny_gated_linear, skinny_linear

# (query, key, value) of the layer's own tokens -> attention output, all [..., heads, head_dim]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

Checkpointing = Literal["none", "feed_forward", "layers"]


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines of rotary position embedding, [..., 1, head_dim] float32, broadcast over heads."""

    cosine: Tensor
    sine: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """Rotate [..., heads, head_dim] (the half-split convention of Llama and Qwen)."""
        rotated: Tensor = _Rotate.apply(x, self.cosine, self.sine)  # type: ignore[no-untyped-call]
        return rotated


class _Rotate(torch.autograd.Function):
    """The gradient of a rotation is the rotation back: both directions are one launch and keep nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return rotate_heads(x, cosine, sine)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        cosine, sine = ctx.saved_tensors
        return rotate_heads(gradient, cosine, -sine), None, None


class RotaryEmbedding:
    """Rotary position embedding of a layer config; keeps its frequencies in float32 whatever the module's dtype.

    Raises:
        ConfigError: the rope type is unknown or depends on the sequence length (`dynamic`, `longrope`), since drafters use
            one rotation; or its settings are missing or give no finite rotation.
    """

    def __init__(self, config: LayerConfig) -> None:
        rope = dict(config.rope_parameters)
        rope.setdefault("rope_type", rope.pop("type", "default"))
        known = rope["rope_type"] in ["default", *ROPE_INIT_FUNCTIONS]
        if not known or rope["rope_type"] in {"dynamic", "longrope"}:
            why = "changes with the sequence length" if known else "is unknown"
            raise ConfigError(
                f"rope_parameters.rope_type = {rope['rope_type']!r} {why};"
                " drafters take default, linear, llama3 or yarn: set rope_parameters for the drafter"
            )
        try:
            shape = LlamaConfig(
                hidden_size=config.hidden_size,
                num_attention_heads=config.num_attention_heads,
                head_dim=config.head_dim,
                max_position_embeddings=config.max_position_embeddings,
                rope_parameters=rope,
            )
            with torch.device("cpu"):  # values, also while a skeleton is built on the meta device
                table = LlamaRotaryEmbedding(shape)
            finite = bool(torch.isfinite(table.inv_freq).all()) and math.isfinite(table.attention_scaling)
        except (KeyError, TypeError, ValueError, ArithmeticError, StrictDataclassError) as error:
            reason = " ".join(str(error.args[0] if error.args else error).split())
            raise ConfigError(f"rope_parameters = {rope} cannot be used ({reason}); correct them") from None
        if not finite:
            raise ConfigError(f"rope_parameters = {rope} give no finite rotation; correct them")
        self._frequencies: dict[torch.device, Tensor] = {torch.device("cpu"): table.inv_freq.detach().float()}
        self._scaling = float(table.attention_scaling)

    def __call__(self, position_ids: Tensor) -> Rotation:
        """[...] int64 positions -> the rotation of each."""
        device = position_ids.device
        if device not in self._frequencies:
            self._frequencies[device] = self._frequencies[torch.device("cpu")].to(device)
        angles = position_ids[..., None].float() * self._frequencies[device]
        angles = torch.cat([angles, angles], dim=-1)[..., None, :]
        return Rotation(angles.cos() * self._scaling, angles.sin() * self._scaling)


class RMSNorm(nn.RMSNorm):
    """RMS norm that keeps the dtype of its input: float32 weights must not promote a bfloat16 stream."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]; computed in float32 inside the operation."""
        assert self.eps is not None
        return rms_norm(x, self.weight, self.eps)


class Projection(nn.Linear):
    """A linear layer whose backward pass makes the 16-bit copy of its float32 weights again instead of keeping it."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        apply = linear if torch.is_grad_enabled() else skinny_linear
        return apply(x, self.weight, self.bias)


class Attention(nn.Module):
    """Projections of one attention sublayer. With `normalise_heads`, Qwen3's RMS norm of each query and key head."""

    def __init__(self, config: LayerConfig, input_size: int, normalise_heads: bool) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        bias = config.attention_bias
        self.q_proj = Projection(input_size, config.num_attention_heads * config.head_dim, bias=bias)
        self.k_proj = Projection(input_size, config.num_key_value_heads * config.head_dim, bias=bias)
        self.v_proj = Projection(input_size, config.num_key_value_heads * config.head_dim, bias=bias)
        self.o_proj = Projection(config.num_attention_heads * config.head_dim, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps) if normalise_heads else None
        self.k_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps) if normalise_heads else None

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (-1, self.head_dim))
        return heads

    def query(self, x: Tensor, rotation: Rotation) -> Tensor:
        """[..., input] -> [..., heads, head_dim], rotated. One vector for all of the rotation's tokens is projected once."""
        return self._rotated(self._heads(self.q_proj(x)), self.q_norm, rotation)

    def key_value(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """[..., input] -> keys (rotated) and values, [..., key/value heads, head_dim]."""
        key = self._rotated(self._heads(self.k_proj(x)), self.k_norm, rotation)
        return key, self._heads(self.v_proj(x)).expand_as(key)

    def together(self, x: Tensor, rotation: Rotation, cache: CacheSlots | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """`query` and `key_value` of the same tokens, in two launches where their weights lie together and no gradient is recorded.

        Args:
            x: [rows, ..., input]; [1, ..., 1, input] where it is one vector for all tokens.
            rotation: of the tokens' positions.
            cache: where keys and values are also written.
        """
        alike = x.shape[:-1] != rotation.cosine.shape[:-2]
        weights = None if torch.is_grad_enabled() or alike else joined((self.q_proj, self.k_proj, self.v_proj))
        if weights is None:
            query, (key, value) = self.query(x, rotation), self.key_value(x, rotation)
            if cache is not None:
                shape = (len(x), -1, *key.shape[-2:])
                write_slots(cache, key.reshape(shape), value.reshape(shape))
            return query, key, value
        states, norms, epsilon = self._heads(skinny_linear(x, *weights)), (self.q_norm, self.k_norm), 0.0
        if self.q_norm is not None:
            assert self.q_norm.eps is not None
            epsilon = self.q_norm.eps
        query_norm, key_norm = (None if norm is None else norm.weight for norm in norms)
        key_heads = self.k_proj.out_features // self.head_dim
        return attention_heads(states, key_heads, rotation.cosine, rotation.sine, query_norm, key_norm, epsilon, cache)

    @staticmethod
    def _rotated(heads: Tensor, norm: RMSNorm | None, rotation: Rotation) -> Tensor:
        tokens = torch.broadcast_shapes(heads.shape[:-2], rotation.cosine.shape[:-2])
        if norm is None or torch.is_grad_enabled():
            normed = heads if norm is None else norm(heads)
            return rotation.apply(normed.expand(*tokens, -1, -1))
        assert norm.eps is not None
        return rotate_heads(heads.expand(*tokens, -1, -1), rotation.cosine, rotation.sine, norm.weight, norm.eps)


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate x) * up x)."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        if config.hidden_act not in {"silu", "swish"}:
            raise ConfigError(f"hidden_act = {config.hidden_act!r}: drafter layers know 'silu' only")
        self.gate_proj = Projection(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = Projection(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = Projection(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self._has_bias = config.mlp_bias

    def forward(self, x: Tensor, *, recompute: bool = False) -> Tensor:
        """[..., hidden] -> [..., hidden]; with `recompute` the backward pass computes all but x again (biases excepted)."""
        if recompute and not self._has_bias:
            return feed_forward(x, self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight)
        weights = None if torch.is_grad_enabled() else joined((self.gate_proj, self.up_proj))
        if weights is not None:
            out: Tensor = self.down_proj(skinny_gated_linear(x, *weights))
            return out
        gate, up = self.gate_proj(x), self.up_proj(x)
        down = gated_projection(gate, up, self.down_proj.weight)
        return down + self.down_proj.bias.to(down.dtype) if self._has_bias else down


@dataclass
class ResidualStream:
    """The residual stream, whose newest summand the next norm adds: both in one launch."""

    x: Tensor
    update: Tensor | None = None

    def normed(self, norm: RMSNorm) -> Tensor:
        """Add the summand, and norm the sum."""
        if self.update is None:
            out: Tensor = norm(self.x)
            return out
        assert norm.eps is not None
        (self.x, normed), self.update = add_rms_norm(self.x, self.update, norm.weight, norm.eps), None
        return normed

    def value(self) -> Tensor:
        """[..., hidden], the summand included."""
        if self.update is not None:
            self.x, self.update = self.x + self.update, None
        return self.x


class DecoderLayer(nn.Module):
    """A pre-norm decoder layer.

    With `fuses_embedding` it is the first layer of EAGLE-3 and P-EAGLE (EAGLE-3, arXiv 2503.01840): its attention
    reads [norm(token embedding) ; norm(hidden)], twice the hidden size, and its residual is the hidden half.
    """

    def __init__(
        self,
        config: LayerConfig,
        *,
        normalise_heads: bool,
        fuses_embedding: bool = False,
        norm_before_residual: bool = False,
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = norm_before_residual
        self.input_layernorm = RMSNorm(size, eps=eps)
        self.hidden_norm = RMSNorm(size, eps=eps) if fuses_embedding else None
        self.self_attn = Attention(config, 2 * size if fuses_embedding else size, normalise_heads)
        self.post_attention_layernorm = RMSNorm(size, eps=eps)
        self.mlp = FeedForward(config)

    def forward(
        self, x: Tensor, rotation: Rotation, attend: Attend, embedding: Tensor | None = None, *, recompute_feed_forward: bool = False
    ) -> Tensor:
        """One layer.

        Args:
            x: [..., hidden].
            rotation: of the tokens' positions.
            attend: attention over the tokens' own keys and values and their context.
            embedding: [..., hidden] token embeddings, for a layer that fuses them. Where all tokens are alike but for their
                positions, x and embedding may be [1, ..., 1, hidden]: what comes before attention is computed once.
            recompute_feed_forward: see `run_layer`.
        """
        stream = ResidualStream(x)
        self.step(stream, rotation, attend, embedding, recompute_feed_forward=recompute_feed_forward)
        return stream.value()

    def step(
        self,
        stream: ResidualStream,
        rotation: Rotation,
        attend: Attend,
        embedding: Tensor | None = None,
        *,
        cache: CacheSlots | None = None,
        recompute_feed_forward: bool = False,
    ) -> None:
        """The layer on a residual stream, in place; see `forward`. With `cache`, the tokens' keys and values are written to it."""
        if self.hidden_norm is None:
            normed = stream.normed(self.input_layernorm)
        else:
            assert embedding is not None
            normed = self._fused_input(stream, self.hidden_norm, embedding)
        query, key, value = self.self_attn.together(normed, rotation, cache)
        stream.update = self.self_attn.o_proj(attend(query, key, value).flatten(-2))
        stream.update = self.mlp(stream.normed(self.post_attention_layernorm), recompute=recompute_feed_forward)

    def _fused_input(self, stream: ResidualStream, hidden_norm: RMSNorm, embedding: Tensor) -> Tensor:
        """[norm(embedding) ; norm(stream)]."""
        first, x = self.input_layernorm, stream.value()
        assert first.eps is not None and hidden_norm.eps is not None
        normed = joined_norms(embedding, x, first.weight, hidden_norm.weight, first.eps, hidden_norm.eps)
        if self.norm_before_residual:
            stream.x = normed[..., x.shape[-1] :]
        return normed

    def lay_together(self) -> None:
        """Lay out the weights for decoding, where they are not being trained; see `lay_together`."""
        if not self.training:
            attention = self.self_attn
            lay_together((attention.q_proj, attention.k_proj, attention.v_proj))
            lay_together((self.mlp.gate_proj, self.mlp.up_proj))


def run_layer(
    layer: DecoderLayer, x: Tensor, rotation: Rotation, attend: Attend, embedding: Tensor | None = None, *, checkpointing: Checkpointing
) -> Tensor:
    """A layer in training. What `checkpointing` names is computed again in the backward pass instead of being kept."""
    out: Tensor
    if checkpointing == "layers" and torch.is_grad_enabled():
        # A layer draws nothing at random, and restoring a generator's state would break a captured graph.
        out = torch.utils.checkpoint.checkpoint(layer, x, rotation, attend, embedding, use_reentrant=False, preserve_rng_state=False)
    else:
        out = layer(x, rotation, attend, embedding, recompute_feed_forward=checkpointing == "feed_forward" and torch.is_grad_enabled())
    return out


def initialise(module: nn.Module, std: float) -> None:
    """Draw every matrix from N(0, std), set biases to 0; norms keep their ones."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=std)
            if isinstance(part, nn.Linear) and part.bias is not None:
                nn.init.zeros_(part.bias)
