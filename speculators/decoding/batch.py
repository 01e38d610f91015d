"""One batch of rows in decoding: its state on the verifier's device, the prefill, and what a round does to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import cast

import torch
from torch import Tensor

from speculators.decoding.calibration import calibration_for
from speculators.decoding.graph import LENGTH_MULTIPLE, GraphedRounds, StaticState, reusable
from speculators.decoding.length_schedules import LengthSchedule
from speculators.decoding.proposal import Drafter, Observation, Proposal
from speculators.decoding.rejection import Acceptance, accept_greedy
from speculators.decoding.sampling import MAX_ELEMENTS, RoundSampler, SamplingParams, penalised, probabilities
from speculators.errors import ConfigError
from speculators.kernels.greedy_verification import greedy_verification
from speculators.kernels.rejection_sampling import Distributions, rejection_sampling
from speculators.kernels.round_outcome import RoundOutcome, RowState, round_outcome
from speculators.verifier import Verifier

# Prompts run in pieces: attention masks and hidden states of a piece stay small whatever the prompt's length.
PREFILL_WIDTH = 512
PREFILL_TOKENS = 32768
# Rounds whose results may be on their way or unread; the engine has two.
LANDINGS = 4


@dataclass(frozen=True)
class Drafts:
    """What is verified: token_ids [rows, width] int64, of which lengths [rows] count; probabilities as in `Proposal`."""

    token_ids: Tensor
    lengths: Tensor
    probabilities: Tensor | None


class Arriving:
    """A round's results on their way to the host, which need not wait for them before it launches the next round.

    Args:
        result: of the round.
        landing: pinned memory for `RoundOutcome.packed`, and an event, where it comes from a GPU.
    """

    def __init__(self, result: RoundOutcome, landing: tuple[Tensor, torch.cuda.Event] | None) -> None:
        self.width = result.tokens.shape[1]  # the most tokens that a row can have got
        self._packed = result.packed
        self._arrived: torch.cuda.Event | None = None
        if landing is not None:
            self._packed, self._arrived = landing
            self._packed.copy_(result.packed, non_blocking=True)
            self._arrived.record()

    def rows(self) -> list[list[int]]:
        """`RoundOutcome.packed`; waits for it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return cast("list[list[int]]", self._packed.tolist())


class Batch:
    """The rows of one `generate` call, as tensors on the verifier's device.

    Attributes:
        longest: an upper bound of the cache's lengths, which the host knows and keeps current between rounds.
    """

    def __init__(
        self,
        verifier: Verifier,
        drafter: Drafter | None,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        draft_tokens: int,
        schedule: LengthSchedule,
        max_length: int | None = None,
    ) -> None:
        self.verifier, self.drafter, self.sampling = verifier, drafter, sampling
        self.draft_tokens, self.schedule = draft_tokens, schedule
        self.calibration = None if drafter is None else calibration_for(drafter, sampling.temperature)
        self.longest = 0
        self.graphs: GraphedRounds | None = None
        self._static_length: int | None = None
        device, rows = verifier.device, len(prompts)
        max_length = longest_row(prompts, sampling, draft_tokens) if max_length is None else max_length
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
        self._landings: dict[torch.Size, Iterator[tuple[Tensor, torch.cuda.Event]]] = {}
        # Tokens of each row's prompt and reply, for the repetition penalty alone.
        self.seen = None if sampling.repetition_penalty == 1.0 else torch.zeros(rows, verifier.vocab_size, dtype=torch.bool, device=device)

    # -- before the first round ------------------------------------------------------------------------------

    def prefill(self, prompts: Sequence[Sequence[int]]) -> RoundOutcome:
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
            newest = output.last_hidden_state[self.rows, last]
            ends_here = (counts > 0) & (start + counts == lengths)
            self._check_finite(newest, ends_here)
            acceptance = self._accept(newest[:, None], self._no_drafts())
            self.anchor = torch.where(ends_here, acceptance.next_token, self.anchor)
            following.scatter_(1, lengths[:, None] - 1, self.anchor[:, None])
            self.cache.lengths = start + counts
            self.longest = min(width, start_column + piece_width)
            observed = token_ids[:, piece], following[:, piece], output.hidden_states
            if self.graphs is not None and start_column + piece_width >= width:
                # The last tokens apart, as many as a round observes: the first round then finds the shapes of all later ones.
                columns = torch.arange(self.draft_tokens + 1, device=device)
                before = (counts - len(columns)).clamp(min=0)
                self._observe(*observed, start, before)
                at = (before[:, None] + columns).clamp(max=observed[0].shape[1] - 1)
                hidden = observed[2].gather(1, at[..., None].expand(-1, -1, observed[2].shape[2]))
                observed = observed[0].gather(1, at), observed[1].gather(1, at), hidden
                start, counts = start + before, counts - before
            self._observe(*observed, start, counts)
        none = self._no_drafts()
        return self._commit(none.token_ids, none.lengths, Acceptance(none.lengths, self.anchor))

    def arriving(self, result: RoundOutcome) -> Arriving:
        """A round's results on their way to the host, in memory that is used again `LANDINGS` rounds later."""
        packed = result.packed
        if not packed.is_cuda:
            return Arriving(result, None)
        if packed.shape not in self._landings:  # made once: pinning memory and making events takes as long as a launch
            made = [(torch.empty_like(packed, device="cpu", pin_memory=True), torch.cuda.Event()) for _ in range(LANDINGS)]
            self._landings[packed.shape] = cycle(made)
        return Arriving(result, next(self._landings[packed.shape]))

    # -- rounds over static buffers --------------------------------------------------------------------------

    def use_static_buffers(self, *, capture: bool) -> None:
        """Run `next_round` over static buffers from now on, on CUDA as graphs (`capture`); before anything has run."""
        names = ("anchor", "emitted", "finished", "round_index", "seen", "draft_state")
        self.state = StaticState([(self, names), (self.cache, ("lengths",))])
        self.graphs = GraphedRounds(self.state, self._static_round, self.cache.max_length, capture=capture)

    def next_round(self) -> RoundOutcome:
        """A round, as a graph where the batch uses them. Its tensors hold until the next one."""
        if self.graphs is None:
            return self.round()
        drafts = 0 if self.drafter is None else self.schedule.draft_tokens(self.draft_tokens)
        result: RoundOutcome = self.graphs.round(drafts, self.longest + drafts + 1)
        return result

    def _static_round(self, length: int) -> RoundOutcome:
        """A round whose attention reads `length` positions, which the caller knows to be enough."""
        self._static_length = length
        try:
            return self.round()
        finally:
            self._static_length = None

    # -- one round, in the order it happens ------------------------------------------------------------------

    def round(self) -> RoundOutcome:
        """Propose, verify, accept, observe."""
        return self.verify(self.propose())

    def verify(self, drafts: Drafts) -> RoundOutcome:
        """The half of a round after drafting: verify, accept, observe."""
        block = torch.cat([self.anchor[:, None], drafts.token_ids], dim=1)
        output = self.verifier.forward(block, self.cache, self.taps, static_length=self._read_length(block.shape[1]))
        outcome = self._commit(drafts.token_ids, drafts.lengths, self._accept(output.last_hidden_state, drafts))

        # The block's columns 0 .. accepted (anchor and accepted drafts) stay in the cache; the others are left behind.
        start, self.cache.lengths, self.anchor = self.cache.lengths, outcome.after.lengths, outcome.after.anchor
        self.longest += block.shape[1]
        self._observe(block, outcome.tokens, output.hidden_states, start, outcome.committed)
        return outcome

    def _read_length(self, width: int) -> int | None:
        """Cached positions that the verifier's attention reads; None lets the cache ask the device, which is free on the CPU alone."""
        if self._static_length is not None or self.verifier.device.type == "cpu":
            return self._static_length
        return min(self.longest + width, self.cache.max_length)

    def propose(self) -> Drafts:
        """Ask the drafter for as many drafts as the schedule wants; cut them by it, and so that no row can exceed its budget."""
        self.round_index = self.round_index + 1
        draft_tokens = 0 if self.drafter is None else self.schedule.draft_tokens(self.draft_tokens)
        if self.drafter is None or draft_tokens == 0:
            return self._no_drafts()
        # The verifier adds a token of its own after the drafts, so one less than what remains.
        room = torch.where(self.finished, 0, self.sampling.max_new_tokens - self.emitted - 1)
        # On the CPU a forward costs what its width is, and the host sees every tensor; elsewhere asking would cost a synchronisation.
        on_cpu = room.device.type == "cpu"
        wants_confidence = self.schedule.needs_confidence
        sampler = RoundSampler(
            self.sampling,
            self.rows,
            self.round_index,
            self.seen,
            estimate_confidence=wants_confidence,
            keep=(lambda confidence: self._lengths(confidence, room)) if wants_confidence and on_cpu else None,
        )
        proposal = self.drafter.propose(self.draft_state, self.anchor, sampler, draft_tokens)
        self._check_proposal(proposal, draft_tokens)
        lengths = self._lengths(proposal.confidence, torch.minimum(proposal.lengths, room))
        width = int(lengths.max()) if on_cpu else proposal.token_ids.shape[1]
        q = proposal.probabilities
        return Drafts(proposal.token_ids[:, :width], lengths, None if q is None else q[:, :width])

    def _lengths(self, confidence: Tensor | None, available: Tensor) -> Tensor:
        """What the schedule makes of the confidences [rows, k] and the drafts available [rows]."""
        if not self.schedule.needs_confidence:
            return self.schedule.lengths(None, available, ~self.finished)
        assert confidence is not None
        if self.calibration is not None:
            confidence = self.calibration.apply(confidence)
        return self.schedule.lengths(confidence, available.clamp(max=confidence.shape[1]), ~self.finished)

    def _accept(self, last_hidden_state: Tensor, drafts: Drafts) -> Acceptance:
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
            if self.sampling.greedy and seen is None:
                parts.append(greedy_verification(token_ids, lengths, logits))
            elif self.sampling.greedy:
                parts.append(accept_greedy(token_ids, lengths, penalised(logits, self.sampling, seen).argmax(-1)))
            else:
                # Kernels take plain logits as they are; what else shapes a distribution, the pipeline applies.
                from_logits = logits.is_cuda and self.sampling.only_temperature
                target = (
                    Distributions(logits, self.sampling.temperature)
                    if from_logits
                    else Distributions(probabilities(logits, self.sampling, seen))
                )
                parts.append(
                    rejection_sampling(
                        token_ids,
                        lengths,
                        target,
                        None if drafts.probabilities is None else Distributions(drafts.probabilities[part]),
                        seed=self.sampling.seed,
                        rows=self.rows[part],
                        round_index=self.round_index,
                        verification=self.sampling.verification,
                    )
                )
        if len(parts) == 1:
            return parts[0]
        return Acceptance(torch.cat([part.accepted for part in parts]), torch.cat([part.next_token for part in parts]))

    def _commit(self, drafts: Tensor, proposed: Tensor, acceptance: Acceptance) -> RoundOutcome:
        """Add accepted drafts [rows, width] and the next token to the replies, up to the first stop token."""
        state = RowState(self.anchor, self.emitted, self.finished, self.cache.lengths)
        outcome = round_outcome(
            state, drafts, proposed, acceptance.accepted, acceptance.next_token, self.stop_ids, self.sampling.max_new_tokens
        )
        if self.seen is not None:
            column = torch.arange(outcome.tokens.shape[1], device=drafts.device)
            new = column < (outcome.after.emitted - self.emitted)[:, None]
            self.seen.scatter_(1, torch.where(new, outcome.tokens, self.anchor[:, None]), True)
        self.emitted, self.finished = outcome.after.emitted, outcome.after.finished
        return outcome

    def _observe(self, token_ids: Tensor, next_token_ids: Tensor, hidden_states: Tensor, start: Tensor, counts: Tensor) -> None:
        """Hand the committed columns to the drafter."""
        if self.drafter is not None:
            observation = Observation(token_ids, next_token_ids, hidden_states, start, counts, self.longest)
            self.drafter.observe(self.draft_state, observation)

    def _no_drafts(self) -> Drafts:
        return Drafts(self.anchor.new_empty(len(self.rows), 0), torch.zeros_like(self.anchor), None)

    def _check_finite(self, hidden_states: Tensor, rows: Tensor) -> None:
        """Refuse prompts [rows] after which the verifier's state [rows, hidden] is no number: nothing could be drawn from it."""
        broken = (rows & ~hidden_states.isfinite().all(-1)).nonzero()
        if len(broken):
            raise ConfigError(
                f"after prompt {int(broken[0])} the verifier's hidden state is not finite in {self.verifier.dtype}: its arithmetic"
                " overflows there, or its weights are damaged; load it in bfloat16 or float32"
            )

    def _check_proposal(self, proposal: Proposal, draft_tokens: int) -> None:
        rows, width = proposal.token_ids.shape
        if rows != len(self.rows) or width > draft_tokens:
            raise ConfigError(
                f"{type(self.drafter).__name__}.propose returned {width} drafts for {rows} rows, asked for at most"
                f" {draft_tokens} for {len(self.rows)}"
            )
        if self.schedule.needs_confidence and proposal.confidence is None:
            raise ConfigError(f"{type(self.drafter).__name__}.propose returned no confidence, though its confidence_source is not 'none'")


def prepare(
    verifier: Verifier,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    draft_tokens: int,
    schedule: LengthSchedule,
) -> Batch:
    """A batch for the prompts. On CUDA one whose rounds are graphs, and which calls of the same shapes use again.

    A schedule that reads confidences runs eagerly; one that only chooses how much to draft has a graph for each length.
    """
    if verifier.device.type != "cuda" or schedule.needs_confidence:
        return Batch(verifier, drafter, prompts, sampling, draft_tokens, schedule)
    max_length = -(-longest_row(prompts, sampling, draft_tokens) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE

    def make() -> Batch:
        batch = Batch(verifier, drafter, prompts, sampling, draft_tokens, schedule, max_length)
        batch.use_static_buffers(capture=True)
        return batch

    key = (id(drafter), len(prompts), max_length, sampling, draft_tokens)
    batch = reusable(verifier.prepared_batches, key, make, verifier.device)
    batch.schedule = schedule
    batch.state.reset()
    return batch


def longest_row(prompts: Sequence[Sequence[int]], sampling: SamplingParams, draft_tokens: int) -> int:
    """Positions a row may need: the last round may start one token before the budget's end and still runs a whole block."""
    return max(map(len, prompts)) + sampling.max_new_tokens + draft_tokens + 1


def _seen_in_block(seen: Tensor, token_ids: Tensor) -> Tensor:
    """[rows, width + 1, vocabulary] bool: the context of each verified distribution, drafts before it included."""
    blocks = [seen]
    for draft in token_ids.split(1, dim=1):
        blocks.append(blocks[-1].scatter(1, draft, True))
    return torch.stack(blocks, dim=1)
