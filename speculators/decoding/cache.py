"""KeyValueCache: the verifier's keys and values, preallocated, with a length a row.

Rows of a speculative round accept different numbers of draft tokens. Every write goes to the row's own next
positions, and whatever lies at or beyond a row's length is never seen by later tokens, so rejected tokens are rolled
back by not advancing the length: nothing is copied, moved or cleared.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from speculators.errors import ConfigError
from speculators.kernels.visible_keys import VisibleKeys

# Attention reads a multiple of this many positions, so that a growing context meets few different shapes.
_READ_MULTIPLE = 32


def cache_argument(module: nn.Module) -> str:
    """What a transformers model or layer calls its cache; the library renames it, model by model."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"


class KeyValueCache(Cache):
    """Keys and values of all decoder layers, handed to a transformers model as its `past_key_values`.

    Memory of a layer is [rows, max_length, kv_heads, head_dim], allocated at the first write in the dtype and on the
    device of the keys; attention gets [rows, kv_heads, length, head_dim] views of it. Key and value sizes may differ
    from layer to layer.

    Attributes:
        lengths: [rows] int64, committed tokens of each row. The engine owns it: assign it, or change it in place
            under CUDA graphs.
        rows: sequences.
        max_length: positions of each row, committed and not yet committed ones together.
    """

    def __init__(self, num_layers: int, rows: int, max_length: int, device: torch.device) -> None:
        super().__init__(layers=[_Layer(self) for _ in range(num_layers)])
        # Ordinary tensors also when the engine runs in inference mode, so that they may be updated in place anywhere.
        with torch.inference_mode(False):
            self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self.rows = rows
        self.max_length = max_length
        self.read_length = 0
        self._positions = torch.zeros(rows, 0, dtype=torch.int64, device=device)
        self._slots: Tensor | None = None  # the same in the flattened memory of a layer
        self._visible: VisibleKeys | None = None

    def begin(self, width: int, static_length: int | None = None) -> Tensor:
        """Choose where the next forward writes: `width` tokens a row, at `lengths[b] + i`.

        Args:
            width: new tokens of every row.
            static_length: positions that attention reads, chosen by the caller (CUDA graphs need fixed shapes and
                no host synchronisation); it must cover every row's length + width, which is then not checked.
                By default the longest row decides.

        Returns:
            [rows, width] int64 positions of the new tokens.

        Raises:
            ConfigError: a row would grow beyond `max_length`.
        """
        if static_length is None:
            needed = int(self.lengths.max()) + width
            read_length = min(self.max_length, -(-needed // _READ_MULTIPLE) * _READ_MULTIPLE)
        else:
            needed = read_length = static_length
        if needed > self.max_length:
            raise ConfigError(
                f"the key/value cache holds {self.max_length} positions a row, this forward needs {needed};"
                " ask new_cache for a longer one (prompt + new tokens + draft tokens)"
            )
        self.read_length = read_length
        self._visible = None
        self._positions, self._slots = self.lengths[:, None] + torch.arange(width, device=self.lengths.device), None
        return self._positions

    def visible(self) -> VisibleKeys:
        """What the new tokens see of the cache, their own slots written: positions up to their own. One for all layers."""
        if self._visible is None:
            end = (self._positions + 1).to(torch.int32)
            nothing = torch.zeros_like(end)
            self._visible = VisibleKeys(nothing, end, nothing, nothing, reach=0)
        return self._visible

    def write(self, memory: Tensor, states: Tensor) -> Tensor:
        """Write new states and return what attention reads.

        Args:
            memory: [rows, max_length, kv_heads, head_dim].
            states: [rows, kv_heads, width, head_dim].

        Returns:
            [rows, kv_heads, read_length, head_dim], a view.
        """
        if self._slots is None:
            first_slot = torch.arange(self.rows, device=self.lengths.device)[:, None] * self.max_length
            self._slots = (first_slot + self._positions).reshape(-1)
        flat = memory.view(self.rows * self.max_length, -1)
        flat.index_copy_(0, self._slots.to(memory.device), states.transpose(1, 2).reshape(self._slots.shape[0], -1))
        return memory[:, : self.read_length].transpose(1, 2)


class _Layer(CacheLayerMixin):
    """One layer's memory behind transformers' cache interface."""

    is_sliding = False

    def __init__(self, cache: KeyValueCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        def memory(states: Tensor) -> Tensor:
            # Zeros, because masked positions still meet a weight of zero and 0 * NaN is NaN.
            shape = (self._cache.rows, self._cache.max_length, states.shape[1], states.shape[3])
            return torch.zeros(shape, dtype=states.dtype, device=states.device)

        with torch.inference_mode(False):
            self.keys, self.values = memory(key_states), memory(value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        return self._cache.write(self.keys, key_states), self._cache.write(self.values, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.read_length, 0

    def get_seq_length(self) -> int:
        return int(self._cache.lengths.max())

    def get_max_length(self) -> int:
        return self._cache.max_length
