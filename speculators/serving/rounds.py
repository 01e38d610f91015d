"""Watch a running vLLM engine: which drafts it verified in every round, and what came of them. The same for both runners."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ServedRound:
    """One verification of one request.

    Attributes:
        length: tokens known before it, prompt and anchor included.
        drafts: what was verified.
        emitted: tokens gained: the accepted drafts and one of the verifier's own. A token budget or a stop token may cut
            the reply short of them.
    """

    length: int
    drafts: tuple[int, ...]
    emitted: tuple[int, ...]

    @property
    def accepted(self) -> int:
        """Drafts accepted."""
        return len(self.emitted) - 1


@contextmanager
def recorded_rounds(llm: Any) -> Iterator[dict[str, list[ServedRound]]]:
    """While open, every round of every request of an offline `vllm.LLM` is noted, by request id.

    The engine must run in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0) and schedule synchronously
    (`async_scheduling=False`), so that drafts are on the host when they are verified.
    """
    core = llm.llm_engine.engine_core.engine_core
    scheduler, runner = core.scheduler, core.model_executor.driver_worker.worker.model_runner
    rounds: dict[str, list[ServedRound]] = {}
    scheduled: dict[str, tuple[int, ...]] = {}
    schedule, update = scheduler.schedule, scheduler.update_from_output

    def schedule_and_note(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        scheduled.clear()
        for request, drafts in output.scheduled_spec_decode_tokens.items():
            scheduled[request] = _drafts(runner, request, drafts)
        return output

    def update_and_note(output: Any, result: Any) -> Any:
        for request, drafts in scheduled.items():
            emitted = tuple(map(int, result.sampled_token_ids[result.req_id_to_index[request]]))
            if emitted and request in scheduler.requests:
                rounds.setdefault(request, []).append(ServedRound(scheduler.requests[request].num_tokens, drafts, emitted))
        return update(output, result)

    scheduler.schedule, scheduler.update_from_output = schedule_and_note, update_and_note
    try:
        yield rounds
    finally:
        del scheduler.schedule, scheduler.update_from_output


def _drafts(runner: Any, request: str, scheduled: list[int]) -> tuple[int, ...]:
    """The V1 scheduler holds the drafts; the V2 runner keeps them and schedules placeholders."""
    if not any(token < 0 for token in scheduled):
        return tuple(map(int, scheduled))
    states = runner.req_states
    row = states.draft_tokens[states.req_id_to_index[request]]
    return tuple(map(int, row[: len(scheduled)].tolist()))
