"""Rows of an evaluation table: two a run, one without looping prompts and one with all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from speculators.evaluation import metrics
from speculators.evaluation.runs import Run

STANDARD_MAX_NEW_TOKENS = 128


class Row(TypedDict):
    """One method on one prompt set.

    `prompts` names the set, "all prompts" where looping ones are kept, and the token budget where it is not 128.
    `kind` says where the numbers come from: here always "decode", real decoding in the engine.
    """

    method: str
    checkpoint: str | None
    prompts: str
    k: int
    temperature: float
    acceptance_length: float | None
    acceptance_by_position: list[float | None]
    conditional_acceptance_by_position: list[float | None]
    tokens_per_second: float | None
    baseline_tokens_per_second: float | None
    speedup: float | None
    token_identical: bool | None
    near_ties: int | None
    degenerate_prompts: int
    parameters: int
    kind: str


def rows_of(runs: Sequence[Run], baselines: Sequence[Run]) -> list[Row]:
    """Two rows a run, in the order of `runs`.

    Args:
        runs: what the table shows.
        baselines: runs among which the plain decoding of the same set, temperature and dtype is found, if any.
    """
    plain = {_contract(run): run for run in baselines if run.method == "plain"}
    return [row_of(run, plain.get(_contract(run)), exclude_degenerate=exclude) for run in runs for exclude in (True, False)]


def row_of(run: Run, baseline: Run | None, *, exclude_degenerate: bool) -> Row:
    """One row. `baseline` is plain decoding of the same prompts on the same contract."""
    chosen = run.select(exclude_degenerate=exclude_degenerate)
    rounds = [run.rounds[i] for i in chosen]
    label = run.prompts if exclude_degenerate else f"{run.prompts}, all prompts"
    if run.max_new_tokens != STANDARD_MAX_NEW_TOKENS:
        label += f", {run.max_new_tokens} tokens"
    speed = run.tokens_per_second(chosen)
    baseline_speed = baseline.tokens_per_second(chosen) if baseline else None
    return Row(
        method=run.method,
        checkpoint=run.checkpoint,
        prompts=label,
        k=run.k,
        temperature=run.temperature,
        acceptance_length=metrics.acceptance_length(rounds),
        acceptance_by_position=metrics.acceptance_by_position(rounds, run.k),
        conditional_acceptance_by_position=metrics.conditional_acceptance_by_position(rounds, run.k),
        tokens_per_second=speed,
        baseline_tokens_per_second=baseline_speed,
        speedup=speed / baseline_speed if speed and baseline_speed else None,
        token_identical=None if run.identical is None or not chosen else all(run.identical[i] for i in chosen),
        near_ties=None if run.near_tie is None else sum(run.near_tie[i] for i in chosen),
        degenerate_prompts=sum(run.degenerate),
        parameters=run.parameters,
        kind="decode",
    )


def _contract(run: Run) -> tuple[object, ...]:
    return run.verifier, run.prompts, run.prompt_ids, run.temperature, run.max_new_tokens, run.batch_size, run.dtype, run.device
