"""`python -m speculators`, and `torchrun -m speculators`: the same as the command."""

from speculators.cli.main import app

app()
