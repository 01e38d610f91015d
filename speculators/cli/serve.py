"""`speculators serve`: check a drafter and its verifier, then start `vllm serve` with them, or write deployment files."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from speculators.cli.common import JsonOption, check_json_path, write_json
from speculators.errors import ConfigError

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": False}


class ServeCommand(TyperCommand):
    """A command whose arguments behind `--`, and no others, are left for vLLM, in `context.args`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Cut the arguments at the first `--`, and refuse words in front of it that this command does not take.

        Raises:
            ConfigError: naming the first of them.
        """
        end = args.index("--") if "--" in args else len(args)
        ours, vllm = args[:end], args[end + 1 :]
        super().parse_args(ctx, ours)
        if ctx.args:
            raise ConfigError(f"serve takes one CHECKPOINT, so it has no use for {ctx.args[0]!r}; vLLM's own arguments go behind `--`")
        ctx.args = vllm
        return vllm


def serve(
    context: typer.Context,
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="The drafter: folder or Hub name. Behind `--`, vLLM's arguments.")
    ],
    verifier: Annotated[str | None, typer.Option(help="Verifier: folder or Hub name. Default: the one the checkpoint names.")] = None,
    k: Annotated[int | None, typer.Option("--k", help="Draft tokens a round. Default: the checkpoint's.")] = None,
    draft_sampling: Annotated[str, typer.Option(help="How drafts are drawn at temperature above 0: greedy or probabilistic.")] = "greedy",
    attention_backend: Annotated[str | None, typer.Option(help="Attention backend of the drafter, as vLLM spells it.")] = None,
    adaptive_verification: Annotated[
        bool, typer.Option("--adaptive-verification", help="Verify as many drafts as the confidence head finds worth it (GPU).")
    ] = False,
    step_times: Annotated[
        Path | None, typer.Option(help="Let K follow the batch size: step times that benchmarks/scheduling.py measured, as JSON.")
    ] = None,
    vllm_version: Annotated[str | None, typer.Option(help="Check for this vLLM release. Default: the installed one.")] = None,
    plugin: Annotated[bool, typer.Option(help="Whether vLLM runs where this library is installed, and so finds its plugin.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command, run nothing.")] = False,
    target: Annotated[str | None, typer.Option(help="Instead of running: docker, compose, sagemaker or sglang.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for the files of --target.")] = None,
    json: JsonOption = None,
) -> None:
    """Serve a verifier with a drafter in vLLM, after checking that vLLM will draft as the drafter was trained."""
    check_json_path(json)
    from speculators.serving.deployment import deploy
    from speculators.serving.plan import plan
    from speculators.serving.versions import NEWEST, installed

    version = vllm_version or (NEWEST if target else installed() or NEWEST)
    checked = plan(
        checkpoint,
        verifier=verifier,
        num_draft_tokens=k,
        draft_sampling=draft_sampling,
        attention_backend=attention_backend,
        adaptive_verification=adaptive_verification,
        step_times=step_times,
        plugin=plugin,
        version=version,
        arguments=context.args,
    )
    for note in checked.notes:
        typer.echo(f"note: {note}", err=True)
    result = {"command": "serve", "shell": checked.shell, "plan": vars(checked)}
    if target is not None:
        for line in deploy(checked, target, output):
            typer.echo(line)
        return write_json(json, result)
    if output is not None:
        raise ConfigError("--output is the folder for the files of --target; name a target, or leave it out")
    typer.echo(checked.shell)
    write_json(json, result)
    if not dry_run:
        _run(checked.command, checked.environment)
    return None


def _run(command: list[str], environment: dict[str, str]) -> None:
    """Become vLLM: signals, output and exit code are its own."""
    beside = str(Path(sys.executable).parent)
    program = shutil.which("vllm", path=os.pathsep.join([beside, os.environ.get("PATH", "")]))
    if program is None:
        raise ConfigError("vLLM is not installed here: pip install vllm, or pass --dry-run to see the command only")
    sys.stdout.flush()
    os.execve(program, command, {**os.environ, **environment})
