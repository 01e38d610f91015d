"""The decode engine: prefill, then rounds of propose -> verify -> accept -> observe, for every drafter and without one.

Positions of one row, prompt of P tokens: after the prefill the cache holds positions 0 to P - 1, and the first sampled
token is the *anchor*: known, but not yet run through the verifier. A round runs the block [anchor, draft 1 .. draft K] in
one forward at positions P .. P + K. If the first a drafts are accepted, the anchor and they are committed (the cache
length grows by a + 1) and the token drawn after them is the new anchor. Plain decoding is the same with K = 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speculators.decoding.proposal import Drafter, Observation, Proposal
from speculators.decoding.randomness import Purpose, uniform
from speculators.decoding.rejection import Acceptance, accept_greedy, accept_sampled
from speculators.decoding.sampling import MAX_ELEMENTS, RoundSampler, SamplingParams, penalised, probabilities
from speculators.decoding.statistics import Round
from speculators.errors import ConfigError, DataError
from speculators.verifier import Verifier

__all__ = ["Generation", "Round", "generate"]

# Prompts run in pieces: attention masks and hidden states of a piece stay small whatever the prompt's length.
PREFILL_WIDTH = 512
PREFILL_TOKENS = 32768

OnTokens = Callable[[int, list[int]], None]


@dataclass(frozen=True)
class Generation:
    """Replies to a batch of prompts, one entry a row in each list.

    Attributes:
        token_ids: new tokens only, the stop token included.
        rounds: what each verify forward did for the row. The first token comes from the prefill, so a row's reply has
            1 + sum(emitted) tokens.
        finish_reasons: "stop" or "length".
        seconds: wall time of all rounds.
        prefill_seconds: wall time before, up to the first token.
        verify_forwards: forwards of the verifier after the prefill, each over the whole batch.
    """

    token_ids: list[list[int]]
    rounds: list[list[Round]]
    finish_reasons: list[str]
    seconds: float
    prefill_seconds: float
    verify_forwards: int


@torch.inference_mode()
def generate(
    verifier: Verifier,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
    *,
    num_draft_tokens: int | None = None,
    confidence_threshold: float = 0.0,
    on_tokens: OnTokens | None = None,
) -> Generation:
    """Decode a batch of prompts; the output is distributed as the verifier's own, whatever the drafter.

    Greedy output equals plain decoding token by token up to rounding: a near tie of the two most likely tokens may fall
    either way, since the verifier computes K + 1 positions at once. Sampled output of row b depends on the seed, on b and
    on the row's prompt, not on the other rows.

    Args:
        verifier: the target model.
        drafter: proposes drafts; None decodes plainly.
        prompts: token ids, each at least one; lengths may differ.
        sampling: how to sample and when to stop.
        num_draft_tokens: K; the drafter's default when None. Not used without a drafter.
        confidence_threshold: drop the drafts from the first one whose confidence is below it; possibly all.
        on_tokens: called as on_tokens(row, new token ids) whenever a row grows.

    Raises:
        ConfigError: K is above what the drafter proposes, or a confidence threshold meets a drafter without confidence.
        DataError: a prompt is empty, holds ids outside the vocabulary, or does not fit the verifier's context with its reply.
    """
    draft_tokens = _check_draft_tokens(drafter, num_draft_tokens, confidence_threshold)
    _check_prompts(verifier, prompts, sampling)
    started = time.perf_counter()
    batch = _Batch(verifier, drafter, prompts, sampling, draft_tokens, confidence_threshold)
    replies = _Replies(len(prompts), on_tokens)
    replies.add(batch.prefill(prompts), prefill=True)
    decoding_started = _now(verifier.device)
    forwards = 0
    while replies.active:
        replies.add(batch.round())
        forwards += 1
    return Generation(
        token_ids=replies.token_ids,
        rounds=replies.rounds,
        finish_reasons=replies.finish_reasons,
        seconds=_now(verifier.device) - decoding_started,
        prefill_seconds=decoding_started - started,
        verify_forwards=forwards,
    )


@dataclass(frozen=True)
class _Drafts:
    """What is verified: token_ids [rows, width] int64, of which lengths [rows] count; probabilities as in `Proposal`."""

    token_ids: Tensor
    lengths: Tensor
    probabilities: Tensor | None


@dataclass(frozen=True)
class _RoundResult:
    """One round of every row, on the device; rows that were finished before emit 0 tokens.

    tokens: [rows, width + 1], the accepted drafts, then the next token, then padding. proposed, accepted, emitted: [rows],
    as in `Round`. stopped: [rows] bool, ended by a stop token now. finished: [rows] bool, ended now or before.
    """

    tokens: Tensor
    proposed: Tensor
    accepted: Tensor
    emitted: Tensor
    stopped: Tensor
    finished: Tensor


class _Batch:
    """The rows of one `generate` call, as tensors on the verifier's device."""

    def __init__(
        self,
        verifier: Verifier,
        drafter: Drafter | None,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        draft_tokens: int,
        confidence_threshold: float,
    ) -> None:
        self.verifier, self.drafter, self.sampling = verifier, drafter, sampling
        self.draft_tokens, self.confidence_threshold = draft_tokens, confidence_threshold
        device, rows = verifier.device, len(prompts)
        # The last round may start one token before the budget's end and still runs a whole block.
        max_length = max(map(len, prompts)) + sampling.max_new_tokens + draft_tokens + 1
        self.cache = verifier.new_cache(rows, max_length)
        self.taps = tuple(drafter.aux_hidden_state_layer_ids) if drafter is not None else ()
        self.draft_state = drafter.new_state(rows, max_length, device, verifier.dtype) if drafter is not None else None

        stop_ids = verifier.stop_token_ids if sampling.stop_token_ids is None else sampling.stop_token_ids
        self.stop_ids = torch.tensor(() if sampling.ignore_eos else stop_ids, dtype=torch.int64, device=device)
        self.rows = torch.arange(rows, device=device)
        self.anchor = torch.zeros(rows, dtype=torch.int64, device=device)
        self.emitted = torch.zeros_like(self.anchor)  # tokens of the reply so far
        self.finished = torch.zeros(rows, dtype=torch.bool, device=device)
        self.round_index = torch.zeros((), dtype=torch.int64, device=device)
        # Tokens of each row's prompt and reply, for the repetition penalty alone.
        self.seen = None if sampling.repetition_penalty == 1.0 else torch.zeros(rows, verifier.vocab_size, dtype=torch.bool, device=device)

    # -- before the first round ------------------------------------------------------------------------------

    def prefill(self, prompts: Sequence[Sequence[int]]) -> _RoundResult:
        """Run the prompts, draw each row's first token (the first anchor), and let the drafter observe the prompts."""
        device = self.verifier.device
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        width = max(map(len, prompts))
        token_ids = torch.tensor([[*prompt, *[prompt[-1]] * (width - len(prompt))] for prompt in prompts], device=device)
        following = token_ids.roll(-1, dims=1)  # the token after each, once the first token stands at each row's end
        if self.seen is not None:
            self.seen.scatter_(1, token_ids, True)  # padding repeats the last token, which is seen anyway

        piece_width = min(PREFILL_WIDTH, max(1, PREFILL_TOKENS // len(prompts)))
        for start_column in range(0, width, piece_width):
            piece = slice(start_column, start_column + piece_width)
            start = self.cache.lengths
            counts = (lengths - start).clamp(max=piece_width)
            output = self.verifier.forward(token_ids[:, piece], self.cache, self.taps)
            last = (counts - 1).clamp(min=0)
            acceptance = self._accept(output.last_hidden_state[self.rows, last][:, None], self._no_drafts())
            ends_here = (counts > 0) & (start + counts == lengths)
            self.anchor = torch.where(ends_here, acceptance.next_token, self.anchor)
            following.scatter_(1, lengths[:, None] - 1, self.anchor[:, None])
            self.cache.lengths = start + counts
            self._observe(token_ids[:, piece], following[:, piece], output.hidden_states, start, counts)
        return self._commit(self.anchor[:, None], torch.zeros_like(self.anchor), torch.zeros_like(self.anchor))

    # -- one round, in the order it happens ------------------------------------------------------------------

    def round(self) -> _RoundResult:
        """Propose, verify, accept, observe."""
        self.round_index = self.round_index + 1
        drafts = self._propose()
        block = torch.cat([self.anchor[:, None], drafts.token_ids], dim=1)
        output = self.verifier.forward(block, self.cache, self.taps)
        acceptance = self._accept(output.last_hidden_state, drafts)

        next_token = acceptance.next_token[:, None]
        tokens = torch.cat([drafts.token_ids, next_token], dim=1).scatter(1, acceptance.accepted[:, None], next_token)
        result = self._commit(tokens, drafts.lengths, acceptance.accepted)

        # The block's columns 0 .. accepted (anchor and accepted drafts) stay in the cache; the others are left behind.
        start, counts = self.cache.lengths, torch.where(self.finished, 0, result.emitted)
        self.cache.lengths = start + counts
        self.anchor = torch.where(self.finished, self.anchor, acceptance.next_token)
        self._observe(block, tokens, output.hidden_states, start, counts)
        return result

    def _propose(self) -> _Drafts:
        """Ask the drafter; cut by its confidence, and so that no row can exceed its budget."""
        if self.drafter is None:
            return self._no_drafts()
        sampler = RoundSampler(self.sampling, self.rows, self.round_index, self.seen)
        proposal = self.drafter.propose(self.draft_state, self.anchor, sampler, self.draft_tokens)
        self._check_proposal(proposal)
        lengths = proposal.lengths
        if self.confidence_threshold > 0:
            assert proposal.confidence is not None
            confident = (proposal.confidence >= self.confidence_threshold).long().cumprod(1).sum(1)
            lengths = torch.minimum(lengths, confident)
        # The verifier adds a token of its own after the drafts, so one less than what remains.
        remaining = self.sampling.max_new_tokens - self.emitted - 1
        lengths = torch.where(self.finished, 0, torch.minimum(lengths, remaining))
        width = proposal.token_ids.shape[1]
        if lengths.device.type == "cpu":
            width = int(lengths.max())  # here the forward costs what its width is; elsewhere asking would cost a synchronisation
        q = proposal.probabilities
        return _Drafts(proposal.token_ids[:, :width], lengths, None if q is None else q[:, :width])

    def _accept(self, last_hidden_state: Tensor, drafts: _Drafts) -> Acceptance:
        """Verify drafts against the verifier's distributions, as many rows at a time as memory allows.

        last_hidden_state: [rows, width + 1, hidden], of the anchor and the drafts.
        """
        width = drafts.token_ids.shape[1]
        rows_at_once = max(1, MAX_ELEMENTS // ((width + 1) * self.verifier.vocab_size))
        parts = []
        for first in range(0, len(self.rows), rows_at_once):
            part = slice(first, first + rows_at_once)
            token_ids, lengths = drafts.token_ids[part], drafts.lengths[part]
            logits = self.verifier.logits(last_hidden_state[part])
            seen = None if self.seen is None else _seen_in_block(self.seen[part], token_ids)
            if self.sampling.greedy:
                parts.append(accept_greedy(token_ids, lengths, penalised(logits, self.sampling, seen).argmax(-1)))
                continue
            p = probabilities(logits, self.sampling, seen)
            q = None if drafts.probabilities is None else drafts.probabilities[part]
            rows, seed = self.rows[part], self.sampling.seed
            slots = torch.arange(width, device=rows.device)
            accept_uniforms = uniform(seed, Purpose.ACCEPT, rows[:, None], self.round_index, slots)
            correct_uniforms = uniform(seed, Purpose.CORRECT, rows, self.round_index, torch.zeros_like(rows))
            parts.append(accept_sampled(token_ids, lengths, q, p, accept_uniforms, correct_uniforms))
        return Acceptance(torch.cat([part.accepted for part in parts]), torch.cat([part.next_token for part in parts]))

    def _commit(self, tokens: Tensor, proposed: Tensor, accepted: Tensor) -> _RoundResult:
        """Add tokens[:, : accepted + 1] to the replies, up to the first stop token.

        tokens: [rows, width + 1]; proposed, accepted: [rows].
        """
        column = torch.arange(tokens.shape[1], device=tokens.device)
        stops = (tokens[..., None] == self.stop_ids).any(-1) & (column <= accepted[:, None])
        stopped = stops.any(1) & ~self.finished
        emitted = torch.where(stopped, stops.long().argmax(1), accepted) + 1
        emitted = torch.where(self.finished, 0, emitted)
        if self.seen is not None:
            self.seen.scatter_(1, torch.where(column < emitted[:, None], tokens, self.anchor[:, None]), True)
        self.emitted = self.emitted + emitted
        self.finished = self.finished | stopped | (self.emitted >= self.sampling.max_new_tokens)
        cut = emitted <= accepted  # an accepted draft was a stop token: the round ends there
        return _RoundResult(
            tokens, torch.where(cut, emitted, proposed), torch.where(cut, emitted, accepted), emitted, stopped, self.finished
        )

    def _observe(self, token_ids: Tensor, next_token_ids: Tensor, hidden_states: Tensor, start: Tensor, counts: Tensor) -> None:
        """Hand the committed columns to the drafter."""
        if self.drafter is not None:
            self.drafter.observe(self.draft_state, Observation(token_ids, next_token_ids, hidden_states, start, counts))

    def _no_drafts(self) -> _Drafts:
        return _Drafts(self.anchor.new_empty(len(self.rows), 0), torch.zeros_like(self.anchor), None)

    def _check_proposal(self, proposal: Proposal) -> None:
        rows, width = proposal.token_ids.shape
        if rows != len(self.rows) or width > self.draft_tokens:
            raise ConfigError(
                f"{type(self.drafter).__name__}.propose returned {width} drafts for {rows} rows, asked for at most"
                f" {self.draft_tokens} for {len(self.rows)}"
            )
        if self.confidence_threshold > 0 and proposal.confidence is None:
            raise ConfigError(
                f"confidence_threshold {self.confidence_threshold} needs a drafter with a confidence head, and"
                f" {type(self.drafter).__name__} has none; leave the threshold at 0"
            )


class _Replies:
    """The replies on the host: one transfer a round brings the tokens and counts of all rows."""

    def __init__(self, rows: int, on_tokens: OnTokens | None) -> None:
        self.token_ids: list[list[int]] = [[] for _ in range(rows)]
        self.rounds: list[list[Round]] = [[] for _ in range(rows)]
        self.finish_reasons = [""] * rows  # empty while the row is active
        self._on_tokens = on_tokens

    @property
    def active(self) -> bool:
        """Whether any row is unfinished."""
        return "" in self.finish_reasons

    def add(self, result: _RoundResult, *, prefill: bool = False) -> None:
        """Append what a round emitted; the prefill's token belongs to no round."""
        counts = torch.stack([result.proposed, result.accepted, result.emitted, result.stopped.long(), result.finished.long()], dim=1)
        for row, (proposed, accepted, emitted, stopped, finished, *tokens) in enumerate(torch.cat([counts, result.tokens], dim=1).tolist()):
            if self.finish_reasons[row]:
                continue
            self.token_ids[row] += tokens[:emitted]
            if not prefill:
                self.rounds[row].append(Round(proposed, accepted, emitted))
            if finished:
                self.finish_reasons[row] = "stop" if stopped else "length"
            if self._on_tokens is not None:
                self._on_tokens(row, tokens[:emitted])


def _seen_in_block(seen: Tensor, token_ids: Tensor) -> Tensor:
    """[rows, width + 1, vocabulary] bool: the context of each verified distribution, drafts before it included."""
    blocks = [seen]
    for draft in token_ids.split(1, dim=1):
        blocks.append(blocks[-1].scatter(1, draft, True))
    return torch.stack(blocks, dim=1)


def _check_draft_tokens(drafter: Drafter | None, requested: int | None, confidence_threshold: float) -> int:
    """K, or 0 without a drafter."""
    if not 0 <= confidence_threshold <= 1:
        raise ConfigError(f"confidence_threshold {confidence_threshold} must be between 0 (keep every draft) and 1")
    if drafter is None:
        return 0
    draft_tokens = drafter.default_draft_tokens if requested is None else requested
    if not 1 <= draft_tokens <= drafter.max_draft_tokens:
        raise ConfigError(
            f"num_draft_tokens {draft_tokens} must be between 1 and {drafter.max_draft_tokens}, the most that"
            f" {type(drafter).__name__} proposes in one round; for plain decoding pass no drafter"
        )
    return draft_tokens


def _check_prompts(verifier: Verifier, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> None:
    if not prompts:
        raise DataError("there are no prompts to decode; pass at least one")
    context = verifier.weights.config.get("max_position_embeddings")
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise DataError(f"prompt {index} is empty; a prompt needs at least one token")
        if not 0 <= min(prompt) <= max(prompt) < verifier.vocab_size:
            raise DataError(f"prompt {index} holds token ids outside 0 to {verifier.vocab_size - 1}, the verifier's vocabulary")
        if context is not None and len(prompt) + sampling.max_new_tokens > context:
            raise DataError(
                f"prompt {index} has {len(prompt)} tokens, with max_new_tokens {sampling.max_new_tokens} that exceeds the context of"
                f" {context} tokens of {verifier.weights.name_or_path!r}; shorten the prompt or lower max_new_tokens"
            )


def _now(device: torch.device) -> float:
    """Wall time after all work submitted to the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
