"""Kill every data command at instants spread over its run, repeat it, and compare the output with that of a run left alone.

    python benchmarks/kill_and_rerun.py --instants 20

A tiny random verifier and a few hundred conversations keep each run at seconds. The commands run in forked children of this
process, so that the instants fall into their work and not into imports. SIGKILL leaves them no moment to tidy up.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["OMP_NUM_THREADS"] = "1"  # a fork copies no other thread

import torch
from harness import Report

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from chat_tokenizer import chat_tokenizer
from tiny_models import tiny_model

from speculators.cli.main import app


def make_world(folder: Path, conversations: int) -> None:
    """A tiny chat verifier, conversations, and the same prepared."""
    tokenizer = chat_tokenizer()
    stops = [tokenizer.eos_token_id, *range(200, 216)]
    model = tiny_model("llama", seed=1, vocab_size=len(tokenizer), layers=2, initializer_range=0.3, eos_token_id=stops)
    model.save_pretrained(folder / "verifier")
    tokenizer.save_pretrained(folder / "verifier")
    draw = random.Random(0)
    words = [line for line in Path(__file__).read_text(encoding="utf-8").split() if line.isalpha()]
    with (folder / "chat.jsonl").open("w", encoding="utf-8") as stream:
        for number in range(conversations):
            texts = [" ".join(draw.choices(words, k=draw.randint(3, 30))) for _ in range(4)]
            messages = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, texts, strict=True)]
            stream.write(f"{json.dumps({'messages': messages})}\n" if number % 50 else "a broken row\n")


def commands(world: Path, conversations: int) -> dict[str, list[str]]:
    """Name -> arguments; the output is left out."""
    verifier, float32 = ["--verifier", str(world / "verifier")], ["--dtype", "float32"]
    chat, prepared = str(world / "chat.jsonl"), str(world / "prepared")
    store = ["--taps", "1,2", "--row-length", "512", "--shard-mib", "1", "--rows-per-forward", "1"]
    return {
        "prepare": ["data", "prepare", chat, *verifier, "--workers", "0"],
        "prepare with workers": ["data", "prepare", chat, *verifier, "--workers", "2"],
        "generate": [
            "data",
            "generate",
            chat,
            *verifier,
            "--limit",
            str(conversations // 20),
            "--max-new-tokens",
            "40",
            "--dtype",
            "float32",
        ],
        "synthesize": ["data", "synthesize", *verifier, "--conversations", str(conversations // 40), *float32],
        "store": ["data", "store", prepared, *verifier, *store, *float32],
    }


def start(arguments: list[str], output: Path) -> int:
    """Run a command in a child; its process id."""
    child = os.fork()
    if child == 0:
        os.setsid()
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        try:
            app([*arguments, "--output", str(output)], standalone_mode=False)
            os._exit(0)
        except BaseException:
            os._exit(1)
    return child


def finish(child: int) -> bool:
    """Wait for a child; whether it succeeded."""
    return os.waitpid(child, 0)[1] == 0


def digest(output: Path) -> str:
    """Of all names and contents; timings in headers are left out, since no two runs have the same."""
    total = hashlib.sha256()
    for file in sorted([*output.rglob("*")] if output.is_dir() else output.parent.glob(f"{output.stem}.*")):
        content = file.read_bytes()
        if file.name == "header.json" or file.name.endswith(".card.json"):
            content = json.dumps(without_timings(json.loads(content)), sort_keys=True).encode()
        total.update(file.name.encode() + b"\0" + content)
    return total.hexdigest()


def without_timings(header: dict[str, Any]) -> dict[str, Any]:
    """What a header says about the data, not about the run."""
    timings = ("seconds", "steps", "generated_tokens", "generated_tokens_per_second")
    return {key: value for key, value in header.items() if key not in timings}


def main() -> None:
    """Kill, repeat, compare, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instants", type=int, default=20)
    parser.add_argument("--conversations", type=int, default=4000)
    parser.add_argument("--only", nargs="*", help="names of commands")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "kill_and_rerun")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = Report("Data commands killed and repeated", torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        world = Path(folder)
        make_world(world, options.conversations)
        table = commands(world, options.conversations)
        if not finish(start([*table["prepare"], "--limit", str(options.conversations // 8)], world / "prepared")):
            raise SystemExit("the first command failed")
        for name, arguments in table.items():
            if options.only and name not in options.only:
                continue
            suffix = ".jsonl" if name == "generate" else ""
            place = world / "run"
            place.mkdir()
            output = place / f"output{suffix}"
            began = time.monotonic()
            if not finish(start(arguments, output)):
                raise SystemExit(f"{name} failed")
            seconds = time.monotonic() - began
            expected = digest(output)
            shutil.rmtree(place)
            killed = resumed = same = 0
            for number in range(options.instants):
                place.mkdir()
                child = start(arguments, output)
                time.sleep((number + 0.5) / options.instants * seconds)
                os.kill(child, signal.SIGKILL)
                killed += os.WIFSIGNALED(os.waitpid(child, 0)[1])
                resumed += any(entry.name.endswith(".partial") for entry in place.iterdir())
                whole = finish(start(arguments, output)) and digest(output) == expected
                clean = not any(entry.name.endswith(".partial") for entry in place.iterdir())
                same += whole and clean
                shutil.rmtree(place)
            report.add(
                name, None, seconds=seconds, killed_while_running=killed, left_work_to_resume=resumed, same_output=same, of=options.instants
            )
            if same != options.instants:
                raise SystemExit(f"{name}: {options.instants - same} of {options.instants} outputs differ")
    report.write(options.output)


if __name__ == "__main__":
    main()
