"""Convert a checkpoint folder from any known format to any other. Everything goes by way of the speculators format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from speculators.checkpoint.card import ModelCard, render_card
from speculators.checkpoint.convert.adapter import Tensors
from speculators.checkpoint.convert.fields import stored_copy
from speculators.checkpoint.convert.formats import NATIVE, detect_format, get_format
from speculators.checkpoint.native import (
    compact_hash,
    config_to_write,
    may_write_card,
    read_config_folder,
)
from speculators.checkpoint.shared import (
    SHARED_NAMES,
    check_embedding_hash,
    check_shared_tensors,
    stored_names,
    verifier_tensor,
    with_own_head,
)
from speculators.checkpoint.storage import (
    CARD_FILE,
    CONFIG_FILE,
    DEFAULT_SHARD_BYTES,
    StoredTensors,
    model_files,
    read_json,
    read_tensors,
    resolve,
    staged_folder,
    weights_sha256,
    write_json,
    write_tensors,
)
from speculators.checkpoint.validation import derive_t2d, skeleton, validate
from speculators.config import SpeculatorConfig
from speculators.errors import CheckpointError
from speculators.speculator import Speculator, VerifierWeights


@dataclass(frozen=True)
class Conversion:
    """What a conversion did.

    Attributes:
        source_format: as detected.
        target_format: as asked for.
        method: the algorithm.
        verifier: name of the verifier.
        num_draft_tokens: K.
        tensors: number of tensors written.
        dropped: tensors of the source that the target does not repeat, because they are the verifier's.
        added: tensors taken from the verifier.
    """

    source_format: str
    target_format: str
    method: str
    verifier: str
    num_draft_tokens: int
    tensors: int
    dropped: tuple[str, ...]
    added: tuple[str, ...]


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    to: str = NATIVE,
    verifier: VerifierWeights | None = None,
    include_shared: bool = False,
) -> Conversion:
    """Convert a checkpoint to another format; the source's format is detected. `dst` appears whole or not at all.

    Tensors keep their dtype. Copies of the verifier's embedding and head are compared with the verifier when it is
    given; otherwise they stay in the file, where loading compares them.

    Args:
        src: a folder, or a Hub repository `owner/name`; only read.
        dst: folder to write, made if needed.
        to: name of the target format, see `format_names`.
        verifier: needed where the target repeats tensors that the source does not hold, or where the source does not
            tell the verifier's name or depth.
        include_shared: allow speculators to speculators: a compact checkpoint becomes a full one.

    Raises:
        CheckpointError: `src` is no valid checkpoint of a known format, the target cannot hold what it has, or a model lies
            in `dst`.
        PairingError: the verifier is not the drafter's.
        ConfigError: there is no format `to`.
    """
    target = None if to == NATIVE else get_format(to)
    source, folder = resolve(src), Path(dst)
    if source.resolve() == folder.expanduser().resolve():
        raise CheckpointError(f"{folder} is the source itself; name another folder for the converted checkpoint")
    if present := model_files(folder.expanduser()):
        raise CheckpointError(f"{folder} holds a model ({present[0].name}), which the converted one would replace; name another folder")
    raw = read_json(source / CONFIG_FILE)
    stored = read_tensors(source)
    found = detect_format(raw, stored.tensors.keys(), source)
    if found == to and not (found == NATIVE and include_shared):
        remedy = "; include_shared expands a compact one to the full form" if found == NATIVE else ""
        raise CheckpointError(f"{source} already is in the {found} format: there is nothing to convert{remedy}")
    if found == NATIVE:
        config, tensors = _read_native(source, stored, verifier)
    else:
        config, tensors = _from_foreign(found, raw, stored, source, verifier)
    if target is None:
        tensors = _full(config, tensors, verifier)
        _write_native(folder, found, config, tensors, verifier)
        written: Mapping[str, Tensor] = tensors
    else:
        data, written = target.from_native(config, tensors, verifier)
        _write_foreign(folder, data, written)
    return Conversion(
        source_format=found,
        target_format=to,
        method=config.speculators_model_type,
        verifier=str(config.speculators_config.verifier.name_or_path),
        num_draft_tokens=config.num_draft_tokens,
        tensors=len(written),
        dropped=tuple(name for name in SHARED_NAMES if name in stored.tensors and name not in written),
        added=tuple(name for name in SHARED_NAMES if name in written and name not in stored.tensors),
    )


# -- reading ---------------------------------------------------------------------------------------------------


def _read_native(folder: Path, stored: StoredTensors, verifier: VerifierWeights | None) -> tuple[SpeculatorConfig, Tensors]:
    config = read_config_folder(folder, verifier)
    digest = compact_hash(config, folder / CONFIG_FILE)
    if verifier is not None:
        config = with_own_head(config, stored.tensors, verifier, same_embedding=False)
    return config, _checked(config, stored.tensors, stored, folder, verifier, digest)


def _from_foreign(
    found: str, raw: dict[str, Any], stored: StoredTensors, folder: Path, verifier: VerifierWeights | None
) -> tuple[SpeculatorConfig, Tensors]:
    try:
        config, tensors = get_format(found).to_native(raw, stored.tensors, verifier)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    return config, _checked(config, tensors, stored, folder, verifier, None)


def _checked(
    config: SpeculatorConfig,
    tensors: Mapping[str, Tensor],
    stored: StoredTensors,
    folder: Path,
    verifier: VerifierWeights | None,
    digest: str | None,
) -> Tensors:
    """The tensors, with both halves of a vocabulary mapping, once they fit the configuration and the verifier.

    Args:
        config: in the speculators format.
        tensors: by native name.
        stored: the files they came from.
        folder: of the source.
        verifier: None when it is not at hand.
        digest: the embedding's sha256 that a compact checkpoint records, else None.
    """
    if verifier is not None:  # the pair first: a wrong verifier explains more than any tensor can
        skeleton(config, folder / CONFIG_FILE).attach(verifier)
        if digest is not None:
            check_embedding_hash(digest, config.speculators_config.verifier.name_or_path, verifier)
    optional = SHARED_NAMES if digest is not None else ()
    validate(config, tensors, verifier, folder=folder, files=stored.files, main_file=stored.main_file, optional=optional)
    complete = dict(tensors)
    if "d2t" in complete and "t2d" not in complete:
        complete["t2d"] = derive_t2d(config, complete["d2t"], stored.file_of("d2t"))
    if verifier is not None:
        _compare_copies(config, complete, verifier)
    return complete


def _compare_copies(config: SpeculatorConfig, tensors: Mapping[str, Tensor], verifier: VerifierWeights) -> None:
    """What the checkpoint repeats of the verifier, not what the drafter owns, must equal it."""
    owned = skeleton(config).state_dict()
    copies = {name: tensors[name] for name in SHARED_NAMES if name in tensors and name not in owned}
    check_shared_tensors(copies, config.speculators_config.verifier.name_or_path, verifier, tensors.get("t2d"))


# -- writing ---------------------------------------------------------------------------------------------------


def _full(config: SpeculatorConfig, tensors: Tensors, verifier: VerifierWeights | None) -> Tensors:
    """The full form: with what engines want repeated of the verifier, without further copies of it."""
    drafter = skeleton(config)
    owned, wanted = drafter.state_dict(), stored_names(drafter)
    complete = dict(tensors)
    for name in SHARED_NAMES:
        if name in owned or name in wanted:
            if name not in complete and verifier is None:
                raise CheckpointError(f"the full form stores {name}, which the source leaves to the verifier; give the verifier")
            if name not in complete and verifier is not None:
                table = verifier_tensor(name, verifier, tensors.get("t2d"))
                complete[name] = stored_copy(table, tensors["fc.weight"].dtype)
        elif verifier is not None:
            complete.pop(name, None)  # compared with the verifier above
    return complete


def _write_native(folder: Path, found: str, config: SpeculatorConfig, tensors: Tensors, verifier: VerifierWeights | None) -> None:
    drafter: Speculator = skeleton(config)
    if verifier is not None:
        drafter.attach(verifier)
    dtype = str(tensors["fc.weight"].dtype).removeprefix("torch.")
    data = config_to_write(drafter, dtype, None)
    validate(config, tensors, verifier, folder=folder)
    with staged_folder(folder) as staged:
        write_tensors(staged, _writable(tensors), DEFAULT_SHARD_BYTES)
        if may_write_card(folder / CARD_FILE):
            drafter.config = type(config).parse(data)
            origin = "Expanded from the compact form." if found == NATIVE else f"Converted from the {get_format(found).title} format."
            text = render_card(ModelCard(summary=origin), drafter, "full", weights_sha256(staged), dtype)
            (staged / CARD_FILE).write_text(text, encoding="utf-8")
        write_json(staged / CONFIG_FILE, data)


def _write_foreign(folder: Path, data: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    with staged_folder(folder) as staged:
        write_tensors(staged, _writable(tensors), DEFAULT_SHARD_BYTES)
        write_json(staged / CONFIG_FILE, data)


def _writable(tensors: Mapping[str, Tensor]) -> Tensors:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}
