"""Draft state: the keys and values of every layer of a drafter, preallocated, and what its passes look up in them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from speculators.algorithms.layers import RotaryEmbedding, Rotation
from speculators.config import LayerConfig
from speculators.decoding.proposal import Observation
from speculators.kernels.attention_heads import CacheSlots
from speculators.kernels.draft_inputs import DraftInputs, draft_inputs
from speculators.kernels.visible_keys import VisibleKeys, visible_blocks

# Positions beyond a state's slots that have a rotation: a draft may run past the end where its tokens will not be kept.
_DRAFT_MARGIN = 64


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
    _row_starts: dict[int, Tensor] = field(init=False, default_factory=dict)

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
        if width not in self._row_starts:  # the same in every round
            self._row_starts[width] = torch.arange(rows + 1, device=token_ids.device) * width
        return draft_inputs(
            token_ids.flatten(),
            self._row_starts[width],
            kept,
            next_token,
            start,
            self._rows,
            mask_slots=mask_slots,
            mask_token_id=mask_token_id,
            page_size=self.memory.shape[3],
        )

    def slots(self, layer: int, start: Tensor) -> CacheSlots:
        """Where keys and values of a layer go from position `start` [rows] of each row.

        What lies past the committed length is overwritten by the next write and never read before.
        """
        return CacheSlots(self.keys[layer], self.values[layer], start)

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
        # Read where that is free; the bound that the host handed over stays what it was in rounds over static buffers.
        known = observation.longest is not None and self.lengths.is_cuda
        self.longest = observation.longest or 0 if known else int(self.lengths.max())
