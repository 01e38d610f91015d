"""Decoding speed end to end: every drafter against plain decoding and transformers, in one run.

    python benchmarks/decode.py --max-prompts 4 --output benchmarks/results/decode_cpu
    python benchmarks/decode.py --batches 1 8 32 --contexts 0 1024 2048 --output benchmarks/results/decode_h200

Each group of prompts goes through all configurations in turn before the next group does, so that a machine that slows down
slows all of them down; speed-ups are ratios of totals over the same groups. Times are of decoding alone, the prefill and the
first token excluded, as tokens a second of one sequence. Replies end at the verifier's stop token or at the budget, the same
greedy replies in every configuration up to rounding. The report is written after each group, so that an interrupted run keeps
what it has. `--vllm` adds vLLM's plain decoding where it is installed, with CUDA graphs and in a process of its own. It starts while
the others warm up and waits while they are timed; `serving.py` measures vLLM with the drafters.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from harness import Report, Timing
from vllm_process import VllmError, VllmProcess, offline_settings

from speculators import generate
from speculators.cli.common import PROMPT_LOOKUP, load_drafter
from speculators.data.prompts import read_prompts
from speculators.decoding import graph
from speculators.decoding.proposal import Drafter
from speculators.decoding.sampling import SamplingParams
from speculators.loading import load_model, locate_verifier
from speculators.verifier import Verifier

PROMPTS = Path(__file__).parent / "prompts" / "gsm8k.jsonl"
CHECKPOINTS = Path(__file__).parent.parent / "checkpoints" / "smollm2-135m-instruct"
METHODS = ("dspark", "dflash", "peagle", "eagle3", PROMPT_LOOKUP)
ROOM = 1024  # tokens that a prompt may have beyond the least
START_LIMIT = 300.0  # seconds for vLLM to start

Group = list[list[int]]


@dataclass
class Measured:
    """What the groups of one configuration gave: decoding seconds, tokens after the first, and engine rounds."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    emitted: int = 0
    row_rounds: int = 0

    def add(self, seconds: float, tokens: int, rounds: int = 0, emitted: int = 0, row_rounds: int = 0) -> None:
        """One group: tokens of all rows together, rounds of the batch; emitted tokens and rounds over rows."""
        self.seconds.append(seconds)
        self.tokens.append(tokens)
        self.rounds.append(rounds)
        self.emitted += emitted
        self.row_rounds += row_rounds


Configuration = Callable[[Group, Measured], Any]


def ours(verifier: Verifier, drafter: Drafter | None, draft_tokens: int | None, budget: int) -> Configuration:
    """The engine of this library."""

    def run(group: Group, into: Measured) -> None:
        result = generate(verifier, drafter, group, SamplingParams(max_new_tokens=budget), num_draft_tokens=draft_tokens)
        tokens = sum(len(reply) - 1 for reply in result.token_ids)
        rounds = [r for row in result.rounds for r in row]
        into.add(result.seconds, tokens, result.verify_forwards, sum(r.emitted for r in rounds), len(rounds))

    return run


def untouched_model(verifier: Verifier) -> Any:
    """The model as transformers loads it, in another copy: a verifier's layers compute by other means."""
    name, dtype = verifier.weights.name_or_path, verifier.dtype
    model, _ = load_model(name, dtype=dtype, device=verifier.device, revision=None, trust_remote_code=False)
    return model.eval()


def transformers_generate(model: Any, verifier: Verifier, budget: int, **options: Any) -> Configuration:
    """transformers' own loop; its prefill and first token are timed alone and subtracted."""
    pad = verifier.stop_token_ids[0]

    @torch.inference_mode()
    def seconds_and_tokens(group: Group, tokens: int) -> tuple[float, int]:
        width = max(map(len, group))
        rows = [[pad] * (width - len(prompt)) + prompt for prompt in group]  # padded on the left, as its batches are
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in group]
        inputs, attention = (torch.tensor(x, device=verifier.device) for x in (rows, mask))
        started = _now(verifier.device)
        output = model.generate(inputs, attention_mask=attention, max_new_tokens=tokens, do_sample=False, pad_token_id=pad, **options)
        elapsed = _now(verifier.device) - started
        replies = output[:, width:].tolist()
        stops = set(verifier.stop_token_ids)
        return elapsed, sum(next((i for i, token in enumerate(reply) if token in stops), len(reply) - 1) for reply in replies)

    def run(group: Group, into: Measured) -> None:
        first, _ = seconds_and_tokens(group, 1)
        whole, tokens = seconds_and_tokens(group, budget)
        into.add(whole - first, tokens)

    return run


def vllm_generate(engine: VllmProcess, stop_token_ids: Sequence[int], budget: int) -> Configuration:
    """vLLM's plain decoding, in a process of its own; its prefill and first token are timed alone and subtracted."""

    def run(group: Group, into: Measured) -> None:
        first, whole = (engine.answer(group, tokens, stop_token_ids=stop_token_ids) for tokens in (1, budget))
        into.add(whole.seconds - first.seconds, sum(len(reply) - 1 for reply in whole.token_ids))

    return run


def warm_up(group: Group, configurations: Mapping[str, Configuration]) -> None:
    """An unmeasured pass: kernels compile, graphs are captured."""
    for run in configurations.values():
        run(group, Measured())


def measure_groups(groups: Sequence[Group], configurations: Mapping[str, Configuration]) -> Iterator[dict[str, Measured]]:
    """All configurations on each group in turn; yields what there is after each group."""
    results = {name: Measured() for name in configurations}
    for number, group in enumerate(groups, start=1):
        for name, run in configurations.items():
            run(group, results[name])
            seconds, tokens = results[name].seconds[-1], results[name].tokens[-1]
            print(f"group {number} of {len(groups)}, {len(group)} rows: {name} {tokens} tokens in {seconds:.3f} s", flush=True)
        yield results


def report_groups(report: Report, results: dict[str, Measured], batch: int, **facts: Any) -> None:
    """One row a configuration; milliseconds are of one token of one sequence."""
    plain = results["plain"]
    plain_time = sum(plain.seconds) / sum(plain.tokens)
    for name, measured in results.items():
        each = [1e3 * batch * s / t for s, t in zip(measured.seconds, measured.tokens, strict=True)]
        tenths = statistics.quantiles(each, n=10, method="inclusive") if len(each) > 1 else [each[0]]
        seconds, tokens = sum(measured.seconds), sum(measured.tokens)
        method, _, k = name.partition(" K = ")
        row = report.add(
            method,
            Timing(statistics.median(each), tenths[0], tenths[-1], len(each), None, None),
            batch=batch,
            **facts,
            k=int(k) if k else None,
            tokens_per_second=tokens / seconds / batch,
            speedup=plain_time * tokens / seconds,
            acceptance_length=measured.emitted / measured.row_rounds if measured.row_rounds else None,
            round_milliseconds=1e3 * seconds / sum(measured.rounds) if sum(measured.rounds) else None,
        )
        del row["peak_bytes"], row["peak_total_bytes"]  # not measured here


def prompt_groups(verifier: Verifier, path: Path, batch: int, groups: int, context: int) -> list[Group]:
    """Groups of `batch` prompts; each prompt is preceded by other prompts' text where it is shorter than `context` tokens."""
    texts = [prompt.text for prompt in read_prompts(path)]
    encoded = []
    for index in range(batch * groups):
        text, before = texts[index % len(texts)], index
        ids = verifier.encode_chat([{"role": "user", "content": text}])
        while len(ids) < context:
            before += 1
            text = texts[before % len(texts)] + "\n\n" + text
            ids = verifier.encode_chat([{"role": "user", "content": text}])
        encoded.append(ids)
    return [encoded[first : first + batch] for first in range(0, len(encoded), batch)]


def main() -> None:
    """Parse arguments, measure, write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verifier", default="smollm2-135m-instruct")
    parser.add_argument("--checkpoints", type=Path, default=CHECKPOINTS, help="holds one folder a method")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--max-prompts", type=int, default=8, help="groups of each batch size")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--batches", nargs="+", type=int, default=[1])
    parser.add_argument("--contexts", nargs="+", type=int, default=[0], help="least tokens of a prompt")
    parser.add_argument("--ks", nargs="+", type=int, default=[3, 5, 7])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--cpu-time", action="store_true", help="count the process's CPU seconds: fair on a busy machine, for one thread")
    parser.add_argument("--vllm", action="store_true", help="vLLM's plain decoding as well")
    parser.add_argument("--output", type=Path, help="without ending; .json and .md are written")
    options = parser.parse_args()
    if options.vllm and options.cpu_time:
        parser.error("--vllm runs in another process, whose CPU time is not counted; leave --cpu-time out")

    if options.cpu_time:
        time.perf_counter = time.process_time  # the engine reads the same clock
    graph.MAX_BATCHES = 1 << 10  # every configuration keeps its graphs for the next group
    verifier = Verifier.from_pretrained(options.verifier, dtype=options.dtype)
    budget = options.max_new_tokens
    engine = begin_vllm(verifier, max(options.contexts) + ROOM + budget, max(options.batches)) if options.vllm else None
    drafters = {
        name: load_drafter(name if name == PROMPT_LOOKUP else str(options.checkpoints / name), verifier) for name in options.methods
    }
    untouched = untouched_model(verifier)
    configurations: dict[str, Configuration] = {
        "plain": ours(verifier, None, None, budget),
        "transformers": transformers_generate(untouched, verifier, budget),
    }
    single = {"transformers, prompt lookup": transformers_generate(untouched, verifier, budget, prompt_lookup_num_tokens=max(options.ks))}
    for name, drafter in drafters.items():
        for k in options.ks:
            if k <= drafter.max_draft_tokens:
                configurations[f"{name} K = {k}"] = ours(verifier, drafter, k, budget)

    clock = f", CPU time of {torch.get_num_threads()} thread" if options.cpu_time else ""
    report = Report(f"Decoding {options.verifier} on {options.prompts.stem}, greedy, {_dtype(verifier)}{clock}", verifier.device)
    cuda = verifier.device.type == "cuda"  # graphs are captured in a first pass
    for context in options.contexts:
        for batch in options.batches:
            groups = prompt_groups(verifier, options.prompts, batch, options.max_prompts, context)
            # transformers looks prompts up for one sequence at a time.
            chosen = {**configurations, **(single if batch == 1 else {})}
            warm_up(groups[0], chosen if cuda else {"plain": chosen["plain"]})
            if engine is not None and "vLLM" not in configurations:  # before anything is timed
                try:
                    await_vllm(engine)
                except VllmError as error:  # the others are measured all the same
                    report.add("vLLM", None, note=f"did not start: {error}"[:300])
                    engine.end()  # or it might still be starting while others are timed
                    engine = None
                else:
                    configurations["vLLM"] = chosen["vLLM"] = vllm_generate(engine, verifier.stop_token_ids, budget)
                    warm_up(groups[0], {"vLLM": chosen["vLLM"]})
            finished = len(report.rows)
            for results in measure_groups(groups, chosen):
                del report.rows[finished:]
                report_groups(report, results, batch, context=context)
                if options.output is not None:
                    report.write(options.output)


def begin_vllm(verifier: Verifier, max_model_len: int, sequences: int) -> VllmProcess:
    """A vLLM engine for the verifier's files, starting."""
    settings = offline_settings(dtype=_dtype(verifier), max_model_len=max_model_len, sequences=sequences)
    log = Path(tempfile.mkdtemp(prefix="vllm-")) / "plain.log"
    return VllmProcess(locate_verifier(str(verifier.weights.name_or_path)), settings, log=log)


def await_vllm(engine: VllmProcess) -> None:
    """Wait until the engine is ready."""
    started = engine.wait(START_LIMIT)
    print(f"vLLM {started.version}, runner {started.runner}, started in {started.seconds:.0f} s; log in {engine.log}", flush=True)


def _dtype(verifier: Verifier) -> str:
    return str(verifier.dtype).removeprefix("torch.")


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":
    main()
