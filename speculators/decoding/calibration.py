"""Calibrated confidence at decode time: what `speculators calibrate` stored with a checkpoint, applied to its proposals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from speculators.decoding.proposal import ConfidenceSource, Drafter
from speculators.errors import CheckpointError
from speculators.json_values import whole_number

ALL_DOMAINS = "all"
CONFIG_KEY = "calibration"  # below EXTRA_KEY of config.json
# Confidence this close to 0 or 1 is as good as certain, and its logit finite.
_SMALLEST = 1e-6


@dataclass(frozen=True)
class Calibration:
    """What was measured of a drafter at one sampling temperature on prompts of one domain.

    Attributes:
        temperature: of the requests, 0 for greedy.
        domain: kind of prompts, or "all".
        source: what was calibrated, see `Drafter.confidence_source`.
        scaling: [K], T_k of Sequential Temperature Scaling; empty for a drafter without confidence.
        offset: [K], b_k that the scaled logits are moved by; 0 is the paper's method.
        acceptance: [K], conditional acceptance of draft k in the rounds of the fit.
        rounds: how many those were.
        raw_ece, calibrated_ece: expected calibration error before and after, the mean over positions on prompts that the fit did
            not see; None where it was not recorded.
    """

    temperature: float
    domain: str
    source: ConfidenceSource
    scaling: tuple[float, ...]
    offset: tuple[float, ...]
    acceptance: tuple[float, ...]
    rounds: int
    raw_ece: float | None = None
    calibrated_ece: float | None = None

    def apply(self, confidence: Tensor) -> Tensor:
        """Calibrated confidence: sigmoid(logit(c_k) / T_k + b_k), [rows, k] -> [rows, k] float64.

        A function of c_k alone, so it may be cut by wherever c_k may. Drafts beyond K keep their confidence.
        """
        width = min(len(self.scaling), confidence.shape[1])
        beyond = confidence.shape[1] - width
        divisor = torch.tensor([*self.scaling[:width], *[1.0] * beyond], dtype=torch.float64, device=confidence.device)
        offset = torch.tensor([*self.offset[:width], *[0.0] * beyond], dtype=torch.float64, device=confidence.device)
        return torch.sigmoid(confidence.double().clamp(_SMALLEST, 1 - _SMALLEST).logit() / divisor + offset)

    def to_json(self) -> dict[str, Any]:
        """As stored in config.json."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> Calibration:
        """Read one entry.

        Raises:
            CheckpointError: it is not what `to_json` writes.
        """
        try:
            scaling, offset = (tuple(float(value) for value in data[name]) for name in ("scaling", "offset"))
            if len(scaling) != len(offset) or not all(0 < t < math.inf for t in scaling) or not all(map(math.isfinite, offset)):
                raise ValueError(f"scaling {list(scaling)} must be positive, and offset {list(offset)} as many finite numbers")
            if data["source"] not in get_args(ConfidenceSource):
                raise ValueError(f"source {data['source']!r} must be one of {', '.join(get_args(ConfidenceSource))}")
            return cls(
                temperature=float(data["temperature"]),
                domain=str(data["domain"]),
                source=data["source"],
                scaling=scaling,
                offset=offset,
                acceptance=tuple(min(1.0, max(0.0, float(value))) for value in data["acceptance"]),
                rounds=whole_number(data["rounds"], "rounds"),
                **{name: None if data.get(name) is None else float(data[name]) for name in ("raw_ece", "calibrated_ece")},
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"config.json: unified_speculators.{CONFIG_KEY} holds an entry that cannot be read ({type(error).__name__}: {error});"
                " run `speculators calibrate` again"
            ) from None


def stored_calibrations(extra: Any) -> list[Calibration]:
    """The calibrations of a checkpoint, from the content of its configuration's own key (None where it has none)."""
    entries = extra.get(CONFIG_KEY) if isinstance(extra, dict) else None
    return [Calibration.from_json(entry) for entry in entries or ()]


def calibration_for(drafter: Drafter, temperature: float) -> Calibration | None:
    """The calibration that a drafter brings along for requests of a temperature; drafters may have `calibrations`, and need not."""
    return choose(getattr(drafter, "calibrations", ()), drafter.confidence_source, temperature)


def choose(
    calibrations: Sequence[Calibration], source: ConfidenceSource, temperature: float, domain: str = ALL_DOMAINS
) -> Calibration | None:
    """The calibration for a request: of this confidence source and domain, at the nearest temperature.

    Greedy acceptance is a match of two tokens, sampled acceptance a ratio of probabilities: a greedy calibration never
    serves a sampled request, nor the other way round. None where nothing fits.
    """
    fitting = [c for c in calibrations if c.source == source and c.domain == domain and (c.temperature == 0) == (temperature == 0)]
    return min(fitting, key=lambda c: abs(c.temperature - temperature), default=None)
