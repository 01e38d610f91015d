"""How long `speculators data prepare` takes for many conversations of two turns, and how much memory for how many.

    python benchmarks/prepare_conversations.py --conversations 20000 100000 --workers 2

The conversations are made of words of the benchmark prompts, 400 tokens on average under the default verifier's template.
Memory is the proportional set size of the command and its workers together, the largest of a look every half second.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from harness import Report

from speculators.data.prompts import read_prompts
from speculators.data.storage import read_header

PROMPTS = Path(__file__).parent / "prompts"


def write_conversations(path: Path, count: int, seed: int = 0) -> None:
    """Two questions and two answers a line."""
    words = " ".join(turn for file in sorted(PROMPTS.glob("*.jsonl")) for prompt in read_prompts(file) for turn in prompt.turns).split(" ")
    draw = random.Random(seed)

    def text(shortest: int, longest: int) -> str:
        length = draw.randint(shortest, longest)
        start = draw.randrange(len(words) - length)
        return " ".join(words[start : start + length])

    with path.open("w", encoding="utf-8") as stream:
        for _ in range(count):
            turns = [("user", text(10, 50)), ("assistant", text(40, 140)), ("user", text(10, 50)), ("assistant", text(40, 140))]
            stream.write(json.dumps({"messages": [{"role": role, "content": content} for role, content in turns]}) + "\n")


def memory(process: int) -> int:
    """Proportional set size of a process and its children, bytes."""
    total = 0
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        total = 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        for children in Path(f"/proc/{process}/task").glob("*/children"):
            total += sum(memory(int(child)) for child in children.read_text().split())
    except OSError:  # it has just ended
        pass
    return total


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, nargs="+", default=[20_000, 100_000])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "prepare_conversations")
    options = parser.parse_args()
    report = Report("Preparing conversations", torch.device("cpu"))
    for count in options.conversations:
        with tempfile.TemporaryDirectory() as folder:
            rows, output = Path(folder) / "rows.jsonl", Path(folder) / "prepared"
            write_conversations(rows, count)
            command = [sys.executable, "-m", "speculators.cli.main", "data", "prepare", str(rows), "--output", str(output)]
            started = time.monotonic()
            process = subprocess.Popen([*command, "--workers", str(options.workers)], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            most = 0
            while process.poll() is None:
                most = max(most, memory(process.pid))
                time.sleep(0.5)
            seconds = time.monotonic() - started
            if process.returncode:
                raise SystemExit(f"{' '.join(command)} ended with exit code {process.returncode}")
            header = read_header(output)
            report.add(
                f"{count} conversations",
                None,
                workers=options.workers,
                seconds=seconds,
                tokens_each=header["tokens"] / count,
                conversations_per_second=count / seconds,
                peak_bytes=most,
            )
    report.write(options.output)


if __name__ == "__main__":
    main()
