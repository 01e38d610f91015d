"""Tiny random verifiers of several model families, small enough for tests on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from speculators.verifier import Verifier

FAMILIES = ("llama", "qwen3", "qwen3_moe", "gemma3", "mistral", "gpt_oss")
SLIDING_WINDOW = 6

_CONFIGS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "qwen3_moe": (Qwen3MoeConfig, {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    "gemma3": (Gemma3TextConfig, {"head_dim": 16, "sliding_window": SLIDING_WINDOW, "query_pre_attn_scalar": 16}),
    "mistral": (MistralConfig, {"head_dim": 16, "sliding_window": SLIDING_WINDOW}),
    "gpt_oss": (
        GptOssConfig,
        {"head_dim": 16, "sliding_window": SLIDING_WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_scaling": None},
    ),
    "gemma2": (
        Gemma2Config,
        {
            "head_dim": 16,
            "sliding_window": SLIDING_WINDOW,
            "final_logit_softcapping": 0.5,
            "attn_logit_softcapping": 1.0,
            "query_pre_attn_scalar": 16,
        },
    ),
    "cohere": (CohereConfig, {"logit_scale": 0.25}),
    "phi": (PhiConfig, {}),
    "granite": (GraniteConfig, {"logits_scaling": 3.0, "embedding_multiplier": 7.0, "residual_multiplier": 0.5}),
}
# Families that alternate window and full layers need both kinds within few layers.
_ALTERNATING = ("gemma3", "gpt_oss", "gemma2")


def tiny_model(
    family: str, seed: int = 0, vocab_size: int = 64, layers: int = 4, dtype: torch.dtype = torch.float32, **overrides: Any
) -> PreTrainedModel:
    """A random model of hidden size 32 with 4 query heads over 2 K/V heads.

    Args:
        family: one of FAMILIES, or "gemma2", "cohere", "granite", "phi" (a head with bias).
        seed: of the weights.
        vocab_size: number of tokens.
        layers: decoder layers.
        dtype: of the weights.
        overrides: settings of the family's transformers config.
    """
    config_class, settings = _CONFIGS[family]
    common: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": vocab_size - 1,
    }
    if family in _ALTERNATING:
        common["layer_types"] = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]
    config = config_class(**{**common, **settings, **overrides})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):  # transformers starts them at one and zero, which would hide a missing one
                parameter.data.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def tiny_verifier(
    family: str = "llama", seed: int = 0, vocab_size: int = 64, layers: int = 4, dtype: torch.dtype = torch.float32, **overrides: Any
) -> Verifier:
    """`tiny_model` as a verifier without tokenizer."""
    return Verifier(tiny_model(family, seed, vocab_size, layers, dtype, **overrides), name_or_path=f"tiny-{family}")
