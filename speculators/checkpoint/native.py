"""Save and load checkpoints in the speculators format, version 0.9: what vLLM loads without conversion."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel
from torch import Tensor

from speculators.checkpoint.card import MARKER, ModelCard, render_card
from speculators.checkpoint.shared import (
    EMBEDDING,
    HEAD,
    HEAD_KEY,
    SHARED_NAMES,
    check_embedding_hash,
    compact_form,
    full_form,
    verifier_tensor,
    with_own_head,
)
from speculators.checkpoint.storage import (
    CARD_FILE,
    CONFIG_FILE,
    DEFAULT_SHARD_BYTES,
    StoredTensors,
    model_files,
    problem,
    read_json,
    read_tensors,
    resolve,
    staged_folder,
    tensor_names,
    weights_sha256,
    write_json,
    write_tensors,
)
from speculators.checkpoint.validation import check_rope_spellings, derive_t2d, skeleton, validate
from speculators.config import FORMAT_VERSION, SpeculatorConfig
from speculators.errors import CheckpointError, ConfigError, PairingError
from speculators.registry import get_algorithm
from speculators.speculator import Speculator, VerifierWeights

Form = Literal["full", "compact"]
STORED_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
EXTRA_KEY = "unified_speculators"  # our own keys of config.json; readers of the format tolerate unknown ones
_HASH_KEY = "verifier_embedding_sha256"
# Keys that only one of the two layer families (Llama, Qwen3) has: written only when something set them.
FAMILY_KEYS = ("mlp_bias", "layer_types", "sliding_window", "use_sliding_window")
# What a drafter must not inherit from its verifier's config: its own weights are plain, and it runs no remote code.
FOREIGN_KEYS = ("quantization_config", "auto_map", "_name_or_path")


# -- saving ----------------------------------------------------------------------------------------------------


def save(
    speculator: Speculator,
    path: str | Path,
    *,
    form: Form | str = "full",
    card: ModelCard | None = None,
    dtype: str = "bfloat16",
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Write a checkpoint folder: `config.json`, safetensors and a model card. All of it appears, or nothing changes.

    Weights of an earlier checkpoint in `path` are replaced; other files there stay. A `README.md` that this
    library did not write stays too, unless a card is given.

    Args:
        speculator: of a registered algorithm.
        path: folder, made if needed.
        form: "full" repeats the verifier's tensors that engines want in the file; "compact" leaves embedding and
            head out where they equal the verifier's and records the sha256 of its embedding.
        card: what is known of the training; a card from the configuration alone when None.
        dtype: stored dtype of the weights: "bfloat16", "float16" or "float32".
        max_shard_bytes: the most bytes of one weights file; more is split into shards with an index.

    Raises:
        CheckpointError: a model that is no speculator lies in `path`, the speculator breaks a rule of the format (a value is
            not finite, the vocabulary mapping is inconsistent ...), its verifier is needed and not attached, or
            `form="compact"` would lose a trained embedding.
        ConfigError: an unknown form or dtype.
    """
    if form not in ("full", "compact"):
        raise ConfigError(f"form = {form!r}: checkpoints are saved in form 'full' or 'compact'")
    if dtype not in STORED_DTYPES:
        raise ConfigError(f"dtype = {dtype!r}: weights are stored as {', '.join(STORED_DTYPES)}")
    folder = Path(path)
    _refuse_another_model(folder)
    own = {name: _stored(tensor, STORED_DTYPES[dtype]) for name, tensor in speculator.state_dict().items()}
    embedding_hash = None
    if form == "compact":
        chosen, embedding_hash = compact_form(speculator, own)
    else:
        chosen = full_form(speculator, own)
    tensors = {name: own[name] if name in own else _stored(tensor, STORED_DTYPES[dtype]) for name, tensor in chosen.items()}
    data = config_to_write(speculator, dtype, embedding_hash)
    config = _parse(type(speculator).config_class, data, folder / CONFIG_FILE)
    verifier = speculator.verifier if speculator.is_attached else None
    validate(config, tensors, verifier, folder=folder, optional=SHARED_NAMES if form == "compact" else ())
    with staged_folder(folder) as staged:
        write_tensors(staged, tensors, max_shard_bytes)
        if card is not None or may_write_card(folder / CARD_FILE):
            text = render_card(card or ModelCard(), speculator, form, weights_sha256(staged), dtype)
            (staged / CARD_FILE).write_text(text, encoding="utf-8")
        write_json(staged / CONFIG_FILE, data)


def _refuse_another_model(folder: Path) -> None:
    """Earlier checkpoints are replaced; a verifier, or a drafter in another format, must not be."""
    present = model_files(folder.expanduser())
    if not present:
        return
    config = read_json(present[0]) if present[0].name == CONFIG_FILE else {}
    if "speculators_model_type" not in config:
        raise CheckpointError(
            f"{folder} holds a model that is no checkpoint of this format ({present[0].name}) and would be replaced; name another folder"
        )


def _stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous CPU copy that shares no memory, its floating values in the stored dtype."""
    kind = dtype if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to(device="cpu", dtype=kind, copy=True).contiguous()


def may_write_card(file: Path) -> bool:
    """Whether a card may be written there: not over one that somebody else wrote."""
    return not file.is_file() or MARKER in file.read_text(encoding="utf-8", errors="replace")


def config_to_write(speculator: Speculator, dtype: str, embedding_hash: str | None) -> dict[str, Any]:
    """The content of `config.json`.

    Raises:
        CheckpointError: nothing names the verifier, which every engine must know.
    """
    config = speculator.config
    data = config.model_dump(mode="json")
    for name in type(config).model_fields.keys() - config.model_fields_set:
        value = getattr(config, name)
        if value is None or isinstance(value, BaseModel):
            data.pop(name, None)  # nothing was said: a file from elsewhere must not come to claim how it was trained
    if not data.get(HEAD_KEY):
        data.pop(HEAD_KEY, None)  # no key of version 0.9: said only where it is so
    data["architectures"] = [get_algorithm(speculator.method).serving.architecture]
    data["speculators_version"] = FORMAT_VERSION
    data["transformers_version"] = version("transformers")
    data["dtype"] = dtype
    if "torch_dtype" in data:  # the older spelling, in files that came with it
        data["torch_dtype"] = dtype
    layers, set_by_source = (data["transformer_layer_config"], config.layers.model_fields_set)
    for key in (*FOREIGN_KEYS, *(key for key in FAMILY_KEYS if key not in set_by_source)):
        layers.pop(key, None)
    write_both_rope_spellings(layers)
    reference = data["speculators_config"]["verifier"]
    if reference["name_or_path"] is None:
        if not speculator.is_attached:
            key = "speculators_config.verifier.name_or_path"
            raise problem(CONFIG_FILE, key, None, "engines load the verifier by this name", "attach the verifier before saving")
        reference["name_or_path"] = speculator.verifier.name_or_path
    if not reference["architectures"] and speculator.is_attached:
        reference["architectures"] = list(speculator.verifier.architectures)
    extra = {key: value for key, value in (data.pop(EXTRA_KEY, None) or {}).items() if key not in ("form", _HASH_KEY)}
    if embedding_hash is not None:
        extra |= {"form": "compact", _HASH_KEY: embedding_hash}
    if extra:
        data[EXTRA_KEY] = extra
    return data


def write_both_rope_spellings(layers: dict[str, Any]) -> None:
    """transformers 5 reads `rope_parameters`; engines on transformers 4 read `rope_theta` and `rope_scaling`.

    With only the new spelling, old readers lose YaRN without a word and acceptance collapses beyond the original context.
    """
    rope = layers["rope_parameters"]
    layers["rope_theta"] = rope["rope_theta"]
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    if scaling.get("rope_type", "default") == "default":
        layers.pop("rope_scaling", None)
    else:
        layers["rope_scaling"] = scaling


# -- loading ---------------------------------------------------------------------------------------------------


def read_config(path_or_repo: str | Path, *, revision: str | None = None) -> SpeculatorConfig:
    """Read only the configuration of a checkpoint, e.g. to learn the name of its verifier.

    Raises:
        CheckpointError: see `load`.
    """
    folder = resolve(path_or_repo, revision)
    return read_config_folder(folder)


def load(
    path_or_repo: str | Path,
    verifier: VerifierWeights | None = None,
    *,
    revision: str | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Speculator:
    """Load a speculator of any registered algorithm.

    Reads files of version 0.8 and 0.9, single or sharded, in any float dtype. Verifier tensors that a file repeats
    and the algorithm borrows (`embed_tokens`, `lm_head`) are compared with the verifier's and then dropped; without a
    verifier they are kept for `Speculator.attach`, which compares them. A head that the drafter trained is its own, also
    in files that do not say so.

    Args:
        path_or_repo: a folder, or a Hub repository `owner/name`.
        verifier: what to pair it with; the compact form needs it.
        revision: branch, tag or commit of a Hub repository.
        device: None takes the verifier's, else the CPU.
        dtype: None takes the verifier's, else that of the file (the widest, where they differ).

    Returns:
        The speculator, in evaluation mode, attached to `verifier` if one is given.

    Raises:
        CheckpointError: no checkpoint is there, or it breaks a rule of the format; the message names file, key, value,
            rule and remedy.
        PairingError: the checkpoint and the verifier do not belong together.
    """
    folder = resolve(path_or_repo, revision)
    config = read_config_folder(folder, verifier)
    stored = read_tensors(folder)
    embedding_hash = compact_hash(config, folder / CONFIG_FILE)
    made_for = config.speculators_config.verifier.name_or_path
    if embedding_hash is not None and verifier is None:
        raise CheckpointError(
            f"{folder} is a compact checkpoint, which borrows the embedding of its verifier {made_for!r}:"
            " pass the weights of that verifier, or use a checkpoint in the full form"
        )
    if verifier is not None:  # the pair first: a wrong verifier explains more than any tensor can
        with _naming(folder):
            Speculator.attach(skeleton(config, folder / CONFIG_FILE), verifier)
            if embedding_hash is not None:
                check_embedding_hash(embedding_hash, made_for, verifier)
            config = with_own_head(config, stored.tensors, verifier, same_embedding=embedding_hash is not None)
    validate(
        config,
        stored.tensors,
        verifier,
        folder=folder,
        files=stored.files,
        main_file=stored.main_file,
        optional=SHARED_NAMES if embedding_hash is not None else (),
    )
    speculator = _build(config)
    _fill(speculator, stored, verifier, device, dtype)
    if verifier is not None:
        with _naming(folder):
            speculator.attach(verifier)
    return speculator.eval()


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Say of a checkpoint that does not fit its verifier which one it is."""
    try:
        yield
    except PairingError as error:
        raise PairingError(f"{folder}: {error}") from None


def read_config_folder(folder: Path, verifier: VerifierWeights | None = None) -> SpeculatorConfig:
    """The valid configuration of a folder; with a verifier, the format's default taps stand in for missing ones.

    Raises:
        CheckpointError: see `load`.
    """
    file = folder / CONFIG_FILE
    data = read_json(file)
    method = data.get("speculators_model_type")
    if method is None:
        raise _not_native(folder, data)
    try:
        config_class = get_algorithm(str(method)).speculator_class.config_class
    except ConfigError as error:
        raise CheckpointError(f"{file}: speculators_model_type = {method!r}: {error}; install the package that registers it") from None
    if data.get(config_class.aux_layer_key) is None and verifier is not None:
        data = {**data, config_class.aux_layer_key: _default_taps(verifier.num_layers, config_class.aux_layer_key, file)}
    config = _parse(config_class, data, file)
    check_rope_spellings(config, file)
    return config


def _not_native(folder: Path, data: dict[str, Any]) -> CheckpointError:
    """What a folder is whose config.json has no speculators_model_type, and what to run."""
    from speculators.checkpoint.convert.formats import detect_format, get_format  # adapters write native files with this module

    try:
        title = get_format(detect_format(data, tensor_names(folder), folder)).title
    except CheckpointError:
        return CheckpointError(
            f"{folder / CONFIG_FILE} has no speculators_model_type: this is no drafter in the speculators format, nor in one that"
            " `speculators convert` knows; name another folder"
        )
    return CheckpointError(
        f"{folder} holds a drafter in the {title} format: run `speculators convert {shlex.quote(str(folder))} DST --verifier VERIFIER`"
        " and name DST instead"
    )


def _parse(config_class: type[SpeculatorConfig], data: dict[str, Any], file: Path) -> SpeculatorConfig:
    try:
        return config_class.parse(data, str(file))
    except ConfigError as error:
        raise CheckpointError(f"{error}; correct this key") from None


def _default_taps(num_layers: int, key: str, file: Path) -> list[int]:
    """The format's default for files that name no taps: [2, n/2, n-3] of an n-layer verifier."""
    taps = [2, num_layers // 2, num_layers - 3]
    if taps != sorted(set(taps)):
        rule = f"its default [2, n/2, n-3] = {taps} needs a verifier of 7 layers or more, not {num_layers}"
        raise problem(file, key, None, rule, "write down the layers the drafter was trained on")
    return taps


def compact_hash(config: SpeculatorConfig, file: Path) -> str | None:
    """The recorded sha256 of the verifier's embedding; None for the full form."""
    extra = getattr(config, EXTRA_KEY, None)
    if not isinstance(extra, dict) or extra.get("form", "full") == "full":
        return None
    digest = extra.get(_HASH_KEY)
    if extra["form"] != "compact":
        raise problem(file, f"{EXTRA_KEY}.form", repr(extra["form"]), "the forms are 'full' and 'compact'", "correct this key")
    if not isinstance(digest, str):
        raise problem(file, f"{EXTRA_KEY}.{_HASH_KEY}", repr(digest), "the compact form records it", "save the checkpoint again")
    return digest


def _build(config: SpeculatorConfig) -> Speculator:
    """An instance whose weights are about to be replaced; the caller's random numbers are not disturbed."""
    with torch.random.fork_rng(devices=[]):
        return get_algorithm(config.speculators_model_type).speculator_class(config)


def _fill(
    speculator: Speculator,
    stored: StoredTensors,
    verifier: VerifierWeights | None,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> None:
    """Put the stored tensors into the speculator, those that the compact form left out from the verifier."""
    if verifier is not None:
        device, dtype = (device or verifier.embedding.device, dtype or verifier.embedding.dtype)
    device, dtype = device or torch.device("cpu"), dtype or _widest(stored.tensors)
    tensors = dict(stored.tensors)
    expected = speculator.state_dict()
    if "t2d" in expected and "t2d" not in tensors:
        tensors["t2d"] = derive_t2d(speculator.config, tensors["d2t"], stored.file_of("d2t"))
    for name in (EMBEDDING, HEAD):
        if name in expected and name not in tensors and verifier is not None:
            tensors[name] = verifier_tensor(name, verifier, tensors.get("t2d"))
    borrowed = {name: tensors.pop(name) for name in SHARED_NAMES if name in tensors and name not in expected}
    ready = {}
    for name, tensor in tensors.items():
        kind = dtype if tensor.is_floating_point() else expected[name].dtype
        # A copy, because safetensors maps the file: later changes of the file must not reach the weights.
        ready[name] = tensor.detach().to(device=device, dtype=kind, copy=True)
        if tensor.is_floating_point() and kind != tensor.dtype and not bool(torch.isfinite(ready[name]).all()):
            rule = f"its values leave the range of {str(dtype).removeprefix('torch.')}"
            raise problem(stored.file_of(name), name, f"up to {float(tensor.abs().max()):.3g}", rule, "load it in bfloat16 or float32")
    speculator.load_state_dict(ready, assign=True)
    speculator.to(device)
    speculator.unchecked_shared_tensors = {name: tensor.clone() for name, tensor in borrowed.items()}


def _widest(tensors: dict[str, Tensor]) -> torch.dtype:
    """The dtype that holds every stored floating value unchanged."""
    kinds = [tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()]
    widest = kinds[0] if kinds else torch.float32
    for kind in kinds:
        widest = torch.promote_types(widest, kind)
    return widest
