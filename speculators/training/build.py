"""From a method name, a verifier and training rows to the float32 speculator that is trained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speculators.checkpoint.calibration import without_calibrations
from speculators.checkpoint.shared import SHARED_NAMES, verifier_tensor
from speculators.checkpoint.validation import skeleton
from speculators.config import SpeculatorConfig
from speculators.data.rows import PackedRows
from speculators.data.vocabulary import read_vocabulary
from speculators.errors import ConfigError
from speculators.registry import get_algorithm
from speculators.speculator import Speculator
from speculators.training.config import TrainingConfig
from speculators.verifier import Verifier


def build_speculator(
    config: TrainingConfig,
    verifier: Verifier,
    rows: PackedRows,
    init_from: Speculator | str | Path | None,
    resumed: SpeculatorConfig | None = None,
) -> Speculator:
    """A new drafter, or one that starts from the weights of another; float32, on the verifier's device, attached to it.

    Args:
        config: names the method; its seed draws the initial weights.
        verifier: the verifier.
        rows: a reduced draft vocabulary without a file takes the tokens that their replies use most.
        init_from: a speculator (copied, not changed) or a checkpoint, of this method or one that this method can start from.
            Taps, draft vocabulary, anchor rule and shape are those of `init_from`; weights it does not have are new.
        resumed: the configuration of a run whose weights are about to be loaded; it then comes before everything else.

    Raises:
        ConfigError: the method is unknown, an option does not fit or contradicts `init_from`, or that is of a method which
            this one cannot start from.
        DataError: the file of the draft vocabulary cannot be read.
        CheckpointError: the checkpoint cannot be read.
        PairingError: it was made for another verifier.
    """
    speculator_class = get_algorithm(config.method).speculator_class
    torch.manual_seed(config.seed)
    speculator: Speculator
    if resumed is not None:
        speculator = speculator_class(resumed)
        speculator.attach(verifier.weights)
    elif init_from is None:
        kept = None if config.draft_vocabulary is None else chosen_tokens(config.draft_vocabulary, config.options, verifier)
        options = config.options if kept is None else {**config.options, "draft_vocab_size": len(kept)}
        speculator = speculator_class.from_verifier(verifier.weights, **options)
        if speculator.has_reduced_vocabulary:
            if kept is None:
                kept = most_frequent_tokens(rows, speculator.config.draft_vocab_size, verifier.vocab_size)
            speculator.set_draft_vocabulary(kept)
    else:
        if config.draft_vocabulary is not None:
            raise ConfigError("a drafter that training starts from brings its draft vocabulary along; leave draft_vocabulary out")
        given = init_from
        if not isinstance(given, Speculator):
            given = Speculator.from_pretrained(given, verifier.weights, dtype=torch.float32)
        speculator = warm_start(speculator_class, given, verifier, config.options)
    return speculator.to(device=verifier.device, dtype=torch.float32).train()


def warm_start(speculator_class: type[Speculator], given: Speculator, verifier: Verifier, options: dict[str, Any]) -> Speculator:
    """A drafter with the weights of another one; what that one does not have is newly initialised, or the verifier's.

    Raises:
        ConfigError: see `build_speculator`.
        PairingError: `given` was made for another verifier.
    """
    method, possible = speculator_class.method, (speculator_class.method, *speculator_class.warm_start_from)
    if given.method not in possible:
        raise ConfigError(
            f"training {method} cannot start from a {given.method} drafter, only from {' or '.join(possible)};"
            f" set method to {given.method!r}"
        )
    Speculator.attach(skeleton(given.config), verifier.weights)  # the pair first: a wrong verifier explains more than an option
    config = speculator_class.continued_config(given.config, verifier.weights, **options)
    speculator = speculator_class(without_calibrations(config))
    weights, expected = given.state_dict(), speculator.state_dict()
    lost = sorted(weights.keys() - expected.keys())
    if lost:
        raise ConfigError(
            f"options {sorted(options)} leave {lost[0]} of the {given.method} drafter that training starts from without a place;"
            " leave out the option that does so"
        )
    for name in SHARED_NAMES:
        if name in expected and name not in weights:  # a table that only the new drafter trains: it starts from the verifier's
            weights[name] = verifier_tensor(name, verifier.weights, weights.get("t2d"))
    speculator.load_state_dict(weights, strict=False)
    speculator.unchecked_shared_tensors = dict(given.unchecked_shared_tensors)
    speculator.attach(verifier.weights)
    return speculator


def chosen_tokens(path: Path, options: Mapping[str, Any], verifier: Verifier) -> Tensor:
    """The tokens of a saved draft vocabulary, [draft vocabulary] int64 ascending.

    Raises:
        DataError: the file is missing or damaged.
        ConfigError: it is another verifier's, or the options ask for another size.
    """
    vocabulary = read_vocabulary(path)
    size = len(vocabulary.token_ids)
    if vocabulary.vocab_size != verifier.vocab_size:
        raise ConfigError(
            f"{path} is for a verifier of {vocabulary.vocab_size} tokens, {verifier.weights.name_or_path!r} has {verifier.vocab_size};"
            " save one with this verifier"
        )
    if (asked := options.get("draft_vocab_size", size)) != size:
        raise ConfigError(f"draft_vocab_size = {asked!r}, but {path} holds {size} tokens; leave one of them out")
    return vocabulary.token_ids


def most_frequent_tokens(rows: PackedRows, count: int, vocab_size: int) -> Tensor:
    """The `count` tokens that replies use most, [count] int64 ascending; unused ones fill up, lowest ids first."""
    supervised = rows.input_ids.to(torch.int64)[rows.loss_mask.bool()]
    frequency = torch.bincount(supervised, minlength=vocab_size)
    return torch.sort(frequency, descending=True, stable=True).indices[:count].sort().values
