"""Where do our drafter and vLLM's part ways? The same draft step on both sides, tensor by tensor, first the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from speculators.checkpoint.storage import read_tensors, resolve
from speculators.decoding.engine import generate
from speculators.decoding.proposal import DraftSampler, DraftVocabulary, Proposal
from speculators.decoding.sampling import SamplingParams
from speculators.kernels.markov_sampling import MarkovChain
from speculators.speculator import Speculator
from speculators.verifier import Verifier

# In the order in which they are computed.
TENSORS = ("aux hidden states", "fused features", "draft hidden states", "draft logits")
# vLLM keeps these matrices in one, rows one after the other.
_PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_RENAMED = {"d2t": "draft_id_to_target_id"}
_TRAINING_ONLY = ("t2d",)


def near_tie(verifier: Verifier, speculator: Speculator, token_ids: list[int], ours: Sequence[int], theirs: Sequence[int]) -> bool:
    """Whether our drafter finds both tokens as likely, where two drafts after the same context first differ.

    Then the order in which an engine sums decides, and no tensor is wrong.
    """
    slot = next(k for k, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    logits = _offered_logits(verifier, speculator, token_ids, len(ours))[slot]
    return float(logits[ours[slot]] - logits[theirs[slot]]) < _tolerance(speculator) * float(logits[ours[slot]].abs())


def first_difference(verifier: Verifier, speculator: Speculator, llm: Any, checkpoint: str, token_ids: list[int], count: int) -> str:
    """Name the first tensor that differs when both sides draft after the same tokens.

    Args:
        verifier, speculator: our side.
        llm: a running `vllm.LLM` in this process.
        checkpoint: what both loaded.
        token_ids: the context; both sides draft after it and the token that follows.
        count: K.
    """
    drafter = _vllm_drafter(llm)
    if drafter is None:
        return "vLLM runs a drafter of this library, and the difference lies outside it"
    if (weight := _different_weight(drafter, checkpoint)) is not None:
        return weight
    theirs = _vllm_tensors(llm, drafter, token_ids)
    ours = _our_tensors(verifier, speculator, token_ids, count)
    for name in TENSORS:
        if name not in ours or name not in theirs:
            continue
        mine, other = (part[name].float().flatten(0, -2) for part in (ours, theirs))
        rows = min(len(mine), len(other))
        if mine.shape[1] != other.shape[1]:
            return f"{name}: {mine.shape[1]} channels here, {other.shape[1]} in vLLM"
        error = (mine[:rows] - other[:rows]).abs().amax(dim=1)
        scale = mine[:rows].abs().amax().clamp_min(1e-6)
        wrong = (error > _tolerance(speculator) * scale).nonzero().flatten()
        if len(wrong):
            row = int(wrong[0])
            return f"{name}, row {row} of {rows}: differs by up to {float(error[row]):.3g} where values reach {float(scale):.3g}"
    return "none of the tensors of this draft step alone: the difference comes from the cache that rounds before it left"


def _tolerance(speculator: Speculator) -> float:
    return {torch.float32: 1e-3, torch.float16: 1e-2}.get(speculator.compute_dtype(), 5e-2)


# -- vLLM's side -----------------------------------------------------------------------------------------------


def _vllm_drafter(llm: Any) -> Any:
    """The drafter model inside a running vLLM; None where a proposer of ours drafts."""
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    holder = getattr(runner, "speculator", None) or getattr(runner, "drafter", None)
    return getattr(holder, "model", None)


def _different_weight(drafter: Any, checkpoint: str) -> str | None:
    """A weight that vLLM does not hold as the checkpoint does."""
    stored = read_tensors(resolve(checkpoint)).tensors
    held = {**dict(drafter.named_parameters(remove_duplicate=False)), **dict(drafter.named_buffers(remove_duplicate=False))}
    for name, tensor in stored.items():
        if name in _TRAINING_ONLY:
            continue
        loaded = _held(name, held, stored)
        if loaded is None:
            return f"the weight {name}: vLLM's {type(drafter).__name__} has no place for it"
        if loaded.numel() == 0:  # vLLM has packed it for the CPU's matrix products and thrown the original away
            continue
        rows = loaded.reshape(-1, *tensor.shape[1:])[: tensor.shape[0]] if tensor.dim() else loaded
        if rows.numel() != tensor.numel() or not torch.equal(rows.reshape(tensor.shape).cpu(), tensor.to(rows.dtype)):
            return f"the weight {name}: vLLM holds other values than the checkpoint"
    return None


def _held(name: str, held: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> Tensor | None:
    """The part of vLLM's parameters that a checkpoint's tensor went to."""
    for packed, parts in _PACKED.items():
        for position, part in enumerate(parts):
            if f".{part}." not in name or f"model.{name}" in held:
                continue
            whole = held.get(f"model.{name.replace(part, packed)}")
            start = sum(len(stored[name.replace(part, before)]) for before in parts[:position])
            return None if whole is None else whole[start : start + len(stored[name])]
    name = _RENAMED.get(name, name)
    return next((held[found] for found in (f"model.{name}", name) if found in held), None)


@torch.inference_mode()
def _vllm_tensors(llm: Any, drafter: Any, token_ids: list[int]) -> dict[str, Tensor]:
    from vllm import SamplingParams as VllmSampling

    seen: dict[str, list[Tensor]] = {}
    logits = "compute_draft_logits" if hasattr(drafter, "compute_draft_logits") else "compute_logits"
    with (
        _watched(drafter, "combine_hidden_states", seen, *TENSORS[:2]),
        _watched(drafter, logits, seen, *TENSORS[2:]),
    ):
        llm.generate([{"prompt_token_ids": token_ids}], VllmSampling(temperature=0, max_tokens=2, ignore_eos=True), use_tqdm=False)
    return _draft_step(seen, len(token_ids))


# -- our side --------------------------------------------------------------------------------------------------


def _our_tensors(verifier: Verifier, speculator: Speculator, token_ids: list[int], count: int) -> dict[str, Tensor]:
    seen: dict[str, list[Tensor]] = {}
    handle = None
    if isinstance(fc := getattr(speculator, "fc", None), nn.Module):

        def keep_fused(module: nn.Module, args: Any, output: Tensor) -> None:
            if output.dim() > 1:  # one vector is the placeholder of P-EAGLE's MASK slots, no token's feature
                seen.setdefault(TENSORS[1], []).append(output.detach().clone())

        handle = fc.register_forward_hook(keep_fused)
    original = speculator.observe

    def observe(state: Any, observation: Any) -> None:
        seen.setdefault(TENSORS[0], []).append(observation.hidden_states.clone())
        original(state, observation)

    speculator.observe = observe  # type: ignore[method-assign]
    try:
        with _watched(speculator, "draft_logits", seen, *TENSORS[2:]):
            generate(verifier, speculator, [token_ids], SamplingParams(max_new_tokens=count + 2, ignore_eos=True), num_draft_tokens=count)
    finally:
        del speculator.observe
        if handle is not None:
            handle.remove()
    return _draft_step(seen, len(token_ids))


class _OfferedLogits:
    """A sampler that keeps the logits it is offered, over the verifier's vocabulary, and draws as the one it wraps."""

    def __init__(self, inner: DraftSampler) -> None:
        self.inner = inner
        self.logits: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def draw(self, logits: Tensor, vocabulary: DraftVocabulary | None = None) -> Tensor:
        logits = logits if vocabulary is None else vocabulary.widen(logits)
        self.logits.append(logits)
        return self.inner.draw(logits)

    def draw_block(self, logits: Tensor, vocabulary: DraftVocabulary | None = None) -> Tensor:
        logits = logits if vocabulary is None else vocabulary.widen(logits)
        self.logits.extend(logits.unbind(1))
        return self.inner.draw_block(logits)

    def draw_chain(self, chain: MarkovChain, widen: Callable[[Tensor], Tensor]) -> Tensor:
        return chain.slot_by_slot(lambda logits: self.draw(widen(logits)))


def _offered_logits(verifier: Verifier, speculator: Speculator, token_ids: list[int], count: int) -> list[Tensor]:
    """[vocabulary] of each slot of the first round after `token_ids` and the token that follows them."""
    kept: list[_OfferedLogits] = []
    propose = speculator.propose

    def keep(state: Any, anchor: Tensor, sampler: DraftSampler, num_draft_tokens: int) -> Proposal:
        kept.append(_OfferedLogits(sampler))
        return propose(state, anchor, kept[-1], num_draft_tokens)

    speculator.propose = keep  # type: ignore[method-assign]
    try:
        generate(verifier, speculator, [token_ids], SamplingParams(max_new_tokens=count + 2, ignore_eos=True), num_draft_tokens=count)
    finally:
        del speculator.propose
    return [logits[0].float() for logits in kept[0].logits]


# -- both ------------------------------------------------------------------------------------------------------


@contextmanager
def _watched(owner: Any, method: str, seen: dict[str, list[Tensor]], before: str, after: str) -> Iterator[None]:
    """While open, every call's first argument is kept under `before`, its result under `after`."""
    original: Callable[..., Any] = getattr(owner, method)

    def call(value: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(value, *args, **kwargs)
        seen.setdefault(before, []).append(value.detach().clone())
        seen.setdefault(after, []).append(result.detach().clone())
        return result

    setattr(owner, method, call)
    try:
        yield
    finally:
        delattr(owner, method)


def _draft_step(seen: dict[str, list[Tensor]], context: int) -> dict[str, Tensor]:
    """Of everything kept, what belongs to the first draft step: `context` rows of features, then the drafted slots in order."""
    step = {}
    for name, parts in seen.items():
        rows = torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
        step[name] = rows[:context] if name in TENSORS[:2] else rows
    return step
