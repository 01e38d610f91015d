"""The reliability diagram of a calibration."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from speculators.evaluation.calibration_report import CalibrationResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RAW, CALIBRATED = "#b0b0b0", "#1f6f8b"


def plot_reliability(result: CalibrationResult, title: str) -> Figure:
    """Predicted against measured acceptance of drafts 1 .. k on the validation prompts, a panel a position.

    A dot is one interval of predictions, its area the share of rounds in it; on the diagonal, predictions come true.
    """
    from matplotlib.figure import Figure

    positions = len(result.raw)
    columns = min(4, positions)
    lines = math.ceil(positions / columns)
    figure = Figure(figsize=(2.9 * columns, 2.9 * lines + 0.7), layout="constrained")
    panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flatten()
    for k, (axes, raw, scaled) in enumerate(zip(panels, result.raw, result.calibrated, strict=False), start=1):
        axes.plot([0, 1], [0, 1], color="black", linewidth=0.7, linestyle="--")
        for quality, color, name in ((raw, RAW, "raw"), (scaled, CALIBRATED, "calibrated")):
            predicted, observed = [part.predicted for part in quality.bins], [part.observed for part in quality.bins]
            sizes = [12 + 250 * part.count / max(1, quality.rounds) for part in quality.bins]
            axes.plot(predicted, observed, color=color, linewidth=1)
            axes.scatter(predicted, observed, s=sizes, color=color, alpha=0.8, linewidths=0, label=f"{name}, ECE {100 * quality.ece:.1f}%")
        axes.set_title(f"drafts 1 to {k} accepted" if k > 1 else "draft 1 accepted", fontsize=9)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, loc="upper left", markerscale=0.6)
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
    for axes in panels[positions:]:
        axes.set_visible(False)
    figure.supxlabel("predicted probability")
    figure.supylabel("measured share")
    figure.suptitle(f"{title}\n{result.validation_rounds:,} rounds of {result.validation_prompts} validation prompts (decode)", fontsize=10)
    return figure
