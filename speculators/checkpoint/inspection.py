"""What can be told of a checkpoint without using it: what it is, what vLLM makes of it, and what is wrong with it.

Nothing here raises over the content of a checkpoint. What cannot be read is None, and why is among the problems.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from speculators.checkpoint.card import serving_command
from speculators.checkpoint.convert.formats import NATIVE, detect_format, get_format
from speculators.checkpoint.native import EXTRA_KEY, compact_hash, read_config_folder
from speculators.checkpoint.shared import (
    EMBEDDING,
    SHARED_NAMES,
    check_embedding_hash,
    check_shared_tensors,
    first_difference,
    verifier_tensor,
    with_own_head,
)
from speculators.checkpoint.storage import CONFIG_FILE, StoredTensors, read_json, read_tensors, resolve, weight_files
from speculators.checkpoint.validation import offences, skeleton
from speculators.config import SpeculatorConfig
from speculators.decoding.calibration import Calibration, stored_calibrations
from speculators.errors import CheckpointError, SpeculatorsError
from speculators.registry import algorithms
from speculators.speculator import Speculator, VerifierWeights


@dataclass(frozen=True)
class SharedTensor:
    """The embedding or the head: whose it is.

    Attributes:
        stored: whether the checkpoint holds it.
        trained: whether the drafter has its own instead of borrowing the verifier's.
        equals_verifier: whether what is stored is the verifier's; None without a verifier or where nothing is stored.
    """

    stored: bool
    trained: bool
    equals_verifier: bool | None


@dataclass(frozen=True)
class ServedByVllm:
    """What vLLM does with a checkpoint.

    Attributes:
        method: of vLLM's speculative config.
        speculative_config: all of it.
        command: the shell command.
        runners: model runners that serve it, best first.
        minimum_version: the oldest vLLM known to serve it.
        caveats: what vLLM reads differently, a sentence each.
    """

    method: str
    speculative_config: dict[str, Any]
    command: str
    runners: tuple[str, ...]
    minimum_version: str | None
    caveats: tuple[str, ...]


@dataclass(frozen=True)
class Inspection:
    """What `inspect` found. None stands for what could not be read.

    Attributes:
        source: as the user named the checkpoint.
        folder: where it lies.
        format: name of the checkpoint's format, "speculators" or one of those that `convert` reads.
        method: the algorithm's method string.
        format_version: of the speculators format; None for another one.
        verifier: name of the verifier it was made for.
        num_draft_tokens: K.
        max_draft_tokens: the largest K it can draft.
        taps: verifier layers it reads.
        num_layers, hidden_size, intermediate_size: shape of its decoder layers.
        vocab_size, draft_vocab_size: tokens of the verifier, and those of them that it can propose.
        parameters: trained values in the files.
        weight_bytes: size of the weights files, in bytes.
        dtypes: of the floating tensors.
        weight_files: names of the weights files, the index excluded.
        form: "full" or "compact".
        shared: by tensor name, what it shares with the verifier.
        calibrations: what was fitted to its confidence, by temperature and kind of prompts.
        vllm: None as well for a method that vLLM has no drafter for, and for another format than ours.
        notes: worth knowing, not wrong.
        problems: every rule that is broken, a sentence each.
    """

    source: str
    folder: str
    format: str | None
    method: str | None
    format_version: str | None
    verifier: str | None
    num_draft_tokens: int | None
    max_draft_tokens: int | None
    taps: list[int] | None
    num_layers: int | None
    hidden_size: int | None
    intermediate_size: int | None
    vocab_size: int | None
    draft_vocab_size: int | None
    parameters: int | None
    weight_bytes: int
    dtypes: tuple[str, ...]
    weight_files: tuple[str, ...]
    form: str | None
    shared: dict[str, SharedTensor]
    calibrations: tuple[Calibration, ...]
    vllm: ServedByVllm | None
    notes: tuple[str, ...]
    problems: tuple[str, ...]


def inspect(path_or_repo: str | Path, verifier: VerifierWeights | None = None, *, revision: str | None = None) -> Inspection:
    """Look a checkpoint over, the pair as well where a verifier is given. Those of other formats are read as `convert` would.

    Args:
        path_or_repo: a folder, or a Hub repository `owner/name`.
        verifier: what it shall be paired with.
        revision: branch, tag or commit of a Hub repository.

    Raises:
        CheckpointError: there is no such folder or repository. What is wrong inside one is among the problems.
    """
    folder = resolve(path_or_repo, revision)
    problems: list[str] = []
    data = _attempt(problems, read_json, folder / CONFIG_FILE) or {}
    stored = _attempt(problems, read_tensors, folder)
    format_name: str | None = NATIVE
    config: SpeculatorConfig | None = None
    if data and stored is not None and "speculators_model_type" not in data:
        format_name, config, stored = _read_foreign(problems, folder, data, stored, verifier)
    elif data:
        config = _attempt(problems, read_config_folder, folder, verifier)
    notes: list[str] = []
    embedding_hash = None if config is None else _attempt(problems, compact_hash, config, folder / CONFIG_FILE)
    if config is not None:
        if verifier is not None:
            if stored is not None:
                same = embedding_hash is not None
                config = _attempt([], with_own_head, config, stored.tensors, verifier, same_embedding=same) or config
            problems += _pairing_problems(config, folder, stored, embedding_hash, verifier)
            named = config.speculators_config.verifier.name_or_path
            if named != verifier.name_or_path:
                notes.append(f"made for {named!r}, checked with {verifier.name_or_path!r}")
        if stored is not None:
            optional = SHARED_NAMES if embedding_hash is not None else ()
            found = offences(
                config, stored.tensors, verifier, folder=folder, files=stored.files, main_file=stored.main_file, optional=optional
            )
            problems += [str(offence) for offence in found]
    if embedding_hash is not None:
        notes.append("compact: vLLM and this library take the embedding from the verifier; the speculators library needs the full form")
    if format_name not in (None, NATIVE):
        source = shlex.quote(str(path_or_repo))
        notes.append(f"to train, decode or serve it, run `speculators convert {source} DST --verifier VERIFIER` and use DST")
    values = data if config is None else config.model_dump()
    method = values.get("speculators_model_type")
    layers, verifier_name = _nested(values, "transformer_layer_config"), _verifier_name(values)
    files = [file for file in weight_files(folder) if file.suffix == ".safetensors"]
    return Inspection(
        source=str(path_or_repo),
        folder=str(folder),
        format=format_name,
        method=method,
        format_version=values.get("speculators_version") if format_name == NATIVE else None,
        verifier=verifier_name,
        num_draft_tokens=_num_draft_tokens(values),
        max_draft_tokens=None if config is None else config.max_draft_tokens,
        taps=_taps(values) if config is None else config.tapped_layers,
        num_layers=layers.get("num_hidden_layers"),
        hidden_size=layers.get("hidden_size"),
        intermediate_size=layers.get("intermediate_size"),
        vocab_size=layers.get("vocab_size"),
        draft_vocab_size=values.get("draft_vocab_size"),
        parameters=None if stored is None else _count_parameters(config, stored.tensors),
        weight_bytes=sum(file.stat().st_size for file in files),
        dtypes=() if stored is None else _dtypes(stored.tensors),
        weight_files=tuple(file.name for file in files),
        form=None if config is None else "full" if embedding_hash is None else "compact",
        shared={} if stored is None or config is None else _shared(config, stored.tensors, verifier),
        calibrations=tuple(_attempt(problems, stored_calibrations, values.get(EXTRA_KEY)) or ()),
        vllm=None if config is None or format_name != NATIVE else _served(config, str(path_or_repo), verifier_name),
        notes=tuple(notes),
        problems=tuple(dict.fromkeys(problems)),
    )


def _read_foreign(
    problems: list[str], folder: Path, data: dict[str, Any], stored: StoredTensors, verifier: VerifierWeights | None
) -> tuple[str | None, SpeculatorConfig | None, StoredTensors]:
    """Format, configuration and tensors of a checkpoint of another format, as far as they can be read."""
    name = _attempt(problems, detect_format, data, stored.tensors.keys(), folder)
    if name is None:
        return None, None, stored
    read = _attempt(problems, get_format(name).to_native, data, stored.tensors, verifier)
    if read is None:
        problems[-1] = f"{folder}: {problems[-1]}"
        return name, None, stored
    config, tensors = read
    return name, config, replace(stored, tensors=tensors)


def _attempt(problems: list[str], read: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """What `read` returns; None and one more problem where it cannot be read."""
    try:
        return read(*arguments, **named)
    except SpeculatorsError as error:
        problems.append(str(error))
        return None


def _pairing_problems(
    config: SpeculatorConfig, folder: Path, stored: StoredTensors | None, embedding_hash: str | None, verifier: VerifierWeights
) -> list[str]:
    problems: list[str] = []
    empty = _skeleton(config)
    if empty is None:
        return []  # a configuration that its own algorithm refuses is an offence already
    _attempt(problems, empty.attach, verifier)
    if problems:
        return problems
    made_for = config.speculators_config.verifier.name_or_path
    if embedding_hash is not None:
        _attempt(problems, check_embedding_hash, embedding_hash, made_for, verifier)
    if stored is not None:
        borrowed = {name: stored.tensors[name] for name in SHARED_NAMES if name in stored.tensors and name not in empty.state_dict()}
        t2d = stored.tensors.get("t2d")
        comparable = {name: tensor for name, tensor in borrowed.items() if tensor.shape == verifier_tensor(name, verifier, t2d).shape}
        _attempt(problems, check_shared_tensors, comparable, made_for, verifier, t2d)
    return problems


def _skeleton(config: SpeculatorConfig) -> Speculator | None:
    try:
        return skeleton(config)
    except CheckpointError:
        return None


def _shared(config: SpeculatorConfig, tensors: dict[str, Tensor], verifier: VerifierWeights | None) -> dict[str, SharedTensor]:
    empty = _skeleton(config)
    own = {} if empty is None else empty.state_dict()
    return {name: SharedTensor(name in tensors, name in own, _equals(name, tensors, verifier)) for name in SHARED_NAMES}


def _equals(name: str, tensors: dict[str, Tensor], verifier: VerifierWeights | None) -> bool | None:
    if verifier is None or name not in tensors:
        return None
    t2d = tensors.get("t2d")
    if name != EMBEDDING and t2d is not None and t2d.shape != (verifier.vocab_size,):
        return False
    theirs = verifier_tensor(name, verifier, t2d)
    return tensors[name].shape == theirs.shape and first_difference(tensors[name], theirs) is None


def _served(config: SpeculatorConfig, model: str, verifier_name: str | None) -> ServedByVllm | None:
    serving = algorithms()[config.speculators_model_type].serving
    if serving.method is None:
        return None
    return ServedByVllm(
        method=serving.method,
        speculative_config=serving.speculative_config(model, config.num_draft_tokens),
        command=serving_command(serving, verifier_name or "VERIFIER", model, config.num_draft_tokens),
        runners=serving.runners,
        minimum_version=serving.minimum_version_for(config),
        caveats=tuple(serving.caveats(config)),
    )


def _count_parameters(config: SpeculatorConfig | None, tensors: dict[str, Tensor]) -> int:
    empty = None if config is None else _skeleton(config)
    trained = {name for name, _ in empty.named_parameters()} if empty is not None else tensors.keys() - {"t2d", "d2t", *SHARED_NAMES}
    return sum(tensor.numel() for name, tensor in tensors.items() if name in trained)


def _dtypes(tensors: dict[str, Tensor]) -> tuple[str, ...]:
    return tuple(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values() if tensor.is_floating_point()}))


# -- values of a configuration that may be broken --------------------------------------------------------------


def _nested(values: Any, key: str) -> dict[str, Any]:
    value = values.get(key) if isinstance(values, dict) else None
    return value if isinstance(value, dict) else {}


def _verifier_name(values: dict[str, Any]) -> str | None:
    name = _nested(_nested(values, "speculators_config"), "verifier").get("name_or_path")
    return name if isinstance(name, str) else None


def _num_draft_tokens(values: dict[str, Any]) -> int | None:
    methods = _nested(values, "speculators_config").get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else None
    count = first.get("speculative_tokens") if isinstance(first, dict) else None
    return count if isinstance(count, int) else None


def _taps(values: dict[str, Any]) -> list[int] | None:
    """The taps of a configuration that its algorithm could not read, under any key an algorithm stores them."""
    for key in dict.fromkeys(algorithm.speculator_class.config_class.aux_layer_key for algorithm in algorithms().values()):
        if isinstance(values.get(key), list):
            return list(values[key])
    return None
