"""Decoder layers that every drafter is built from, their rotary embedding and their preallocated draft state.

One layer serves all algorithms. What differs between them is the attention it is given: a layer computes
queries, keys and values of its own tokens and hands them to an `attend` function, which knows what context
they may see (see `speculators.kernels.block_attention`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
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
from speculators.decoding.proposal import Observation
from speculators.errors import ConfigError
from speculators.kernels.draft_inputs import DraftInputs, draft_inputs
from speculators.kernels.head_rotation import rotate_heads
from speculators.kernels.projection import feed_forward, gated_projection, linear
from speculators.kernels.visible_keys import VisibleKeys, visible_blocks

# Positions beyond a state's slots that have a rotation: a draft may run past the end where its tokens will not be kept.
_DRAFT_MARGIN = 64

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
        return nn.functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Projection(nn.Linear):
    """A linear layer whose backward pass makes the 16-bit copy of its float32 weights again instead of keeping it."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return linear(x, self.weight, self.bias)


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
        """[..., input] -> [..., heads, head_dim], rotated."""
        return self._rotated(self._heads(self.q_proj(x)), self.q_norm, rotation)

    def key_value(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """[..., input] -> keys (rotated) and values, [..., key/value heads, head_dim]."""
        return self._rotated(self._heads(self.k_proj(x)), self.k_norm, rotation), self._heads(self.v_proj(x))

    @staticmethod
    def _rotated(heads: Tensor, norm: RMSNorm | None, rotation: Rotation) -> Tensor:
        if norm is None or torch.is_grad_enabled():
            return rotation.apply(heads if norm is None else norm(heads))
        assert norm.eps is not None
        return rotate_heads(heads, rotation.cosine, rotation.sine, norm.weight, norm.eps)


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
        gate, up = self.gate_proj(x), self.up_proj(x)
        down = gated_projection(gate, up, self.down_proj.weight)
        return down + self.down_proj.bias.to(down.dtype) if self._has_bias else down


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
            embedding: [..., hidden] token embeddings, for a layer that fuses them.
            recompute_feed_forward: see `run_layer`.
        """
        if self.hidden_norm is None:
            residual, normed = x, self.input_layernorm(x)
        else:
            hidden = self.hidden_norm(x)
            residual = hidden if self.norm_before_residual else x
            normed = torch.cat([self.input_layernorm(embedding), hidden], dim=-1)
        query = self.self_attn.query(normed, rotation)
        key, value = self.self_attn.key_value(normed, rotation)
        x = residual + self.self_attn.o_proj(attend(query, key, value).flatten(-2))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x), recompute=recompute_feed_forward)
        return out


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


@dataclass
class DraftState:
    """Keys and values of committed tokens for every drafter layer: preallocated, rolled back by moving `lengths`.

    Attributes:
        memory: [layers, 2, rows, slots, key/value heads, head_dim]: keys, then values, of every layer; slot = position.
        lengths: [rows] int64, committed positions of each row.
        longest: a host-side upper bound of `lengths`, so that attention reads no more of the buffers than is used.
        rotations: of all positions that a draft may take, [slots and a margin, 1, head_dim].
        keys, values: one [rows, slots, key/value heads, head_dim] view of the memory a layer.
    """

    memory: Tensor
    lengths: Tensor
    rotations: Rotation
    longest: int = 0
    keys: list[Tensor] = field(init=False)
    values: list[Tensor] = field(init=False)
    _rows: Tensor = field(init=False)
    _block_ranges: dict[tuple[int, bool], tuple[Tensor, Tensor]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.keys, self.values = ([self.memory[layer, kind] for layer in range(len(self.memory))] for kind in (0, 1))
        self._rows = torch.arange(self.lengths.shape[0], device=self.lengths.device)[:, None]

    @classmethod
    def allocate(
        cls, config: LayerConfig, rotary: RotaryEmbedding, rows: int, slots: int, device: torch.device, dtype: torch.dtype
    ) -> DraftState:
        """Empty state for `rows` sequences of at most `slots` positions."""
        shape = (config.num_hidden_layers, 2, rows, slots, config.num_key_value_heads, config.head_dim)
        lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        return cls(torch.zeros(shape, device=device, dtype=dtype), lengths, rotary(torch.arange(slots + _DRAFT_MARGIN, device=device)))

    def rotation(self, position_ids: Tensor) -> Rotation:
        """[...] int64 positions -> the rotation of each, looked up."""
        return Rotation(self.rotations.cosine[position_ids], self.rotations.sine[position_ids])

    def visible(self, start: Tensor, width: int, *, causal: bool, window: int | None) -> VisibleKeys:
        """What blocks of `width` tokens, one a row, that begin at `start` [rows] see of their rows and of themselves."""
        if window is not None:
            begin = torch.zeros_like(start)[:, None]
            return visible_blocks(begin, start[:, None], block_queries=width, block_keys=width, causal=causal, window=window)
        if (width, causal) not in self._block_ranges:  # the same in every round
            nothing = torch.zeros(len(start), width, dtype=torch.int32, device=start.device)
            block_end = torch.arange(1, width + 1, dtype=torch.int32, device=start.device) if causal else nothing + width
            self._block_ranges[width, causal] = nothing, block_end.expand_as(nothing).contiguous()
        nothing, block_end = self._block_ranges[width, causal]
        end = start.to(torch.int32)[:, None].expand(-1, width).contiguous()
        return VisibleKeys(nothing, end, nothing, block_end, reach=width)

    def draft_inputs(
        self, token_ids: Tensor, kept: Tensor, next_token: Tensor, start: Tensor, *, mask_slots: int, mask_token_id: int
    ) -> DraftInputs:
        """The slots of a draft pass over [rows, width] verified tokens and MASK slots; see `kernels.draft_inputs`."""
        rows, width = token_ids.shape
        row_starts = torch.arange(rows + 1, device=token_ids.device) * width
        return draft_inputs(
            token_ids.flatten(),
            row_starts,
            kept,
            next_token,
            start,
            self._rows,
            mask_slots=mask_slots,
            mask_token_id=mask_token_id,
            page_size=self.memory.shape[3],
        )

    def slots(self, start: Tensor, width: int) -> Tensor:
        """Where tokens at positions start + 0 .. width - 1 of each row go, [rows, width]; the last slot for those beyond it."""
        return (start[:, None] + torch.arange(width, device=start.device)).clamp_(max=self.memory.shape[3] - 1)

    @torch.no_grad()
    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Write [rows, width, heads, head_dim] to the slots of each row.

        What lies past the committed length is overwritten by the next write and never read before.
        """
        self.keys[layer][self._rows, slots] = key.to(self.memory.dtype)
        self.values[layer][self._rows, slots] = value.to(self.memory.dtype)

    def context(self, layer: int, ahead: int = 0) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer up to `ahead` slots past the longest row: [rows, slots, heads, head_dim].

        On CUDA all slots: the kernel reads no further than a row's length, and a graph needs one shape.
        """
        if self.lengths.is_cuda:
            return self.keys[layer], self.values[layer]
        used = min(max(1, self.longest + ahead), self.keys[layer].shape[1])
        return self.keys[layer][:, :used], self.values[layer][:, :used]

    def commit(self, observation: Observation) -> None:
        """Move every row's length to the end of what was observed."""
        self.lengths = observation.start + observation.counts
        self.longest = int(self.lengths.max()) if observation.longest is None else observation.longest
