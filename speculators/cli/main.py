"""`speculators`: assembles the subcommands, and turns the library's errors into one sentence and exit code 2."""

from __future__ import annotations

import errno
from typing import Any

import typer
from typer.core import TyperGroup

from speculators.cli import calibrate, convert, data, demo, evaluate, generate, inspect, methods, parity, serve, simulate, train
from speculators.errors import SpeculatorsError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class OneSentenceErrors(TyperGroup):
    """A command group that prints bad input and a full disk as one sentence instead of a traceback. Other exceptions are bugs and pass."""

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen subcommand."""
        try:
            return super().invoke(ctx)
        except SpeculatorsError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(getattr(error, "exit_code", 2)) from None
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            typer.echo(f"error: cannot write {error.filename or 'the result'} ({error.strerror}); make room and start again", err=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=OneSentenceErrors,
    help="Parallel drafters for speculative decoding: train, decode losslessly, compare.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo.demo)
app.command("methods")(methods.methods)
app.add_typer(data.app, name="data")
app.command("train")(train.train)
app.command("generate")(generate.generate)
app.command("evaluate")(evaluate.evaluate)
app.command("calibrate")(calibrate.calibrate)
app.command("simulate")(simulate.simulate)
app.command("inspect")(inspect.inspect)
app.command("convert")(convert.convert)
app.command("serve", cls=serve.ServeCommand, context_settings=serve.CONTEXT)(serve.serve)
app.command("parity")(parity.parity)


if __name__ == "__main__":
    app()
