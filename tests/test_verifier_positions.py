"""Verifiers whose positions end or change: tables of learned positions, rotary embeddings of other frequencies for longer rows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_training import packed_rows, tiny_config
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    Llama4TextConfig,
    LlamaConfig,
    OPTConfig,
    Phi3Config,
    PhimoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from speculators.data.rows import Conversation, pack
from speculators.decoding.engine import generate
from speculators.decoding.prompt_lookup import PromptLookup
from speculators.decoding.sampling import SamplingParams
from speculators.errors import DataError
from speculators.training.trainer import train
from speculators.verifier import Verifier

CONTEXT, BEYOND = 32, 512
COMMON: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "initializer_range": 0.2, "init_std": 0.2}
COMMON |= {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 63}
SHAPE: dict[str, Any] = {**COMMON, "num_hidden_layers": 4, "intermediate_size": 48, "num_key_value_heads": 2}
LONG_ROPE: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.2, 1.3]}
LONG_ROPE |= {"long_factor": [8.0] * 4, "original_max_position_embeddings": CONTEXT}
DYNAMIC_ROPE: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}

CONFIGS: dict[str, PreTrainedConfig] = {
    "longrope": Phi3Config(
        **SHAPE, max_position_embeddings=BEYOND, original_max_position_embeddings=CONTEXT, rope_parameters=LONG_ROPE, sliding_window=None
    ),
    "phimoe": PhimoeConfig(
        **SHAPE,
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": BEYOND, "sliding_window": None},
        rope_parameters={**LONG_ROPE, "short_mscale": 1.1, "long_mscale": 2.0},
    ),
    "dynamic": LlamaConfig(**SHAPE, max_position_embeddings=CONTEXT, rope_parameters=DYNAMIC_ROPE),
    "llama4": Llama4TextConfig(
        **SHAPE,
        **{"head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 4, "num_experts_per_tok": 2, "no_rope_layers": [1, 0, 1, 0]},
        **{"attn_temperature_tuning": True, "floor_scale": CONTEXT + 1, "attn_scale": 5.0, "max_position_embeddings": BEYOND},
    ),
    "gpt2": GPT2Config(**COMMON, n_positions=CONTEXT, n_layer=4),
    "opt": OPTConfig(
        **COMMON, ffn_dim=48, num_hidden_layers=4, word_embed_proj_dim=32, max_position_embeddings=CONTEXT, do_layer_norm_before=True
    ),
}
# The longest fills the context with its reply, while shorter ones still have room for drafts.
PROMPTS = [[5, 9, 11, 7], [3, 4, 5, 3, 4, 5, 3, 4, 5, 3, 4, 5, 6, 2], [8]]
NEW = CONTEXT - max(map(len, PROMPTS))


def model_of(kind: str) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(CONFIGS[kind], dtype=torch.float32).eval()


def own_reply(model: Any, prompt: list[int], new: int) -> list[int]:
    """The likeliest token after the whole row, again and again: neither cache nor drafts."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(new):
            tokens.append(int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("draft_tokens", [None, 1, 4, 7])
def test_replies_that_fill_the_context_are_the_models_own_though_drafts_reach_past_it(kind: str, draft_tokens: int | None) -> None:
    model = model_of(kind)
    expected = [own_reply(copy.deepcopy(model), prompt, NEW) for prompt in PROMPTS]
    drafter = None if draft_tokens is None else PromptLookup(draft_tokens)
    verifier = Verifier(model, name_or_path=kind)
    sampling = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    assert verifier.context_length == CONTEXT
    assert generate(verifier, drafter, PROMPTS, sampling).token_ids == expected
    for prompt, reply in zip(PROMPTS, expected, strict=True):  # a shorter row beside it, or not
        assert generate(verifier, drafter, [prompt], sampling).token_ids == [reply]


@pytest.mark.parametrize("kind", CONFIGS)
def test_blocks_past_the_context_leave_what_comes_before_as_it_was(kind: str) -> None:
    """On a GPU blocks are not cut: the last round of a row runs all drafts, and finished rows go on."""
    verifier = Verifier(model_of(kind), name_or_path=kind)
    input_ids = torch.randint(0, 62, (1, CONTEXT + 8), generator=torch.Generator().manual_seed(2))
    short, long = verifier.new_cache(1, CONTEXT), verifier.new_cache(1, CONTEXT + 8)
    expected = verifier.forward(input_ids[:, :CONTEXT], short).last_hidden_state
    verifier.forward(input_ids[:, :CONTEXT], long)
    long.lengths.fill_(CONTEXT - 1)
    crossing = verifier.forward(input_ids[:, CONTEXT - 1 :], long).last_hidden_state
    torch.testing.assert_close(crossing[:, :1], expected[:, -1:], atol=1e-5, rtol=1e-5)
    assert bool(crossing.isfinite().all())


@pytest.mark.parametrize("kind", CONFIGS)
def test_rows_beyond_the_context_are_refused_in_one_sentence(kind: str) -> None:
    verifier = Verifier(model_of(kind), name_or_path=kind)
    with pytest.raises(DataError, match=rf"exceeds the context of {CONTEXT} tokens of '{kind}'; shorten the prompt or lower"):
        generate(verifier, None, PROMPTS, SamplingParams(max_new_tokens=NEW + 1))
    long = Conversation([1] * (CONTEXT + 1), [False] * CONTEXT + [True])
    with pytest.raises(DataError, match=rf"conversations of {CONTEXT + 1} tokens, .* context of {CONTEXT} .* row_length of {CONTEXT} or"):
        train(verifier, pack([long], CONTEXT + 4), tiny_config())


def test_a_model_that_ran_longer_rows_before_is_back_at_the_frequencies_of_shorter_ones() -> None:
    for kind in ("longrope", "dynamic"):
        fresh, used = model_of(kind), model_of(kind)
        with torch.no_grad():
            used(input_ids=torch.zeros(1, CONTEXT + 9, dtype=torch.int64))
        input_ids = torch.tensor([PROMPTS[1]])
        first, second = (Verifier(model, name_or_path=kind) for model in (fresh, used))
        states = [verifier.forward(input_ids, verifier.new_cache(1, 16)).last_hidden_state for verifier in (first, second)]
        assert torch.equal(*states)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("method", ["eagle3", "peagle", "dflash", "dspark"])
def test_every_method_trains_a_drafter_for_them_that_decodes_losslessly(kind: str, method: str) -> None:
    model = model_of(kind)
    expected = [own_reply(copy.deepcopy(model), prompt, NEW) for prompt in PROMPTS]
    verifier = Verifier(model, name_or_path=kind)
    options: dict[str, Any] = {"num_layers": 1, "num_draft_tokens": 3, "aux_hidden_state_layer_ids": [1, 2], "mask_token_id": 3}
    options |= {"training": {"anchors": 4}} | ({"markov_rank": 4} if method == "dspark" else {})
    drafter = train(verifier, packed_rows(4), tiny_config(method=method, options=options, steps=2)).eval()
    assert drafter.config.layers.rope_parameters["rope_type"] == "default"
    assert generate(verifier, drafter, PROMPTS, SamplingParams(max_new_tokens=NEW, ignore_eos=True)).token_ids == expected
