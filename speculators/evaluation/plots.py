"""Two figures that compare drafters on one contract. Each says on itself what its numbers are (`kind`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from speculators.errors import DataError
from speculators.evaluation.rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_acceptance_by_position(rows: Sequence[Row], *, conditional: bool = False) -> Figure:
    """One line a row: acceptance of the draft at position 1 to K.

    Args:
        rows: rows of one prompt set and temperature; one line each.
        conditional: among rounds that accepted every earlier draft, instead of over all rounds.

    Raises:
        DataError: no rows, or rows of different kinds.
    """
    key = "conditional_acceptance_by_position" if conditional else "acceptance_by_position"
    figure, kind = _figure(rows)
    axes = figure.subplots()
    for row in rows:
        values = row[key]  # type: ignore[literal-required]
        axes.plot(range(1, len(values) + 1), [float("nan") if v is None else v for v in values], marker="o", label=_label(row))
    axes.set_xlabel("draft position")
    axes.set_ylabel("conditional acceptance" if conditional else "acceptance (this draft and all before it)")
    axes.set_ylim(0, 1)
    axes.set_title(f"{rows[0]['prompts']}, T = {rows[0]['temperature']:g}, {kind}")
    _finish(axes)
    return figure


def plot_acceptance_length_by_k(rows: Sequence[Row]) -> Figure:
    """One line a method: acceptance length against K, the number of draft tokens a round.

    Args:
        rows: rows of one prompt set and temperature at several K.

    Raises:
        DataError: no rows, or rows of different kinds.
    """
    figure, kind = _figure(rows)
    axes = figure.subplots()
    for label in dict.fromkeys(_label(row) for row in rows):
        points = sorted((row["k"], row["acceptance_length"] or float("nan")) for row in rows if _label(row) == label)
        axes.plot([k for k, _ in points], [length for _, length in points], marker="o", label=label)
    axes.set_xlabel("K (draft tokens a round)")
    axes.set_ylabel("acceptance length (bonus token included)")
    axes.set_title(f"{rows[0]['prompts']}, T = {rows[0]['temperature']:g}, {kind}")
    _finish(axes)
    return figure


def _figure(rows: Sequence[Row]) -> tuple[Figure, str]:
    """An empty figure outside pyplot's global state, and the one kind of the rows."""
    from matplotlib.figure import Figure

    kinds = {row["kind"] for row in rows}
    if len(kinds) != 1:
        raise DataError(f"a plot shows numbers of one kind, got {', '.join(sorted(kinds)) or 'no rows'}; plot each kind by itself")
    return Figure(figsize=(7, 4.2), layout="constrained"), kinds.pop()


def _finish(axes: Axes) -> None:
    """Whole numbers on the horizontal axis, a light grid, the legend."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend()


def _label(row: Row) -> str:
    return row["method"] if row["parameters"] == 0 else f"{row['method']} ({row['parameters'] / 1e6:.1f} M)"
