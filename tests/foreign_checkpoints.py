"""Tiny checkpoints as other projects write them: names, shapes and keys as documented, random values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_drafters import HIDDEN, VOCABULARY, verifier_weights
from torch import Tensor

DEPTH, HEADS, KEY_VALUE_HEADS, HEAD_DIM, WIDTH, RANK, DRAFT_VOCABULARY = 6, 4, 2, 8, 48, 3, 20
SHAPE_KEYS = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_VALUE_HEADS,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
}


def write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """A checkpoint folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(dict(config)))
    return folder


def random_tensors(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randn(shape, generator=generator).to(dtype) * 0.2 for name, shape in shapes.items()}


def layer_shapes(prefix: str, inputs: int, head_norms: bool) -> dict[str, tuple[int, ...]]:
    queries, keys = HEADS * HEAD_DIM, KEY_VALUE_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (queries, inputs),
        "self_attn.k_proj.weight": (keys, inputs),
        "self_attn.v_proj.weight": (keys, inputs),
        "self_attn.o_proj.weight": (HIDDEN, queries),
        "mlp.gate_proj.weight": (WIDTH, HIDDEN),
        "mlp.up_proj.weight": (WIDTH, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, WIDTH),
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
    }
    if head_norms:
        shapes |= {"self_attn.q_norm.weight": (HEAD_DIM,), "self_attn.k_norm.weight": (HEAD_DIM,)}
    if inputs == 2 * HIDDEN:
        shapes["hidden_norm.weight"] = (HIDDEN,)
    return {prefix + name: shape for name, shape in shapes.items()}


def block_shapes(taps: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (HIDDEN, taps * HIDDEN), "hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    for layer in range(2):
        shapes |= layer_shapes(f"layers.{layer}.", HIDDEN, head_norms=True)
    return shapes


def head_shapes(kind: str) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "markov_head.markov_w1.weight": (VOCABULARY, RANK),
        "markov_head.markov_w2.weight": (VOCABULARY, RANK),
        "confidence_head.proj.weight": (1, HIDDEN + RANK),
        "confidence_head.proj.bias": (1,),
    }
    if kind == "gated":
        shapes |= {"markov_head.gate_proj.weight": (RANK, HIDDEN + RANK), "markov_head.gate_proj.bias": (RANK,)}
    if kind == "rnn":
        shapes |= {"markov_head.joint_proj.weight": (3 * RANK, 2 * RANK + HIDDEN), "markov_head.joint_proj.bias": (3 * RANK,)}
    return shapes


def copies(dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """The verifier's embedding and head, as files repeat them."""
    verifier = verifier_weights()
    return {"embed_tokens.weight": verifier.embedding.to(dtype), "lm_head.weight": verifier.head.to(dtype)}


def zlab(folder: Path, **changes: Any) -> Path:
    config = {
        **SHAPE_KEYS,
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "num_target_layers": DEPTH,
        "layer_types": ["full_attention"] * 2,
        "block_size": 6,
        "dflash_config": {"target_layer_ids": [0, 2, 5], "mask_token_id": 3},
    }
    return write(folder, config | changes, random_tensors(block_shapes(3)))


def deepspec_config(rank: int = RANK, kind: str = "vanilla", confidence: bool = True) -> dict[str, Any]:
    heads: dict[str, Any] = {"markov_rank": rank, "enable_confidence_head": confidence}
    heads |= {"markov_head_type": kind} if rank else {}
    heads |= {"confidence_head_with_markov": True} if confidence else {}
    return {
        **SHAPE_KEYS,
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "num_target_layers": DEPTH,
        "layer_types": ["full_attention"] * 2,
        "tie_word_embeddings": False,
        "block_size": 5,
        "mask_token_id": 3,
        "target_layer_ids": [0, 1, 3],
        "num_anchors": 256,
        **heads,
    }


def deepspec_dspark(folder: Path, kind: str = "vanilla", **changes: Any) -> Path:
    tensors = random_tensors(block_shapes(3) | head_shapes(kind)) | copies()
    return write(folder, deepspec_config(kind=kind) | changes, tensors)


def deepspec_dflash(folder: Path, **changes: Any) -> Path:
    return write(folder, deepspec_config(rank=0, confidence=False) | changes, random_tensors(block_shapes(3)) | copies())


def deepspec_eagle3(folder: Path, **changes: Any) -> Path:
    config = {
        **SHAPE_KEYS,
        "architectures": ["Qwen3Eagle3Model"],
        "model_type": "qwen3",
        "num_hidden_layers": 1,
        "draft_num_hidden_layers": 1,
        "num_target_layers": DEPTH,
        "target_layer_ids": [0, 1, 2, 3, 4],
        "ttt_length": 7,
        "step_loss_decay": 0.8,
        "target_model_name_or_path": "tiny-verifier",
        "tie_word_embeddings": False,
    }
    shapes = {"fc.weight": (HIDDEN, 5 * HIDDEN), "norm.weight": (HIDDEN,), **layer_shapes("layers.0.", 2 * HIDDEN, head_norms=True)}
    return write(folder, config | changes, random_tensors(shapes) | copies())


def mapping() -> dict[str, Tensor]:
    """t2d and d2t that keep the tokens 1, 4, 7 ... 58."""
    kept = torch.arange(1, 60, 3)
    t2d = torch.zeros(VOCABULARY, dtype=torch.bool)
    t2d[kept] = True
    return {"t2d": t2d, "d2t": kept - torch.arange(DRAFT_VOCABULARY)}


def safeailab(folder: Path, head: Tensor | None = None, **changes: Any) -> Path:
    config = {
        **SHAPE_KEYS,
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": DRAFT_VOCABULARY,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4], "use_aux_hidden_state": True},
    }
    shapes = {"fc.weight": (HIDDEN, 3 * HIDDEN), "norm.weight": (HIDDEN,), **layer_shapes("midlayer.", 2 * HIDDEN, head_norms=False)}
    kept = mapping()
    rows = copies()["lm_head.weight"][kept["t2d"]] if head is None else head
    return write(folder, config | changes, random_tensors(shapes) | kept | {"lm_head.weight": rows})


def aws_peagle(folder: Path, **changes: Any) -> Path:
    config = {
        **SHAPE_KEYS,
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 2,
        "draft_vocab_size": VOCABULARY,
        "ptd_token_id": 3,
        "parallel_drafting": True,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]},
    }
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "norm.weight": (HIDDEN,),
        "mask_hidden": (1, 1, 3 * HIDDEN),
        "embed_tokens.weight": (VOCABULARY, HIDDEN),
        **layer_shapes("midlayer.", 2 * HIDDEN, head_norms=False),
        **layer_shapes("layers.1.", HIDDEN, head_norms=False),
    }
    return write(folder, config | changes, random_tensors(shapes) | {"lm_head.weight": copies()["lm_head.weight"]})


def specforge(folder: Path, projector: str = "dspark", **changes: Any) -> Path:
    inner: dict[str, Any] = {"projector_type": projector, "target_layer_ids": [0, 2, 5], "mask_token_id": 3, "block_size": 6}
    shapes = block_shapes(3)
    if projector == "dspark":
        inner |= {"markov_rank": RANK, "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True}
        shapes |= head_shapes("vanilla")
    config = {
        **SHAPE_KEYS,
        "architectures": ["DSparkDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "num_target_layers": DEPTH,
        "layer_types": ["full_attention"] * 2,
        "dflash_config": inner,
    }
    return write(folder, config | changes, random_tensors(shapes))
