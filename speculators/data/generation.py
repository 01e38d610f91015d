"""Continuous batching for data generation: many short sequences at the highest throughput, not the lowest latency.

A fixed number of slots decodes one token a step. A slot either takes a forced token (prompts are short, so they are
prefilled by decoding) or the one it drew; a finished slot starts the next job at once. A job is a coroutine of
stages, so that what a model wrote in one stage (a question) stays in the slot's cache for the next one (its answer).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from speculators.data.decode_step import DecodeStep, RunningStep
from speculators.decoding.randomness import Purpose, uniform
from speculators.errors import DataError
from speculators.verifier import Verifier

T = TypeVar("T")

_WATCH_EVERY = 64  # generated tokens between two looks of `Stage.abandon_if`


@dataclass(frozen=True)
class Stage:
    """One piece of a job: tokens to feed, then tokens to generate.

    Attributes:
        forced: token ids, at least one. They follow what the slot holds so far; where the stage before ended with a
            stop token, they take that token's place (repeat it at their start to keep it).
        max_new_tokens: at most this many are generated, a stop token included.
        temperature: 0 is greedy.
        min_p: keep tokens of at least this share of the largest probability; 0 keeps all.
        stop_token_ids: what ends the stage; None is the verifier's own stop tokens.
        abandon_if: looked at every 64 generated tokens with those generated so far; True ends the stage.
        restart: the forced tokens are the whole context instead of following what the slot holds. What they repeat of it
            from the start on stays in the cache.
    """

    forced: Sequence[int]
    max_new_tokens: int
    temperature: float = 0.0
    min_p: float = 0.0
    stop_token_ids: frozenset[int] | None = None
    abandon_if: Callable[[Sequence[int]], bool] | None = None
    restart: bool = False


@dataclass(frozen=True)
class StageResult:
    """What a stage produced.

    Attributes:
        context: everything before the generated tokens, from the job's first token on.
        token_ids: the generated tokens, the stop token included.
        finish_reason: "stop", "length" (the budget is used up) or "abandoned".
    """

    context: list[int]
    token_ids: list[int]
    finish_reason: Literal["stop", "length", "abandoned"]

    @property
    def stopped(self) -> bool:
        """Whether the last token is a stop token."""
        return self.finish_reason == "stop"


# Yields stages, is sent their results, and returns what `TokenGenerator.run` hands on.
Job = Generator[Stage, StageResult, T]


class TokenGenerator:
    """Runs jobs on a verifier.

    Every random number is a function of the seed, the job's number and the token's position: what a job writes does
    not depend on the number of slots, up to the rounding of the model's own arithmetic.

    Attributes:
        generated_tokens: tokens generated so far, those of abandoned stages included.
        steps: decode steps so far.
    """

    def __init__(
        self, verifier: Verifier, *, slots: int | None = None, max_length: int = 512, seed: int = 0, cuda_graphs: bool = True
    ) -> None:
        """Allocate `slots` sequences of `max_length` positions.

        Args:
            verifier: the model.
            slots: sequences decoded at once; by default 16 on a CPU, and on CUDA what fits into 60% of the free memory, 2048 at most.
            max_length: positions a slot, forced and generated tokens together.
            seed: of all draws.
            cuda_graphs: see `DecodeStep`.
        """
        self.slots = slots if slots is not None else _default_slots(verifier, max_length)
        self.max_length = max_length
        self.generated_tokens = 0
        self.steps = 0
        self._seed = seed
        self._step = DecodeStep(verifier, self.slots, max_length, cuda_graphs)
        self._stop_sets: dict[frozenset[int], int] = {}
        self._is_stop = np.zeros((0, verifier.vocab_size), dtype=np.bool_)
        self._verifier_stops = frozenset(verifier.stop_token_ids)

    def run(self, jobs: Iterable[Job[T]], *, seconds: float | None = None, clock: Callable[[], float] = time.monotonic) -> Iterator[T]:
        """Run jobs and yield what each returns, in the order in which they end.

        Args:
            jobs: taken one by one as slots become free; may be endless. Their numbers are their places.
            seconds: stop after this time; jobs still running are dropped.
            clock: what tells the time, in seconds.

        Raises:
            DataError: a stage has no forced tokens or does not fit into a slot.
        """
        return self.run_numbered(enumerate(jobs), seconds=seconds, clock=clock)

    def run_numbered(
        self, jobs: Iterable[tuple[int, Job[T]]], *, seconds: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> Iterator[T]:
        """`run` for jobs that bring their numbers along, so that some of them may have been done before."""
        started = clock()
        slots = _Slots(self.slots, self.max_length)
        waiting = iter(jobs)
        for slot in range(self.slots):
            yield from self._start_next_job(slots, slot, waiting)
        if not slots.active.any():
            return
        running = self._step_after(slots)
        while slots.active.any() and (seconds is None or clock() - started < seconds):
            # The next step starts before this one's tokens are known. Where they end a stage, the slot's part of the
            # next step is void: one slot-step lost a stage, against a device that would wait for the host every step.
            following = self._step_after(slots)
            tokens = running.tokens()
            for slot in self._record(slots, running.position, tokens):
                following.position[slot] = -1
                yield from self._end_stage(slots, slot, waiting)
            running = following

    # -- inside ----------------------------------------------------------------------------------------------

    def _step_after(self, slots: _Slots) -> RunningStep:
        """Launch a step that feeds every slot's next token."""
        plan = self._step.next_plan()
        rows = np.arange(self.slots)
        plan.forced[:] = np.where(slots.position < slots.forced_until, slots.history[rows, slots.position], -1)
        plan.position[:] = slots.position
        plan.temperature[:] = slots.temperature
        plan.min_p[:] = slots.min_p
        job, position = torch.from_numpy(slots.job_number), torch.from_numpy(slots.position)
        plan.uniform[:] = uniform(self._seed, Purpose.GENERATE, job, position, torch.zeros_like(job)).numpy()
        running = self._step.launch()
        slots.position += slots.active
        self.steps += 1
        return running

    def _record(self, slots: _Slots, position: NDArray[np.int64], tokens: NDArray[np.int64]) -> list[int]:
        """Note the tokens that a step drew; returns the slots whose stage they end."""
        index = position + 1
        rows = np.flatnonzero(slots.active & (index >= slots.forced_until))
        index, drawn = index[rows], tokens[rows]
        slots.history[rows, index] = drawn
        slots.end[rows] = index + 1
        self.generated_tokens += len(rows)
        stopped = self._is_stop[slots.stop_set[rows], drawn]
        count = index + 1 - slots.forced_until[rows]
        ended = stopped | (count == slots.budget[rows])
        slots.reason[rows] = np.where(stopped, "stop", "length")
        for place in np.flatnonzero(~ended & (count % _WATCH_EVERY == 0)):
            abandon_if = slots.abandon_if[rows[place]]
            if abandon_if is not None and abandon_if(slots.generated(rows[place])):
                ended[place] = True
                slots.reason[rows[place]] = "abandoned"
        return [int(row) for row in rows[ended]]

    def _end_stage(self, slots: _Slots, slot: int, waiting: Iterator[tuple[int, Job[T]]]) -> Iterator[T]:
        """Hand a stage's result to its job; begin the job's next stage, or the next job."""
        result = slots.result(slot)
        try:
            stage = slots.jobs[slot].send(result)
        except StopIteration as finished:
            yield finished.value
            yield from self._start_next_job(slots, slot, waiting)
        else:
            start = 0 if stage.restart else int(slots.end[slot]) - result.stopped
            slots.begin(slot, stage, start, self._stop_set(stage))

    def _start_next_job(self, slots: _Slots, slot: int, waiting: Iterator[tuple[int, Job[T]]]) -> Iterator[T]:
        for number, job in waiting:
            try:
                stage = next(job)
            except StopIteration as finished:
                yield finished.value  # a job without stages
                continue
            slots.jobs[slot], slots.job_number[slot], slots.active[slot] = job, number, True
            slots.begin(slot, stage, 0, self._stop_set(stage))
            return
        slots.active[slot] = False
        slots.position[slot] = 0

    def _stop_set(self, stage: Stage) -> int:
        """Row of the stop table for a stage's stop tokens; the few different sets are added as they come."""
        stops = self._verifier_stops if stage.stop_token_ids is None else stage.stop_token_ids
        if stops not in self._stop_sets:
            row = np.zeros((1, self._is_stop.shape[1]), dtype=np.bool_)
            row[0, _as_index(stops)] = True
            self._is_stop = np.concatenate([self._is_stop, row])
            self._stop_sets[stops] = len(self._is_stop) - 1
        return self._stop_sets[stops]


class _Slots:
    """The host's view of all slots, in arrays of [slots].

    `history` holds each slot's tokens by position, `position` is the next one to feed, `end` is behind the last known
    token. Tokens before `forced_until` are forced, those from there on are the stage's generated ones.
    """

    def __init__(self, slots: int, max_length: int) -> None:
        self.history = np.zeros((slots, max_length + 2), dtype=np.int64)
        self.position, self.end, self.forced_until, self.budget, self.stop_set, self.job_number = np.zeros((6, slots), dtype=np.int64)
        self.temperature, self.min_p = np.zeros((2, slots), dtype=np.float32)
        self.active = np.zeros(slots, dtype=np.bool_)
        self.reason: NDArray[Any] = np.full(slots, "", dtype="<U9")
        self.abandon_if: list[Callable[[Sequence[int]], bool] | None] = [None] * slots
        self.jobs: list[Any] = [None] * slots
        self._max_length = max_length

    def begin(self, slot: int, stage: Stage, start: int, stop_set: int) -> None:
        """Begin a stage whose forced tokens go to positions `start` and on."""
        forced = np.asarray(stage.forced, dtype=np.int64)
        until = start + len(forced)
        if not len(forced) or stage.max_new_tokens < 1:
            raise DataError("a generation stage needs at least one forced token and a budget of at least one new token")
        if until + stage.max_new_tokens > self._max_length:
            raise DataError(
                f"a stage of {len(forced)} forced and {stage.max_new_tokens} new tokens after {start} others does not fit into"
                f" {self._max_length} positions a slot; raise max_length or shorten it"
            )
        # What the slot has fed already and the stage would repeat (the system prompt, a kept stop token) stays in the
        # cache. The last forced token is always fed: its output is the first generated one.
        fed = self.history[slot, start : min(int(self.position[slot]), until - 1)]
        differing = np.flatnonzero(fed != forced[: len(fed)])
        self.position[slot] = start + (int(differing[0]) if len(differing) else len(fed))
        self.history[slot, start:until] = forced
        self.end[slot] = self.forced_until[slot] = until
        self.budget[slot] = stage.max_new_tokens
        self.temperature[slot], self.min_p[slot] = stage.temperature, stage.min_p
        self.stop_set[slot] = stop_set
        self.abandon_if[slot] = stage.abandon_if

    def generated(self, slot: int) -> list[int]:
        """The stage's generated tokens so far."""
        return self.history[slot, self.forced_until[slot] : self.end[slot]].tolist()  # type: ignore[no-any-return]

    def result(self, slot: int) -> StageResult:
        """The stage's result, once it has ended."""
        context = self.history[slot, : self.forced_until[slot]].tolist()
        return StageResult(context, self.generated(slot), str(self.reason[slot]))  # type: ignore[arg-type]


def _default_slots(verifier: Verifier, max_length: int) -> int:
    if verifier.device.type != "cuda":
        return 16
    probe = verifier.new_cache(1, 32)
    verifier.forward(torch.zeros((1, 1), dtype=torch.int64, device=verifier.device), probe)
    layers: list[Any] = list(probe.layers)
    position_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers) / probe.max_length
    sampling_bytes = 24 * verifier.vocab_size  # float32 logits, weights, their sums, and what lies between
    free, _ = torch.cuda.mem_get_info(verifier.device)
    return max(1, min(2048, int(0.6 * free / (max_length * position_bytes + sampling_bytes))))


def _as_index(ids: Collection[int]) -> NDArray[np.int64]:
    return np.fromiter(ids, dtype=np.int64, count=len(ids))
