"""`speculators data`: make training data."""

from __future__ import annotations

import typer

app = typer.Typer(help="Make training data.", no_args_is_help=True)


@app.callback()
def data() -> None:
    """Make training data."""


@app.command("synthesize")
def synthesize() -> None:
    """x"""
