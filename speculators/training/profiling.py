"""Where the time of a step goes, on request, and how much of the device training uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from speculators.files import make_folder

PROFILE_FOLDER = "profile"
WAIT_STEPS = 3  # compiling, allocating, first-touch: not what a run spends its time on

# Dense bfloat16 TFLOP/s of one device, from the vendors' data sheets.
_PEAK_TFLOPS = {"B200": 2250.0, "H200": 989.0, "H100 PCIe": 756.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0, "RTX 4090": 165.0}


def peak_flops(device: torch.device, given_tflops: float | None) -> float | None:
    """FLOP/s that a device can do; None where that is not known."""
    if given_tflops is not None:
        return given_tflops * 1e12
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    known = [tflops for part, tflops in _PEAK_TFLOPS.items() if part in name]
    return known[0] * 1e12 if known else None


class StepProfiler:
    """Traces a few steps of a run with torch.profiler.

    Writes `steps-A-B.trace.json` for Perfetto or chrome://tracing, and `steps-A-B.txt`, operations by time.

    Args:
        output: the run's folder; None traces nothing.
        steps: how many; 0 traces nothing.
        first: step of the run when it begins.
    """

    def __init__(self, output: Path | None, steps: int, first: int) -> None:
        self._folder = None if output is None or not steps else output / PROFILE_FOLDER
        self._begin, self._end = first + WAIT_STEPS, first + WAIT_STEPS + steps
        self._profile: Any = None

    def before(self, step: int) -> None:
        """Call before a step."""
        if self._folder is not None and step == self._begin:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profile = torch.profiler.profile(activities=activities, profile_memory=True, record_shapes=True)
            self._profile.start()

    def after(self, step: int) -> None:
        """Call after a step, with the number of steps done."""
        if self._profile is not None and step == self._end:
            self.close(step)

    def close(self, step: int) -> None:
        """Write what was traced, if anything was."""
        if self._profile is None or self._folder is None:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profile.stop()
        make_folder(self._folder)
        name = f"steps-{self._begin}-{step - 1}"
        self._profile.export_chrome_trace(str(self._folder / f"{name}.trace.json"))
        order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        (self._folder / f"{name}.txt").write_text(self._profile.key_averages().table(sort_by=order, row_limit=40), encoding="utf-8")
        self._profile = None
