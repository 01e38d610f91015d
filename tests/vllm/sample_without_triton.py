"""Run by test_cpu_sampling in a process without the Triton backend: sample with a drafter, print the second tokens as JSON."""

from __future__ import annotations

import json
import sys

from vllm import LLM, SamplingParams


def main() -> None:
    settings = json.loads(sys.argv[1])
    llm = LLM(
        settings["checkpoint"],
        dtype="float32",
        max_model_len=64,
        max_num_seqs=64,
        block_size=32,
        num_gpu_blocks_override=128,
        enforce_eager=True,
        enable_prefix_caching=False,
        seed=0,
    )
    sampling = SamplingParams(temperature=settings["temperature"], max_tokens=3, ignore_eos=True, n=1)
    prompts = [{"prompt_token_ids": settings["prompt"]}] * settings["samples"]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    print("TOKENS", json.dumps([output.outputs[0].token_ids[1] for output in outputs]))


if __name__ == "__main__":
    main()
