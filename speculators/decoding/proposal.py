"""What passes between the engine and a drafter: `Observation` in, `Proposal` out, `DraftSampler` between.

A drafter never picks a sampled token itself. It hands logits to the `DraftSampler`, which turns them into
one float32 probability tensor, draws from that tensor and keeps it for verification. So a sampled draft
without its probabilities, or with other ones than it was drawn from, cannot be expressed: the constructor of
`Proposal` takes a key that only the sampler holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import InitVar, dataclass
from typing import Any, Final, Literal, Protocol

import torch
from torch import Tensor

from speculators.kernels.markov_sampling import MarkovChain

SAMPLER_KEY: Final = object()

# Where a drafter's confidence comes from: a head trained for it, its own most likely token's probability, or nowhere.
ConfidenceSource = Literal["head", "probability", "none"]


@dataclass(frozen=True)
class Observation:
    """Newly committed tokens of every row, with the verifier's hidden states for them.

    Row b holds `counts[b]` valid columns; what lies right of them is padding with finite values.

    Attributes:
        token_ids: [rows, width] int64, the committed tokens.
        next_token_ids: [rows, width] int64, the token after each; the last valid one is the new anchor.
        hidden_states: [rows, width, taps * hidden], the verifier's aux hidden states of `token_ids`.
        start: [rows] int64, position of column 0. Column i sits at position `start + i`.
        counts: [rows] int64, valid columns, possibly 0.
        longest: an upper bound of `start + counts` over all rows, where the host knows it; spares a device read.
    """

    token_ids: Tensor
    next_token_ids: Tensor
    hidden_states: Tensor
    start: Tensor
    counts: Tensor
    longest: int | None = None


@dataclass(frozen=True)
class DraftVocabulary:
    """The verifier's tokens that a drafter of a reduced vocabulary can propose.

    Attributes:
        ids: [columns] int64, ascending: the verifier id of each column of its logits.
        size: of the verifier's vocabulary.
    """

    ids: Tensor
    size: int

    def widen(self, logits: Tensor) -> Tensor:
        """[..., columns] -> [..., size], -inf where the drafter cannot propose a token."""
        full = logits.new_full((*logits.shape[:-1], self.size), float("-inf"))
        full[..., self.ids] = logits
        return full


@dataclass(frozen=True)
class Proposal:
    """Draft tokens of one round. Made by `DraftSampler`, never by a drafter.

    Attributes:
        token_ids: [rows, K] int64.
        lengths: [rows] int64, how many leading drafts of each row count.
        probabilities: [rows, K, vocabulary] float32, the distribution each draft was drawn from; None when
            every draft is a point mass (greedy decoding, or a deterministic drafter such as prompt lookup).
        confidence: [rows, K] float32 in [0, 1], an estimate that draft k is accepted given that those before it are:
            the algorithm's own, else, where the round asked for one, the probability of the most likely token of the
            distribution that draft k is drawn from; None without either. It may depend on the drafts before k, never on
            draft k itself: cutting a block by it would then bias the output.

    Raises:
        TypeError: constructed by anything but a `DraftSampler`.
    """

    token_ids: Tensor
    lengths: Tensor
    probabilities: Tensor | None
    confidence: Tensor | None = None
    key: InitVar[object] = None

    def __post_init__(self, key: object) -> None:
        if key is not SAMPLER_KEY:
            raise TypeError(
                "a Proposal is made by the sampler that propose() receives: return sampler.proposal() after sampler.draw() or"
                " sampler.draw_block(), or sampler.point_mass(token_ids) for deterministic drafts"
            )


class DraftSampler(Protocol):
    """Draws draft tokens under the request's own sampling parameters; one instance a round."""

    @property
    def enough(self) -> bool:
        """Whether every row's block will be cut before the next draft.

        A drafter that makes one pass a draft asks before each further pass and stops; one that has all logits at once need
        not ask.
        """
        ...

    @property
    def wants_confidence(self) -> bool:
        """Whether the round reads confidences; an algorithm with an estimate of its own need not compute it otherwise."""
        ...

    def draw(self, logits: Tensor, vocabulary: DraftVocabulary | None = None) -> Tensor:
        """Draw the next draft token of every row.

        Args:
            logits: [rows, vocabulary], any float dtype.
            vocabulary: whose columns the logits have; None for the verifier's.

        Returns:
            [rows] int64 token ids.
        """
        ...

    def draw_block(self, logits: Tensor, vocabulary: DraftVocabulary | None = None) -> Tensor:
        """Draw all K draft tokens at once, independently of each other.

        Args:
            logits: [rows, K, vocabulary], any float dtype.
            vocabulary: as in `draw`.

        Returns:
            [rows, K] int64 token ids.
        """
        ...

    def draw_chain(self, chain: MarkovChain, widen: Callable[[Tensor], Tensor]) -> Tensor:
        """Draw all K draft tokens, each from logits that depend on the token before it.

        Args:
            chain: logits and sequential head.
            widen: from its columns to the verifier's vocabulary, [rows, columns] -> [rows, vocabulary].

        Returns:
            [rows, K] int64 token ids of the verifier.
        """
        ...

    def point_mass(self, token_ids: Tensor, lengths: Tensor | None = None) -> Proposal:
        """A proposal of deterministic tokens: each is accepted with the verifier's own probability of it.

        Args:
            token_ids: [rows, K] int64.
            lengths: [rows] int64, leading tokens that count; all K when None.
        """
        ...

    def proposal(self, confidence: Tensor | None = None) -> Proposal:
        """Everything drawn so far, as a proposal.

        Args:
            confidence: [rows, K] in [0, 1].
        """
        ...


class Drafter(Protocol):
    """What the engine needs of a drafter. Every `Speculator` is one; prompt lookup, without weights, too."""

    @property
    def aux_hidden_state_layer_ids(self) -> tuple[int, ...]:
        """Verifier layers whose hidden states `observe` wants, ascending; may be empty."""
        ...

    @property
    def max_draft_tokens(self) -> int:
        """The largest K that `propose` accepts."""
        ...

    @property
    def default_draft_tokens(self) -> int:
        """K when the caller names none."""
        ...

    @property
    def confidence_source(self) -> ConfidenceSource:
        """Where the confidence of its proposals comes from."""
        ...

    def new_state(self, rows: int, max_length: int, device: torch.device, dtype: torch.dtype) -> Any:
        """Preallocate draft state for `rows` sequences of at most `max_length` tokens each.

        Args:
            rows: sequences.
            max_length: tokens of each, at most.
            device: of the state.
            dtype: of the hidden states to observe; the drafter's own keys and values may have another.
        """
        ...

    def observe(self, state: Any, observation: Observation) -> None:
        """Take newly committed tokens into the draft state."""
        ...

    def propose(self, state: Any, anchor: Tensor, sampler: DraftSampler, num_draft_tokens: int) -> Proposal:
        """Draft `num_draft_tokens` tokens after the anchor.

        Args:
            state: what `new_state` made and `observe` filled.
            anchor: [rows] int64, the newest token: committed, its hidden state not yet known.
            sampler: draws and records the tokens.
            num_draft_tokens: K of this round, 1 <= K <= max_draft_tokens.
        """
        ...
