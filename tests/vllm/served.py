"""A tiny verifier, drafters that learned its replies by heart, and real vLLM over both."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import toy_algorithm  # noqa: F401 (registers the toy)
from chat_tokenizer import chat_tokenizer
from tiny_models import tiny_verifier
from vllm import LLM
from vllm import SamplingParams as VllmSampling

from speculators import SamplingParams, Speculator, Verifier, generate
from speculators.data.rows import Conversation, pack
from speculators.serving.parity import WatchedDrafter
from speculators.serving.rounds import ServedRound, recorded_rounds
from speculators.training.config import TrainingConfig
from speculators.training.trainer import train

K = 4
REPLY_TOKENS = 40
MASK_TOKEN = 258
_TAPS = {"aux_hidden_state_layer_ids": [1, 2, 4], "num_draft_tokens": K}  # 4 is the stream before the final norm
_BLOCK = {**_TAPS, "num_layers": 2, "mask_token_id": MASK_TOKEN}
# name -> method and options
DRAFTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("eagle3", {**_TAPS, "num_layers": 1}),
    "peagle": ("peagle", _BLOCK),
    "dflash": ("dflash", _BLOCK),
    "dspark": ("dspark", {**_BLOCK, "markov_rank": 16}),
    "dspark-fill-in": ("dspark", {**_BLOCK, "markov_rank": 16, "sample_from_anchor": False}),
    "dspark-gated": ("dspark", {**_BLOCK, "markov_rank": 16, "markov_head_type": "gated"}),
    "dspark-rnn": ("dspark", {**_BLOCK, "markov_rank": 16, "markov_head_type": "rnn"}),
    "dspark-rnn-fill-in": ("dspark", {**_BLOCK, "markov_rank": 16, "markov_head_type": "rnn", "sample_from_anchor": False}),
    "dspark-no-head": ("dspark", {**_BLOCK, "markov_rank": 0}),
    "dspark-reduced": ("dspark", {**_BLOCK, "markov_rank": 16, "draft_vocab_size": 96}),
    "dflash-reduced": ("dflash", {**_BLOCK, "draft_vocab_size": 96}),
    "eagle3-reduced": ("eagle3", {**_TAPS, "num_layers": 1, "draft_vocab_size": 96}),
    "peagle-reduced": ("peagle", {**_BLOCK, "draft_vocab_size": 96}),
    "toy": ("toy", {"num_draft_tokens": K, "tap": 2}),
}
STEPS = 150


@cache
def folder() -> Path:
    """Where the models of this run lie."""
    return Path(mkdtemp(prefix="speculators-vllm-"))


@cache
def verifier() -> Verifier:
    """A random Llama of four layers, saved with a tokenizer. CPU attention of vLLM wants heads of 32 channels."""
    shape = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "eos_token_id": 259}
    made = tiny_verifier("llama", seed=1, vocab_size=320, initializer_range=0.15, **shape)
    path = folder() / "verifier"
    made.model.save_pretrained(path)
    chat_tokenizer().save_pretrained(path)
    made.weights = dataclasses.replace(made.weights, name_or_path=str(path))
    return made


@cache
def prompts() -> list[list[int]]:
    """Three prompts of different lengths."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 256, (length,), generator=generator).tolist() for length in (9, 14, 23)]


SAMPLING = SamplingParams(max_new_tokens=REPLY_TOKENS, ignore_eos=True)


@cache
def replies() -> list[list[int]]:
    """The verifier's own greedy replies: what every drafter learned, and what every engine must answer."""
    return generate(verifier(), None, prompts(), SAMPLING).token_ids


@cache
def drafter(name: str) -> Speculator:
    """A drafter that learned the replies, saved under `checkpoint(name)` by the library."""
    method, options = DRAFTERS[name]
    rows = pack(
        [Conversation([*p, *r], [False] * len(p) + [True] * len(r)) for p, r in zip(prompts(), replies(), strict=True)],
        row_length=max(map(len, prompts())) + REPLY_TOKENS,
    )
    config = TrainingConfig(
        method=method, options=options, steps=STEPS, rows_per_step=3, learning_rate=5e-3, seed=0, log_every=STEPS, progress=False
    )
    learned = train(verifier(), rows, config)
    learned.save_pretrained(folder() / name, dtype="float32")
    return learned


def checkpoint(name: str) -> str:
    """Folder of a trained drafter."""
    drafter(name)
    return str(folder() / name)


@contextmanager
def engine(model: str, **options: Any) -> Iterator[LLM]:
    """vLLM on the CPU in this process, eager, in float32."""
    settings: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 128,
        "max_num_seqs": 4,
        "block_size": 32,
        "num_gpu_blocks_override": 32,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        **options,
    }
    llm = LLM(model, **settings)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


@dataclass(frozen=True)
class Answer:
    """Greedy replies; the rounds of each prompt; prompt tokens found in the prefix cache."""

    replies: list[list[int]]
    rounds: list[list[ServedRound]]
    cached_tokens: list[int]


def answer(llm: LLM, token_ids: list[list[int]], tokens: int = REPLY_TOKENS, temperature: float = 0) -> Answer:
    """Let vLLM answer prompts, greedily if not told otherwise, and watch."""
    sampling = VllmSampling(temperature=temperature, max_tokens=tokens, ignore_eos=True, seed=0)
    with recorded_rounds(llm) as rounds:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in token_ids], sampling, use_tqdm=False)
    noted = {request.partition("-")[0]: of_request for request, of_request in rounds.items()}
    return Answer(
        replies=[list(output.outputs[0].token_ids) for output in outputs],
        rounds=[noted.get(output.request_id, []) for output in outputs],
        cached_tokens=[output.num_cached_tokens or 0 for output in outputs],
    )


def our_rounds(name: str) -> tuple[list[dict[int, tuple[int, ...]]], list[list[int]]]:
    """Our engine's drafts by tokens known, and the accepted counts of every round, for each prompt."""
    watched = WatchedDrafter(drafter(name), len(prompts()))
    generation = generate(verifier(), watched, prompts(), SAMPLING)
    assert generation.token_ids == replies()
    return watched.proposals, [[one.accepted for one in of_row] for of_row in generation.rounds]
