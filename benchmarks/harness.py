"""How every benchmark here measures, and what it leaves behind.

    timing = measure(lambda: loss(batch).backward(), setup=optimizer.zero_grad, device=device)
    report.add("loss", timing, work=Work(flops=..., bytes=...), rows=3584)
    report.write(Path("benchmarks/results/training"))

On CUDA a repetition is timed with events around it, on the CPU with a clock. A measurement is the median of its repetitions
after a warm-up; the 10th and the 90th percentile beside it are its spread, and differences smaller than that are noise.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

# Larger than the L2 cache of an H200 (50 MB): written between repetitions, it makes each of them find a cold cache.
_FLUSH_BYTES = 256 << 20
_BUSY_CYCLES = 1_000_000  # about half a millisecond
# Packages whose versions decide what was measured.
_PACKAGES = ("torch", "triton", "transformers", "liger-kernel", "speculators", "unified-speculators")


@dataclass(frozen=True)
class Timing:
    """One measurement.

    Attributes:
        milliseconds: median of the repetitions.
        low, high: their 10th and 90th percentile, milliseconds.
        repetitions: how many there were.
        peak_bytes: the most memory allocated during a repetition beyond what was allocated before it; None on the CPU.
        peak_total_bytes: the most memory allocated at all; None on the CPU.
    """

    milliseconds: float
    low: float
    high: float
    repetitions: int
    peak_bytes: int | None
    peak_total_bytes: int | None


@dataclass(frozen=True)
class Ceilings:
    """What the machine reaches at best.

    Attributes:
        flops: matrix products, FLOP/s.
        bytes: copies, bytes read plus bytes written, a second.
    """

    flops: float
    bytes: float


@dataclass(frozen=True)
class Work:
    """The least that must be done, however it is done.

    Attributes:
        flops: of matrix products; a multiply-add is two.
        bytes: every input read once, every output written once.
    """

    flops: float = 0.0
    bytes: float = 0.0

    def floor_milliseconds(self, ceilings: Ceilings) -> float:
        """No implementation is much faster than this."""
        return 1e3 * max(self.flops / ceilings.flops, self.bytes / ceilings.bytes)


def measure(
    function: Callable[[], Any],
    setup: Callable[[], Any] | None = None,
    *,
    device: torch.device,
    repetitions: int = 20,
    warmup: int = 3,
    graph: bool = False,
    cold_cache: bool = True,
) -> Timing:
    """Time a function.

    Args:
        function: what is timed; its result is dropped.
        setup: runs before each repetition, outside the time.
        device: where the function works.
        repetitions: timed calls.
        warmup: calls before them: kernels compile, allocators grow.
        graph: capture the function in a CUDA graph and time its replays; `function` must then be static. Ignored on the CPU.
        cold_cache: overwrite the GPU's L2 cache before each repetition.
    """
    prepare = setup or (lambda: None)
    cuda = device.type == "cuda"
    stream = torch.cuda.Stream(device) if cuda and graph else None
    if stream is None:
        for _ in range(warmup):
            prepare()
            function()
    else:
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(max(1, warmup)):
                prepare()
                function()
        torch.cuda.current_stream(device).wait_stream(stream)
        prepare()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=stream):
            function()
        function = captured.replay
    times = []
    if not cuda:
        for _ in range(repetitions):
            prepare()
            start = time.perf_counter()
            function()
            times.append(1e3 * (time.perf_counter() - start))
        return _timing(times, None, None)
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device) if cold_cache else None
    peak = 0
    for _ in range(repetitions):
        prepare()
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # The device is busy while the host launches all that follows: events then bracket the work, not the host's launches.
        torch.cuda._sleep(_BUSY_CYCLES)
        if flush is not None:
            flush.zero_()
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize(device)
        times.append(begin.elapsed_time(end))
        peak = max(peak, torch.cuda.max_memory_allocated(device) - before)
    total = torch.cuda.max_memory_allocated(device) - (0 if flush is None else flush.nbytes)
    return _timing(times, peak, total)


def _timing(times: list[float], peak: int | None, total: int | None) -> Timing:
    tenths = statistics.quantiles(times, n=10, method="inclusive") if len(times) > 1 else [times[0]]
    return Timing(statistics.median(times), tenths[0], tenths[-1], len(times), peak, total)


def measured_ceilings(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Ceilings:
    """The machine's own: a large matrix product of random numbers, and a large copy. Small ones on the CPU."""
    size, elements = (8192, 1 << 30) if device.type == "cuda" else (512, 1 << 22)
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, generator=generator, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(left)
    matmul = measure(lambda: torch.mm(left, right, out=product), device=device, repetitions=10)
    source = torch.randint(0, 127, (elements,), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    copy = measure(lambda: target.copy_(source), device=device, repetitions=10)
    return Ceilings(2e3 * size**3 / matmul.milliseconds, 2e3 * elements / copy.milliseconds)


def machine(device: torch.device) -> dict[str, Any]:
    """What the numbers were measured on: device, processor, versions, commit and date."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    stamp: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "versions": versions,
        "commit": _commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        stamp["memory_bytes"], stamp["multiprocessors"] = properties.total_memory, properties.multi_processor_count
    return stamp


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def other_processes(device: torch.device) -> int:
    """How many processes beside this one use a GPU; 0 where nvidia-smi cannot tell, or names none of this machine's."""
    if device.type != "cuda":
        return 0
    command = [
        "nvidia-smi",
        f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}",
        "--query-compute-apps=pid",
        "--format=csv,noheader",
    ]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(pid.isdigit() and int(pid) != os.getpid() and Path("/proc", pid).exists() for pid in listed)


def _commit() -> str | None:
    if given := os.environ.get("BENCHMARK_COMMIT"):  # a copy without its history
        return given
    try:
        found = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True, cwd=Path(__file__).parent
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


@dataclass
class Report:
    """Measurements of one benchmark, written as JSON and as a table.

    Attributes:
        title: heading of the table.
        device: of the measurements.
        ceilings: of the machine, for floors; None leaves floors out.
        rows: one dict a measurement, ready for JSON.
    """

    title: str
    device: torch.device
    ceilings: Ceilings | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, name: str, timing: Timing | None, *, work: Work | None = None, **facts: Any) -> dict[str, Any]:
        """Keep a measurement and print it.

        Args:
            name: what was measured.
            timing: None for something that did not run; say why in `facts`.
            work: for the floor and the share of it that was reached.
            facts: shapes, memory, notes: numbers and strings, one column each.

        Where other processes use the GPU when it is called, the row says how many: they may have slowed it down.
        """
        row: dict[str, Any] = {"name": name, **facts}
        if timing is not None and (others := other_processes(self.device)):
            row["other_processes"] = others
        if timing is not None:
            row.update(asdict(timing))
        if work is not None:
            row["flops"], row["bytes"] = work.flops, work.bytes
            if self.ceilings is not None:
                row["floor_milliseconds"] = work.floor_milliseconds(self.ceilings)
        self.rows.append(row)
        print("  ".join(f"{key} {_cell(value)}" for key, value in row.items() if value is not None and key not in _HIDDEN), flush=True)
        return row

    def write(self, path: Path) -> None:
        """Write `path`.json and `path`.md, making the folder."""
        path.parent.mkdir(parents=True, exist_ok=True)
        stamp = machine(self.device)
        document = {
            "title": self.title,
            "machine": stamp,
            "ceilings": None if self.ceilings is None else asdict(self.ceilings),
            "measurements": self.rows,
        }
        path.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
        path.with_suffix(".md").write_text(self.markdown(stamp))

    def markdown(self, stamp: dict[str, Any]) -> str:
        """The table, with the machine in its caption."""
        columns = list(dict.fromkeys(key for row in self.rows for key in row if key not in _HIDDEN))
        versions = ", ".join(f"{name} {number}" for name, number in stamp["versions"].items())
        where = f"{stamp['device']}, {stamp['processor']} ({stamp['cores']} cores); {versions}; commit {stamp['commit']}, {stamp['date']}."
        lines = [f"# {self.title}", "", where]
        if self.ceilings is not None:
            lines[-1] += f" Measured ceilings: {self.ceilings.flops / 1e12:.4g} TFLOP/s, {self.ceilings.bytes / 1e12:.3g} TB/s."
        lines += ["", "| " + " | ".join(_HEADINGS.get(column, column.replace("_", " ")) for column in columns) + " |"]
        lines.append("|" + " --- |" * len(columns))
        lines += ["| " + " | ".join(_cell(row.get(column), column) for column in columns) + " |" for row in self.rows]
        return "\n".join(lines) + "\n"


_HIDDEN = {"repetitions", "flops", "bytes", "peak_total_bytes"}  # in the JSON only
_HEADINGS = {
    "milliseconds": "ms (median)",
    "low": "10%",
    "high": "90%",
    "peak_bytes": "peak memory, GiB",
    "floor_milliseconds": "floor, ms",
}


def _cell(value: Any, column: str = "") -> str:
    if value is None:
        return ""
    if column.endswith("_bytes"):
        return f"{value / 2**30:.3g}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
