"""The decoding operations that `operations.py` measures, at the shapes of a Qwen3-8B drafter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from harness import Work
from torch import Tensor

from speculators.kernels.block_attention import block_attention
from speculators.kernels.draft_inputs import draft_inputs
from speculators.kernels.greedy_verification import greedy_verification
from speculators.kernels.hidden_state_scatter import hidden_state_scatter
from speculators.kernels.kv_injection import InjectionWeights, kv_injection
from speculators.kernels.markov_sampling import MarkovChain, Randomness, TableFactors, markov_sampling
from speculators.kernels.rejection_sampling import Distributions, rejection_sampling
from speculators.kernels.visible_keys import visible_blocks

Side = Literal["reference", "triton"]


@dataclass(frozen=True)
class Sizes:
    """Shapes of the verifier and its drafter; K = draft_tokens."""

    hidden: int = 4096
    vocabulary: int = 151936
    draft_vocabulary: int = 32000
    heads: int = 32
    key_heads: int = 8
    head_dim: int = 128
    layers: int = 5
    rank: int = 256
    draft_tokens: int = 8
    context: int = 2048


TINY = Sizes(64, 301, 300, 4, 2, 16, 2, 8, 3, 40)


@dataclass(frozen=True)
class Case:
    """One operation at one shape: `run` by either implementation, the least it must do, and what it runs on.

    `inputs` are the arguments of the operation's counterpart in `vllm_operations`.
    """

    name: str
    rows: int
    run: Callable[[Side], Any]
    work: Work
    operation: str
    inputs: dict[str, Any]


class Cases:
    """Makes the cases of one set of sizes on one device."""

    def __init__(self, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> None:
        self.sizes, self.device, self.dtype = sizes, device, dtype
        self.bytes = torch.empty((), dtype=dtype).element_size()

    def random(self, *shape: int) -> Tensor:
        """Standard normal numbers in the working dtype."""
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def integers(self, high: int, *shape: int) -> Tensor:
        """Integers below `high`."""
        return torch.randint(high, shape, device=self.device)

    def all(self, batches: list[int]) -> list[Case]:
        """Every operation at every batch size, and the injection of a whole prompt."""
        made: list[Case] = []
        for rows in batches:
            made += [self.draft_inputs(rows), self.hidden_state_scatter(rows), self.kv_injection(rows, self.sizes.draft_tokens + 1)]
            made += [self.block_attention(rows), self.greedy_verification(rows)]
            made += [self.rejection_sampling(rows, "standard"), self.rejection_sampling(rows, "block")]
            made += [self.markov_sampling(rows, sampled=False), self.markov_sampling(rows, sampled=True)]
        return [*made, self.kv_injection(1, self.sizes.context)]

    def draft_inputs(self, rows: int) -> Case:
        """The expansion of K + 1 verified tokens a row, of which a random number was kept."""
        k = self.sizes.draft_tokens
        width = k + 1
        starts, kept = torch.arange(rows + 1, device=self.device) * width, 1 + self.integers(width, rows)
        arguments = (
            self.integers(self.sizes.vocabulary, rows * width),
            starts,
            kept,
            self.integers(self.sizes.vocabulary, rows),
            self.integers(self.sizes.context, rows),
            torch.arange(rows, device=self.device)[:, None],
        )
        names = ("token_ids", "row_starts", "kept", "next_token", "position", "page_table")
        numbers: dict[str, Any] = {"mask_slots": k - 1, "mask_token_id": 3, "page_size": 2 * self.sizes.context}
        slots = rows * (width + k - 1)

        def run(side: Side) -> Any:
            return draft_inputs(*arguments, **numbers, implementation=side)

        work = Work(0.0, 8.0 * (rows * (width + 5) + 4 * slots + rows * k) + 2.0 * slots)
        return Case("draft_inputs", rows, run, work, "draft_inputs", {**dict(zip(names, arguments, strict=True)), **numbers})

    def hidden_state_scatter(self, rows: int) -> Case:
        """Half of the verified tokens' features, placeholders elsewhere."""
        k, size = self.sizes.draft_tokens, self.sizes.hidden
        tokens, slots = rows * (k + 1), rows * 2 * k
        hidden, placeholder = self.random(tokens, size), self.random(size)
        real = torch.arange(slots, device=self.device)
        source = torch.where(real % (2 * k) < (k + 1) // 2, real // (2 * k) * (k + 1) + real % (2 * k), -1)
        read = int((source >= 0).sum())

        def run(side: Side) -> Any:
            return hidden_state_scatter(hidden, source, placeholder, implementation=side)

        inputs = {"hidden": hidden, "rows": source, "placeholder": placeholder}
        work = Work(0.0, self.bytes * size * (read + slots) + 8.0 * slots)
        return Case("hidden_state_scatter", rows, run, work, "hidden_state_scatter", inputs)

    def kv_injection(self, rows: int, width: int) -> Case:
        """`width` new tokens a row."""
        s = self.sizes
        kv = s.layers * 2 * s.key_heads * s.head_dim
        slots = max(2 * width, s.context + 2 * width)
        table = torch.rand(slots, s.head_dim // 2, device=self.device)
        weights = InjectionWeights(self.random(kv, s.hidden), None, self.random(s.layers, s.head_dim), 1e-6, table, table)
        memory, features = self.random(s.layers, 2, rows, slots, s.key_heads, s.head_dim), self.random(rows, width, s.hidden)
        start = torch.full((rows,), slots - 2 * width, device=self.device)
        counts = torch.full_like(start, width)

        def run(side: Side) -> Any:
            kv_injection(features, weights, start, counts, memory, implementation=side)

        tokens = rows * width
        work = Work(2.0 * tokens * kv * s.hidden, self.bytes * (kv * s.hidden + tokens * (s.hidden + kv)))
        name = "kv_injection" if width <= s.draft_tokens + 1 else "kv_injection, a prompt"
        inputs = {"features": features, "weights": weights, "start": start, "counts": counts, "memory": memory}
        return Case(name, rows, run, work, "kv_injection", inputs)

    def block_attention(self, rows: int) -> Case:
        """One layer's attention of a block of K over the context; which keys a query sees is worked out once for all layers."""
        s, block = self.sizes, self.sizes.draft_tokens
        query = self.random(rows, 1, block, s.heads, s.head_dim)
        key, value = (self.random(rows, 1, block, s.key_heads, s.head_dim) for _ in range(2))
        context_key, context_value = (self.random(rows, s.context, s.key_heads, s.head_dim) for _ in range(2))
        end = torch.full((rows, 1), s.context, device=self.device)
        start = torch.zeros_like(end)
        visible = visible_blocks(start, end, block_queries=block, block_keys=block, causal=False)

        def run(side: Side) -> Any:
            implementation = "reference" if side == "reference" else "auto"
            return block_attention(
                query, key, value, context_key, context_value, start, end, causal=False, visible=visible, implementation=implementation
            )

        pairs = rows * s.heads * block * (s.context + block)
        moved = rows * ((s.context + block) * 2 * s.key_heads + 2 * block * s.heads) * s.head_dim
        names = ("query", "key", "value", "context_key", "context_value", "start", "end")
        inputs = dict(zip(names, (query, key, value, context_key, context_value, start, end), strict=True))
        work = Work(4.0 * pairs * s.head_dim, self.bytes * moved)
        return Case("block_attention, drafting", rows, run, work, "block_attention", inputs)

    def greedy_verification(self, rows: int) -> Case:
        """K drafts a row, wrong in the middle."""
        k, vocabulary = self.sizes.draft_tokens, self.sizes.vocabulary
        logits = self.random(rows, k + 1, vocabulary)
        drafts, lengths = logits[:, :-1].argmax(-1), torch.full((rows,), k, device=self.device)
        drafts[:, k // 2] += 1

        def run(side: Side) -> Any:
            return greedy_verification(drafts, lengths, logits, implementation=side)

        inputs = {"token_ids": drafts, "lengths": lengths, "logits": logits}
        return Case("greedy verification", rows, run, Work(0.0, float(self.bytes * logits.numel())), "greedy_verification", inputs)

    def rejection_sampling(self, rows: int, verification: Literal["standard", "block"]) -> Case:
        """K likely drafts a row, draft and verifier as logits."""
        k, vocabulary = self.sizes.draft_tokens, self.sizes.vocabulary
        logits = 2 * self.random(rows, k + 1, vocabulary)
        draft_logits = logits[:, :-1] + 0.5 * self.random(rows, k, vocabulary)
        drafts = draft_logits.argmax(-1)
        lengths, numbers, round_index = torch.full((rows,), k, device=self.device), torch.arange(rows, device=self.device), self.integers(9)
        target, draft = Distributions(logits, 0.8), Distributions(draft_logits, 0.8)

        def run(side: Side) -> Any:
            return rejection_sampling(
                drafts,
                lengths,
                target,
                draft,
                seed=1,
                rows=numbers,
                round_index=round_index,
                verification=verification,
                implementation=side,
            )

        inputs = {"token_ids": drafts, "lengths": lengths, "target": target, "draft": draft, "verification": verification}
        work = Work(0.0, float(self.bytes * (logits.numel() + draft_logits.numel())))
        return Case(f"{verification} verification", rows, run, work, "rejection_sampling", inputs)

    def markov_sampling(self, rows: int, *, sampled: bool) -> Case:
        """K - 1 steps of a vanilla head."""
        s = self.sizes
        steps = s.draft_tokens - 1
        logits, table, head = (
            self.random(rows, steps, s.draft_vocabulary),
            self.random(s.draft_vocabulary, s.rank),
            self.random(s.draft_vocabulary, s.rank),
        )
        numbers = torch.arange(rows, device=self.device)
        draw = Randomness(0.8, 1, numbers, self.integers(9)) if sampled else None
        chain = MarkovChain(logits, head, self.integers(s.draft_vocabulary, rows), TableFactors(table))

        def run(side: Side) -> Any:
            return markov_sampling(chain, draw=draw, implementation=side)

        work = Work(2.0 * rows * steps * head.numel(), float(self.bytes * (steps * head.numel() + logits.numel())))
        inputs = {"chain": chain, "table": table, "draw": draw}
        return Case(f"markov_sampling, {steps} steps, {'sampled' if sampled else 'greedy'}", rows, run, work, "markov_sampling", inputs)
