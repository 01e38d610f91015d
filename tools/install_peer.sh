#!/usr/bin/env bash
# Usage: tools/install_peer.sh VENV. The public speculators library of version 0.9.0, for `make test-parity`.
#
# A venv of its own, since its import name is ours. Without its dependencies: some are CUDA builds that would replace
# torch, most serve its data pipeline. What its models, losses and checkpoints import is named here.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
release=0.9.0

tools/install.sh "$venv" torch
python=$venv/bin/python
pip=("$python" -m pip --disable-pip-version-check --quiet)

echo "installing speculators $release"
"${pip[@]}" install --no-deps "speculators==$release" "hs-connectors==$release"
"${pip[@]}" install --constraint "$venv/torch.txt" "transformers>=5.16.1,<5.20" "numpy>=2,<2.5.5" \
    datasets httpx loguru openai psutil pydantic pydantic-settings rich safetensors typer
"$python" -I -c 'import speculators.models' # -I: not ours from this folder
