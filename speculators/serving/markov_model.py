"""DSpark's drafter model in vLLM with every sequential head: vLLM's own knows the vanilla one only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM

from speculators.algorithms.heads import MarkovHead, MarkovKind

_PREFIX = "markov_head."


class MarkovDraftModel(Qwen3DSparkForCausalLM):  # type: ignore[misc]
    """vLLM's model. A gated or recurrent head of the library's own, or none, stands where the checkpoint's is not vanilla."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        config = vllm_config.speculative_config.draft_model_config.hf_config
        rank: int = config.markov_rank
        if not rank:
            config.markov_rank = 1  # vLLM builds a head in any case, and one of rank 0 ends its process
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        kind: MarkovKind = getattr(config, "markov_head_type", None) or "vanilla"
        if not rank:
            self.model.markov_head = None
        elif kind != "vanilla":
            head = MarkovHead(kind, config.vocab_size, config.draft_vocab_size, config.hidden_size, rank)
            self.model.markov_head = head.requires_grad_(False)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Any:
        """Fill the model. Our head is filled here: vLLM's loader would take its `gate_proj` for half of a fused MLP matrix."""
        head = self.model.markov_head
        if not isinstance(head, MarkovHead):
            return super().load_weights(weights)
        tensors = dict(weights)
        head.load_state_dict({name.removeprefix(_PREFIX): tensors.pop(name) for name in list(tensors) if name.startswith(_PREFIX)})
        return super().load_weights(tensors.items())
