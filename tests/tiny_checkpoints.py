"""Checkpoint folders for tests: drafters to save, and what lies on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tiny_drafters import drafter
from torch import Tensor

from speculators.speculator import Speculator

METHODS = ("dflash", "dspark", "eagle3", "peagle")
SHARED = {"embed_tokens.weight", "lm_head.weight"}


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Every stored tensor by name, over all shards."""
    merged: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        merged |= load_file(file)
    return merged


def config_of(folder: Path) -> dict[str, Any]:
    """config.json."""
    data: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return data


def edit_config(folder: Path, **changes: Any) -> None:
    """Change top-level keys of config.json."""
    (folder / "config.json").write_text(json.dumps(config_of(folder) | changes))


def edit_layers(folder: Path, remove: tuple[str, ...] = (), **changes: Any) -> None:
    """Change and remove keys of transformer_layer_config."""
    layers = config_of(folder)["transformer_layer_config"] | changes
    edit_config(folder, transformer_layer_config={key: value for key, value in layers.items() if key not in remove})


def contents(folder: Path) -> dict[str, bytes]:
    """Relative path -> bytes of every file below a folder."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def frozen_embedding(method: str, **options: Any) -> Speculator:
    """A drafter that shares the verifier's embedding."""
    return drafter(method, **({"train_embedding": False} if method == "peagle" else {}), **options)


def reduced(method: str, **options: Any) -> Speculator:
    """A drafter that proposes 20 of the 61 tokens: 1, 4, 7 ..."""
    speculator = drafter(method, draft_vocab_size=20, **options)
    speculator.set_draft_vocabulary(torch.arange(1, 60, 3))
    return speculator
