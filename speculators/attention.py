"""Attention of the verifier: the masks it is given, and grouped attention that never repeats K/V heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from speculators.errors import CheckpointError

GROUPED_ATTENTION = "speculators_grouped"
# Wider inputs (prefill, training features) are bound by arithmetic, and their folded mask would cost more than repeated K/V.
_WIDEST_FOLD = 32


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Grouped-query attention with the query heads of a K/V head folded into the query axis.

    Decoding is bound by reading K and V. Transformers repeats them for every query head before a masked SDPA; here
    the G query heads that share a K/V head become G * width queries of that one head, and K/V are read as they lie.

    Args:
        module: the attention layer.
        query: [rows, heads, width, head_dim].
        key, value: [rows, kv_heads, length, head_dim].
        attention_mask: [rows, 1, width, length], bool or additive; None leaves everything to transformers' SDPA.
        dropout: 0 in evaluation.
        scaling: factor on the scores, 1 / sqrt(head_dim) when None.

    Returns:
        [rows, width, heads, head_dim] and None.
    """
    rows, heads, width, _ = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    if attention_mask is None or attention_mask.shape[1] != 1 or width > _WIDEST_FOLD or "position_bias" in kwargs:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    folded_query = query.reshape(rows, kv_heads, groups * width, query.shape[-1])
    folded_mask = attention_mask if width == 1 else attention_mask.repeat(1, 1, groups, 1)
    output = nn.functional.scaled_dot_product_attention(folded_query, key, value, attn_mask=folded_mask, dropout_p=dropout, scale=scaling)
    return output.reshape(rows, heads, width, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED_ATTENTION, grouped_attention)
AttentionMaskInterface.register(GROUPED_ATTENTION, sdpa_mask)


@dataclass(frozen=True)
class AttentionMasks:
    """Builds the masks of a decoder's layer types in the form its attention takes.

    Attributes:
        kinds: layer type -> size of its window or chunk; None for full attention.
        additive: whether the attention adds its mask to the scores instead of taking booleans.
        dtype: dtype of additive masks.
    """

    kinds: dict[str, int | None]
    additive: bool
    dtype: torch.dtype

    @classmethod
    def from_config(cls, config: PreTrainedConfig, additive: bool, dtype: torch.dtype) -> AttentionMasks:
        """Read the layer types of a text config.

        Raises:
            CheckpointError: a layer type is not attention over all earlier tokens, a window or a chunk of them.
        """
        sizes: dict[str, int | None] = {
            "full_attention": None,
            "sliding_attention": getattr(config, "sliding_window", None),
            "chunked_attention": getattr(config, "attention_chunk_size", None),
        }
        layer_types = getattr(config, "layer_types", None)
        if layer_types is None:
            # Transformers' own rule for configs without layer types: a window or a chunk applies to all layers.
            named = [kind for kind in ("sliding_attention", "chunked_attention") if sizes[kind] is not None]
            layer_types = named[:1] or ["full_attention"]
        unknown = sorted(set(layer_types) - set(sizes))
        if unknown:
            raise CheckpointError(
                f"{config.model_type} has layers of type {', '.join(unknown)}; a verifier must roll back rejected tokens, which this"
                " library does for full, sliding and chunked attention only: choose another verifier"
            )
        return cls({kind: sizes[kind] for kind in sorted(set(layer_types))}, additive, dtype)

    def cached(self, positions: Tensor, length: int) -> Tensor | dict[str, Tensor]:
        """Masks of new tokens over a cache whose slot j holds position j.

        Args:
            positions: [rows, width] int64 of the new tokens, whose own slots are already written.
            length: slots that attention reads.
        """
        slots = torch.arange(length, device=positions.device)
        return self._masks(slots <= positions[:, :, None], positions, slots[None], positions, slots[None])

    def packed(self, position_ids: Tensor, document_ids: Tensor) -> Tensor | dict[str, Tensor]:
        """Masks of packed rows: a token sees the earlier tokens of its own document, a padding token only itself.

        Args:
            position_ids: [rows, width] int64, restarting with every document.
            document_ids: [rows, width] int64, -1 on padding.
        """
        columns = torch.arange(document_ids.shape[1], device=document_ids.device)
        same_document = (document_ids[:, :, None] == document_ids[:, None, :]) & (document_ids[:, :, None] >= 0)
        itself = columns[:, None] == columns
        visible = (same_document & (columns <= columns[:, None])) | itself
        return self._masks(visible, columns[None], columns[None], position_ids, position_ids)

    def _masks(
        self, visible: Tensor, query_columns: Tensor, key_columns: Tensor, query_positions: Tensor, key_positions: Tensor
    ) -> Tensor | dict[str, Tensor]:
        masks = {}
        for kind, size in self.kinds.items():
            mask = visible
            if kind == "sliding_attention" and size is not None:
                mask = visible & (key_columns[:, None, :] > query_columns[:, :, None] - size)
            elif kind == "chunked_attention" and size is not None:
                mask = visible & (key_positions[:, None, :] // size == query_positions[:, :, None] // size)
            masks[kind] = self._form(mask[:, None])
        # Models with one kind of layer take a single mask, models with several a mask for each kind.
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _form(self, mask: Tensor) -> Tensor:
        if not self.additive:
            return mask
        blocked = torch.finfo(self.dtype).min
        return torch.zeros(mask.shape, dtype=self.dtype, device=mask.device).masked_fill_(~mask, blocked)
