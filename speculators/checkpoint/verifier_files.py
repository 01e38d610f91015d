"""Embedding, head and final norm of a verifier, read from its files alone: a checkpoint is checked without building the model.

Works for whatever family `Verifier` does, since the names come from the model's own modules, built without memory. The
rest of the model may be quantised, sharded, tied, or the text side of one that also sees images.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from speculators.checkpoint.storage import INDEX_FILE, WEIGHTS_FILE, problem
from speculators.checkpoint.validation import FLOAT_DTYPES
from speculators.data.default_verifier import DEFAULT_VERIFIER_NAME, default_verifier_folder
from speculators.errors import CheckpointError, SpeculatorsError
from speculators.loading import cannot_load
from speculators.speculator import VerifierWeights
from speculators.verifier import Verifier

_OTHER_SIDES = ("vision", "visual", "audio", "image")  # parts of a name that is not of the text model
_PACKED = ("qweight", "weight_packed", "qzeros")


def read_verifier_weights(
    name_or_path: str | Path, *, revision: str | None = None, dtype: torch.dtype | None = None, trust_remote_code: bool = False
) -> VerifierWeights:
    """What a speculator borrows from its verifier, on the CPU. Of a Hub repository only the shards it lies in are fetched.

    Args:
        name_or_path: a folder, a Hub name, or the embedded default's name.
        revision: commit, branch or tag on the Hub.
        dtype: None keeps the stored one.
        trust_remote_code: run the model code that a repository brings along.

    Raises:
        CheckpointError: nothing usable lies there, or one of the three is packed by a quantisation that is not undone here.
    """
    files = _Files(str(name_or_path), revision)
    try:
        config = AutoConfig.from_pretrained(files.source, revision=revision, trust_remote_code=trust_remote_code)
        model = _model_without_memory(config, trust_remote_code)
    except SpeculatorsError:
        raise
    except Exception as error:  # as in `load_model`
        raise cannot_load(str(name_or_path), error) from None
    empty = Verifier(model, None, str(name_or_path)).weights
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), name)  # of a tied head the embedding's, which is the one that files hold
    embedding = files.read(names[id(empty.embedding)], dtype)
    head = embedding if empty.head is empty.embedding else files.read(names[id(empty.head)], dtype)
    bias = None if empty.head_bias is None else files.read(names[id(empty.head_bias)], dtype)
    return replace(empty, embedding=embedding, head=head, head_bias=bias, final_norm=_final_norm(model, empty.final_norm, files, dtype))


def _model_without_memory(config: Any, trust_remote_code: bool) -> Any:
    """The model of a config on the meta device; one that also sees images where transformers has no text side alone."""
    config = copy.deepcopy(config)
    for part in (config, config.get_text_config()):
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config  # its modules would be packed ones
    language, images = cast(Any, AutoModelForCausalLM), cast(Any, AutoModelForImageTextToText)
    with torch.device("meta"):
        try:
            model = language.from_config(config, trust_remote_code=trust_remote_code)
        except ValueError:
            model = images.from_config(config, trust_remote_code=trust_remote_code)
    for module in model.modules():
        if isinstance(getattr(module, "scalar_embed_scale", None), float):  # a constant that must have a value
            module.embed_scale = torch.tensor(module.scalar_embed_scale)
    return model


def _final_norm(model: Any, norm: Any, files: _Files, dtype: torch.dtype | None) -> nn.Module:
    """A copy of the final norm with its stored values."""
    prefix = next(name for name, module in model.named_modules() if module is norm)
    filled: nn.Module = copy.deepcopy(norm).to_empty(device="cpu")
    values = {name: files.read(f"{prefix}.{name}", dtype) for name in norm.state_dict()}
    filled.load_state_dict(values, assign=True)
    return filled.requires_grad_(False).eval()


class _Files:
    """The safetensors files of a verifier: where each tensor lies, each file fetched when it is read."""

    def __init__(self, name: str, revision: str | None) -> None:
        self.name, self.revision = name, revision
        folder = default_verifier_folder() if name == DEFAULT_VERIFIER_NAME else Path(name).expanduser()
        self.folder = folder if folder.is_dir() else None
        self.source = name if self.folder is None else str(self.folder)
        index = self._file(INDEX_FILE)
        if index is not None:
            weight_map = json.loads(index.read_text(encoding="utf-8")).get("weight_map")
            if not isinstance(weight_map, dict):
                raise problem(index, "weight_map", weight_map, "an index maps every tensor's name to its shard", "fetch the verifier again")
            self.names: dict[str, str] = weight_map
            return
        single = self._file(WEIGHTS_FILE)
        if single is None:
            raise CheckpointError(f"the verifier {name!r} has neither {WEIGHTS_FILE} nor {INDEX_FILE}; pass a complete folder or Hub name")
        with self._opened(single) as content:
            self.names = dict.fromkeys(content.keys(), WEIGHTS_FILE)

    def _file(self, file: str) -> Path | None:
        """A file of the verifier, None where it has none of this name."""
        if self.folder is not None:
            return self.folder / file if (self.folder / file).is_file() else None
        try:
            return Path(hf_hub_download(self.name, file, revision=self.revision))
        except (EntryNotFoundError, LocalEntryNotFoundError):
            return None
        except (HFValidationError, HfHubHTTPError, OSError) as error:
            reason = str(error).strip().splitlines()[0].rstrip(".")
            raise CheckpointError(f"cannot load the verifier {self.name!r}: {reason}; pass an existing folder or Hub name") from None

    def _opened(self, file: Path) -> Any:
        try:
            return safe_open(file, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is no complete safetensors file ({error}): fetch the verifier again") from None

    def read(self, wanted: str, dtype: torch.dtype | None) -> Tensor:
        """The tensor that the model calls `wanted`; the files of a multimodal model may call it by a longer name."""
        found = self._find(wanted)
        tensor = self._stored(found)
        if tensor.dtype not in FLOAT_DTYPES:
            tensor = self._unscaled(found, tensor)
        return tensor if dtype is None else tensor.to(dtype)

    def _stored(self, name: str) -> Tensor:
        file = self._file(self.names[name])
        if file is None:
            raise CheckpointError(f"the verifier {self.name!r} lacks its shard {self.names[name]}; fetch it again")
        with self._opened(file) as content:
            if name not in content.keys():  # noqa: SIM118 (not a mapping)
                raise CheckpointError(f"{file} does not hold {name}, which the index puts there; fetch the verifier again")
            tensor: Tensor = content.get_tensor(name)
            return tensor

    def _find(self, wanted: str) -> str:
        if wanted in self.names:
            return wanted
        parts = wanted.split(".")
        text = [name for name in self.names if not any(side in name for side in _OTHER_SIDES)]
        for length in range(len(parts), 1, -1):
            same = [name for name in text if name.split(".")[-length:] == parts[-length:] and not _is_of_layer(name)]
            if len(same) == 1:
                return same[0]
            if same:
                raise CheckpointError(f"the verifier {self.name!r} has several tensors that could be its {wanted}: {_list(same)}")
        stem = parts[-2]
        packed = [name for name in text if name.split(".")[-2:-1] == [stem] and name.endswith(_PACKED)]
        if packed:
            raise CheckpointError(
                f"the verifier {self.name!r} holds {wanted} packed by its quantisation ({_list(packed)}), and drafters need it in floating"
                " point; name an unquantised sibling"
            )
        raise CheckpointError(f"the verifier {self.name!r} holds no {wanted}; pass a complete folder or another Hub name")

    def _unscaled(self, name: str, tensor: Tensor) -> Tensor:
        """A float8 or int8 table with a scale a tensor or a row beside it, as float32."""
        for suffix in ("_scale", "_scale_inv"):
            if name + suffix not in self.names:
                continue
            scale = self._stored(name + suffix).float()
            if scale.numel() in (1, len(tensor)):
                return tensor.float() * scale.reshape(-1, *[1] * (tensor.ndim - 1))
        kind = str(tensor.dtype).removeprefix("torch.")
        raise CheckpointError(
            f"the verifier {self.name!r} stores {name} as {kind} without a scale a tensor or row, and drafters need it in floating point;"
            " name an unquantised sibling"
        )


def _is_of_layer(name: str) -> bool:
    return any(part.isdigit() for part in name.split("."))


def _list(names: Sequence[str] | Iterable[str]) -> str:
    return ", ".join(sorted(names)[:3])
