#!/usr/bin/env bash
# Usage: tools/sanitize.sh [memcheck|initcheck|racecheck|synccheck] [FOLDER]. Runs small tests of every kernel natively under
# NVIDIA's compute-sanitizer (part of the CUDA toolkit), a process a group of them, and prints what each found; whole logs go to FOLDER.
# Exit code 1 when anything was found, a test failed, or nothing ran on the GPU. Environment: PYTHON, JOBS (processes at once),
# LIMIT (seconds a group).
#
# PyTorch's caching allocator would hide a read past the end of one tensor inside the block that it shares with others, so it is
# switched off: every tensor is an allocation of its own, with unused memory after it. Only our kernels are instrumented: a Triton
# kernel's symbol is its plain name, those of PyTorch and cuBLAS look otherwise.
set -uo pipefail
cd "$(dirname "$0")/.."
tool=${1:-memcheck}
logs=${2:-build/sanitize/$tool}
python=${PYTHON:-python3}
padding=()
[ "$tool" = memcheck ] && padding=(--padding 4096)
command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not on PATH; it comes with the CUDA toolkit" >&2; exit 2; }
mkdir -p "$logs"

# FILE[.GROUP] EXPRESSION: a file whose kernels take long to compile is several groups.
# Odd sizes, tails of tiles, both dtypes, forward and backward, one or a few cases a kernel: instrumented code is 10 to 50 times slower.
selection() {
    cat <<'TESTS'
block_attention.blocks    longer-blocks or no-context
block_attention.windows   window-causal or in_bfloat16
block_attention.chains    chains_of_unequal or 64-9-3
distillation_loss         4097 and (plain or rank+reduced or head_bias+rank) or bfloat16_inputs and rank+softcap-triton or (weight_zero or labels_alone and reduced) and triton
linear_cross_entropy      definition and 129 and triton and wide or far_apart and 30.0
running_sums              triton and (5 or 16) and 60
scaled                    triton and dtype1
cross_entropy             definition and (4097 or 9000 and True)
partitioning              test_a_gpu and autocast and (segments or dspark)
projection                gate_kernels
decoding_kernels.heads    norms_equal or gate_equals or heads_and_cache or likeliest_token
decoding_kernels.products products_of_few
fused_layers              fused_steps_compute and kernels
draft_attention           kernels_equal or never_read or sees_nothing
draft_inputs              kernel_equals
draft_layout              2k_rows or any_batch or nobodys
hidden_state_scatter      triton
kv_injection              every_layer and triton
head_rotation             kernel_equals or wider
markov_sampling           printed and triton or kernels_draw and (gated or rnn)
round_outcome             triton
training_optimizer        equals_that_of_torch
rejection_sampling        kernels_decide and (61 or 4099) or greedy_verification and triton
TESTS
}

check() { # GROUP EXPRESSION
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout "${LIMIT:-300}" compute-sanitizer --tool "$tool" "${padding[@]}" --error-exitcode 9 \
        --target-processes application-only --launch-timeout 120 --kernel-name 'regex=^[a-z_]+_kernel$' \
        "$python" -m pytest "tests/test_${1%%.*}.py" -k "$2" -q -p no:xdist -p no:cacheprovider >"$logs/$1.log" 2>&1
    echo $? >"$logs/$1.code"
}

# Plain nproc obeys OMP_NUM_THREADS, which says nothing about processes.
processes=${JOBS:-$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)}
while read -r name expression; do
    while [ "$(jobs -rp | wc -l)" -ge "$processes" ]; do wait -n; done
    check "$name" "$expression" &
done < <(selection)
wait

failed=0
while read -r name _; do
    code=$(cat "$logs/$name.code")
    [ "$code" = 0 ] || failed=1
    [ "$code" = 124 ] && note=" (out of time)" || note=
    printf '%-26s %-45s %s\n' "$name" "$(grep -E '^[0-9]+ (passed|failed|error|deselected|skipped)|no tests ran' "$logs/$name.log" | tail -n 1)" \
        "$(grep -o 'ERROR SUMMARY.*\|Target application terminated.*\|RACECHECK SUMMARY.*' "$logs/$name.log" | tail -n 1)$note"
done < <(selection)
exit $failed
