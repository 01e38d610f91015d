"""Evaluation rows as text: a terminal table, a Markdown table, and the remarks that belong under either."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from speculators.evaluation.rows import Row

if TYPE_CHECKING:
    from rich.table import Table


def number(value: float | None, digits: int = 2) -> str:
    """A number for a table cell; a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def parameters_text(count: int) -> str:
    """A parameter count in millions; 0 for a drafter without weights."""
    return "0" if count == 0 else f"{count / 1e6:.2f} M"


def identity_text(row: Row) -> str:
    """Whether outputs equal plain decoding, with the near ties among them."""
    if row["token_identical"] is None:
        return "-"
    ties = row["near_ties"] or 0
    return ("yes" if row["token_identical"] else "NO") + (f" ({ties} near tie{'s' * (ties > 1)})" if ties else "")


def row_cells(row: Row) -> list[str]:
    """The cells of one row, as `HEADER` names them."""
    survival = " ".join("-" if value is None else f"{value:.2f}".removeprefix("0") for value in row["acceptance_by_position"])
    return [
        row["method"] if row["checkpoint"] is None else f"{row['method']} ({Path(row['checkpoint']).name})",
        row["prompts"],
        str(row["k"]),
        number(row["temperature"], 1),
        number(row["acceptance_length"]),
        survival,
        number(row["tokens_per_second"], 1),
        "-" if row["speedup"] is None else f"{row['speedup']:.2f}x",
        identity_text(row),
        str(row["degenerate_prompts"]),
        parameters_text(row["parameters"]),
        row["kind"],
    ]


HEADER = (
    "method",
    "prompts",
    "K",
    "T",
    "acceptance length",
    "acceptance by position",
    "tokens/s",
    "speed-up",
    "identical",
    "looping prompts",
    "parameters",
    "kind",
)


def terminal_table(rows: Sequence[Row], title: str) -> Table:
    """A rich table of the rows."""
    from rich.table import Table

    table = Table(title=title)
    for index, name in enumerate(HEADER):
        table.add_column(name, justify="left" if index in (0, 1, 5, 8, 11) else "right", overflow="fold")
    for row in rows:
        table.add_row(*row_cells(row))
    return table


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; columns after the first are right-aligned."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def below_prompt_lookup(rows: Sequence[Row]) -> list[Row]:
    """Rows of drafters whose acceptance length does not exceed prompt lookup's on the same prompts, K and temperature."""

    def contract(row: Row) -> tuple[object, ...]:
        return row["prompts"], row["k"], row["temperature"]

    untrained = {contract(row): row["acceptance_length"] for row in rows if row["method"] == "prompt_lookup"}
    failing = []
    for row in rows:
        length, limit = row["acceptance_length"], untrained.get(contract(row))
        if row["method"] not in ("prompt_lookup", "plain") and length is not None and limit is not None and length <= limit:
            failing.append(row)
    return failing


def remarks(rows: Sequence[Row]) -> list[str]:
    """Sentences under a table: drafters that do not beat prompt lookup, outputs that differ from plain decoding."""
    sentences = [
        f"{row['method']} does not beat prompt lookup on {row['prompts']} (K = {row['k']}, T = {row['temperature']:g}): it fails there."
        for row in below_prompt_lookup(rows)
    ]
    sentences += [
        f"{row['method']} differs from plain decoding on {row['prompts']} (K = {row['k']})."
        for row in rows
        if row["token_identical"] is False
    ]
    return sentences
