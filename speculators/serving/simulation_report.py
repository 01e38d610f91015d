"""Simulations as rows, tables and figures. Every one of them says `simulated`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from speculators.decoding.calibration import ALL_DOMAINS
from speculators.decoding.step_times import StepTimes
from speculators.errors import ConfigError, DataError
from speculators.serving.drafter_profile import DrafterProfile
from speculators.serving.simulator import KIND, Simulation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class SimulationRow:
    """One drafter and policy under one load.

    Attributes:
        drafter, policy: names.
        load: users in a closed loop, or requests a second.
        closed: which of the two.
        gpus: of the cluster.
        tokens_per_second: of the cluster.
        tokens_per_second_a_user: mean over requests, from joining a batch to the last token.
        verified_a_step: mean drafts verified of a row and step. mean_batch: mean rows of a step.
        latency_seconds, first_token_seconds: percentiles 50, 90 and 99, from arrival; queueing counts, prefill does not.
        kind: "simulated".
    """

    drafter: str
    policy: str
    load: float
    closed: bool
    gpus: int
    tokens_per_second: float
    tokens_per_second_a_user: float
    verified_a_step: float
    mean_batch: float
    latency_seconds: tuple[float, ...]
    first_token_seconds: tuple[float, ...]
    kind: str = KIND

    @classmethod
    def of(cls, result: Simulation, drafter: str, policy: str, load: float, closed: bool, gpus: int) -> SimulationRow:
        """The row of a simulation."""
        return cls(
            drafter,
            policy,
            load,
            closed,
            gpus,
            result.tokens_per_second,
            result.tokens_per_second_a_user,
            result.verified_a_step,
            result.mean_batch,
            tuple(result.latency(PERCENTILES)),
            tuple(result.time_to_first_token(PERCENTILES)),
        )


HEADER = ("drafter", "policy", "load", "tokens/s", "tokens/s a user", "drafts a step", "rows a step", "p50 s", "p99 s", "first p50 s")


def cells(row: SimulationRow) -> list[str]:
    """One line of the table under `HEADER`."""
    return [
        row.drafter,
        row.policy,
        f"{row.load:g} users" if row.closed else f"{row.load:g}/s",
        *(f"{row.tokens_per_second:,.1f}", f"{row.tokens_per_second_a_user:.1f}", f"{row.verified_a_step:.2f}", f"{row.mean_batch:.1f}"),
        *(f"{row.latency_seconds[0]:.2f}", f"{row.latency_seconds[-1]:.2f}", f"{row.first_token_seconds[0]:.3f}"),
    ]


def origin_of_times(tables: Sequence[StepTimes]) -> str:
    """Where the step times of a simulation come from: measured, and on what, or assumed; each origin once."""
    origins = []
    for times in tables:
        if times.kind == "decode":
            origins.append(f"step times measured on {times.machine or 'a machine that the file does not name'}")
        else:
            origins.append("assumed step times" + (f" ({times.machine})" if times.machine else ""))
    return "; ".join(dict.fromkeys(origins))


def read_profile(name: str, source: str, times: StepTimes, temperature: float | None, domain: str = ALL_DOMAINS) -> DrafterProfile:
    """A drafter's profile from the JSON of `speculators calibrate`, or from acceptances as text ("0.9,0.8,0.8").

    Args:
        name: for tables.
        source: path of the file, or the acceptances.
        times: of its rounds.
        temperature: which result of the file; the first where None.
        domain: likewise.

    Raises:
        DataError: the file is missing, or holds no such result.
        ConfigError: the text holds no probabilities.
    """
    if not source.endswith(".json"):
        try:
            return DrafterProfile(name, np.array([[float(value) for value in source.split(",")]]), times)
        except ValueError:
            raise ConfigError(f"drafter {name}={source}: name a JSON file of `speculators calibrate`, or acceptances as 0.9,0.8") from None
    try:
        results = json.loads(Path(source).read_text(encoding="utf-8"))["results"]
        for result in results:
            kept = result["calibration"]
            if kept["domain"] == domain and temperature in (None, kept["temperature"]):
                return DrafterProfile(name, np.array(result["sample"] or [kept["acceptance"]], dtype=np.float64), times)
    except OSError as error:
        raise DataError(f"{source} cannot be read ({error.strerror}); write it with `speculators calibrate --json`") from None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{source} is no result of `speculators calibrate --json` ({type(error).__name__}: {error})") from None
    raise DataError(f"{source} holds no calibration at temperature {temperature} for domain {domain!r}")


def plot_frontier(rows: Sequence[SimulationRow], title: str) -> Figure:
    """Throughput a GPU against the speed a user sees, a line a drafter and policy, a dot a load (DSpark, figure 7)."""
    figure, axes = _figure(title)
    _draw(axes, rows, lambda row: (row.tokens_per_second_a_user, row.tokens_per_second / row.gpus))
    axes.set_xlabel(f"tokens/s a user sees ({KIND})")
    axes.set_ylabel(f"tokens/s a GPU ({KIND})")
    _finish(axes)
    return figure


def plot_concurrency(rows: Sequence[SimulationRow], title: str) -> Figure:
    """Throughput of the cluster by load, a line a drafter and policy."""
    figure, axes = _figure(title)
    _draw(axes, rows, lambda row: (row.load, row.tokens_per_second))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    loads = sorted({row.load for row in rows})
    if len(loads) <= 12:
        axes.set_xticks(loads, [f"{load:g}" for load in loads])
    axes.set_xlabel("users" if rows[0].closed else "requests/s")
    axes.set_ylabel(f"tokens/s ({KIND})")
    _finish(axes)
    return figure


def _draw(axes: Any, rows: Sequence[SimulationRow], place: Callable[[SimulationRow], tuple[float, float]]) -> None:
    """Every line with its dots, the later ones thinner: where two lie on each other, both are seen."""
    lines = _lines(rows)
    for number, (label, points) in enumerate(lines.items()):
        width = 1.5 + 3 * (1 - number / max(1, len(lines) - 1))
        axes.plot(*zip(*map(place, points), strict=True), marker="o", markersize=3 + width, linewidth=width, label=label)


def _lines(rows: Sequence[SimulationRow]) -> dict[str, list[SimulationRow]]:
    several = len({row.drafter for row in rows}) > 1
    lines: dict[str, list[SimulationRow]] = {}
    for row in rows:
        lines.setdefault(f"{row.drafter}, {row.policy}" if several else row.policy, []).append(row)
    return {label: sorted(points, key=lambda row: row.load) for label, points in lines.items()}


def _figure(title: str) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.6), layout="constrained")
    axes = figure.subplots()
    axes.set_title(f"{title} ({KIND})", fontsize=10)
    return figure, axes


def _finish(axes: Any) -> None:
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
