"""`speculators calibrate`: make a drafter's confidence a probability, and store how with the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from speculators.cli.common import (
    DEFAULT_VERIFIER,
    PROMPT_LOOKUP,
    DeviceOption,
    DtypeOption,
    JsonOption,
    SeedOption,
    check_json_path,
    load_drafter,
    load_verifier,
    write_json,
)
from speculators.errors import ConfigError, DataError

if TYPE_CHECKING:
    from speculators.evaluation.calibration_records import CalibrationPrompt
    from speculators.verifier import Verifier


def calibrate(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="Drafter checkpoint folder, or prompt_lookup.")],
    data: Annotated[
        Path | None, typer.Option(help="Conversations of `speculators data`; their held-out prompts are used, topics are domains.")
    ] = None,
    prompts: Annotated[list[Path] | None, typer.Option(help="Prompt file instead, one domain each; repeat for several.")] = None,
    verifier: Annotated[str | None, typer.Option(help="Default: the one that the checkpoint was made for.")] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(help="Of the requests, 0 is greedy; repeat for several. Default: 0 and 1.")
    ] = None,
    held_out: Annotated[float, typer.Option(help="Share of the conversations that training left out.")] = 0.01,
    max_prompts: Annotated[int | None, typer.Option(min=1, help="Only the first prompts of all.")] = None,
    replies: Annotated[int, typer.Option(min=1, help="Replies a prompt where sampled; greedy has one.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Token budget of a reply.")] = 192,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts decoded together.")] = 32,
    min_rounds: Annotated[int, typer.Option(min=1, help="Fewest rounds of a fit, and of its validation.")] = 1000,
    rounds: Annotated[Path | None, typer.Option(help="Folder of collected rounds, for resuming. Default: the cache folder.")] = None,
    store: Annotated[bool, typer.Option(help="Store the temperatures in the checkpoint's config.json.")] = True,
    plots: Annotated[Path | None, typer.Option(help="Folder for reliability diagrams (PNG); needs matplotlib.")] = None,
    seed: SeedOption = 0,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    json: JsonOption = None,
) -> None:
    """Fit the temperatures of every position on half of the prompts, and report their worth on the other half.

    An interrupted run goes on where it was when the same command is given again.
    """
    check_json_path(json)
    if plots is not None:
        check_plots(plots)
    temperatures = sorted(set(temperature or (0.0, 1.0)))
    for degree in temperatures:
        if not 0 <= degree < float("inf"):
            raise ConfigError(f"--temperature {degree:g} must be 0 (greedy) or positive")
    if (data is None) == (not prompts):
        raise DataError("say where the prompts come from: --data with a folder of conversations, or --prompts with a file, not both")
    from rich.console import Console

    from speculators.checkpoint import read_config
    from speculators.checkpoint.calibration import check_calibration_target, store_calibrations
    from speculators.checkpoint.storage import resolve, weights_sha256
    from speculators.data.default_verifier import cache_folder
    from speculators.decoding.sampling import SamplingParams
    from speculators.evaluation import calibration_records, calibration_report
    from speculators.evaluation.report import narrow_table

    untrained = checkpoint == PROMPT_LOOKUP
    if store and untrained:
        raise ConfigError(f"{PROMPT_LOOKUP} has no checkpoint to store its acceptance in; pass --no-store")
    if store:
        check_calibration_target(Path(checkpoint))
    made_for = None if untrained else read_config(checkpoint).speculators_config.verifier.name_or_path
    target = load_verifier(verifier or made_for or DEFAULT_VERIFIER, dtype, device)
    drafter = load_drafter(checkpoint, target)
    chosen = _read_prompts(target, data, prompts or [], held_out)[:max_prompts]
    folder = rounds or cache_folder() / "calibration"
    identity = calibration_records.fingerprint(target, {} if untrained else weights_sha256(resolve(checkpoint)))
    progress, console = Console(stderr=True), Console()
    results = []
    for degree in temperatures:
        progress.print(f"collecting rounds at temperature {degree:g}", style="dim")
        records = calibration_records.collect(
            target,
            drafter,
            chosen,
            SamplingParams(temperature=degree, max_new_tokens=max_new_tokens, seed=seed),
            num_draft_tokens=drafter.default_draft_tokens,
            batch_size=batch_size,
            folder=folder,
            fingerprint=identity,
            replies=replies,
            on_progress=lambda text: progress.print(text, style="dim"),
        )
        results += calibration_report.calibrate(records, chosen, drafter.confidence_source, degree, min_rounds=min_rounds)
    for result in results:
        kept, errors = result.calibration, result.mean_ece
        header, *lines = calibration_report.table_rows(result)
        means = f"mean ECE {100 * errors['raw']:.2f}% raw, {100 * errors['calibrated']:.2f}% calibrated (decode)"
        title = f"temperature {kept.temperature:g}, {kept.domain}: {means}"
        console.print(narrow_table(title, header, lines))
        console.print(
            f"fitted on {kept.rounds:,} rounds of {result.fit_prompts} prompts, judged on the {result.validation_rounds:,} of"
            f" {result.validation_prompts} others"
        )
        if not result.worth_storing:
            console.print("not stored: prompts that the fit did not see are predicted no better by it")
        if plots is not None:
            from speculators.evaluation.calibration_plots import plot_reliability

            name = f"reliability-t{kept.temperature:g}-{kept.domain.replace(' ', '-').replace('/', '-')}.png"
            plot_reliability(result, f"{Path(checkpoint).name}, T = {kept.temperature:g}, {kept.domain} prompts").savefig(
                plots / name, dpi=110
            )
    if store:
        store_calibrations(Path(checkpoint), [result.calibration for result in results if result.worth_storing])
    write_json(
        json,
        {
            "command": "calibrate",
            "checkpoint": checkpoint,
            "verifier": target.weights.name_or_path,
            "dtype": str(target.dtype).removeprefix("torch."),
            "max_new_tokens": max_new_tokens,
            "replies": replies,
            "seed": seed,
            "results": [result.to_json() for result in results],
        },
    )


def check_plots(folder: Path) -> None:
    """Make the folder for figures, before any work is done for them.

    Raises:
        ConfigError: matplotlib is missing.
        DataError: the folder cannot be used.
    """
    from importlib.util import find_spec

    from speculators.files import check_output_folder, make_folder

    if find_spec("matplotlib") is None:
        raise ConfigError("--plots needs matplotlib; install it, or the package's [notebooks] extra, or leave --plots out")
    check_output_folder(folder)
    make_folder(folder)


def _read_prompts(verifier: Verifier, data: Path | None, files: list[Path], held_out: float) -> list[CalibrationPrompt]:
    from speculators.data.prompts import read_prompts
    from speculators.data.rows import split_held_out
    from speculators.data.storage import load_conversations
    from speculators.evaluation.calibration_records import prompts_of_conversations, prompts_of_file

    if data is not None:
        return prompts_of_conversations(split_held_out(load_conversations(data)[0], held_out)[1])
    return [prompt for file in files for prompt in prompts_of_file(verifier, read_prompts(file), file.stem)]
