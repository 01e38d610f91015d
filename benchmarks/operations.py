"""Every decoding kernel against its reference, at the shapes of a Qwen3-8B drafter, beside its floor.

    python benchmarks/operations.py --output benchmarks/results/operations_h200
    python benchmarks/operations.py --tiny --repetitions 2        # a dry run: the references alone on a machine without a GPU

All sides run in CUDA graphs on a cold cache: the kernel, the reference in PyTorch's own operations, the reference through
torch.compile, and, where vLLM is installed, its counterparts (`vllm_operations.py`). `times_faster` compares the kernel with the
fastest other side that does the same work. The training kernels have a benchmark of their own.

The file is not called kernels.py, since transformers imports a package of that name where it finds one.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import vllm_operations
from harness import Report, Timing, measure, measured_ceilings
from layer_cases import LayerCases
from operation_cases import TINY, Case, Cases, Sizes
from vllm_counterparts import unavailable


def compiled_timing(case: Case, device: torch.device, repetitions: int) -> Timing | str:
    """The reference through torch.compile, or why it does not run."""
    torch.compiler.reset()
    reference = torch.compile(lambda: case.run("reference"), dynamic=False)
    try:
        return measure(reference, device=device, repetitions=repetitions, graph=True)
    except Exception as error:  # whatever the compiler cannot do
        return _first_line(error)


def add_vllm(report: Report, kernels: list[tuple[Case, dict[str, Any]]], device: torch.device, repetitions: int) -> None:
    """Measure vLLM's counterparts of all cases and put them behind our kernels' rows.

    They come last: importing vLLM changes settings of torch.compile.
    """
    if (reason := unavailable()) is not None:
        print(reason, flush=True)
        return
    for case, ours in kernels:
        others, added = [ours["milliseconds"] * ours["times_faster"]], []
        try:
            found = vllm_operations.counterparts(case.operation, case.inputs)
        except Exception as error:  # another release may have moved what is imported
            added.append(report.add(case.name, None, rows=case.rows, side="vLLM", note=_first_line(error)))
            found = []
        for one in found:
            try:
                one.run()
                note = "; ".join(filter(None, (one.agrees(case.run("triton")), one.difference)))
                timing = measure(one.run, device=device, repetitions=repetitions, graph=True)
            except Exception as error:
                added.append(report.add(case.name, None, rows=case.rows, side=one.name, note=_first_line(error)))
            else:
                added.append(report.add(case.name, timing, work=case.work, rows=case.rows, side=one.name, note=note))
                others += [timing.milliseconds] if not one.difference else []
        del report.rows[len(report.rows) - len(added) :]
        at = report.rows.index(ours) + 1
        report.rows[at:at] = added
        ours["times_faster"] = min(others) / ours["milliseconds"]


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"


def main() -> None:
    """Parse arguments, measure, write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, for a dry run")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 64])
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--only", nargs="+", default=[], help="operations whose name starts with one of these")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--no-vllm", action="store_true", help="leave vLLM out where it is installed")
    parser.add_argument("--output", type=Path, help="without ending; .json and .md are written")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cuda = device.type == "cuda"
    report = Report("Decoding kernels, in CUDA graphs" if cuda else "References of the decoding kernels", device, measured_ceilings(device))
    shapes = TINY if options.tiny else Sizes(), device, torch.bfloat16 if cuda else torch.float32
    cases = [*Cases(*shapes).all(options.batches), *LayerCases(*shapes).all(options.batches)]
    kernels: list[tuple[Case, dict[str, Any]]] = []
    with torch.inference_mode():
        for case in cases:
            if options.only and not case.name.startswith(tuple(options.only)):
                continue
            eager = measure(lambda case=case: case.run("reference"), device=device, repetitions=options.repetitions, graph=True)
            report.add(case.name, eager, work=case.work, rows=case.rows, side="PyTorch")
            if not cuda:
                continue
            others = [eager.milliseconds]
            if not options.no_compile:
                compiled = compiled_timing(case, device, options.repetitions)
                if isinstance(compiled, Timing):
                    others.append(compiled.milliseconds)
                    report.add(case.name, compiled, work=case.work, rows=case.rows, side="torch.compile")
                else:
                    report.add(case.name, None, rows=case.rows, side="torch.compile", note=compiled)
            kernel = measure(lambda case=case: case.run("triton"), device=device, repetitions=options.repetitions, graph=True)
            faster = min(others) / kernel.milliseconds
            row = report.add(case.name, kernel, work=case.work, rows=case.rows, side="kernel", times_faster=faster)
            kernels.append((case, row))
            if options.output is not None:
                report.write(options.output)
        if kernels and not options.no_vllm:
            add_vllm(report, kernels, device, options.repetitions)
    if options.output is not None:
        report.write(options.output)


if __name__ == "__main__":
    main()
