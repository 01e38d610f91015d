"""`speculators demo`: the embedded verifier with every drafter on four prompts: acceptance, identity, speed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from speculators.cli.common import DEFAULT_VERIFIER, DeviceOption, JsonOption, check_json_path, load_drafter, load_verifier, write_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from speculators.data.rows import PackedRows
    from speculators.decoding.proposal import Drafter
    from speculators.evaluation.evaluate import Evaluation, PromptSet
    from speculators.evaluation.rows import Row
    from speculators.verifier import Verifier

METHODS = ("dspark", "dflash", "peagle", "eagle3")
NUM_DRAFT_TOKENS = 7
SMOKE_LABEL = "overfitted smoke drafter"
SMOKE_SECONDS = 15.0


def demo(
    max_new_tokens: Annotated[int, typer.Option(help="Token budget a prompt.")] = 96,
    device: DeviceOption = None,
    json: JsonOption = None,
) -> None:
    """Decode four prompts with every drafter: float32 shows identity with plain decoding, the fast dtype shows speed."""
    check_json_path(json)
    from rich.console import Console

    from speculators.data.prompts import read_prompts
    from speculators.evaluation.evaluate import EvaluationSettings, PromptSet, evaluate
    from speculators.verifier import fast_dtype

    console, started = Console(), time.monotonic()
    exact = load_verifier(DEFAULT_VERIFIER, "float32", device)
    prompts = PromptSet.from_prompts(exact, "demo", read_prompts(Path(__file__).parents[1] / "data" / "demo_prompts.jsonl"))
    drafters, checkpoints = load_drafters(exact, prompts, max_new_tokens, console.print)

    def run(verifier: Verifier, drafters: Mapping[str, Drafter], batch_size: int) -> Evaluation:
        precision = str(verifier.dtype).removeprefix("torch.")
        settings = EvaluationSettings(max_new_tokens=max_new_tokens, num_draft_tokens=NUM_DRAFT_TOKENS, batch_size=batch_size)
        return evaluate(
            verifier,
            drafters,
            prompts,
            settings,
            checkpoints=checkpoints,
            on_progress=lambda text: console.print(f"{time.monotonic() - started:4.0f} s  {text} in {precision}", style="dim"),
        )

    identity = run(exact, drafters, batch_size=len(prompts.ids))  # together: what is asked here is not speed
    dtype = fast_dtype(exact.device)
    fast = exact if dtype == exact.dtype else load_verifier(DEFAULT_VERIFIER, str(dtype).removeprefix("torch."), device)
    speed = run(fast, {name: moved(drafter, fast) for name, drafter in drafters.items()}, batch_size=1)
    rows = merged(identity.rows, speed.rows)
    console.print(table(rows, str(dtype).removeprefix("torch."), identity.runs[0].device))
    if SMOKE_LABEL in checkpoints.values():
        console.print(f"smoke: an {SMOKE_LABEL} learned these very replies by heart; it shows that a method runs, not its quality.")
    write_json(
        json,
        {
            "command": "demo",
            "verifier": DEFAULT_VERIFIER,
            "max_new_tokens": max_new_tokens,
            "identity_dtype": "float32",
            "speed_dtype": str(dtype).removeprefix("torch."),
            "device": identity.runs[0].device,
            "seconds": time.monotonic() - started,
            "rows": rows,
        },
    )


def load_drafters(
    verifier: Verifier, prompts: PromptSet, max_new_tokens: int, say: Callable[[str], None]
) -> tuple[dict[str, Drafter], dict[str, str]]:
    """The committed drafters; a smoke drafter, trained here for seconds, where one is missing. And what each row calls them."""
    folder = Path(__file__).parents[2] / "checkpoints" / DEFAULT_VERIFIER
    trained = [method for method in METHODS if (folder / method / "config.json").is_file()]
    missing = [method for method in METHODS if method not in trained]
    drafters = {method: load_drafter(str(folder / method), verifier) for method in trained}
    checkpoints = {method: f"checkpoints/{DEFAULT_VERIFIER}/{method}" for method in trained}
    if missing:
        say(f"No trained drafter in {folder} for {', '.join(missing)}: training an {SMOKE_LABEL} each, {SMOKE_SECONDS:.0f} s.")
        rows = own_replies(verifier, prompts, max_new_tokens)
        drafters |= {method: smoke_drafter(method, verifier, rows) for method in missing}
        checkpoints |= dict.fromkeys(missing, SMOKE_LABEL)
    return {method: drafters[method] for method in METHODS}, checkpoints


def own_replies(verifier: Verifier, prompts: PromptSet, max_new_tokens: int) -> PackedRows:
    """The verifier's greedy replies to the prompts as training rows, one conversation a row."""
    from speculators.data.rows import Conversation, pack
    from speculators.decoding.engine import generate
    from speculators.decoding.sampling import SamplingParams

    replies = generate(verifier, None, prompts.token_ids, SamplingParams(max_new_tokens=max_new_tokens)).token_ids
    conversations = [
        Conversation(input_ids=[*prompt, *reply], loss_mask=[False] * len(prompt) + [True] * len(reply))
        for prompt, reply in zip(prompts.token_ids, replies, strict=True)
    ]
    return pack(conversations, row_length=max(len(conversation.input_ids) for conversation in conversations))


def smoke_drafter(method: str, verifier: Verifier, rows: PackedRows, seconds: float = SMOKE_SECONDS) -> Drafter:
    """A one-layer drafter that learns these very rows by heart."""
    from speculators.training.config import TrainingConfig
    from speculators.training.trainer import train

    config = TrainingConfig(
        method=method,
        options={"num_layers": 1, "num_draft_tokens": NUM_DRAFT_TOKENS},
        time_budget_seconds=seconds,
        rows_per_step=1,
        learning_rate=2e-3,
        progress=False,
    )
    return train(verifier, rows, config).eval()


def moved(drafter: Drafter, verifier: Verifier) -> Drafter:
    """The drafter in another verifier's dtype, attached to it; one without weights is left alone."""
    from speculators.speculator import Speculator

    if not isinstance(drafter, Speculator):
        return drafter
    drafter.to(device=verifier.device, dtype=verifier.dtype).attach(verifier.weights)
    return drafter


def merged(identity: Sequence[Row], speed: Sequence[Row]) -> list[Row]:
    """Acceptance and identity from one evaluation, times from the other: row by row."""
    times = ("tokens_per_second", "baseline_tokens_per_second", "speedup")
    return [{**exact, **{key: fast[key] for key in times}} for exact, fast in zip(identity, speed, strict=True)]  # type: ignore[typeddict-item, literal-required]


def table(rows: Sequence[Row], dtype: str, device: str) -> Any:
    """One line a method; looping prompts are left out of the first acceptance length and counted."""
    from rich import box
    from rich.table import Table

    from speculators.evaluation.report import identity_text, number, parameters_text

    speed = number(rows[0]["baseline_tokens_per_second"], 1)
    result = Table(
        title=f"{DEFAULT_VERIFIER}, greedy, K = {NUM_DRAFT_TOKENS}, kind: decode\nidentity in float32, speed in {dtype} on {device}",
        caption=f"Plain decoding: {speed} tokens/s. Looping prompts, left out of the first column: {rows[0]['degenerate_prompts']}.",
        box=box.SIMPLE,
        collapse_padding=True,
        pad_edge=False,
    )
    result.add_column("method", no_wrap=True)
    for name in ("acceptance length", "all prompts", "identical", "tokens/s", "speed-up", "weights"):
        result.add_column(name, justify="right", min_width=max(map(len, name.split())))
    for without_loops, everything in zip(rows[::2], rows[1::2], strict=True):
        speedup = everything["speedup"]
        result.add_row(
            everything["method"] + (" (smoke)" if everything["checkpoint"] == SMOKE_LABEL else ""),
            number(without_loops["acceptance_length"]),
            number(everything["acceptance_length"]),
            identity_text(everything),
            number(everything["tokens_per_second"], 1),
            "-" if speedup is None else f"{speedup:.2f}x",
            parameters_text(everything["parameters"]),
        )
    return result
