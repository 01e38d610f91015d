"""How long a round takes on a machine, by rows and drafts: a measured grid, and what lies between its points."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from speculators.errors import ConfigError, DataError
from speculators.files import write_text_atomically
from speculators.json_values import whole_number

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class StepTimes:
    """Seconds of the two halves of a round.

    Between grid points times are linear, and beyond the last ones they go on as between the last two. More work never takes
    less time: smaller measurements are raised to those of less work.

    Attributes:
        rows: batch sizes, ascending.
        drafts: drafts a row, ascending from 0.
        draft_seconds: [rows, drafts], drafting that many tokens of every row.
        verify_seconds: [rows, drafts], verifying them with the anchor, accepting, and letting the drafter observe.
        machine: what was measured, for people.
        kind: "decode" where measured; "simulated" where made up.

    Raises:
        ConfigError: the grid is not ascending, its shape does not fit, or a time is not positive.
    """

    rows: tuple[int, ...]
    drafts: tuple[int, ...]
    draft_seconds: tuple[tuple[float, ...], ...]
    verify_seconds: tuple[tuple[float, ...], ...]
    machine: str = ""
    kind: str = "decode"

    def __post_init__(self) -> None:
        for name, axis, first in (("rows", self.rows, 1), ("drafts", self.drafts, 0)):
            if not axis or axis[0] < first or any(a >= b for a, b in pairwise(axis)):
                raise ConfigError(f"step times: {name} {list(axis)} must be ascending from {first} or more")
        if self.drafts[0] != 0:
            raise ConfigError(f"step times: drafts {list(self.drafts)} must begin at 0, the round without drafts")
        for name, grid, least in (("draft_seconds", self.draft_seconds, -1e-300), ("verify_seconds", self.verify_seconds, 0.0)):
            if len(grid) != len(self.rows) or any(len(line) != len(self.drafts) for line in grid):
                raise ConfigError(f"step times: {name} must hold {len(self.rows)} x {len(self.drafts)} numbers (rows x drafts)")
            if not all(least < seconds < float("inf") for line in grid for seconds in line):
                raise ConfigError(f"step times: {name} holds a time that is not positive and finite")

    @classmethod
    def affine(
        cls, fixed: float, a_token: float, *, draft_fixed: float = 0.0, draft_a_token: float = 0.0, max_rows: int = 2, max_drafts: int = 1
    ) -> StepTimes:
        """Verifying B tokens takes fixed + a_token * B seconds; drafting K > 0 tokens of R rows draft_fixed + draft_a_token * R * K."""
        rows, drafts = (1, max(2, max_rows)), (0, *sorted({1, max(1, max_drafts)}))
        return cls(
            rows,
            drafts,
            tuple(tuple(draft_fixed + draft_a_token * r * k if k else 0.0 for k in drafts) for r in rows),
            tuple(tuple(fixed + a_token * r * (1 + k) for k in drafts) for r in rows),
            "affine",
            "simulated",
        )

    def draft(self, rows: npt.ArrayLike, drafts: npt.ArrayLike) -> Array:
        """Seconds to draft `drafts` tokens of each of `rows` rows; the arguments broadcast."""
        return self._interpolate(self._draft, rows, drafts)

    def verify(self, rows: npt.ArrayLike, drafts: npt.ArrayLike) -> Array:
        """Seconds to verify `drafts` drafts and the anchor of each of `rows` rows; the arguments broadcast."""
        return self._interpolate(self._verify, rows, drafts)

    def round(self, rows: npt.ArrayLike, drafts: npt.ArrayLike) -> Array:
        """Seconds of a whole round."""
        return self.draft(rows, drafts) + self.verify(rows, drafts)

    def steps_per_second(self, rows: int, max_drafts: int) -> Array:
        """SPS(B) for B = 0 .. rows * (1 + max_drafts) tokens of `rows` requests, the draft pass of all `max_drafts` included.

        Entries below `rows`, which no step has, repeat that of `rows` tokens.
        """
        tokens = np.arange(rows * (1 + max_drafts) + 1)
        drafts = np.clip(tokens / rows - 1, 0, None)
        return np.asarray(1.0 / (self.draft(rows, max_drafts) + self.verify(rows, drafts)))

    @cached_property
    def _draft(self) -> Array:
        return _monotone(self.draft_seconds)

    @cached_property
    def _verify(self) -> Array:
        return _monotone(self.verify_seconds)

    def _interpolate(self, grid: Array, rows: npt.ArrayLike, drafts: npt.ArrayLike) -> Array:
        row, row_share = _locate(self.rows, rows)
        column, column_share = _locate(self.drafts, drafts)
        next_row, next_column = np.minimum(row + 1, grid.shape[0] - 1), np.minimum(column + 1, grid.shape[1] - 1)
        low = grid[row, column] + column_share * (grid[row, next_column] - grid[row, column])
        high = grid[next_row, column] + column_share * (grid[next_row, next_column] - grid[next_row, column])
        return np.asarray(low + row_share * (high - low), dtype=np.float64)

    def to_json(self) -> dict[str, Any]:
        """All fields, as JSON values."""
        return asdict(self)

    def save(self, path: Path) -> None:
        """Write as JSON, atomically."""
        write_text_atomically(path, json.dumps(self.to_json()) + "\n")

    @classmethod
    def load(cls, path: Path) -> StepTimes:
        """Read what `save` wrote.

        Raises:
            DataError: the file is missing or holds something else.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            rows, drafts = (tuple(whole_number(number, name) for number in data[name]) for name in ("rows", "drafts"))
            draft, verify = (tuple(tuple(map(float, line)) for line in data[name]) for name in ("draft_seconds", "verify_seconds"))
            return cls(rows, drafts, draft, verify, machine=str(data.get("machine", "")), kind=str(data.get("kind", "decode")))
        except FileNotFoundError:
            raise DataError(f"no step times at {path}: the file does not exist; write it with benchmarks/scheduling.py") from None
        except (OSError, ValueError, OverflowError, KeyError, TypeError, ConfigError) as error:
            raise DataError(f"{path} does not hold step times ({type(error).__name__}: {error}); measure them again") from None


def lower_convex_hull(seconds: Sequence[float] | Array) -> Array:
    """[n] -> [n]: the largest convex function below the times of 0, 1, .. n - 1 drafts, whose slopes do not fall."""
    times = np.asarray(seconds, dtype=np.float64)
    kept: list[int] = []
    for index in range(len(times)):
        while len(kept) >= 2 and (times[kept[-1]] - times[kept[-2]]) * (index - kept[-1]) >= (times[index] - times[kept[-1]]) * (
            kept[-1] - kept[-2]
        ):
            kept.pop()
        kept.append(index)
    return np.interp(np.arange(len(times)), kept, times[kept])


def _monotone(grid: Sequence[Sequence[float]]) -> Array:
    return np.maximum.accumulate(np.maximum.accumulate(np.asarray(grid, dtype=np.float64), axis=1), axis=0)


def _locate(axis: Sequence[int], values: npt.ArrayLike) -> tuple[npt.NDArray[np.int64], Array]:
    """Index of the grid point below each value, and the share of the way to the next; above 1 beyond the last."""
    points, wanted = np.asarray(axis, dtype=np.float64), np.asarray(values, dtype=np.float64)
    index = np.clip(np.searchsorted(points, wanted, side="right") - 1, 0, max(0, len(points) - 2))
    following = np.minimum(index + 1, len(points) - 1)
    gap = np.where(following > index, points[following] - points[index], 1.0)
    return index, np.where(following > index, np.maximum(wanted - points[index], 0.0) / gap, 0.0)
