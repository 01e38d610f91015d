"""`speculators simulate`: what a drafter and a length policy are worth under load, from measured inputs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from speculators.cli.common import JsonOption, SeedOption, check_json_path, write_json
from speculators.errors import ConfigError

if TYPE_CHECKING:
    from speculators.serving.drafter_profile import DrafterProfile
    from speculators.serving.workload import Workload


def simulate(
    drafter: Annotated[
        list[str], typer.Option(help="NAME=FILE, a JSON file of `calibrate`, or NAME=0.9,0.8,.. acceptances; repeat for several.")
    ],
    step_times: Annotated[
        list[str], typer.Option(help="FILE of measured step times, or NAME=FILE for one drafter; see benchmarks/scheduling.py.")
    ],
    policy: Annotated[list[str] | None, typer.Option(help="none, fixed:K, threshold:C, scheduler or auto. Default: a comparison.")] = None,
    users: Annotated[list[int] | None, typer.Option(help="Users who are never idle; repeat. Default: 1, 2, 4 .. 64.")] = None,
    arrivals: Annotated[
        list[str] | None, typer.Option(help="Instead of users: poisson:RATE, burst:RATE:SIZE, or a trace (JSON lines); repeat.")
    ] = None,
    gpus: Annotated[int, typer.Option(help="GPUs, each with the whole model.")] = 1,
    max_batch: Annotated[int, typer.Option(help="Most requests in a GPU's batch.")] = 256,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a reply, where no trace says it.")] = 256,
    requests: Annotated[int, typer.Option(min=1, help="Requests a user, or a hundredth of those of an arrival process.")] = 3,
    temperature: Annotated[float | None, typer.Option(help="Which of a file's calibrations. Default: its first.")] = None,
    engine: Annotated[bool, typer.Option("--engine", help="Pad rows and keep finished ones, as this library's engine does.")] = False,
    plots: Annotated[Path | None, typer.Option(help="Folder for figures (PNG); needs matplotlib.")] = None,
    seed: SeedOption = 0,
    json: JsonOption = None,
) -> None:
    """Simulate a cluster under load: throughput, the speed a user sees, and latency. Every number is `simulated`."""
    check_json_path(json)
    if plots is not None:
        from speculators.cli.calibrate import check_plots

        check_plots(plots)
    from rich.console import Console

    from speculators.decoding.step_times import StepTimes
    from speculators.evaluation.report import narrow_table
    from speculators.serving.simulation_report import (
        HEADER,
        SimulationRow,
        cells,
        origin_of_times,
        plot_concurrency,
        plot_frontier,
        read_profile,
    )
    from speculators.serving.simulator import make_policy
    from speculators.serving.simulator import simulate as run
    from speculators.serving.workload import Workload

    if users and arrivals:
        raise ConfigError("--users and --arrivals each say what the load is; use one of them")
    tables = {name: StepTimes.load(Path(path)) for name, path in (_named(text, "") for text in step_times)}
    profiles: list[DrafterProfile] = []
    for text in drafter:
        name, source = _named(text)
        times = tables.get(name, tables.get(""))
        if times is None:
            raise ConfigError(f"drafter {name!r} has no step times: pass --step-times FILE, or --step-times {name}=FILE")
        if name in {profile.name for profile in profiles}:
            raise ConfigError(f"two drafters are called {name!r}, and their rows would look alike; name them apart")
        profiles.append(read_profile(name, source, times, temperature))
    loads: list[tuple[float, Workload]]
    if arrivals:
        loads = [_arrivals(text, output_tokens, 100 * requests, seed) for text in arrivals]
    else:
        counts = sorted(set(users or [2**power for power in range(7)]))
        loads = [(float(count), Workload.closed_loop(count, output_tokens, requests)) for count in counts]
    rows = []
    for profile in profiles:
        names = policy or [
            "none",
            *(f"fixed:{k}" for k in sorted({1, 3, profile.max_drafts}) if k <= profile.max_drafts),
            "scheduler",
            "auto",
        ]
        for name in names:
            chosen = make_policy(name, profile, max_batch)
            for load, workload in loads:
                result = run(workload, profile, chosen, gpus=gpus, max_batch=max_batch, packed=not engine, seed=seed)
                rows.append(SimulationRow.of(result, profile.name, chosen.name, load, workload.users is not None, gpus))
    cluster, origin = f"{gpus} GPU{'s' * (gpus > 1)}", origin_of_times([profile.times for profile in profiles])
    title = f"simulated: {cluster}, batches of at most {max_batch}; {origin}"
    Console().print(narrow_table(title, HEADER, [cells(row) for row in rows]))
    if plots is not None:
        title = f"{cluster}, {origin}"
        plot_frontier(rows, title).savefig(plots / "frontier.png", dpi=110)
        plot_concurrency(rows, title).savefig(plots / "concurrency.png", dpi=110)
    write_json(json, {"command": "simulate", "kind": "simulated", "rows": [asdict(row) for row in rows]})


def _named(text: str, default: str | None = None) -> tuple[str, str]:
    """NAME=VALUE; without "=" the default name, where there is one."""
    name, equals, value = text.partition("=")
    if equals and name and value:
        return name, value
    if default is None or equals:
        raise ConfigError(f"--drafter {text!r} must have the form NAME=FILE or NAME=0.9,0.8")
    return default, text


def _arrivals(text: str, output_tokens: int, requests: int, seed: int) -> tuple[float, Workload]:
    """The load in requests a second, and its workload."""
    from speculators.serving.workload import Workload

    kind, *numbers = text.split(":")
    if kind not in ("poisson", "burst"):
        workload = Workload.read(Path(text))
        return len(workload) / max(float(workload.arrival[-1]), 1e-9), workload
    try:
        rate = float(numbers[0])
        burst = int(numbers[1]) if kind == "burst" else 1
        if len(numbers) != (2 if kind == "burst" else 1):
            raise ValueError
    except (ValueError, IndexError):
        raise ConfigError(f"--arrivals {text!r} must be poisson:RATE, burst:RATE:SIZE, or a trace file") from None
    return rate, Workload.poisson(rate, requests, output_tokens, seed, burst)
