"""Fit on one half of the prompts, judge on the other: the calibration of a drafter at one temperature, as numbers and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from speculators.decoding.calibration import ALL_DOMAINS, Calibration
from speculators.decoding.proposal import ConfidenceSource
from speculators.errors import DataError
from speculators.evaluation.calibration import (
    PositionQuality,
    fit_sequential_scaling,
    fit_sequential_temperatures,
    logits_of,
    prefix_probabilities,
    quality_by_position,
)
from speculators.evaluation.calibration_records import CalibrationPrompt, Records

# Validation rounds whose calibrated confidences the JSON keeps, for the load simulator.
SAMPLE = 128
# Of few rounds the calibration error is a step function of T, and its minimum chance.
MIN_ROUNDS = 1000


@dataclass(frozen=True)
class CalibrationResult:
    """One fit, and what it is worth on prompts it did not see.

    Attributes:
        calibration: what is stored.
        fit_prompts, validation_prompts: numbers of prompts with rounds; no prompt is in both.
        validation_rounds: rounds of the validation prompts; those of the fit are `calibration.rounds`.
        raw, temperatures_only, calibrated: [K] quality of the prefix probabilities on the validation rounds: as they come, after
            the paper's Sequential Temperature Scaling, and after what is stored, which has offsets too. For a drafter without
            confidence all come from measured acceptance, the same for every round.
        sample: calibrated confidences of whole validation rounds, [at most SAMPLE][K], evenly spread over them.
    """

    calibration: Calibration
    fit_prompts: int
    validation_prompts: int
    validation_rounds: int
    raw: tuple[PositionQuality, ...]
    temperatures_only: tuple[PositionQuality, ...]
    calibrated: tuple[PositionQuality, ...]
    sample: tuple[tuple[float, ...], ...]

    @property
    def worth_storing(self) -> bool:
        """Whether unseen prompts gain by it. What holds for all domains is stored anyway: it carries the measured acceptance."""
        return self.calibration.domain == ALL_DOMAINS or self.mean_ece["calibrated"] < self.mean_ece["raw"]

    @property
    def mean_ece(self) -> dict[str, float]:
        """Mean over positions of each of the three."""
        sides = {"raw": self.raw, "temperatures_only": self.temperatures_only, "calibrated": self.calibrated}
        return {name: _mean_ece(side) for name, side in sides.items()}

    def to_json(self) -> dict[str, Any]:
        """All of it, as JSON values rounded to six digits."""
        return {"kind": "decode", **_rounded(asdict(self)), "mean_ece": _rounded(self.mean_ece)}


def calibrate(
    records: Records,
    prompts: Sequence[CalibrationPrompt],
    source: ConfidenceSource,
    temperature: float,
    *,
    min_rounds: int = MIN_ROUNDS,
) -> list[CalibrationResult]:
    """One result over all domains, then one for every domain with enough rounds in both halves.

    Args:
        records: rounds of the prompts.
        prompts: in the order that `Records.prompt` counts in.
        source: of the confidences.
        temperature: of the requests.
        min_rounds: fewest rounds of the fit, and of the validation.

    Raises:
        DataError: there are too few rounds over all domains.
    """
    validation = np.array([prompt.for_validation for prompt in prompts])[records.prompt]
    domain = np.array([prompt.domain for prompt in prompts])[records.prompt]
    counts = {"fit": int((~validation).sum()), "validation": int(validation.sum())}
    if min(counts.values()) < min_rounds:
        raise DataError(
            f"{counts['fit']} rounds to fit and {counts['validation']} to validate at temperature {temperature:g}; calibration needs"
            f" {min_rounds} of each: use more prompts or a larger --max-new-tokens"
        )
    results = [_result(records.select(~validation), records.select(validation), ALL_DOMAINS, source, temperature)]
    for name in sorted(set(domain.tolist()) - {ALL_DOMAINS}):
        fit, judged = records.select(~validation & (domain == name)), records.select(validation & (domain == name))
        # Deep positions are seen only in rounds that the budget or a stop token did not cut.
        if (
            min(len(fit), len(judged)) >= min_rounds
            and min(int(part.observed.max()) for part in (fit, judged)) == records.confidence.shape[1]
        ):
            results.append(_result(fit, judged, name, source, temperature))
    return results


def _mean_ece(qualities: Sequence[PositionQuality]) -> float:
    return float(np.mean([quality.ece for quality in qualities]))


def _result(fit: Records, judged: Records, domain: str, source: ConfidenceSource, temperature: float) -> CalibrationResult:
    acceptance = fit.conditional_acceptance()
    if source == "none":
        scaling: list[float] = []
        offset: list[float] = []
        conditional = np.broadcast_to(np.asarray(acceptance), judged.confidence.shape)[:1]
        sides = [np.broadcast_to(np.cumprod(acceptance), judged.confidence.shape)] * 3
    else:
        logits = logits_of(fit.confidence)
        temperatures = fit_sequential_temperatures(logits, fit.accepted, fit.observed)
        scaling, offset = fit_sequential_scaling(logits, fit.accepted, fit.observed)
        unseen = logits_of(judged.confidence)
        sides = [
            prefix_probabilities(unseen, [1.0] * len(scaling)),
            prefix_probabilities(unseen, temperatures),
            prefix_probabilities(unseen, scaling, offset),
        ]
        whole = sides[-1][judged.observed == judged.confidence.shape[1]]
        kept = whole[np.unique(np.linspace(0, len(whole) - 1, SAMPLE).round().astype(int))] if len(whole) else whole
        conditional = kept / np.concatenate([np.ones((len(kept), 1)), kept[:, :-1]], axis=1)
    raw, temperatures_only, calibrated = (tuple(quality_by_position(side, judged.accepted, judged.observed)) for side in sides)
    t, b, measured = (tuple(round(value, 6) for value in values) for values in (scaling, offset, acceptance))
    before, after = (round(_mean_ece(side), 6) for side in (raw, calibrated))
    return CalibrationResult(
        Calibration(temperature, domain, source, t, b, measured, len(fit), before, after),
        fit_prompts=len(np.unique(fit.prompt)),
        validation_prompts=len(np.unique(judged.prompt)),
        validation_rounds=len(judged),
        raw=raw,
        temperatures_only=temperatures_only,
        calibrated=calibrated,
        sample=tuple(tuple(round(float(value), 4) for value in line) for line in conditional),
    )


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return round(value, 6) if isinstance(value, float) else value


def table_rows(result: CalibrationResult) -> list[list[str]]:
    """A header and a line a position."""

    def percent(value: float) -> str:
        return f"{100 * value:.2f}%"

    def area(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    lines = [["k", "rounds", "accepted", "T", "b", "ECE raw", "ECE T only", "ECE", "AUC raw", "AUC", "Brier raw", "Brier"]]
    kept = result.calibration
    for k, (raw, only, scaled) in enumerate(zip(result.raw, result.temperatures_only, result.calibrated, strict=True)):
        fitted = [f"{kept.scaling[k]:.2f}", f"{kept.offset[k]:+.1f}"] if kept.scaling else ["-", "-"]
        lines.append(
            [
                *(str(k + 1), f"{scaled.rounds:,}", percent(scaled.observed), *fitted),
                *(percent(raw.ece), percent(only.ece), percent(scaled.ece)),
                *(area(raw.auc), area(scaled.auc), f"{raw.brier:.4f}", f"{scaled.brier:.4f}"),
            ]
        )
    return lines
