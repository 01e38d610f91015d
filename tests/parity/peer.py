"""Runs the public speculators library for the parity tests, in the environment that `make test-parity` builds.

    python -I peer.py JOBS.json

That library bears our import name, so it gets a process of its own, and what goes in and out are files. A job is an object:

    name         of the job; its answers are NAME.json and, where there are tensors, NAME.safetensors beside JOBS.json.
    checkpoint   a folder to load.
    create       config.json of a new drafter with random weights, saved to `checkpoint` first; null to load only.
    mapping      safetensors file with t2d and d2t for a created drafter of a reduced vocabulary; null for the full one.
    resave       a folder that the loaded drafter is saved to; null for none.
    batch        safetensors file with the arguments of the model's forward; null to load only.
    draws        what would be drawn at random: {"anchors": [...]}, or {"anchor": [...], "depth": [...]}; {} draws.
    arguments    of the trainer: losses, passes, number of anchors ...
    attention    "sdpa" or "eager".
    backward     whether gradients are wanted; their names and largest magnitudes are answered.

NAME.json holds `error` (the exception's type and text, null for none), `loss` and `gradients`. NAME.safetensors holds
`hidden` and `logits` (what enters and leaves the output head), every argument of the model's metrics (`final_logits`,
`targets`, `loss_mask`, `confidence_logits` ...) and the attention masks, in the order in which they were made.
"""

from __future__ import annotations

import inspect
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.models.dflash import core as dflash_core
from speculators.models.dspark import core as dspark_core
from speculators.models.eagle3 import core as eagle3_core
from speculators.models.peagle import core as peagle_core

CORES = {"dflash": dflash_core, "dspark": dspark_core, "eagle3": eagle3_core, "peagle": peagle_core}
# Arguments of `compute_metrics`, which every model calls with all it has computed: ours -> theirs.
METRICS = {
    "final_logits": "logits",
    "targets": "targets",
    "loss_mask": "loss_mask",
    "confidence_logits": "confidence_logits",
    "anchor": "anchor_pos",
    "depth": "depth",
}
PEER_DRAWS = (dflash_core.select_anchors, peagle_core.generate_cod_sample_indices)


def pin(draws: dict[str, list[int]]) -> None:
    """Replace the peer's random draws by given ones; an empty object gives them back to it."""
    dflash_core.select_anchors, peagle_core.generate_cod_sample_indices = PEER_DRAWS
    if "anchors" in draws:
        anchors = torch.tensor(draws["anchors"])
        dflash_core.select_anchors = lambda *_, **__: (anchors, torch.ones_like(anchors, dtype=torch.bool))
    if "anchor" in draws:
        elements = torch.tensor(draws["anchor"]), torch.tensor(draws["depth"])
        peagle_core.generate_cod_sample_indices = lambda **_: elements


def load(folder: str, attention: str) -> Any:
    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = attention
    return SpeculatorModel.from_pretrained(folder, config=config)


def create(job: dict[str, Any]) -> None:
    """A drafter with random weights, large enough to see, in the folder `checkpoint`."""
    folder = Path(job["checkpoint"])
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(job["create"]))
    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = job["attention"]
    torch.manual_seed(11)
    model = SpeculatorModel.registered_model_class_from_config(config)(config)
    for name, parameter in model.named_parameters():
        if name.split(".")[0] in ("embed_tokens", "lm_head", "verifier_lm_head", "verifier_norm"):
            continue
        scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
        parameter.data = scale * torch.randn_like(parameter) + (parameter.dim() == 1)
    mapping = load_file(job["mapping"]) if job["mapping"] else {}
    model.load_vocab_mappings(mapping.get("t2d"), mapping.get("d2t"))
    model.load_verifier_weights()
    model.save_pretrained(folder)


def observe(model: nn.Module, method: str) -> tuple[dict[str, list[Tensor]], Callable[[], None]]:
    """Note what passes through a forward; returns the notes and what ends it."""
    core, seen = CORES[method], {}

    def note(name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            seen.setdefault(name, []).append(value.detach())

    def watch_head(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        note("hidden", inputs[0])
        note("logits", output)

    measure, make_mask = core.compute_metrics, model._create_mask_fn
    signature = inspect.signature(measure)

    def watch_metrics(*arguments: Any, **named: Any) -> Any:
        given = signature.bind(*arguments, **named).arguments
        for name, theirs in METRICS.items():
            note(name, given.get(theirs))
        return measure(*arguments, **named)

    def watch_mask(*arguments: Any, **named: Any) -> Tensor:
        mask = make_mask(*arguments, **named)
        note("mask", mask)
        return mask

    handle = model.lm_head.register_forward_hook(watch_head)
    core.compute_metrics, model._create_mask_fn = watch_metrics, watch_mask
    extend = eagle3_core.extend_dense_mask_for_draft_tokens

    def watch_extension(*arguments: Any, **named: Any) -> Tensor:
        mask = extend(*arguments, **named)
        note("mask", mask)
        return mask

    eagle3_core.extend_dense_mask_for_draft_tokens = watch_extension

    def end() -> None:
        handle.remove()
        core.compute_metrics, eagle3_core.extend_dense_mask_for_draft_tokens = measure, extend

    return seen, end


def forward(job: dict[str, Any], model: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    method = model.config.speculators_model_type
    pin(job["draws"])
    options, _ = type(model).get_trainer_kwargs(**{"loss_implementation": "eager", **job["arguments"]})
    seen, end = observe(model, method)
    torch.manual_seed(5)
    try:
        _, loss, _ = model(**load_file(job["batch"]), **options)
    finally:
        end()
    answer: dict[str, Any] = {"loss": float(loss.detach())}
    if job["backward"]:
        loss.backward()
        answer["gradients"] = {
            name: None if parameter.grad is None else float(parameter.grad.abs().max()) for name, parameter in model.named_parameters()
        }
    tensors = {f"{name}.{number}": value.contiguous().clone() for name, values in seen.items() for number, value in enumerate(values)}
    return tensors, answer


def run(job: dict[str, Any], answers: Path) -> None:
    answer: dict[str, Any] = {"error": None}
    try:
        if job["create"]:
            create(job)
        model = load(job["checkpoint"], job["attention"])
        if job["resave"]:
            model.save_pretrained(job["resave"])
        if job["batch"]:
            tensors, more = forward(job, model)
            save_file(tensors, answers / f"{job['name']}.safetensors")
            answer |= more
    except Exception as error:  # what the peer refuses is an answer as well
        answer["error"] = f"{type(error).__name__}: {error}"
    (answers / f"{job['name']}.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    request = Path(sys.argv[1])
    for each in json.loads(request.read_text()):
        run(each, request.parent)
