"""`Run`: everything one method did on one prompt set, and its compact JSON form. Every table is rebuilt from runs.

A run keeps each round of each row, so a new metric needs no new decoding. On disk a row is a string with one
base-36 digit a round: `accepted`, and `proposed` without its leading digits that equal K. Every round before the
last emits `accepted + 1` tokens, so of `emitted` only the last round's count is kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speculators.decoding.statistics import Round
from speculators.errors import DataError
from speculators.files import write_text_atomically

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
FORMAT = 1


@dataclass(frozen=True)
class Run:
    """One method on one prompt set at one K and temperature.

    Attributes:
        verifier: as the user named it.
        method: registered name, `prompt_lookup`, or `plain` for decoding without a drafter.
        checkpoint: folder or Hub name of the drafter; None where it has none.
        parameters: weights the drafter owns; what it borrows from the verifier is not counted.
        prompts: name of the prompt set.
        prompt_ids: one id a row.
        k: draft tokens a round asked for; 0 for plain decoding.
        temperature: 0 is greedy.
        confidence_threshold: blocks were cut before their first slot below it; 0 cuts nothing.
        seed: of sampling.
        max_new_tokens: token budget a row.
        batch_size: rows decoded together.
        dtype: of verifier and drafter, e.g. "float32".
        device: name of the machine's processor or accelerator.
        rounds: per row, its rounds.
        degenerate: per row, whether plain greedy output loops.
        identical: per row, whether the output equals plain greedy decoding, near ties included; None when sampling.
        near_tie: per row, whether it diverged where plain decoding's top two logits tie; None when sampling.
        batch_seconds: decode wall time of each batch of consecutive rows, prefill excluded; None where the rows
            were decoded together with other prompt sets, so that no time belongs to this set alone.
    """

    verifier: str
    method: str
    checkpoint: str | None
    parameters: int
    prompts: str
    prompt_ids: tuple[str, ...]
    k: int
    temperature: float
    confidence_threshold: float
    seed: int
    max_new_tokens: int
    batch_size: int
    dtype: str
    device: str
    rounds: tuple[tuple[Round, ...], ...]
    degenerate: tuple[bool, ...]
    identical: tuple[bool, ...] | None
    near_tie: tuple[bool, ...] | None
    batch_seconds: tuple[float, ...] | None

    def select(self, *, exclude_degenerate: bool) -> list[int]:
        """Row indices: all of them, or those whose plain greedy output does not loop."""
        return [i for i, loops in enumerate(self.degenerate) if not (loops and exclude_degenerate)]

    def tokens_per_second(self, rows: Sequence[int]) -> float | None:
        """Tokens emitted after the first / decode seconds.

        Decoded one row at a time, the rate is that of `rows` alone. A larger batch has one time for all its rows,
        so there the rate is that of the whole set, whatever `rows` says.
        """
        if self.batch_seconds is None:
            return None
        chosen = list(rows) if self.batch_size == 1 else list(range(len(self.rounds)))
        seconds = sum(self.batch_seconds[i] for i in chosen) if self.batch_size == 1 else sum(self.batch_seconds)
        tokens = sum(a_round.emitted for i in chosen for a_round in self.rounds[i])
        return tokens / seconds if seconds > 0 and tokens else None


def to_json(run: Run) -> dict[str, Any]:
    """The compact form; see the module's docstring."""
    return {
        "verifier": run.verifier,
        "method": run.method,
        "checkpoint": run.checkpoint,
        "parameters": run.parameters,
        "prompts": run.prompts,
        "prompt_ids": list(run.prompt_ids),
        "k": run.k,
        "temperature": run.temperature,
        "confidence_threshold": run.confidence_threshold,
        "seed": run.seed,
        "max_new_tokens": run.max_new_tokens,
        "batch_size": run.batch_size,
        "dtype": run.dtype,
        "device": run.device,
        "accepted": [_digits(a_round.accepted for a_round in row) for row in run.rounds],
        "proposed": [_digits(a_round.proposed for a_round in row).lstrip(DIGITS[run.k]) for row in run.rounds],
        "last_emitted": [row[-1].emitted if row else 0 for row in run.rounds],
        "degenerate": _bits(run.degenerate),
        "identical": _bits(run.identical),
        "near_tie": _bits(run.near_tie),
        "batch_seconds": None if run.batch_seconds is None else [round(seconds, 4) for seconds in run.batch_seconds],
    }


def from_json(data: dict[str, Any]) -> Run:
    """The inverse of `to_json`."""
    rows = zip(data["accepted"], data["proposed"], data["last_emitted"], strict=True)
    fields = {key: value for key, value in data.items() if key not in ("accepted", "proposed", "last_emitted")}
    seconds = data["batch_seconds"]
    return Run(
        **{
            **fields,
            "prompt_ids": tuple(data["prompt_ids"]),
            "rounds": tuple(_rounds(accepted, of_row, last, data["k"]) for accepted, of_row, last in rows),
            "degenerate": tuple(bit == "1" for bit in data["degenerate"]),
            "identical": _flags(data["identical"]),
            "near_tie": _flags(data["near_tie"]),
            "batch_seconds": None if seconds is None else tuple(seconds),
        }
    )


def save_runs(runs: Sequence[Run], path: Path) -> None:
    """Write runs as one JSON file, one run a line, atomically."""
    lines = ",\n".join(json.dumps(to_json(run), separators=(",", ":")) for run in runs)
    write_text_atomically(path, f'{{"format":{FORMAT},"runs":[\n{lines}\n]}}\n')


def load_runs(path: Path) -> list[Run]:
    """Read what `save_runs` wrote.

    Raises:
        DataError: the file is missing, or holds something else.
    """
    try:
        data = json.loads(path.read_text())
        return [from_json(run) for run in data["runs"]]
    except FileNotFoundError:
        raise DataError(f"no evaluation runs at {path}: the file does not exist; write it with `speculators evaluate --runs`") from None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} does not hold evaluation runs ({type(error).__name__}: {error}); evaluate again") from None


def _digits(counts: Iterable[int]) -> str:
    return "".join(DIGITS[count] for count in counts)


def _rounds(accepted: str, proposed: str, last_emitted: int, k: int) -> tuple[Round, ...]:
    counts = [DIGITS.index(digit) for digit in accepted]
    asked = [DIGITS.index(digit) for digit in proposed.rjust(len(accepted), DIGITS[k])]
    emitted = [*(count + 1 for count in counts[:-1]), last_emitted][: len(counts)]
    return tuple(Round(proposed=p, accepted=a, emitted=e) for p, a, e in zip(asked, counts, emitted, strict=True))


def _bits(flags: Sequence[bool] | None) -> str | None:
    return None if flags is None else "".join("1" if flag else "0" for flag in flags)


def _flags(bits: str | None) -> tuple[bool, ...] | None:
    return None if bits is None else tuple(bit == "1" for bit in bits)
