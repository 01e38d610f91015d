"""Loading a verifier's model and tokenizer, with one clear sentence where that cannot work."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from speculators.attention import AttentionMasks
from speculators.errors import CheckpointError, ConfigError, SpeculatorsError

WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def fast_dtype(device: torch.device | str) -> torch.dtype:
    """The dtype in which a device multiplies fastest: bfloat16 on CUDA and on CPUs that have instructions for it, else float32."""
    kind = torch.device(device).type
    if kind == "cuda":
        return torch.bfloat16
    if kind == "cpu":
        probes = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
        if any(probe() for probe in probes if probe is not None):
            return torch.bfloat16
    return torch.float32


def load_model(
    name: str, *, dtype: str | torch.dtype, device: torch.device | str | None, revision: str | None, trust_remote_code: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Load what `Verifier.from_pretrained` names; see there for the arguments.

    Raises:
        CheckpointError: nothing usable lies there, tensors are missing, or the model cannot serve as a verifier.
        ConfigError: the dtype is unknown.
    """
    device = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    weights_dtype = dtype if isinstance(dtype, torch.dtype) else _named_dtype(dtype, device)
    source = locate_verifier(name)
    remote: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(source, **remote)
        refuse_unsupported(config, _model_class(config), name)
        model, report = _auto_class(config).from_pretrained(
            source, config=config, dtype=weights_dtype, output_loading_info=True, ignore_mismatched_sizes=True, **remote
        )
        tokenizer = _load_tokenizer(source, remote)
    except SpeculatorsError:
        raise
    except Exception as error:  # transformers raises whatever a stranger's files make its code meet
        raise cannot_load(name, error) from error
    if mismatched := sorted(report["mismatched_keys"]):
        key, stored, built = mismatched[0]
        raise CheckpointError(
            f"the files of the verifier {name!r} hold {key} of shape {tuple(stored)} where its config.json makes it {tuple(built)}; fetch"
            " both again"
        )
    if missing := sorted(report["missing_keys"]):
        raise CheckpointError(f"the files of the verifier {name!r} lack {len(missing)} of its tensors, {missing[0]} first; fetch it again")
    model = model.to(device)
    _refuse_damaged(model, name)
    return model, tokenizer


@dataclass(frozen=True)
class ChatFacts:
    """What preparing data needs of a verifier, which is all but its weights.

    Attributes:
        tokenizer: its tokenizer, or None.
        stop_token_ids: ids that end a reply.
        vocab_size: number of logits.
        name: as the user names it.
    """

    tokenizer: PreTrainedTokenizerBase | None
    stop_token_ids: tuple[int, ...]
    vocab_size: int
    name: str


def load_chat_facts(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> ChatFacts:
    """Tokenizer, stop tokens and vocabulary of a verifier, without reading its weights.

    Raises:
        CheckpointError: nothing usable lies there.
    """
    source = locate_verifier(name)
    remote: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(source, **remote)
        tokenizer = _load_tokenizer(source, remote)
    except Exception as error:  # as in `load_model`
        raise cannot_load(name, error) from error
    try:
        generation = GenerationConfig.from_pretrained(source, revision=revision or "main")
    except OSError:  # a verifier need not have one
        generation = None
    return ChatFacts(tokenizer, stop_token_ids(generation, config, tokenizer), int(config.get_text_config().vocab_size), name)


def stop_token_ids(generation: Any, config: Any, tokenizer: Any) -> tuple[int, ...]:
    """The generation config's stop ids (one or several), else the model config's, else the tokenizer's."""
    for holder in (generation, config, config.get_text_config(), tokenizer):
        ids = getattr(holder, "eos_token_id", None)
        if ids is not None:
            return tuple(int(token) for token in ids) if isinstance(ids, list | tuple) else (int(ids),)
    return ()


def cannot_load(name: str, error: Exception) -> CheckpointError:
    """One sentence of whatever transformers raised."""
    lines = str(error).strip().splitlines() or [""]
    # Its validators name themselves first, and what they found last.
    reason = lines[-1 if isinstance(error, StrictDataclassError) else 0].strip().rstrip(".")
    if not isinstance(error, OSError | ValueError | RuntimeError | ImportError | SafetensorError | StrictDataclassError):
        reason = f"{type(error).__name__} {reason}".strip()  # such as KeyError, whose text is the key alone
    return CheckpointError(f"cannot load the verifier {name!r}: {reason}; pass a complete folder or another Hub name")


def _refuse_damaged(model: PreTrainedModel, name: str) -> None:
    """A weight that is not finite makes every logit of the model NaN, and its greedy reply the token 0 or garbage."""
    for key, parameter in model.named_parameters():
        # The extremes and not isfinite(): one pass and no temporary of the weight's size. A NaN is both of them.
        if parameter.numel() == 0 or parameter.dtype not in WEIGHT_DTYPES:
            continue
        if not all(bool(torch.isfinite(end)) for end in parameter.detach().aminmax()):
            raise CheckpointError(f"the files of the verifier {name!r} hold values in {key} that are not finite; fetch them again")


def _auto_class(config: Any) -> Any:
    """Where transformers lists the model: among language models, or, for its text side, among those that also see images."""
    of_text, of_images = cast(Any, AutoModelForCausalLM), cast(Any, AutoModelForImageTextToText)
    return of_images if type(config) not in of_text._model_mapping and type(config) in of_images._model_mapping else of_text


def _model_class(config: Any) -> Any:
    """The transformers class that would be built from a config; None for code that a repository brings along."""
    return _auto_class(config)._model_mapping.get(type(config), None)


def refuse_unsupported(config: Any, model_class: Any, name: str) -> None:
    """Say in one sentence why a model cannot be a verifier. Needs no weights."""
    text_config = config.get_text_config()
    if config.is_encoder_decoder:
        raise CheckpointError(f"{name!r} is an encoder-decoder model; choose a decoder-only verifier")
    if getattr(model_class, "_is_stateful", False):
        raise CheckpointError(
            f"{name!r} ({config.model_type}) keeps a recurrent state, which cannot be rolled back after rejected draft tokens;"
            " choose a verifier with attention layers only"
        )
    if getattr(text_config, "use_bidirectional_attention", False):
        raise CheckpointError(f"{name!r} attends to later tokens (use_bidirectional_attention); choose a causal verifier")
    AttentionMasks.from_config(text_config, additive=False, dtype=torch.float32)


def locate_verifier(name: str) -> str:
    """The folder of a verifier, or its Hub name unchanged.

    Raises:
        CheckpointError: the name is that of a folder, and the folder is missing or holds no configuration.
    """
    from speculators.data.default_verifier import DEFAULT_VERIFIER_NAME, default_verifier_folder

    if name == DEFAULT_VERIFIER_NAME:
        return str(default_verifier_folder())
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise CheckpointError(f"the folder {name} holds no config.json; pass a folder written by save_pretrained")
        return str(path)
    if path.is_absolute() or name.startswith(".") or name.count("/") > 1:  # no Hub name looks like this
        raise CheckpointError(f"there is no folder {name}; pass an existing folder, a Hub name (owner/model) or {DEFAULT_VERIFIER_NAME!r}")
    return name


def _load_tokenizer(source: str, remote: dict[str, Any]) -> PreTrainedTokenizerBase | None:
    if Path(source).is_dir() and not any(Path(source).glob("*token*")):
        return None  # weights alone still decode token ids
    auto_tokenizer: Any = AutoTokenizer
    tokenizer: PreTrainedTokenizerBase = auto_tokenizer.from_pretrained(source, **remote)
    return tokenizer


def _named_dtype(name: str, device: torch.device) -> torch.dtype:
    dtype = fast_dtype(device) if name == "auto" else getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(f"dtype {name!r} is unknown; use auto, float32, bfloat16 or float16")
    return dtype
