"""Any algorithm inside vLLM: a proposer for vLLM's `custom_class` interface (V1 runner) around a `Speculator`.

vLLM hands such a proposer token ids and nothing else. The verifier's hidden states are taken where vLLM's own drafters
get them, from `set_aux_hidden_state_layers` of its model, and kept by slot of the paged key/value cache: whatever vLLM
caches, shares between requests, evicts or computes again, a token's features lie where its keys and values lie.
In every round the drafter observes a request's whole context anew, so nothing else has to be rolled back or moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.forward_context import get_forward_context

from speculators import checkpoint
from speculators.decoding.proposal import Observation
from speculators.decoding.sampling import RoundSampler, SamplingParams
from speculators.errors import ConfigError
from speculators.serving.translation import CHECKPOINT_KEY
from speculators.speculator import Speculator, VerifierWeights


class SpeculatorProposer:
    """What vLLM's `create_custom_proposer` builds.

    Args:
        vllm_config: vLLM's; its `additional_config` names the checkpoint.

    Raises:
        ConfigError: vLLM is set up in a way that hides the hidden states, or names no checkpoint.
    """

    def __init__(self, vllm_config: Any) -> None:
        parallel, model = vllm_config.parallel_config, vllm_config.model_config
        if parallel.tensor_parallel_size * parallel.pipeline_parallel_size > 1:
            raise ConfigError("drafters without a native vLLM method run on one GPU; leave tensor and pipeline parallelism at 1")
        if not model.enforce_eager:
            raise ConfigError("drafters without a native vLLM method need --enforce-eager: graphs would not hand over hidden states")
        path = (vllm_config.additional_config or {}).get(CHECKPOINT_KEY)
        if path is None:
            raise ConfigError(f"no checkpoint is named under {CHECKPOINT_KEY} of additional_config; name the method and the checkpoint")
        self.path = str(path)
        self.vllm_config = vllm_config
        self.num_draft_tokens: int = vllm_config.speculative_config.num_speculative_tokens
        self.features: Tensor | None = None  # [slots of the key/value cache, taps * hidden]
        self.block_table: Tensor | None = None  # [requests, blocks] of the last forward
        self.block_size = 0

    def load_model(self, target_model: nn.Module) -> None:
        """Load the checkpoint beside vLLM's model and tap that model."""
        weights = verifier_weights(target_model, self.vllm_config.model_config)
        self.speculator: Speculator = checkpoint.load(self.path, weights)
        taps = self.speculator.aux_hidden_state_layer_ids
        if not taps:
            return
        tapped: Any = target_model
        if not hasattr(tapped, "set_aux_hidden_state_layers"):
            raise ConfigError(f"vLLM's {type(target_model).__name__} hands out no hidden states; its EAGLE-3 support is what is missing")
        tapped.set_aux_hidden_state_layers(taps)
        target_model.register_forward_hook(self._keep_features)

    def _keep_features(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Take the taps off the model's output and file them by cache slot."""
        last, taps = output
        metadata = get_forward_context().attn_metadata
        if isinstance(metadata, dict):  # None while vLLM measures memory
            layer = next(iter(metadata.values()))
            slots = layer.slot_mapping
            features = torch.cat(list(taps), dim=-1)[: len(slots)]
            if self.features is None:
                cache = self.vllm_config.cache_config
                self.block_size = cache.block_size
                self.features = features.new_zeros(cache.num_gpu_blocks * cache.block_size, features.shape[1])
            self.features[slots] = features
            self.block_table = layer.block_table
        return last

    @torch.inference_mode()
    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray[Any, Any],
        token_ids_cpu: np.ndarray[Any, Any],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Draft for every request that has a new token; none for prompts that are not through yet.

        Args:
            sampled_token_ids: the new tokens of each request of the batch.
            num_tokens_no_spec: [requests] int32, tokens of each, the new ones included.
            token_ids_cpu: [requests, longest] int32.
            slot_mappings: not used.
        """
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        # The verifier needs room for the drafts and one token more.
        longest = self.vllm_config.model_config.max_model_len - self.num_draft_tokens - 1
        rows = [row for row, new in enumerate(sampled_token_ids) if new and num_tokens_no_spec[row] <= longest]
        if not rows:
            return drafts
        device = self.speculator.verifier.embedding.device
        lengths = torch.tensor([int(num_tokens_no_spec[row]) for row in rows])
        width = int(lengths.max())
        tokens = torch.from_numpy(token_ids_cpu[rows, :width].astype(np.int64)).to(device)
        counts = (lengths - 1).to(device)  # the newest token is the anchor
        state = self.speculator.new_state(len(rows), width + self.num_draft_tokens, device, self.speculator.verifier.embedding.dtype)
        self.speculator.observe(
            state,
            Observation(
                token_ids=tokens[:, :-1],
                next_token_ids=tokens[:, 1:],
                hidden_states=self._context_features(rows, width - 1),
                start=torch.zeros_like(counts),
                counts=counts,
                longest=width - 1,
            ),
        )
        anchor = tokens.gather(1, counts[:, None])[:, 0]
        sampler = RoundSampler(SamplingParams(), torch.arange(len(rows), device=device), torch.zeros((), dtype=torch.int64), None)
        proposal = self.speculator.propose(state, anchor, sampler, self.num_draft_tokens)
        for row, ids, length in zip(rows, proposal.token_ids.tolist(), proposal.lengths.tolist(), strict=True):
            drafts[row] = ids[:length]
        return drafts

    def _context_features(self, rows: list[int], width: int) -> Tensor:
        """[rows, width, taps * hidden]: the features of each request's first `width` positions; beyond its length, anything finite."""
        embedding = self.speculator.verifier.embedding
        if self.features is None or self.block_table is None:
            return embedding.new_zeros(len(rows), width, 0)
        position = torch.arange(width, device=embedding.device)
        blocks = self.block_table[rows][:, position // self.block_size].long()
        return self.features[blocks * self.block_size + position % self.block_size]


def verifier_weights(model: Any, config: Any) -> VerifierWeights:
    """What a speculator borrows, from vLLM's model on one GPU.

    Args:
        model: vLLM's causal language model.
        config: vLLM's model config.
    """
    text = config.hf_text_config
    language = model.get_language_model() if hasattr(model, "get_language_model") else model
    size = text.vocab_size
    embedding = language.model.embed_tokens.weight.data[:size]
    head = embedding if text.tie_word_embeddings else language.lm_head.weight.data[:size]
    stops = text.eos_token_id
    return VerifierWeights(
        embedding=embedding,
        head=head,
        final_norm=language.model.norm,
        num_layers=text.num_hidden_layers,
        stop_token_ids=tuple(stops) if isinstance(stops, list) else () if stops is None else (stops,),
        name_or_path=config.model,
        architectures=tuple(config.architectures),
        config=text.to_dict(),
    )
