"""vLLM's CPU build without Triton samples from the verifier's own distribution once the plugin has repaired it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import served
import torch
from goodness_of_fit import chi_square_p_value

SAMPLES, TEMPERATURE = 3000, 1.0


def exact_second_token() -> torch.Tensor:
    """[vocabulary] float64: P(second token) after the first prompt, summed over all first tokens."""
    model, prompt = served.verifier().model, served.prompts()[0]
    vocabulary = served.verifier().vocab_size
    with torch.no_grad():
        first = (model(torch.tensor([prompt])).logits[0, -1].double() / TEMPERATURE).softmax(-1)
        rows = torch.tensor([[*prompt, token] for token in range(vocabulary)])
        second = (model(rows).logits[:, -1].double() / TEMPERATURE).softmax(-1)
    return first @ second


def test_sampled_tokens_are_distributed_as_the_verifiers() -> None:
    settings = {
        "checkpoint": served.checkpoint("eagle3"),
        "prompt": served.prompts()[0],
        "samples": SAMPLES,
        "temperature": TEMPERATURE,
    }
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VLLM_PLUGINS", "TRITON_INTERPRET")}
    script = Path(__file__).with_name("sample_without_triton.py")
    run = subprocess.run([sys.executable, str(script), json.dumps(settings)], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    (line,) = (line for line in run.stdout.splitlines() if line.startswith("TOKENS "))
    tokens = torch.tensor(json.loads(line.removeprefix("TOKENS ")))
    counts = torch.bincount(tokens, minlength=served.verifier().vocab_size)
    assert chi_square_p_value(counts, exact_second_token()) > 1e-4
