"""What must hold between a checkpoint's configuration, its tensors and its verifier, beyond single values.

vLLM catches little of this: a missing tensor loads there in silence and no draft is ever accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speculators.checkpoint.shared import EMBEDDING, EMBEDDING_KEY, HEAD, HEAD_KEY, SHARED_NAMES
from speculators.checkpoint.storage import CONFIG_FILE, WEIGHTS_FILE, problem
from speculators.config import SpeculatorConfig
from speculators.errors import CheckpointError, ConfigError
from speculators.registry import get_algorithm
from speculators.speculator import Speculator, VerifierWeights

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_MAPPING = ("t2d", "d2t")
_AGAIN = "save or download the checkpoint again"


def skeleton(config: SpeculatorConfig, file: Path | str = CONFIG_FILE) -> Speculator:
    """A speculator of this configuration on the meta device: everything but values, whatever its size.

    Raises:
        CheckpointError: the algorithm refuses the configuration.
    """
    try:
        with torch.device("meta"):
            return get_algorithm(config.speculators_model_type).speculator_class(config)
    except ConfigError as error:
        raise CheckpointError(f"{file}: {error}") from None
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:  # sizes that no tensor can have
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{file}: no {config.speculators_model_type} drafter can be built from it ({reason}); correct its sizes"
        ) from None


def validate(
    config: SpeculatorConfig,
    tensors: Mapping[str, Tensor],
    verifier: VerifierWeights | None = None,
    *,
    folder: Path,
    files: Mapping[str, Path] | None = None,
    main_file: Path | None = None,
    optional: tuple[str, ...] = (),
) -> None:
    """Check what the configuration's own validation cannot: tensors against configuration, both against the verifier.

    Args:
        config: already valid by itself.
        tensors: everything the checkpoint holds, verifier tensors included.
        verifier: None when it is not known.
        folder: where the checkpoint lies; named in messages.
        files: which file holds each tensor; `main_file` where it is not said.
        main_file: the file to name when a tensor is missing; None for `model.safetensors`.
        optional: expected tensors that may be absent (what the compact form leaves out).

    Raises:
        CheckpointError: `file: key = value: rule; remedy` for the first offence.
    """
    for offence in offences(config, tensors, verifier, folder=folder, files=files, main_file=main_file, optional=optional):
        raise offence


def offences(
    config: SpeculatorConfig,
    tensors: Mapping[str, Tensor],
    verifier: VerifierWeights | None = None,
    *,
    folder: Path,
    files: Mapping[str, Path] | None = None,
    main_file: Path | None = None,
    optional: tuple[str, ...] = (),
) -> Iterator[CheckpointError]:
    """Every rule of `validate` that is broken, each checked only when the one before it has been asked for.

    What follows from an earlier offence (the shape of a tensor that is not expected at all) is not named again.
    """
    config_file, files = folder / CONFIG_FILE, files or {}
    default_file = main_file or folder / WEIGHTS_FILE
    yield from _caught(check_mask_token, config, verifier, config_file)
    yield from _caught(check_rope_spellings, config, config_file)
    yield from _caught(check_width, config, config_file)
    try:
        expected = dict(skeleton(config, config_file).state_dict())
    except CheckpointError as error:
        yield error
        return
    named = set()
    for offence in _caught(check_fusion_width, config, tensors, files.get("fc.weight", default_file)):
        named.add("fc.weight")
        yield offence
    yield from _caught(check_names, config, tensors, expected, files, default_file, optional)
    allowed = expected | {name: _shared_tensor(config, name) for name in SHARED_NAMES if name not in expected}
    present = [name for name in tensors if name in allowed and name not in named]
    mapping = [name for name in _MAPPING if name in present]
    shapes_fit = True
    for name in mapping:  # first, because a wrong mapping explains a head of the wrong size
        for offence in _caught(check_tensor, name, tensors[name], allowed[name], files.get(name, default_file)):
            shapes_fit = False
            yield offence
    if "d2t" in mapping and shapes_fit:
        yield from _caught(_check_mapping, config, tensors, files.get("d2t", default_file))
    for name in present:
        if name not in mapping:
            yield from _caught(check_tensor, name, tensors[name], allowed[name], files.get(name, default_file))


def _check_mapping(config: SpeculatorConfig, tensors: Mapping[str, Tensor], file: Path) -> None:
    t2d = tensors["t2d"] if "t2d" in tensors else derive_t2d(config, tensors["d2t"], file)
    check_vocabulary_mapping(t2d, tensors["d2t"], config.draft_vocab_size, file)


def _caught(check: Callable[..., None], *arguments: Any) -> list[CheckpointError]:
    try:
        check(*arguments)
    except CheckpointError as error:
        return [error]
    return []


def _shared_tensor(config: SpeculatorConfig, name: str) -> Tensor:
    rows = {EMBEDDING: config.vocab_size, HEAD: config.draft_vocab_size}[name]
    return torch.empty(rows, config.layers.hidden_size, device="meta")


def check_mask_token(config: SpeculatorConfig, verifier: VerifierWeights | None, file: Path) -> None:
    """A MASK slot must not read as the end of a reply or as padding.

    Raises:
        CheckpointError: a parallel drafter names no mask token, or it is one of the verifier's stop tokens or its pad token.
    """
    mask_id = getattr(config, "mask_token_id", None)
    if mask_id is None and "mask_token_id" in type(config).model_fields:
        raise problem(
            file,
            "mask_token_id",
            None,
            "drafting in parallel needs a token for slots that have none yet",
            "name the one it was trained with",
        )
    if verifier is None or mask_id is None:
        return
    remedy = "train the drafter with a token that the verifier never uses"
    if mask_id in verifier.stop_token_ids:
        raise problem(
            file,
            "mask_token_id",
            mask_id,
            f"it must not be a stop token of {verifier.name_or_path!r} {list(verifier.stop_token_ids)}",
            remedy,
        )
    if mask_id == verifier.config.get("pad_token_id"):
        raise problem(file, "mask_token_id", mask_id, f"it must not be the pad token of {verifier.name_or_path!r}", remedy)


def check_rope_spellings(config: SpeculatorConfig, file: Path) -> None:
    """`rope_parameters` and the older `rope_theta` may stand side by side only if they agree.

    Raises:
        CheckpointError: they name different base frequencies.
    """
    old = getattr(config.layers, "rope_theta", None)
    new = config.layers.rope_parameters["rope_theta"]
    if old is not None and old != new:
        rule = f"it contradicts rope_parameters.rope_theta = {new}, and engines read one or the other"
        raise problem(file, "transformer_layer_config.rope_theta", old, rule, "keep the value the drafter was trained with in both")


def check_width(config: SpeculatorConfig, file: Path) -> None:
    """A drafter of another width than its verifier cannot borrow the verifier's embedding and head.

    Raises:
        CheckpointError: it would.
    """
    hidden, target = config.layers.hidden_size, config.target_hidden_size
    if target in (None, hidden) or (getattr(config, EMBEDDING_KEY, False) and getattr(config, HEAD_KEY, False)):
        return
    rule = f"the drafter is {hidden} wide, so it needs an embedding and head of its own ({EMBEDDING_KEY} and {HEAD_KEY})"
    raise problem(file, "target_hidden_size", target, rule, "correct the width, or say that both are its own")


def check_fusion_width(config: SpeculatorConfig, tensors: Mapping[str, Tensor], file: Path) -> None:
    """`fc` reads one hidden state of the verifier for each tapped layer.

    Raises:
        CheckpointError: its input width is not taps * hidden size.
    """
    fc, taps = tensors.get("fc.weight"), config.tapped_layers
    hidden = config.target_hidden_size or config.layers.hidden_size
    if fc is None or fc.ndim != 2 or not taps or fc.shape[1] == len(taps) * hidden:
        return
    rule = f"{len(taps)} taps {taps} of hidden size {hidden} need {len(taps) * hidden} input columns, not {fc.shape[1]}"
    raise problem(file, "fc.weight", _shape(fc), rule, f"correct {config.aux_layer_key} or target_hidden_size in {CONFIG_FILE}")


def check_names(
    config: SpeculatorConfig,
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    files: Mapping[str, Path],
    default_file: Path,
    optional: tuple[str, ...],
) -> None:
    """Every expected tensor is there, and no other (the verifier's embedding and head may be).

    Raises:
        CheckpointError: naming the missing or the unexpected ones.
    """
    method = config.speculators_model_type
    # Engines read d2t alone, so files without t2d exist; it follows from d2t.
    derived = ("t2d",) if "d2t" in tensors else ()
    missing = [name for name in expected if name not in (*tensors, *optional, *derived)]
    unexpected = [name for name in tensors if name not in expected and name not in SHARED_NAMES]
    if missing:
        also = f", and unexpectedly holds {_some(unexpected)}" if unexpected else ""
        rule = f"a {method} speculator with this {CONFIG_FILE} needs every one of its tensors{also}"
        raise problem(default_file, _some(missing), "missing", rule, _AGAIN)
    if unexpected:
        rule = f"a {method} speculator with this {CONFIG_FILE} has no such tensor"
        remedy = f"correct speculators_model_type or the sizes in {CONFIG_FILE}, or remove the tensor"
        raise problem(files.get(unexpected[0], default_file), _some(unexpected), _shape(tensors[unexpected[0]]), rule, remedy)


def check_tensor(name: str, tensor: Tensor, expected: Tensor, file: Path) -> None:
    """One tensor has the expected shape and kind and holds finite values.

    Raises:
        CheckpointError: it does not.
    """
    if tensor.shape != expected.shape:
        rule = f"this {CONFIG_FILE} makes it {_shape(expected)}"
        raise problem(file, name, _shape(tensor), rule, f"correct {CONFIG_FILE} or take the weights that belong to it")
    dtype = str(tensor.dtype).removeprefix("torch.")
    if expected.dtype.is_floating_point:
        if tensor.dtype not in FLOAT_DTYPES:
            names = ", ".join(str(kind).removeprefix("torch.") for kind in FLOAT_DTYPES)
            raise problem(file, name, dtype, f"weights are stored as {names}", "store it unquantised")
        finite = torch.isfinite(tensor)
        if not bool(finite.all()):
            position = (~finite).nonzero()[0].tolist()
            value = f"{float(tensor[tuple(position)])} at {position}"
            rule = f"every value must be finite ({int((~finite).sum())} of {tensor.numel()} are not)"
            raise problem(file, name, value, rule, "training diverged or the file is damaged: take an earlier checkpoint")
    elif (tensor.dtype == torch.bool) != (expected.dtype == torch.bool) or tensor.dtype.is_floating_point:
        wanted = "bool" if expected.dtype == torch.bool else "an integer dtype"
        raise problem(file, name, dtype, f"it must be stored as {wanted}", _AGAIN)


def check_vocabulary_mapping(t2d: Tensor, d2t: Tensor, draft_vocab_size: int, file: Path) -> None:
    """t2d [vocabulary] marks the draft vocabulary and d2t [draft vocabulary] holds offsets: d2t = nonzero(t2d) - arange.

    Raises:
        CheckpointError: t2d keeps another number of tokens, or d2t names other tokens than t2d.
    """
    kept = t2d.nonzero().flatten()
    if kept.numel() != draft_vocab_size:
        rule = f"it must keep exactly draft_vocab_size = {draft_vocab_size} tokens"
        raise problem(file, "t2d", f"{kept.numel()} true entries", rule, "store the mapping the drafter was trained with")
    named = d2t.to(torch.int64) + torch.arange(draft_vocab_size, device=d2t.device)
    wrong = (named != kept).nonzero().flatten()
    if wrong.numel():
        i = int(wrong[0])
        absolute = " (it looks like verifier ids instead of offsets)" if torch.equal(d2t.to(torch.int64), kept) else ""
        rule = f"d2t must equal nonzero(t2d) - arange, so d2t[{i}] = {int(kept[i]) - i}{absolute}"
        raise problem(file, f"d2t[{i}]", int(d2t[i]), rule, "store the mapping the drafter was trained with")


def derive_t2d(config: SpeculatorConfig, d2t: Tensor, file: Path) -> Tensor:
    """t2d [vocabulary] bool from the offsets d2t [draft vocabulary].

    Raises:
        CheckpointError: an offset leads outside the vocabulary.
    """
    ids = d2t.to(torch.int64) + torch.arange(d2t.numel(), device=d2t.device)
    outside = ((ids < 0) | (ids >= config.vocab_size)).nonzero().flatten()
    if outside.numel():
        i = int(outside[0])
        rule = f"it names the verifier token {int(ids[i])}, outside 0 to {config.vocab_size - 1}"
        raise problem(file, f"d2t[{i}]", int(d2t[i]), rule, "store offsets: verifier id minus draft id")
    t2d = torch.zeros(config.vocab_size, dtype=torch.bool, device=d2t.device)
    t2d[ids] = True
    return t2d


def _shape(tensor: Tensor) -> str:
    return f"shape {list(tensor.shape)}"


def _some(names: list[str]) -> str:
    """The first three names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
