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


def terminal_tables(rows: Sequence[Row], title: str) -> list[Table]:
    """Rich tables that fit a terminal: what every row reached, and acceptance by draft position without looping prompts."""
    from rich import box
    from rich.table import Table

    kinds = ", ".join(sorted({row["kind"] for row in rows}))
    overview = Table(title=f"{title}, kind: {kinds}", box=box.SIMPLE, collapse_padding=True, pad_edge=False)
    overview.add_column("method", no_wrap=True)
    overview.add_column("prompts", min_width=8)
    for name in ("K", "acceptance length", "tokens/s", "speed-up", "identical", "weights"):
        overview.add_column(name, justify="right", min_width=max(map(len, name.split())))
    for row in rows:
        overview.add_row(
            row_name(row),
            row["prompts"],
            str(row["k"]),
            number(row["acceptance_length"]),
            number(row["tokens_per_second"], 1),
            "-" if row["speedup"] is None else f"{row['speedup']:.2f}x",
            identity_text(row),
            parameters_text(row["parameters"]),
        )
    positions = max(len(row["acceptance_by_position"]) for row in rows)
    survival = Table(title=f"acceptance by draft position, kind: {kinds}", box=box.SIMPLE, collapse_padding=True, pad_edge=False)
    survival.add_column("method", no_wrap=True)
    survival.add_column("prompts")
    for position in range(1, positions + 1):
        survival.add_column(str(position), justify="right")
    for row in rows:
        if "all prompts" not in row["prompts"] and row["acceptance_by_position"]:
            survival.add_row(row_name(row), row["prompts"], *(number(value) for value in row["acceptance_by_position"]))
    return [overview, survival]


def narrow_table(title: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    """A Rich table of many columns that loses no digit on a narrow terminal: headers have a word a line, and cells fold."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, padding=0)
    for position, name in enumerate(header):
        table.add_column(name.replace(" ", "\n"), overflow="fold", justify="right" if position else "left")
    for line in lines:
        table.add_row(*line)
    return table


def row_name(row: Row) -> str:
    """The method, and the checkpoint folder's name where that says more."""
    folder = None if row["checkpoint"] is None else Path(row["checkpoint"]).name
    return row["method"] if folder in (None, row["method"]) else f"{row['method']} ({folder})"


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
    """Sentences under a table: what was left out, drafters that do not beat prompt lookup, outputs that differ from plain decoding."""
    looping = {row["prompts"]: row["degenerate_prompts"] for row in rows if "all prompts" not in row["prompts"]}
    sentences = [f"{prompts}: {count} looping prompts left out, except under 'all prompts'." for prompts, count in looping.items() if count]
    for row in below_prompt_lookup(rows):
        where = f"{row['prompts']} (K = {row['k']}, T = {row['temperature']:g})"
        sentences.append(f"{row['method']} does not beat prompt lookup on {where}: it fails there.")
    for row in rows:
        if row["token_identical"] is False:
            sentences.append(f"{row['method']} differs from plain decoding on {row['prompts']} (K = {row['k']}).")
    return sentences
