"""The decode engine: prefill, then rounds of propose -> verify -> accept -> observe, for every drafter and without one.

Positions of one row, prompt of P tokens: after the prefill the cache holds positions 0 to P - 1, and the first sampled
token is the *anchor*: known, but not yet run through the verifier. A round runs the block [anchor, draft 1 .. draft K] in
one forward at positions P .. P + K. If the first a drafts are accepted, the anchor and they are committed (the cache
length grows by a + 1) and the token drawn after them is the new anchor. Plain decoding is the same with K = 0.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from speculators.capture import current_device
from speculators.decoding.arguments import AUTO, check_draft_tokens, check_kinds, check_pair, check_prompts, choose_schedule
from speculators.decoding.batch import Arriving, prepare
from speculators.decoding.length_schedules import LengthSchedule
from speculators.decoding.proposal import Drafter
from speculators.decoding.replies import OnTokens, Replies
from speculators.decoding.sampling import SamplingParams
from speculators.decoding.statistics import Round
from speculators.verifier import Verifier

__all__ = ["AUTO", "Generation", "Round", "generate"]


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
    num_draft_tokens: int | Literal["auto"] | None = None,
    confidence_threshold: float = 0.0,
    schedule: LengthSchedule | None = None,
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
        num_draft_tokens: K; the drafter's default when None. "auto" chooses every round's length up to that default from
            this machine's measured step times (`profiler.step_times`) and the drafter's acceptance. Not used without a drafter.
        confidence_threshold: drop the drafts from the first one whose confidence, calibrated where the checkpoint is, is
            below it; possibly all.
        schedule: chooses the lengths instead, up to K; see `length_schedules`.
        on_tokens: called as on_tokens(row, new token ids) whenever a row grows.

    Raises:
        ConfigError: K is above what the drafter proposes, a threshold or schedule meets a drafter without the confidence it
            needs, two of "auto", threshold and schedule are asked for, or an argument is of another type. Nothing has run then.
        PairingError: the drafter was made for a verifier of another vocabulary or width.
        DataError: a prompt is empty, holds ids outside the vocabulary, or does not fit the verifier's context with its reply.
    """
    check_kinds(verifier, drafter, sampling)
    check_prompts(verifier, prompts, sampling)
    check_pair(verifier, drafter)
    draft_tokens = check_draft_tokens(drafter, num_draft_tokens)
    with current_device(verifier.device):
        chosen = choose_schedule(verifier, drafter, prompts, sampling, num_draft_tokens, confidence_threshold, schedule)
        started = time.perf_counter()
        batch = prepare(verifier, drafter, prompts, sampling, draft_tokens, chosen)
        replies = Replies(len(prompts), on_tokens)
        replies.add(batch.arriving(batch.prefill(prompts)), prefill=True)
        decoding_started = _now(verifier.device)
        forwards = 0
        running: Arriving | None = None
        while replies.active:
            # The anchor is a token of the reply, but not yet in the cache.
            known = max(len(prompt) + len(reply) - 1 for prompt, reply in zip(prompts, replies.token_ids, strict=True))
            if running is None:
                batch.longest = known
                running = batch.arriving(batch.next_round())
            ahead = None
            # A graph reads nothing from the host: the next round starts before the host has looked at this one, unless this one must
            # be the last. Where stop tokens end it after all, the round ahead emits nothing.
            if batch.graphs is not None and replies.shortest + running.width < sampling.max_new_tokens:
                batch.longest = known + running.width
                ahead = batch.arriving(batch.next_round())
            chosen.record(replies.add(running), replies.remaining(sampling.max_new_tokens))
            running = ahead
            forwards += 1
        return Generation(
            token_ids=replies.token_ids,
            rounds=replies.rounds,
            finish_reasons=replies.finish_reasons,
            seconds=time.perf_counter() - decoding_started,  # the last tokens are on the host
            prefill_seconds=decoding_started - started,
            verify_forwards=forwards,
        )


def _now(device: torch.device) -> float:
    """Wall time after all work submitted to the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
