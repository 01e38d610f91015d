"""Parallel speculative drafters: train, decode losslessly, compare, serve.

    from speculators import Speculator, Verifier, generate

    verifier = Verifier.from_pretrained("smollm2-135m-instruct")
    drafter = Speculator.from_pretrained("checkpoints/smollm2-135m-instruct/dspark", verifier.weights)
    prompt = verifier.encode_chat([{"role": "user", "content": "Why is the sky blue?"}])
    print(verifier.tokenizer.decode(generate(verifier, drafter, [prompt]).token_ids[0]))

Names load on first use, so that importing the package stays fast.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from speculators.decoding.engine import Generation, generate
    from speculators.decoding.sampling import SamplingParams
    from speculators.evaluation.evaluate import EvaluationSettings, PromptSet, evaluate
    from speculators.registry import get_algorithm, register_algorithm
    from speculators.serving.config import speculative_config
    from speculators.speculator import Speculator
    from speculators.verifier import Verifier

_source_tree = Path(__file__).parent.parent
if (_source_tree / "kernels" / "launch.py").is_file():
    # A source tree on the path, as for `python -m` at its root, keeps `algorithms` and `kernels` beside this folder, not in it.
    __path__.append(str(_source_tree))

_HOMES = {
    "Verifier": "speculators.verifier",
    "Speculator": "speculators.speculator",
    "generate": "speculators.decoding.engine",
    "Generation": "speculators.decoding.engine",
    "SamplingParams": "speculators.decoding.sampling",
    "register_algorithm": "speculators.registry",
    "get_algorithm": "speculators.registry",
    "speculative_config": "speculators.serving.config",
    "evaluate": "speculators.evaluation.evaluate",
    "EvaluationSettings": "speculators.evaluation.evaluate",
    "PromptSet": "speculators.evaluation.evaluate",
}

__all__ = [
    "EvaluationSettings",
    "Generation",
    "PromptSet",
    "SamplingParams",
    "Speculator",
    "Verifier",
    "evaluate",
    "generate",
    "get_algorithm",
    "register_algorithm",
    "speculative_config",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
