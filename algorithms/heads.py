"""DSpark's sequential (Markov) heads and confidence head (arXiv 2607.05147, section 3.2).

A head adds to the parallel logits U_k a bias that depends on the token before slot k,

    p_k(v | x_0, x_<k) = softmax_v( U_k(v) + f_k . W2[v] ),

so that the block's tokens fit each other. The three heads differ only in their factors f_k, [rank]:

    vanilla  f_k = W1[x_{k-1}]
    gated    f_k = sigmoid(G [h_k ; W1[x_{k-1}]] + b) * W1[x_{k-1}]
    rnn      z_k = J [s_{k-1} ; W1[x_{k-1}] ; h_k] + b, split in (gate, candidate, output);
             f_k = tanh(output),  s_k = sigmoid(gate) s_{k-1} + (1 - sigmoid(gate)) tanh(candidate),  s_0 = 0

W1 is indexed by verifier token ids, W2's rows are draft token ids.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from speculators.kernels.markov_sampling import TableFactors

MarkovKind = Literal["vanilla", "gated", "rnn"]


class MarkovHead(nn.Module):
    """A sequential head of low rank.

    Args:
        kind: which of the three.
        vocab_size: verifier vocabulary, rows of W1.
        draft_vocab_size: rows of W2.
        hidden_size: of the drafter.
        rank: r.
    """

    def __init__(self, kind: MarkovKind, vocab_size: int, draft_vocab_size: int, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.kind: MarkovKind = kind
        self.rank = rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def initial_state(self, previous: Tensor) -> Tensor:
        """s_0 = 0 for every row: [..., rank] for previous tokens [...]."""
        return self.markov_w1.weight.new_zeros((*previous.shape, self.rank))

    def step(self, previous: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Factors of one slot.

        Args:
            previous: [...] int64, the token before the slot.
            hidden: [..., hidden], the slot's hidden state after the drafter's final norm.
            state: [..., rank], s_{k-1}; used by the rnn head only.

        Returns:
            f_k and s_k, both [..., rank].
        """
        embedded = self.markov_w1(previous)
        if self.kind == "vanilla":
            return embedded, state
        if self.kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded], dim=-1))) * embedded, state
        gate, candidate, output = self.joint_proj(torch.cat([state.to(embedded.dtype), embedded, hidden], dim=-1)).chunk(3, dim=-1)
        keep = torch.sigmoid(gate)
        return torch.tanh(output), keep * state + (1 - keep) * torch.tanh(candidate)

    def factors(self, previous: Tensor, hidden: Tensor, state: Tensor | None = None) -> Tensor:
        """Teacher-forced factors of a whole block: [..., K] tokens and [..., K, hidden] -> [..., K, rank].

        `state` [..., rank] is what the first slot's step starts from, `initial_state` when None.
        """
        state = self.initial_state(previous[..., 0]) if state is None else state
        if self.kind != "rnn":
            return self.step(previous, hidden, state)[0]
        steps = []
        for k in range(previous.shape[-1]):
            factor, state = self.step(previous[..., k], hidden[..., k, :], state)
            steps.append(factor)
        return torch.stack(steps, dim=-2)

    def chain(self, hidden: Tensor, state: Tensor) -> Callable[[int, Tensor], Tensor]:
        """The steps of one drawn block: a function of (slot k, tokens before it [rows]), called once a slot, in order.

        Args:
            hidden: [rows, K, hidden].
            state: [rows, rank], what the first slot's step starts from.
        """
        if self.kind == "vanilla":
            return TableFactors(self.markov_w1.weight)

        def factors(k: int, previous: Tensor) -> Tensor:
            nonlocal state
            factor, state = self.step(previous, hidden[:, k], state)
            return factor

        return factors

    def bias(self, factors: Tensor) -> Tensor:
        """[..., rank] -> [..., draft vocabulary], the bias on the logits."""
        bias: Tensor = self.markov_w2(factors)
        return bias


class ConfidenceHead(nn.Module):
    """c_k = sigmoid(w [h_k ; W1[x_{k-1}]] + b): the estimated probability that draft k is accepted if reached.

    It depends on x_{k-1}, never on x_k, so truncating a block by it keeps decoding lossless.
    """

    def __init__(self, input_size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(input_size, 1)

    def forward(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        """Logits [...] of hidden [..., hidden] and, where the head reads it, W1 of the previous token [..., rank]."""
        features = hidden if embedded is None else torch.cat([hidden, embedded.to(hidden.dtype)], dim=-1)
        logits: Tensor = self.proj(features)
        return logits.squeeze(-1)
