"""`speculators inspect`: a checkpoint looked over, without running it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from speculators.cli.common import JsonOption, check_json_path, write_json
from speculators.errors import CheckpointError

if TYPE_CHECKING:
    from speculators.checkpoint.inspection import Inspection, SharedTensor
    from speculators.decoding.calibration import Calibration


def inspect(
    checkpoint: Annotated[str, typer.Argument(metavar="PATH_OR_REPO", help="A checkpoint folder, or a Hub repository owner/name.")],
    verifier: Annotated[str | None, typer.Option(help="Also check the pair with this verifier.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub repository.")] = None,
    json: JsonOption = None,
) -> None:
    """Tell what a checkpoint is, what vLLM will do with it, and every problem found. Exit code 2 if there is one."""
    check_json_path(json)
    from speculators.checkpoint.inspection import inspect as look_over
    from speculators.checkpoint.verifier_files import read_verifier_weights

    weights = None if verifier is None else read_verifier_weights(verifier)
    inspection = look_over(checkpoint, weights, revision=revision)
    for name, value in described(inspection):
        typer.echo(f"{name:<22}{value}")
    write_json(json, {"command": "inspect", **asdict(inspection)})
    if inspection.problems:
        count = len(inspection.problems)
        raise CheckpointError(inspection.problems[0] + (f" (the first of {count} problems)" if count > 1 else ""))


def described(inspection: Inspection) -> list[tuple[str, str]]:
    """The lines that are printed: a name and what is known of it."""
    found = inspection
    lines = [
        ("method", _known(found.method)),
        ("format", f"speculators {_known(found.format_version)}" if found.format == "speculators" else _known(found.format)),
        ("verifier", _known(found.verifier)),
        ("draft tokens (K)", _known(found.num_draft_tokens) + (f", at most {found.max_draft_tokens}" if found.max_draft_tokens else "")),
        ("taps", "unknown" if found.taps is None else ", ".join(map(str, found.taps)) or "none"),
        ("layers", f"{_known(found.num_layers)}, hidden size {_known(found.hidden_size)}, MLP width {_known(found.intermediate_size)}"),
        ("parameters", "unknown" if found.parameters is None else f"{found.parameters:,}"),
        ("weights", f"{found.weight_bytes:,} bytes in {_files(len(found.weight_files))}, {' and '.join(found.dtypes) or 'dtype unknown'}"),
        ("draft vocabulary", _coverage(found.draft_vocab_size, found.vocab_size)),
        ("form", _known(found.form)),
        *((name, _ownership(tensor)) for name, tensor in found.shared.items()),
        *(("calibration", _calibrated(calibration)) for calibration in found.calibrations),
    ]
    served = found.vllm
    if served is not None:
        lines += [
            ("vLLM method", served.method),
            ("vLLM runner", " or ".join(served.runners)),
            ("vLLM version", "unknown" if served.minimum_version is None else f"{served.minimum_version} or later"),
            ("vLLM command", served.command),
            *(("vLLM caveat", caveat) for caveat in served.caveats),
        ]
    elif found.form is not None and found.format == "speculators":
        lines.append(("vLLM", "has no drafter of its own for this method"))
    lines += [("note", note) for note in found.notes]
    return lines + ([("problem", problem) for problem in found.problems] or [("problems", "none found")])


def _calibrated(calibration: Calibration) -> str:
    from speculators.checkpoint.card import CALIBRATED, shown_error

    fitted = f"temperature {calibration.temperature:g}, {calibration.domain} prompts, {CALIBRATED[calibration.source]}"
    errors = f"mean ECE {shown_error(calibration.raw_ece)} before, {shown_error(calibration.calibrated_ece)} after (decode)"
    return f"{fitted}: {calibration.rounds:,} rounds, {errors}"


def _known(value: object) -> str:
    return "unknown" if value is None else str(value)


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"


def _coverage(draft: int | None, whole: int | None) -> str:
    if not isinstance(draft, int) or not isinstance(whole, int) or whole < 1:
        return f"{_known(draft)} of {_known(whole)} tokens"
    return f"{draft:,} of {whole:,} tokens ({draft / whole:.1%})"


def _ownership(tensor: SharedTensor) -> str:
    if not tensor.stored:
        return "not stored: the verifier's is used"
    whose = "the drafter's own" if tensor.trained else "a copy of the verifier's"
    compared = {None: "", True: ", equal to that of this verifier", False: ", another than that of this verifier"}
    return f"stored, {whose}{compared[tensor.equals_verifier]}"
