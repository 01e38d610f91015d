"""The drafters under checkpoints/ for the embedded default verifier, and the data they were trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from speculators.checkpoint import read_config
from speculators.data.decontamination import PromptIndex
from speculators.data.prompts import read_prompts
from speculators.data.storage import load_conversations
from speculators.decoding.engine import generate
from speculators.decoding.sampling import SamplingParams
from speculators.decoding.statistics import acceptance_length
from speculators.speculator import Speculator
from speculators.verifier import Verifier

ROOT = Path(__file__).parent.parent
DRAFTERS = ROOT / "checkpoints" / "smollm2-135m-instruct"
PROMPTS = sorted((ROOT / "benchmarks" / "prompts").glob("*.jsonl"))
METHODS = ("dflash", "dspark", "eagle3", "peagle")


def test_no_training_row_shares_thirteen_tokens_or_words_with_a_benchmark_prompt(default_verifier: Verifier) -> None:
    conversations, header = load_conversations(DRAFTERS / "data")
    assert len(PROMPTS) == 4
    assert len(conversations) == header["conversations"] == 74_244
    index = PromptIndex.from_prompt_files(PROMPTS, default_verifier)
    assert not any(index.overlaps(conversation) for conversation in conversations)
    # The check can fail: each benchmark's own first prompt is found.
    assert default_verifier.tokenizer is not None
    for path in PROMPTS:
        prompt = read_prompts(path)[0].turns[0]
        assert index.overlaps(default_verifier.tokenizer(prompt, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("method", METHODS)
def test_a_committed_drafter_is_small_and_keeps_the_contract(method: str) -> None:
    folder = DRAFTERS / method
    sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
    assert sum(sizes) <= 32_000_000
    assert max(sizes) <= 16_000_000
    config = read_config(folder)
    assert config.tapped_layers == [2, 15, 27]
    assert config.num_draft_tokens == 7
    assert (folder / "README.md").is_file()


def test_all_committed_drafters_saw_the_same_data() -> None:
    logs = [(DRAFTERS / "training" / f"train-{method}.jsonl").read_text().splitlines() for method in METHODS]
    runs = [[(run["rows"], run["reply_tokens"], run["seed"]) for run in map(json.loads, log)] for log in logs]
    assert runs == [[(18910, 5523952, 0), (41222, 12070286, 0)]] * len(METHODS)


@pytest.mark.parametrize("method", METHODS)
def test_a_committed_drafter_drafts_well_and_losslessly(method: str, default_verifier: Verifier) -> None:
    speculator = Speculator.from_pretrained(DRAFTERS / method, default_verifier.weights, dtype=torch.float32)
    prompt = read_prompts(ROOT / "benchmarks" / "prompts" / "gsm8k.jsonl", 1)[0]
    token_ids = [default_verifier.encode_chat(prompt.messages)]
    sampling = SamplingParams(max_new_tokens=32)
    decoded = generate(default_verifier, speculator, token_ids, sampling)
    assert decoded.token_ids == generate(default_verifier, None, token_ids, sampling).token_ids
    assert acceptance_length(decoded.rounds[0]) >= 2.0
