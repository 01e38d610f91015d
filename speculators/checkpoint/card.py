"""The model card: README.md of a checkpoint, with the front matter that the Hub reads."""

from __future__ import annotations

import json
import platform
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from speculators.data.default_verifier import DEFAULT_VERIFIER_NAME
from speculators.decoding.calibration import Calibration
from speculators.errors import ConfigError
from speculators.registry import VllmServing, get_algorithm
from speculators.speculator import Speculator

MARKER = "<!-- written by unified-speculators -->"
Kind = Literal["decode", "teacher-forced", "train", "simulated"]
CALIBRATED: dict[str, str] = {"head": "confidence head", "probability": "draft probability", "none": "measured acceptance alone"}
_CALIBRATION_HEADING = "## Calibration"
_KINDS: dict[str, str] = {
    "decode": "measured while decoding with the verifier",
    "teacher-forced": "computed on given replies, without decoding",
    "train": "computed on training rows",
    "simulated": "computed from recorded acceptances, without running the models",
}


@dataclass(frozen=True)
class Acceptance:
    """One measured row. Rows of different kinds never share a table.

    Attributes:
        prompts: name of the prompt set.
        num_draft_tokens: K.
        acceptance_length: tokens a round, the bonus token included.
        kind: how the number came about.
        temperature: 0 is greedy.
        by_position: share of rounds in which draft token k was accepted, k = 1 .. K; empty when not known.
        speedup: tokens a second over plain decoding's with the same engine; None when not known.
    """

    prompts: str
    num_draft_tokens: int
    acceptance_length: float
    kind: Kind
    temperature: float = 0.0
    by_position: tuple[float, ...] = ()
    speedup: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ConfigError(f"kind = {self.kind!r}: an acceptance is one of {', '.join(_KINDS)}")


@dataclass(frozen=True)
class ModelCard:
    """What only the one who trained a drafter knows. Everything is optional; what is unknown is not mentioned.

    Attributes:
        summary: a sentence or two on what this drafter is for.
        base_model: Hub name of the verifier; None takes the name it was trained with.
        repository: Hub name or path under which users will load this checkpoint.
        license: Hub identifier of the licence, e.g. "apache-2.0".
        training_command: the command that made it.
        data: where prompts and replies came from, the thinking mode included.
        tokens: reply tokens trained on, counted once.
        steps: optimiser steps.
        seconds: wall time of the training.
        hardware: what it was trained on.
        seed: of the training.
        acceptance: measured acceptance.
        notes: anything else, Markdown.
        tags: Hub tags beside the usual ones.
    """

    summary: str = ""
    base_model: str | None = None
    repository: str | None = None
    license: str | None = None
    training_command: str = ""
    data: str = ""
    tokens: int | None = None
    steps: int | None = None
    seconds: float | None = None
    hardware: str = ""
    seed: int | None = None
    acceptance: tuple[Acceptance, ...] = ()
    notes: str = ""
    tags: tuple[str, ...] = ()


def render_card(card: ModelCard, speculator: Speculator, form: str, weights_sha256: Mapping[str, str], dtype: str) -> str:
    """The text of README.md.

    Args:
        card: what is known of the training.
        speculator: what is saved.
        form: "full" or "compact".
        weights_sha256: file name -> sha256 of the saved weights.
        dtype: stored dtype.
    """
    trained_for = speculator.config.speculators_config.verifier.name_or_path
    if trained_for is None:
        trained_for = speculator.verifier.name_or_path
    base_model = card.base_model or trained_for
    sections = [
        _front_matter(card, speculator.method, base_model),
        MARKER,
        f"# {speculator.method} drafter for {base_model}",
        card.summary,
        _overview(speculator, trained_for, form, dtype),
        _training(card),
        *_acceptance_tables(card.acceptance),
        calibration_section(speculator.calibrations),
        _loading(card, speculator, trained_for, base_model),
        card.notes and f"## Notes\n\n{card.notes}",
        _files(weights_sha256),
    ]
    return "\n\n".join(section.strip() for section in sections if section) + "\n"


def _front_matter(card: ModelCard, method: str, base_model: str) -> str:
    # A JSON string is a valid YAML string, whatever it holds.
    lines = [f"base_model: {json.dumps(base_model)}", 'library_name: "unified-speculators"', 'pipeline_tag: "text-generation"']
    if card.license:
        lines.append(f"license: {json.dumps(card.license)}")
    tags = dict.fromkeys(("speculative-decoding", "speculators", method, *card.tags))
    lines += ["tags:", *(f"  - {json.dumps(tag)}" for tag in tags)]
    return "\n".join(["---", *lines, "---"])


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    head, *body = [f"| {' | '.join(cell.replace('|', chr(92) + '|').replace(chr(10), ' ') for cell in row)} |" for row in rows]
    return "\n".join([head, "|" + " --- |" * len(rows[0]), *body])


def _overview(speculator: Speculator, trained_for: str, form: str, dtype: str) -> str:
    config, layers = speculator.config, speculator.config.layers
    rows = [
        ("", ""),
        ("method", speculator.method),
        ("verifier", trained_for),
        ("draft tokens a round (K)", str(speculator.default_draft_tokens)),
        (config.aux_layer_key, ", ".join(map(str, config.tapped_layers)) or "none"),
        ("layers x hidden size x MLP width", f"{layers.num_hidden_layers} x {layers.hidden_size} x {layers.intermediate_size}"),
        ("draft vocabulary", f"{config.draft_vocab_size} of {config.vocab_size} tokens"),
        ("parameters", f"{sum(parameter.numel() for parameter in speculator.parameters()):,}"),
        ("stored as", f"{dtype}, {form} form" + (": what equals the verifier's is left out" if form == "compact" else "")),
    ]
    return f"## Overview\n\n{_table(rows)}"


def _training(card: ModelCard) -> str:
    facts = {
        "data": card.data,
        "reply tokens": None if card.tokens is None else f"{card.tokens:,}",
        "steps": None if card.steps is None else f"{card.steps:,}",
        "seconds": None if card.seconds is None else f"{card.seconds:,.0f}",
        "hardware": card.hardware,
        "seed": None if card.seed is None else str(card.seed),
    }
    rows = [("", ""), *((key, value) for key, value in facts.items() if value)]
    command = card.training_command and f"```bash\n{card.training_command.strip()}\n```"
    table = _table(rows) if len(rows) > 1 else ""
    versions = {"python": platform.python_version()} | {name: _version(name) for name in ("torch", "transformers", "unified-speculators")}
    written_with = "Written with " + ", ".join(f"{name} {number}" for name, number in versions.items() if number) + "."
    return "## Training\n\n" + "\n\n".join(part for part in (command, table, written_with) if part)


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def _acceptance_tables(rows: tuple[Acceptance, ...]) -> list[str]:
    """One table a kind."""
    tables = []
    for kind in dict.fromkeys(row.kind for row in rows):
        cells = [("prompts", "K", "temperature", f"acceptance length ({kind})", f"accepted by position ({kind})", f"speed-up ({kind})")]
        for row in rows:
            if row.kind == kind:
                by_position = " ".join(f"{share:.2f}" for share in row.by_position)
                speedup = "" if row.speedup is None else f"{row.speedup:.2f}x"
                cells.append(
                    (row.prompts, str(row.num_draft_tokens), f"{row.temperature:g}", f"{row.acceptance_length:.2f}", by_position, speedup)
                )
        tables.append(f"## Acceptance ({kind})\n\nThese numbers are {kind}: {_KINDS[kind]}. The bonus token counts.\n\n{_table(cells)}")
    return tables


def calibration_section(calibrations: Sequence[Calibration]) -> str:
    """What was fitted, on how much, and what it is worth; empty where nothing was."""
    if not calibrations:
        return ""
    rows = [("temperature", "prompts", "calibrated", "rounds (decode)", "mean ECE before (decode)", "mean ECE after (decode)")]
    rows += [
        (
            f"{one.temperature:g}",
            one.domain,
            CALIBRATED[one.source],
            f"{one.rounds:,}",
            shown_error(one.raw_ece),
            shown_error(one.calibrated_ece),
        )
        for one in calibrations
    ]
    about = (
        "`config.json` holds what turns confidences into probabilities of acceptance; requests use the fit of the nearest temperature."
        " ECE is the expected calibration error, the mean over draft positions on prompts that the fit did not see."
    )
    return f"{_CALIBRATION_HEADING}\n\n{about}\n\n{_table(rows)}"


def with_calibrations(text: str, calibrations: Sequence[Calibration]) -> str:
    """A card that this library wrote, its section on calibration written anew; everything else stays as it is."""
    section = calibration_section(calibrations)
    old = re.search(rf"^{_CALIBRATION_HEADING}\n.*?(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if old is not None:
        return f"{text[: old.start()]}{section}\n\n{text[old.end() :]}".rstrip() + "\n"
    before, heading, after = text.partition("## Use\n")
    return f"{before.rstrip()}\n\n{section}\n\n{heading}{after}".rstrip() + "\n"


def shown_error(ece: float | None) -> str:
    """An expected calibration error for people."""
    return "not recorded" if ece is None else f"{ece:.2%}"


def _loading(card: ModelCard, speculator: Speculator, trained_for: str, base_model: str) -> str:
    checkpoint = card.repository or "PATH_OF_THIS_FOLDER"
    python = "\n".join(
        [
            "```python",
            "from speculators.speculator import Speculator",
            "from speculators.verifier import Verifier",
            "",
            f"verifier = Verifier.from_pretrained({json.dumps(trained_for)})",
            f"speculator = Speculator.from_pretrained({json.dumps(checkpoint)}, verifier.weights)",
            "```",
        ]
    )
    serving = get_algorithm(speculator.method).serving
    if serving.method is None:
        return f"## Use\n\n{python}\n\nvLLM has no drafter of its own for this method."
    command = serving_command(serving, base_model, checkpoint, speculator.default_draft_tokens)
    version = serving.minimum_version_for(speculator.config)
    needs = f"{version} or later, model runner {' or '.join(serving.runners)}" if version else ""
    text = f"## Use\n\n{python}\n\n```bash\n{command}\n```"
    return f"{text}\n\nThis needs vLLM {needs}." if needs else text


def serving_command(serving: VllmServing, verifier: str, checkpoint: str, num_draft_tokens: int) -> str:
    """The shell command that serves a checkpoint. The embedded verifier lies in a cache folder, under no name that vLLM could load."""
    if verifier == DEFAULT_VERIFIER_NAME:
        return f"speculators serve {shlex.quote(checkpoint)}"
    return serving.command(verifier, checkpoint, num_draft_tokens)


def _files(weights_sha256: Mapping[str, str]) -> str:
    return "## Files\n\n" + _table([("file", "sha256"), *weights_sha256.items()])
