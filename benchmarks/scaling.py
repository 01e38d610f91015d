"""How training scales: the P-EAGLE, DFlash and DSpark steps at the Qwen3-8B shape on 1, 2, 4 and 8 GPUs, DDP and FSDP2.

    python benchmarks/scaling.py --gpus 1 2 4 8 --output benchmarks/results/scaling      # starts torchrun for each number
    python benchmarks/scaling.py --cpu --gpus 1 2 --output build/scaling                 # the same code, tiny shapes, gloo

The global batch is the same on every number of GPUs: one GPU accumulates what eight compute at once, so losses and gradient
norms must agree. Hidden states are random numbers that depend on the row only; the verifier's time is measured in one row of
its own, whole and spread over the GPUs.

Columns: milliseconds a step (median), tokens a second, efficiency (time on one GPU / (GPUs x time)), peak memory of a GPU, and the
share of the step that communication adds: 1 - (time that one GPU alone needs for its part of the batch / time of the step).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from harness import Report
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3Config

from speculators import Verifier
from speculators.data.rows import PackedRows
from speculators.registry import get_algorithm
from speculators.speculator import VerifierWeights
from speculators.training.batch import TrainingBatch
from speculators.training.config import TrainingConfig
from speculators.training.graph import Capture
from speculators.training.optimizer import DrafterOptimizer
from speculators.training.order import mix
from speculators.training.parallel import parallelise, shard_verifier
from speculators.training.source import HiddenStateSource, hidden_state_source
from speculators.training.step import TrainingStep
from speculators.training.world import World, local_device, process_group


@dataclass(frozen=True)
class Shape:
    """Of the verifier, and of a packed row of two documents whose last three quarters are supervised."""

    hidden: int = 4096
    intermediate: int = 12288
    heads: int = 32
    key_value_heads: int = 8
    head_dim: int = 128
    vocabulary: int = 151936
    layers: int = 36
    row_length: int = 8192
    draft_vocabulary: int = 32000
    anchors: int = 512
    drafter_layers: int = 5

    @property
    def taps(self) -> list[int]:
        """Three layers, as DFlash chooses them."""
        return [2, self.layers // 2, self.layers - 3]

    def options(self, method: str) -> dict[str, Any]:
        """Of a drafter at this shape."""
        common = {"aux_hidden_state_layer_ids": self.taps, "mask_token_id": self.vocabulary - 1}
        if method == "peagle":
            # Every supervised position begins a chain, as in the paper.
            training = {"anchors": self.row_length * 3 // 4, "num_depths": 8}
            vocabulary = {"draft_vocab_size": self.draft_vocabulary}
            return {**common, **vocabulary, "num_layers": self.drafter_layers - 1, "num_draft_tokens": 8, "training": training}
        if method == "dflash":
            training = {"anchors": self.anchors, "position_weights": "dpace"}
            return {**common, "num_layers": self.drafter_layers, "num_draft_tokens": 15, "training": training}
        rank = min(256, self.hidden // 8)
        training = {"anchors": self.anchors}
        return {**common, "num_layers": self.drafter_layers, "num_draft_tokens": 7, "markov_rank": rank, "training": training}


QWEN3_8B = Shape()
TINY = Shape(32, 48, 4, 2, 8, 128, 8, 64, 48, 8, 2)
METHODS = ("peagle", "dflash", "dspark")


def qwen3_config(shape: Shape) -> Qwen3Config:
    """The verifier's configuration."""
    return Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=max(4096, shape.row_length),
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=shape.vocabulary - 2,
    )


def borrowed_weights(shape: Shape, device: torch.device, dtype: torch.dtype) -> VerifierWeights:
    """What a drafter needs of the verifier: random tables, without its layers."""
    generator = torch.Generator(device).manual_seed(0)

    def table() -> Tensor:
        return (torch.randn(shape.vocabulary, shape.hidden, generator=generator, device=device) * shape.hidden**-0.5).to(dtype)

    return VerifierWeights(
        embedding=table(),
        head=table(),
        final_norm=nn.RMSNorm(shape.hidden, device=device, dtype=dtype).requires_grad_(False),
        num_layers=shape.layers,
        stop_token_ids=(shape.vocabulary - 2,),
        name_or_path="qwen3-8b-shape",
        architectures=("Qwen3ForCausalLM",),
        config=qwen3_config(shape).to_dict(),
    )


def packed_rows(shape: Shape, count: int) -> PackedRows:
    """Random tokens in rows of two documents."""
    generator = torch.Generator().manual_seed(1)
    half = torch.arange(shape.row_length // 2, dtype=torch.int32)
    return PackedRows(
        input_ids=torch.randint(0, shape.vocabulary - 2, (count, shape.row_length), generator=generator).int(),
        loss_mask=(half >= len(half) // 4).repeat(2).expand(count, -1).contiguous(),
        position_ids=half.repeat(2).expand(count, -1).contiguous(),
        document_ids=torch.arange(2, dtype=torch.int32).repeat_interleave(len(half)).expand(count, -1).contiguous(),
    )


class RandomStates:
    """Hidden states that depend on the row alone; those of this process's share of the rows are made once."""

    def __init__(self, shape: Shape, rows: PackedRows, device: torch.device, dtype: torch.dtype) -> None:
        self._shape, self._rows, self._device, self._dtype = shape, rows, device, dtype
        world = World.current()
        share = len(rows) // world.size
        self._states = {row: self._make(row) for row in range(world.rank * share, (world.rank + 1) * share)}

    @property
    def num_rows(self) -> int:
        """Packed rows."""
        return len(self._rows)

    def _make(self, row: int) -> Tensor:
        generator = torch.Generator(self._device).manual_seed(mix(7, row))
        width = (len(self._shape.taps) + 1) * self._shape.hidden
        return torch.randn(self._shape.row_length, width, generator=generator, device=self._device, dtype=self._dtype)

    def batch(self, index: Tensor) -> TrainingBatch:
        """See `HiddenStateSource.batch`."""
        numbers = index.tolist()
        states = torch.stack([self._states[row] if row in self._states else self._make(row) for row in numbers])
        taps, last = states.split([len(self._shape.taps) * self._shape.hidden, self._shape.hidden], dim=-1)
        fields = (self._rows.input_ids, self._rows.loss_mask, self._rows.position_ids, self._rows.document_ids)
        tokens, mask, positions, documents = (values[numbers].to(self._device) for values in fields)
        return TrainingBatch(tokens.long(), taps, last, mask, positions.long(), documents.long())


@dataclass(frozen=True)
class Measured:
    """One training step on some number of processes.

    Attributes:
        milliseconds: median over the timed steps.
        loss, gradient_norm: of the first step.
        peak_bytes: of this process's GPU; None on the CPU.
    """

    milliseconds: float
    loss: float
    gradient_norm: float
    peak_bytes: int | None


def measure_step(
    world: World,
    method: str,
    strategy: str,
    source: Callable[[tuple[int, ...]], HiddenStateSource],
    weights: VerifierWeights,
    shape: Shape,
    rows: int,
    device: torch.device,
    repetitions: int,
) -> Measured:
    """Time whole optimizer steps over `rows` packed rows, one row a micro-batch."""
    gc.collect()  # the step measured before this one refers to itself: its memory is not this one's
    dtype = weights.embedding.dtype
    config = TrainingConfig(
        method=method,
        steps=1000,
        rows_per_step=rows,
        accumulation=rows // world.size,
        learning_rate=1e-5,
        precision="float32" if dtype == torch.float32 else "bfloat16",
        parallel=strategy,
        progress=False,
    )
    torch.manual_seed(config.seed)
    with torch.device(device):
        speculator = get_algorithm(method).speculator_class.from_verifier(weights, **shape.options(method)).float().train()
    if speculator.has_reduced_vocabulary:
        speculator.set_draft_vocabulary(torch.arange(speculator.config.draft_vocab_size, device=device))
    parallel = parallelise(speculator, world, config.parallel, dtype)
    optimizer = DrafterOptimizer(speculator, config, parallel.sharding, world)
    states = source(speculator.aux_hidden_state_layer_ids)
    step = TrainingStep(parallel, states, None, optimizer, config, dtype, Capture(device, enabled=False))
    index = torch.arange(rows)
    step.run(0, index, config.learning_rate)
    first = step.read()
    for number in (1, 2):
        step.run(number, index, config.learning_rate)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times = []
    for number in range(repetitions):
        _synchronise(world, device)
        started = time.perf_counter()
        step.run(3 + number, index, config.learning_rate)
        _synchronise(world, device)
        times.append(1e3 * (time.perf_counter() - started))
    loss, norm = first["loss"], first["gradient_norm"]
    assert isinstance(loss, float) and isinstance(norm, float)
    return Measured(statistics.median(times), loss, norm, torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None)


def _synchronise(world: World, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    world.wait()


def measure(path: Path, *, shape: Shape, rows: int, methods: list[str], strategies: list[str], verifier: bool, repetitions: int) -> None:
    """What every process does: time each method and strategy; rank 0 writes the figures to `path`."""
    device = local_device() or torch.device("cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    results: list[dict[str, Any]] = []
    with process_group() as world:
        weights, packed = borrowed_weights(shape, device, dtype), packed_rows(shape, rows)
        random_states = RandomStates(shape, packed, device, dtype)

        def keep(name: str, method: str, strategy: str, source: Any, borrowed: VerifierWeights, alone: bool) -> None:
            arguments = (source, borrowed, shape)
            measured = measure_step(world, method, strategy, *arguments, rows, device, repetitions)
            (slowest,) = world.largest(measured.milliseconds)
            (peak,) = world.largest(float(measured.peak_bytes or 0))
            communication = None
            if alone and world.size > 1:
                compute = measure_step(World(), method, "ddp", *arguments, rows // world.size, device, repetitions)
                (computing,) = world.largest(compute.milliseconds)
                communication = max(0.0, 1 - computing / slowest)
            results.append(
                {"name": name, **asdict(measured), "milliseconds": slowest, "peak_bytes": int(peak) or None, "communication": communication}
            )
            if world.is_main:  # what is measured is kept, whatever happens next
                path.write_text(json.dumps({"gpus": world.size, "measurements": results}))

        for method in methods:
            for strategy in strategies if world.size > 1 else strategies[:1]:
                keep(f"{method} {strategy}", method, strategy, lambda taps: random_states, weights, True)
        if verifier and world.size > 1:
            model = Verifier(_random_model(shape, device, dtype), name_or_path="qwen3-8b-shape")

            def from_model(taps: tuple[int, ...]) -> HiddenStateSource:
                return hidden_state_source(model, taps, packed, cache_states=False)

            keep("dflash ddp, verifier whole", "dflash", "ddp", from_model, model.weights, False)
            shard_verifier(model, world, device)
            keep("dflash ddp, verifier sharded", "dflash", "ddp", from_model, model.weights, False)


def _random_model(shape: Shape, device: torch.device, dtype: torch.dtype) -> Any:
    with torch.device(device):
        return AutoModelForCausalLM.from_config(qwen3_config(shape), dtype=dtype).eval()


# -- killing and resuming --------------------------------------------------------------------------------------------


def train_tiny(output: Path, steps: int) -> None:
    """A real run of the tiny shape, for killing."""
    from speculators.training.trainer import train

    device = local_device() or torch.device("cpu")
    with process_group():
        torch.manual_seed(0)
        verifier = Verifier(_random_model(TINY, device, torch.float32), name_or_path="tiny")
        config = TrainingConfig(
            method="dflash",
            options=TINY.options("dflash"),
            output=output,
            steps=steps,
            rows_per_step=8,
            save_every=5,
            log_every=5,
            ema_decay=0.9,
            progress=False,
        )
        train(verifier, packed_rows(TINY, 32), config, resume=True)


def kill_and_resume(gpus: int, launch: Callable[..., subprocess.Popen[bytes]], folder: Path, steps: int = 200) -> dict[str, Any]:
    """Kill every process of a run once it has saved a few times, resume it, and compare its last state with a run left alone."""
    from safetensors.torch import load_file

    from speculators.training.run_folder import LATEST, STATE_FILE, RunFolder

    whole, parted = folder / "whole", folder / "parted"
    if launch(gpus, "--train", whole, "--steps", steps).wait():
        raise SystemExit("the uninterrupted run failed")
    process = launch(gpus, "--train", parted, "--steps", steps)
    while RunFolder(parted).newest_step() < steps // 4:
        if process.poll() is not None:
            raise SystemExit("the run ended before it could be killed")
        time.sleep(0.01)
    os.killpg(process.pid, 9)
    process.wait()
    killed_after = RunFolder(parted).newest_step()
    if launch(gpus, "--train", parted, "--steps", steps).wait():
        raise SystemExit("the resumed run failed")
    first, second = (load_file(run / LATEST / STATE_FILE) for run in (whole, parted))
    difference = max(float((first[name].double() - second[name].double()).abs().max()) for name in first if first[name].numel())
    return {"gpus": gpus, "steps": steps, "resumed_from": killed_after, "largest_difference": difference}


# -- the driver ------------------------------------------------------------------------------------------------------


def launcher(environment: dict[str, str], arguments: list[str]) -> Callable[..., subprocess.Popen[bytes]]:
    """Starts this script under torchrun on some number of GPUs, in a process group of its own."""

    def launch(gpus: int, *more: object) -> subprocess.Popen[bytes]:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
        command = [*torchrun, __file__, *arguments, *map(str, more)]
        return subprocess.Popen(command, env={**os.environ, **environment}, start_new_session=True)

    return launch


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--output", type=Path, help="of the table, without suffix")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--parallel", nargs="+", default=["ddp", "fsdp"], choices=["ddp", "fsdp"])
    parser.add_argument("--rows", type=int, default=16, help="packed rows of the global batch")
    parser.add_argument("--repetitions", type=int, default=8)
    parser.add_argument("--cpu", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--no-verifier", action="store_true", help="leave out the rows with a real verifier")
    parser.add_argument("--kill", action="store_true", help="also kill and resume a run on the second number of GPUs")
    parser.add_argument("--no-steps", action="store_true", help="leave the timed steps out, with --kill")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    shape = TINY if args.cpu else QWEN3_8B
    if args.train is not None:
        train_tiny(args.train, args.steps)
        return
    if args.measure is not None:
        settings = {"methods": args.methods, "strategies": args.parallel, "verifier": not args.no_verifier}
        measure(args.measure, shape=shape, rows=args.rows, repetitions=args.repetitions, **settings)
        return
    environment = {"OMP_NUM_THREADS": "1"} if args.cpu else {"NCCL_NVLS_ENABLE": "0"}
    if args.cpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    passed = [*(["--cpu"] if args.cpu else []), *(["--no-verifier"] if args.no_verifier else [])]
    passed += ["--methods", *args.methods, "--parallel", *args.parallel, "--rows", str(args.rows), "--repetitions", str(args.repetitions)]
    launch = launcher(environment, passed)
    device = torch.device("cpu" if args.cpu else "cuda")
    report = Report("Training on several GPUs" + (" (tiny shapes on the CPU: a rehearsal, not a measurement)" if args.cpu else ""), device)
    alone: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for gpus in [] if args.no_steps else args.gpus:
            figures = Path(scratch) / f"{gpus}.json"
            if launch(gpus, "--measure", figures).wait():
                report.add("failed; what came before", None, gpus=gpus)
            if not figures.exists():
                continue
            for row in json.loads(figures.read_text())["measurements"]:
                method = row["name"].split()[0]
                base = alone.setdefault(method, row) if gpus == 1 else alone.get(method)
                tokens = args.rows * shape.row_length / row["milliseconds"] * 1e3
                with_verifier = "verifier" in row["name"]
                efficiency = None if base is None or with_verifier else base["milliseconds"] / (gpus * row["milliseconds"])
                facts = {key: value for key, value in row.items() if key != "name"}
                report.add(row["name"], None, gpus=gpus, **facts, tokens_per_second=round(tokens), efficiency=efficiency)
            report.write(args.output)
        if args.kill and len(args.gpus) > 1:
            report.add("killed and resumed", None, **kill_and_resume(args.gpus[1], launch, Path(scratch)))
    report.write(args.output)


if __name__ == "__main__":
    main()
