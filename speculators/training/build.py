"""From a method name, a verifier and training rows to the float32 speculator that is trained."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from speculators.data.rows import PackedRows
from speculators.errors import ConfigError
from speculators.registry import get_algorithm
from speculators.speculator import Speculator
from speculators.training.config import TrainingConfig
from speculators.verifier import Verifier


def build_speculator(config: TrainingConfig, verifier: Verifier, rows: PackedRows, init_from: Speculator | str | Path | None) -> Speculator:
    """A new drafter, or one that starts from the weights of another; float32, on the verifier's device, attached to it.

    Args:
        config: names the method; its seed draws the initial weights.
        verifier: the verifier.
        rows: a reduced draft vocabulary takes the tokens that their replies use most.
        init_from: a speculator (copied, not changed) or a checkpoint. Its own settings and draft vocabulary stay.

    Raises:
        ConfigError: the method is unknown, an option does not fit, or `init_from` is of another method or comes with options.
        CheckpointError: the checkpoint cannot be read.
        PairingError: it was made for another verifier.
    """
    speculator_class = get_algorithm(config.method).speculator_class
    if init_from is None:
        torch.manual_seed(config.seed)
        speculator: Speculator = speculator_class.from_verifier(verifier.weights, **config.options)
        if speculator.has_reduced_vocabulary:
            speculator.set_draft_vocabulary(most_frequent_tokens(rows, speculator.config.draft_vocab_size, verifier.vocab_size))
    else:
        if config.options:
            raise ConfigError(f"options {sorted(config.options)} cannot change a drafter that training starts from; leave them out")
        given = init_from if isinstance(init_from, Speculator) else Speculator.from_pretrained(init_from, verifier.weights)
        if given.method != config.method:
            raise ConfigError(f"training {config.method} cannot start from a {given.method} drafter; set method to {given.method!r}")
        speculator = speculator_class(given.config)
        speculator.load_state_dict(given.state_dict())
        speculator.attach(verifier.weights)
    return speculator.to(device=verifier.device, dtype=torch.float32).train()


def most_frequent_tokens(rows: PackedRows, count: int, vocab_size: int) -> Tensor:
    """The `count` tokens that replies use most, [count] int64 ascending; unused ones fill up, lowest ids first."""
    supervised = rows.input_ids.to(torch.int64)[rows.loss_mask.bool()]
    frequency = torch.bincount(supervised, minlength=vocab_size)
    return torch.sort(frequency, descending=True, stable=True).indices[:count].sort().values
