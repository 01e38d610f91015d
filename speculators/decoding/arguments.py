"""What `generate` is asked for: checked, and turned into K and a length schedule, before anything runs."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from numbers import Integral
from typing import Literal

import torch

from speculators.decoding.calibration import calibration_for
from speculators.decoding.length_schedules import AutoLength, ConfidenceThreshold, FixedLength, LengthSchedule
from speculators.decoding.proposal import Drafter
from speculators.decoding.sampling import SamplingParams
from speculators.errors import ConfigError, DataError, PairingError
from speculators.speculator import Speculator
from speculators.verifier import Verifier

AUTO: Literal["auto"] = "auto"


def check_kinds(verifier: Verifier, drafter: Drafter | None, sampling: SamplingParams) -> None:
    """Refuse what is no verifier, drafter or request at all.

    Raises:
        ConfigError: one of them is of another type.
    """
    wanted = (
        ("verifier", verifier, isinstance(verifier, Verifier), "a Verifier; Verifier(model, tokenizer) makes one of a transformers model"),
        ("drafter", drafter, drafter is None or hasattr(drafter, "propose"), "a drafter; Speculator.from_pretrained loads one"),
        ("sampling", sampling, isinstance(sampling, SamplingParams), "SamplingParams, such as SamplingParams(max_new_tokens=128)"),
    )
    for name, value, fits, what in wanted:
        if not fits:
            raise ConfigError(f"generate: {name} must be {what}, not {type(value).__name__}")


def check_pair(verifier: Verifier, drafter: Drafter | None) -> None:
    """Refuse a drafter whose layers cannot take what the verifier hands them.

    Raises:
        PairingError: it was made for a verifier of another vocabulary or width.
        ConfigError: its weights are of a dtype that the verifier's hidden states do not fit into.
    """
    if not isinstance(drafter, Speculator):
        return
    own, given = drafter.verifier, verifier.weights
    if own.embedding.shape != given.embedding.shape:
        raise PairingError(
            f"this {drafter.method} drafter belongs to {own.name_or_path!r}, of {own.vocab_size} tokens and hidden size {own.hidden_size},"
            f" but {given.name_or_path!r} has {given.vocab_size} and {given.hidden_size}; decode with its own verifier or train one for"
            " this"
        )
    dtype = next(drafter.parameters()).dtype
    if torch.promote_types(dtype, verifier.dtype) != dtype:
        raise ConfigError(
            f"the drafter's weights are {dtype}, the verifier's {verifier.dtype}; convert the drafter with"
            " drafter.to(verifier.dtype), or load the verifier in the drafter's dtype"
        )


def check_draft_tokens(drafter: Drafter | None, requested: int | Literal["auto"] | None) -> int:
    """K, the most drafts of a round, or 0 without a drafter.

    Raises:
        ConfigError: it is no number, or more than the drafter proposes.
    """
    if drafter is None:
        return 0
    if requested is None or requested == AUTO:
        draft_tokens = drafter.default_draft_tokens
    elif hasattr(requested, "__index__") and not isinstance(requested, bool):
        draft_tokens = int(requested)
    else:
        raise ConfigError(f"num_draft_tokens {requested!r} must be a whole number or {AUTO!r}")
    if not 1 <= draft_tokens <= drafter.max_draft_tokens:
        raise ConfigError(
            f"num_draft_tokens {draft_tokens} must be between 1 and {drafter.max_draft_tokens}, the most that"
            f" {type(drafter).__name__} proposes in one round; for plain decoding pass no drafter"
        )
    return draft_tokens


def choose_schedule(
    verifier: Verifier,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    requested: int | Literal["auto"] | None,
    confidence_threshold: float,
    schedule: LengthSchedule | None,
) -> LengthSchedule:
    """The one schedule that the arguments of `generate` ask for.

    Raises:
        ConfigError: they ask for two, or for one that needs a confidence which the drafter does not have.
    """
    threshold = ConfidenceThreshold(confidence_threshold)  # checks the value
    asked = (
        ("num_draft_tokens='auto'", requested == AUTO),
        ("confidence_threshold", confidence_threshold > 0),
        ("schedule", schedule is not None),
    )
    names = [name for name, wanted in asked if wanted]
    if len(names) > 1:
        raise ConfigError(f"{' and '.join(names)} each choose the lengths of blocks; use one of them")
    if drafter is None:
        return FixedLength()
    if requested == AUTO:
        from speculators.decoding.profiler import step_times  # it times this engine

        limit = check_draft_tokens(drafter, requested)
        calibration = calibration_for(drafter, sampling.temperature)
        return AutoLength.from_step_times(
            step_times(verifier, drafter, limit, prompts, sampling),
            len(prompts),
            limit,
            () if calibration is None else calibration.acceptance,
            # Uncalibrated confidence is no probability to pay by, and off the CPU reading it costs a synchronisation.
            cut=calibration is not None and calibration.source != "none" and verifier.device.type == "cpu",
        )
    chosen = schedule if schedule is not None else threshold if confidence_threshold > 0 else FixedLength()
    if chosen.needs_confidence and drafter.confidence_source == "none":
        what = f"confidence_threshold {confidence_threshold}" if schedule is None else type(chosen).__name__
        raise ConfigError(
            f"{what} needs a drafter with a confidence of its drafts, and {type(drafter).__name__} has none: its drafts are"
            " deterministic and carry no probabilities; leave the threshold at 0 or choose another drafter"
        )
    return chosen


def check_prompts(verifier: Verifier, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> None:
    """Refuse prompts that cannot be decoded.

    Raises:
        DataError: there are none, or one is no list of token ids, is empty, holds ids outside the vocabulary, or leaves no room for
            its reply.
    """
    if not hasattr(prompts, "__len__"):
        raise DataError(f"prompts must be a list of lists of token ids, not {type(prompts).__name__}")
    if not len(prompts):
        raise DataError("there are no prompts to decode; pass at least one")
    context = verifier.context_length
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, Sequence) or not all(map(_is_token_id, prompt)):
            raise DataError(
                f"prompt {index} must be a list of token ids, and prompts a list of such lists, but this one is {reprlib.repr(prompt)};"
                " encode text with Verifier.encode_chat, and turn a tensor into a list with tolist()"
            )
        if not prompt:
            raise DataError(f"prompt {index} is empty; a prompt needs at least one token")
        if not 0 <= min(prompt) <= max(prompt) < verifier.vocab_size:
            raise DataError(f"prompt {index} holds token ids outside 0 to {verifier.vocab_size - 1}, the verifier's vocabulary")
        if context is not None and len(prompt) + sampling.max_new_tokens > context:
            raise DataError(
                f"prompt {index} has {len(prompt)} tokens, with max_new_tokens {sampling.max_new_tokens} that exceeds the context of"
                f" {context} tokens of {verifier.weights.name_or_path!r}; shorten the prompt or lower max_new_tokens"
            )


def _is_token_id(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
