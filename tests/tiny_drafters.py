"""Tiny random verifier weights, packed batches and drafters for tests of the algorithms: no verifier model needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from speculators.decoding.proposal import DraftVocabulary, Observation, Proposal
from speculators.kernels.draft_attention import draft_attention
from speculators.kernels.markov_sampling import MarkovChain
from speculators.kernels.visible_keys import VisibleKeys
from speculators.registry import get_algorithm
from speculators.speculator import Speculator, VerifierWeights
from speculators.training.batch import TrainingBatch

VOCABULARY, HIDDEN, TAPS = 61, 32, [1, 2, 4]


def verifier_weights(dtype: torch.dtype = torch.float32, seed: int = 0) -> VerifierWeights:
    """Random embedding, head and norm of a 6-layer verifier."""
    generator = torch.Generator().manual_seed(seed)
    norm = torch.nn.RMSNorm(HIDDEN).to(dtype)
    return VerifierWeights(
        embedding=torch.randn(VOCABULARY, HIDDEN, generator=generator).to(dtype),
        head=torch.randn(VOCABULARY, HIDDEN, generator=generator).to(dtype),
        final_norm=norm,
        num_layers=6,
        stop_token_ids=(2,),
        name_or_path="tiny-verifier",
        architectures=("LlamaForCausalLM",),
        config={
            "hidden_size": HIDDEN,
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 512,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    )


def drafter(method: str, dtype: torch.dtype = torch.float32, seed: int = 1, **options: Any) -> Speculator:
    """A random drafter of two layers with K = 5 and visible (not near-zero) weights, attached to `verifier_weights`."""
    torch.manual_seed(seed)
    chosen: dict[str, Any] = {"num_layers": 2, "num_draft_tokens": 5, "aux_hidden_state_layer_ids": TAPS, "mask_token_id": 3, **options}
    speculator = get_algorithm(method).speculator_class.from_verifier(verifier_weights(dtype), **chosen)
    with torch.no_grad():
        for parameter in speculator.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    return speculator.to(dtype).eval()


def packed_batch(documents: list[int], prompt: int = 3, dtype: torch.dtype = torch.float32, seed: int = 2) -> TrainingBatch:
    """One packed row of documents of the given lengths with random features; the first `prompt` tokens are unsupervised."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(documents)
    position = torch.cat([torch.arange(length) for length in documents])[None]
    return TrainingBatch(
        input_ids=torch.randint(0, VOCABULARY, (1, total), generator=generator),
        hidden_states=torch.randn(1, total, len(TAPS) * HIDDEN, generator=generator).to(dtype),
        last_hidden_state=torch.randn(1, total, HIDDEN, generator=generator).to(dtype),
        loss_mask=position >= prompt,
        position_ids=position,
        document_ids=torch.cat([torch.full((length,), number) for number, length in enumerate(documents)])[None],
    )


class TeacherForcing:
    """A draft sampler that "draws" given tokens and records the logits it was offered."""

    enough = False
    wants_confidence = True

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens  # [rows, K]
        self.logits: list[Tensor] = []

    def draw(self, logits: Tensor, vocabulary: DraftVocabulary | None = None) -> Tensor:
        """Record one slot."""
        logits = logits if vocabulary is None else vocabulary.widen(logits)
        self.logits.append(logits)
        return self.tokens[:, len(self.logits) - 1]

    def draw_block(self, logits: Tensor, vocabulary: DraftVocabulary | None = None) -> Tensor:
        """Record all slots."""
        logits = logits if vocabulary is None else vocabulary.widen(logits)
        self.logits.extend(logits.unbind(1))
        return self.tokens[:, : logits.shape[1]]

    def draw_chain(self, chain: MarkovChain, widen: Callable[[Tensor], Tensor]) -> Tensor:
        """Record all slots, each after the token given before it."""
        return chain.slot_by_slot(lambda logits: self.draw(widen(logits)))

    def point_mass(self, token_ids: Tensor, lengths: Tensor | None = None) -> Proposal:
        """Not used by speculators."""
        raise AssertionError("a speculator draws from its logits")

    def proposal(self, confidence: Tensor | None = None) -> Any:
        """Return the confidence."""
        return confidence


def decode_logits(speculator: Speculator, batch: TrainingBatch, anchor: int, count: int, pieces: list[int]) -> Tensor:
    """Logits [count, vocabulary] that decoding offers after `anchor` of a one-document row, context observed in pieces.

    Args:
        pieces: lengths of the successive observations; they sum to `anchor`.
    """
    assert sum(pieces) == anchor
    device = batch.input_ids.device
    state = speculator.new_state(1, batch.input_ids.shape[1] + 16, device, batch.hidden_states.dtype)
    start = 0
    sampler = TeacherForcing(batch.input_ids[:, anchor + 1 : anchor + 1 + count])
    for piece in pieces:
        stop = start + piece
        # Two columns of padding: what lies right of `counts` must not matter.
        padded = slice(start, stop + 2)
        speculator.observe(
            state,
            Observation(
                token_ids=batch.input_ids[:, padded],
                next_token_ids=batch.input_ids[:, start + 1 : stop + 3],
                hidden_states=batch.hidden_states[:, padded],
                start=torch.tensor([start], device=device),
                counts=torch.tensor([piece], device=device),
            ),
        )
        start = stop
    speculator.propose(state, batch.input_ids[:, anchor], sampler, count)
    return torch.cat(sampler.logits)


def on_kernels(monkeypatch: pytest.MonkeyPatch, module: Any, *names: str) -> None:
    """Let a module call the Triton kernels of these operations, which it would on CUDA alone."""
    for name in names:
        monkeypatch.setattr(module, name, partial(getattr(module, name), implementation="triton"))


def moved(speculator: Speculator, device: torch.device) -> Speculator:
    """The drafter and what it borrows of its verifier, on a device."""
    weights = speculator.verifier
    tensors = {name: getattr(weights, name).to(device) for name in ("embedding", "head", "final_norm")}
    speculator.attach(replace(weights, **tensors))
    return speculator.to(device)


def attend_few(
    query: Tensor,
    block_key: Tensor | None,
    block_value: Tensor | None,
    context_key: Tensor,
    context_value: Tensor,
    visible: VisibleKeys,
    scale: float | None = None,
) -> Tensor:
    """`attention` as it is on CUDA for few queries and no gradient."""
    if block_key is None or block_value is None:
        block_key, block_value = context_key[:, :0], context_value[:, :0]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return draft_attention(query, block_key, block_value, context_key, context_value, visible, scale=scale)
