"""Every architecture of the table in docs/verifiers.md, as tiny random models; what cannot be a verifier says so at load."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import SLIDING_WINDOW, tiny_model
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

from speculators.errors import CheckpointError
from speculators.verifier import Verifier

COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 63,
}
HEADS = {"head_dim": 16}
WINDOWS = {"sliding_window": SLIDING_WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1}
ROUTED |= {"first_k_dense_replace": 1}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 4}
PER_LAYER_INPUTS = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64, "num_kv_shared_layers": 2}
TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
QWEN_TOWER = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}


def sections(*sizes: int) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sizes)}}


# Row of the table -> transformers configuration class and what it needs to be tiny.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", {}),
    "Llama-4": ("Llama4TextConfig", {**HEADS, **LOCAL_EXPERTS, "intermediate_size_mlp": 48, "attention_chunk_size": SLIDING_WINDOW}),
    "Qwen2": ("Qwen2Config", {}),
    "Qwen2-MoE": ("Qwen2MoeConfig", {**EXPERTS, "shared_expert_intermediate_size": 24}),
    "Qwen3": ("Qwen3Config", HEADS),
    "Qwen3-MoE": ("Qwen3MoeConfig", {**HEADS, **EXPERTS}),
    "Gemma": ("GemmaConfig", HEADS),
    "Gemma-2": ("Gemma2Config", {**HEADS, **WINDOWS, "query_pre_attn_scalar": 16}),
    "Gemma-3": ("Gemma3TextConfig", {**HEADS, **WINDOWS, "query_pre_attn_scalar": 16}),
    "Gemma-4": ("Gemma4TextConfig", {**HEADS, **WINDOWS, **PER_LAYER_INPUTS}),
    "Mistral": ("MistralConfig", {**HEADS, "sliding_window": SLIDING_WINDOW}),
    "Ministral": ("MinistralConfig", {**HEADS, **WINDOWS}),
    "Mixtral": ("MixtralConfig", LOCAL_EXPERTS),
    "Phi": ("PhiConfig", {}),
    "Phi-3, Phi-4": ("Phi3Config", {"sliding_window": SLIDING_WINDOW}),
    "Phi-MoE": ("PhimoeConfig", LOCAL_EXPERTS),
    "gpt-oss": ("GptOssConfig", {**HEADS, **WINDOWS, **LOCAL_EXPERTS, "rope_scaling": None}),
    "GLM": ("GlmConfig", HEADS),
    "GLM-4": ("Glm4Config", HEADS),
    "GLM-4.5": ("Glm4MoeConfig", {**HEADS, **ROUTED}),
    "GLM-4.7 Flash": ("Glm4MoeLiteConfig", {**ROUTED, **LATENT}),
    "DeepSeek-V2": ("DeepseekV2Config", {**ROUTED, **LATENT}),
    "DeepSeek-V3": ("DeepseekV3Config", {**ROUTED, **LATENT}),
    "OLMo": ("OlmoConfig", {}),
    "OLMo-2": ("Olmo2Config", {}),
    "OLMo-3": ("Olmo3Config", WINDOWS),
    "OLMoE": ("OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "SmolLM3": ("SmolLM3Config", {"no_rope_layers": [1, 1, 1, 0]}),
    "Cohere-2": ("Cohere2Config", WINDOWS),
    "EXAONE-4": ("Exaone4Config", {**WINDOWS, "sliding_window_pattern": 2}),
    "Seed-OSS": ("SeedOssConfig", HEADS),
    "StarCoder2": ("Starcoder2Config", {}),
    "StableLM": ("StableLmConfig", {"partial_rotary_factor": 0.5}),
    "Falcon": ("FalconConfig", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "Nemotron": ("NemotronConfig", HEADS),
    "Granite": ("GraniteConfig", {"logits_scaling": 3.0, "embedding_multiplier": 7.0, "residual_multiplier": 0.5}),
    "nanochat": ("NanoChatConfig", {}),
    "GPT-2": ("GPT2Config", {}),
    "GPT-J": ("GPTJConfig", {"rotary_dim": 4}),
    "GPT-NeoX": ("GPTNeoXConfig", {}),
    "OPT": ("OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
}

# Vision-language models, whose text side is the verifier.
VISION: dict[str, Callable[[], PreTrainedConfig]] = {
    "Qwen2.5-VL": lambda: transformers.Qwen2_5_VLConfig(
        text_config={**COMMON, **sections(1, 1, 2)}, vision_config={**QWEN_TOWER, "window_size": 112, "fullatt_block_indexes": [0]}
    ),
    "Qwen3-VL": lambda: transformers.Qwen3VLConfig(
        text_config={**COMMON, **HEADS, **sections(2, 3, 3)}, vision_config={**QWEN_TOWER, "deepstack_visual_indexes": [0]}
    ),
    "Gemma-3 with images": lambda: transformers.Gemma3Config(
        text_config={**COMMON, **HEADS, **WINDOWS, "query_pre_attn_scalar": 16}, vision_config=TOWER, mm_tokens_per_image=4
    ),
    "LLaVA": lambda: transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**COMMON), vision_config=transformers.CLIPVisionConfig(**TOWER, projection_dim=16)
    ),
    "Mistral-3": lambda: transformers.Mistral3Config(
        text_config=transformers.MistralConfig(**COMMON, **HEADS), vision_config=transformers.PixtralVisionConfig(**TOWER)
    ),
}

# What cannot be a verifier: row of the table -> configuration class, what it needs, why not.
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
INDEXED = {**ROUTED, **LATENT, "index_topk": 8, "index_head_dim": 8, "index_n_heads": 2}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "Qwen3-Next": ("Qwen3NextConfig", {**HEADS, **EXPERTS, **LINEAR, "shared_expert_intermediate_size": 24}, "keeps a recurrent state"),
    "Qwen3.5": ("Qwen3_5TextConfig", {**HEADS, **LINEAR}, "keeps a recurrent state"),
    "LFM2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"] * 2}, "choose"),
    "BLOOM": ("BloomConfig", {"n_layer": 4, "n_head": 4}, "does not run with a cache of this library"),
    "Mamba": ("MambaConfig", {}, "keeps a recurrent state"),
    "DeepSeek-V3.2": ("DeepseekV32Config", INDEXED, "layers of type indexed_attention"),
    "Gemma-3n": (
        "Gemma3nTextConfig",
        {**HEADS, **WINDOWS, **PER_LAYER_INPUTS, "num_kv_shared_layers": 0, "laurel_rank": 4, "altup_num_inputs": 2},
        "several residual streams",
    ),
}


def build(config: PreTrainedConfig) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        listed = type(config) in AutoModelForCausalLM._model_mapping
        return (AutoModelForCausalLM if listed else AutoModelForImageTextToText).from_config(config, dtype=torch.float32).eval()


def configuration(row: str) -> PreTrainedConfig:
    if row in VISION:
        return VISION[row]()
    name, settings = (FAMILIES | {key: value[:2] for key, value in REFUSED.items()})[row]
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return getattr(transformers, name)(**{**COMMON, **settings})


@pytest.mark.parametrize("row", [*FAMILIES, *VISION])
def test_the_verifier_computes_what_the_model_does_also_packed_and_after_a_roll_back(row: str) -> None:
    model = build(configuration(row))
    input_ids = torch.randint(1, 62, (2, 16), generator=torch.Generator().manual_seed(1))
    model.set_attn_implementation("eager")  # the model's own, before it becomes a verifier's
    with torch.no_grad():
        expected = model(input_ids=input_ids, use_cache=False).logits
        second = model(input_ids=input_ids[:, 7:], use_cache=False).logits
    verifier = Verifier(model, name_or_path=row)
    tolerance: dict[str, Any] = {"atol": 2e-5 * float(expected.abs().max()), "rtol": 0}
    # Two documents in a row.
    positions = torch.cat([torch.arange(7), torch.arange(9)]).expand(2, 16)
    documents = (torch.arange(16) >= 7).long().expand(2, 16)
    packed = verifier.encode(input_ids, positions, documents, (0, 2, 4))
    torch.testing.assert_close(verifier.logits(packed.last_hidden_state[:, :7]), expected[:, :7], **tolerance)
    torch.testing.assert_close(verifier.logits(packed.last_hidden_state[:, 7:]), second, **tolerance)
    assert torch.equal(packed.hidden_states[..., -verifier.hidden_size :], packed.last_hidden_state)
    # Two rows that accepted different numbers of tokens.
    cache = verifier.new_cache(2, 24)
    verifier.forward(input_ids[:, :9], cache)
    cache.lengths = torch.tensor([4, 8])
    columns = torch.stack([torch.arange(4, 10), torch.arange(8, 14)])
    again = verifier.forward(input_ids.gather(1, columns), cache)
    torch.testing.assert_close(
        verifier.logits(again.last_hidden_state), expected.gather(1, columns[..., None].expand(-1, -1, expected.shape[-1])), **tolerance
    )


@pytest.mark.parametrize("row", REFUSED)
def test_what_cannot_be_rolled_back_or_tapped_is_refused_in_one_sentence(row: str) -> None:
    with pytest.raises(CheckpointError, match=REFUSED[row][2]) as error:
        Verifier(build(configuration(row)), name_or_path=row)
    assert "choose" in str(error.value)


def test_the_table_in_the_documentation_names_exactly_these_rows() -> None:
    page = (Path(__file__).parents[1] / "docs" / "verifiers.md").read_text(encoding="utf-8")
    rows = {match.strip() for match in re.findall(r"^\| ([^|]+) \| `\w+`", page, re.MULTILINE)}
    assert rows == {*FAMILIES, *VISION, *REFUSED}


def test_vision_language_folders_load_as_their_text_side(tmp_path: Path) -> None:
    model = build(configuration("Qwen3-VL"))
    model.save_pretrained(tmp_path)
    verifier = Verifier.from_pretrained(tmp_path, dtype=torch.float32, device="cpu")
    input_ids = torch.arange(1, 9)[None]
    ours = verifier.logits(verifier.forward(input_ids, verifier.new_cache(1, 12)).last_hidden_state)
    torch.testing.assert_close(ours, model(input_ids=input_ids).logits, atol=1e-5, rtol=1e-5)


def save_quantised(
    folder: Path, model: PreTrainedModel, quantise: Callable[[str, torch.Tensor], dict[str, torch.Tensor]], how: dict[str, Any]
) -> None:
    """Save a model with some tensors replaced, and a configuration that says so."""
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file(
        {key: value for name, tensor in load_file(file).items() for key, value in quantise(name, tensor).items()}, file, {"format": "pt"}
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": how}))


@pytest.mark.skipif(torch.cuda.is_available(), reason="on CUDA the weights stay packed")
def test_fp8_weights_in_blocks_are_multiplied_by_their_scales(tmp_path: Path) -> None:
    expected: dict[str, torch.Tensor] = {}

    def quantise(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        if "proj" not in name:
            return {name: weight}
        rows, columns = weight.shape
        blocks = weight.view(max(1, rows // 128), min(128, rows), max(1, columns // 128), min(128, columns))
        scales = blocks.abs().amax(dim=(1, 3), keepdim=True) / 448
        small = (blocks / scales).to(torch.float8_e4m3fn)
        expected[name] = (small.float() * scales).view(rows, columns)
        return {name: small.view(rows, columns), name.replace(".weight", ".weight_scale_inv"): scales[:, 0, :, 0].contiguous()}

    model = tiny_model("llama", hidden_size=128, intermediate_size=256, head_dim=32)
    how = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    save_quantised(tmp_path, model, quantise, how)
    verifier = Verifier.from_pretrained(tmp_path, dtype=torch.float32, device="cpu")
    assert len(expected) == 28
    for name, weight in expected.items():
        torch.testing.assert_close(verifier.model.get_parameter(name).float(), weight, atol=0, rtol=2**-7)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on CUDA the weights stay packed")
def test_four_bit_weights_of_gpt_oss_are_unpacked(tmp_path: Path) -> None:
    expected: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([magnitudes, -magnitudes])

    def quantise(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return {name: weight}
        experts, columns, rows = weight.shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
        exponents = torch.randint(121, 125, (experts, rows, columns // 32), generator=generator, dtype=torch.uint8)
        unpacked = torch.stack([values[(blocks & 15).long()], values[(blocks >> 4).long()]], -1).flatten(-2)
        scaled = unpacked * 2.0 ** (exponents.float() - 127)[..., None]
        expected[name] = scaled.view(experts, rows, columns).transpose(1, 2)
        return {f"{name}_blocks": blocks, f"{name}_scales": exponents}

    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    model = tiny_model("gpt_oss", layers=2, hidden_size=64, intermediate_size=32)
    save_quantised(tmp_path, model, quantise, {"quant_method": "mxfp4", "modules_to_not_convert": kept})
    verifier = Verifier.from_pretrained(tmp_path, dtype=torch.float32, device="cpu")
    assert len(expected) == 4
    for name, weight in expected.items():
        torch.testing.assert_close(verifier.model.get_parameter(name).float(), weight)
