"""Write calibrations into a checkpoint: a key of our own in config.json, which readers of the format ignore, and the model card."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from speculators.checkpoint.card import with_calibrations
from speculators.checkpoint.native import EXTRA_KEY, may_write_card, read_config_folder
from speculators.checkpoint.storage import CARD_FILE, CONFIG_FILE, read_json
from speculators.config import SpeculatorConfig
from speculators.decoding.calibration import CONFIG_KEY, Calibration, stored_calibrations
from speculators.errors import CheckpointError
from speculators.files import check_writable, write_text_atomically


def check_calibration_target(folder: Path) -> None:
    """Refuse a checkpoint that calibrations cannot be stored in, before any work is done for them.

    Raises:
        CheckpointError: it is no local folder of a valid checkpoint.
        DataError: its config.json must not be written.
    """
    if not folder.is_dir():
        raise CheckpointError(f"calibrations are stored in a checkpoint folder, and {folder} is none here; download it, or pass --no-store")
    read_config_folder(folder)
    check_writable(folder / CONFIG_FILE)


def store_calibrations(folder: Path, calibrations: Sequence[Calibration]) -> None:
    """Add calibrations to a checkpoint. Those of the same temperature, domain and source are replaced; the weights are not touched.

    The model card tells of them, unless somebody else wrote it.

    Raises:
        CheckpointError, DataError: as `check_calibration_target`.
    """
    check_calibration_target(folder)
    data = read_json(folder / CONFIG_FILE)
    extra = data.get(EXTRA_KEY)
    extra = dict(extra) if isinstance(extra, dict) else {}
    merged = {_key(calibration): calibration for calibration in (*stored_calibrations(extra), *calibrations)}
    kept = [merged[key] for key in sorted(merged)]
    extra[CONFIG_KEY] = [calibration.to_json() for calibration in kept]
    data[EXTRA_KEY] = extra
    write_text_atomically(folder / CONFIG_FILE, json.dumps(data, indent=2, sort_keys=True) + "\n")
    card = folder / CARD_FILE
    if card.is_file() and may_write_card(card):
        write_text_atomically(card, with_calibrations(card.read_text(encoding="utf-8"), kept))


def without_calibrations(config: SpeculatorConfig) -> SpeculatorConfig:
    """The same configuration for other weights: what was fitted to the old ones says nothing about them."""
    extra = getattr(config, EXTRA_KEY, None)
    if not isinstance(extra, dict) or CONFIG_KEY not in extra:
        return config
    return config.model_copy(update={EXTRA_KEY: {key: value for key, value in extra.items() if key != CONFIG_KEY}})


def _key(calibration: Calibration) -> tuple[float, str, str]:
    return calibration.temperature, calibration.domain, calibration.source
