"""What a drafter's layer does between its products, as cases of `operations.py`: norms, heads, the gate, likeliest tokens."""

from __future__ import annotations

from typing import Any

import torch
from harness import Work
from operation_cases import Case, Cases, Side

from speculators.kernels.attention_heads import CacheSlots, attention_heads
from speculators.kernels.gated_halves import gated_halves
from speculators.kernels.likeliest_tokens import likeliest_tokens
from speculators.kernels.residual_norm import add_rms_norm, joined_norms, rms_norm

INTERMEDIATE = 3  # times the hidden size


class LayerCases(Cases):
    """Makes the cases of a layer: `draft_tokens` tokens of every row go through it."""

    def all(self, batches: list[int]) -> list[Case]:
        """Every operation at every batch size."""
        makers = (self.rms_norm, self.add_rms_norm, self.joined_norms, self.attention_heads, self.gated_halves, self.likeliest_tokens)
        return [make(rows) for rows in batches for make in makers]

    def _case(self, name: str, rows: int, run: Any, elements: float, **inputs: Any) -> Case:
        return Case(name, rows, run, Work(0.0, self.bytes * elements), name, inputs)

    def rms_norm(self, rows: int) -> Case:
        """The norm alone."""
        x, weight = self.random(rows, self.sizes.draft_tokens, self.sizes.hidden), self.random(self.sizes.hidden)

        def run(side: Side) -> Any:
            return rms_norm(x, weight, 1e-6, implementation=side)

        return self._case("rms_norm", rows, run, 2.0 * x.numel(), x=x, weight=weight)

    def add_rms_norm(self, rows: int) -> Case:
        """Residual addition and norm."""
        x, update = (self.random(rows, self.sizes.draft_tokens, self.sizes.hidden) for _ in range(2))
        weight = self.random(self.sizes.hidden)

        def run(side: Side) -> Any:
            return add_rms_norm(x, update, weight, 1e-6, implementation=side)

        return self._case("add_rms_norm", rows, run, 4.0 * x.numel(), x=x, update=update, weight=weight)

    def joined_norms(self, rows: int) -> Case:
        """The two input norms of EAGLE-3 and P-EAGLE."""
        first, second = (self.random(rows, self.sizes.draft_tokens, self.sizes.hidden) for _ in range(2))
        weight = self.random(self.sizes.hidden)

        def run(side: Side) -> Any:
            return joined_norms(first, second, weight, weight, 1e-6, 1e-6, implementation=side)

        return self._case("joined_norms", rows, run, 4.0 * first.numel())

    def attention_heads(self, rows: int) -> Case:
        """Norms and rotation of query and key heads, keys and values into the cache."""
        s, width = self.sizes, self.sizes.draft_tokens
        heads = s.heads + 2 * s.key_heads
        projected = self.random(rows, width, heads, s.head_dim)
        cosine, sine = torch.rand(2, rows, width, 1, s.head_dim, device=self.device)
        query_norm, key_norm = self.random(2, s.head_dim)
        cache = CacheSlots(*self.random(2, rows, 2 * width, s.key_heads, s.head_dim), torch.full((rows,), width // 2, device=self.device))
        states = torch.empty_like(projected)

        def run(side: Side) -> Any:
            states.copy_(projected)  # our kernel turns heads where they lie; every side pays for the copy
            return attention_heads(states, s.key_heads, cosine, sine, query_norm, key_norm, 1e-6, cache, implementation=side)

        elements = 4.0 * projected.numel() + 2 * rows * width * s.key_heads * s.head_dim
        inputs = {"projected": projected, "key_heads": s.key_heads, "query_norm": query_norm, "key_norm": key_norm}
        return self._case("attention_heads", rows, run, elements, **inputs)

    def gated_halves(self, rows: int) -> Case:
        """SwiGLU's gate."""
        states = self.random(rows, self.sizes.draft_tokens, 2 * INTERMEDIATE * self.sizes.hidden)

        def run(side: Side) -> Any:
            return gated_halves(states, implementation=side)

        return self._case("gated_halves", rows, run, 1.5 * states.numel(), states=states)

    def likeliest_tokens(self, rows: int) -> Case:
        """Greedy drafts from a reduced vocabulary."""
        s = self.sizes
        logits, ids = (
            self.random(rows, s.draft_tokens, s.draft_vocabulary),
            torch.randperm(s.vocabulary, device=self.device)[: s.draft_vocabulary],
        )

        def run(side: Side) -> Any:
            return likeliest_tokens(logits, ids, implementation=side)

        return self._case("likeliest_tokens", rows, run, float(logits.numel()))
