#!/usr/bin/env bash
# The committed drafters in real vLLM on the CPU, beside our engine: 5 prompts of each benchmark, greedy, float32.
# Usage, after `make test-vllm-smoke` has built the venv: benchmarks/serving_parity.sh [METHOD ...]
set -euo pipefail
cd "$(dirname "$0")/.."
results=benchmarks/results/serving-parity
mkdir -p "$results"
prompts=()
for file in benchmarks/prompts/*.jsonl; do prompts+=(--prompts "$file"); done

[ $# -gt 0 ] || set -- eagle3 peagle dflash dspark
for method in "$@"; do
    # DSpark needs the V2 runner, and that needs Triton: here its interpreter, which is slow.
    path=
    if [ "$method" = dspark ]; then path=$PWD/tests/vllm/triton_cpu; fi
    VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_LOGGING_LEVEL=ERROR PYTHONPATH=$path .venv-vllm/bin/speculators parity \
        "checkpoints/smollm2-135m-instruct/$method" "${prompts[@]}" --max-prompts 5 --max-new-tokens 64 \
        --json "$results/$method.json" || [ $? -eq 1 ] # 1: a round differs, and the result says which
done
