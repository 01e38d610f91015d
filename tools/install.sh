#!/usr/bin/env bash
# Usage: tools/install.sh VENV EXTRAS. Creates VENV if missing and installs the project into it, editable, with EXTRAS.
# EXTRAS "torch" stops after torch, without the project.
#
# torch comes first and is then held by a constraint, so that no later requirement can replace a CPU build by one
# of several gigabytes for CUDA. Environment: PYTHON, TORCH_RELEASE, TORCH_CPU_INDEX (see the Makefile).
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
extras=$2
: "${TORCH_RELEASE:?run this through make, which pins torch}"

fits() { # exists, starts, and is a Python that the project supports
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}

if [ ! -x "$venv/bin/python" ]; then
    chosen=
    for python in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if fits "$python"; then chosen=$python && break; fi
    done
    [ -n "$chosen" ] || { echo "no Python 3.11 to 3.13 found; install one or name it: make PYTHON=/path/to/python3.12" >&2; exit 2; }
    echo "creating $venv with $("$chosen" --version)"
    "$chosen" -m venv "$venv" || { echo "python -m venv failed; on Debian and Ubuntu install python3-venv" >&2; exit 2; }
fi
python=$venv/bin/python
pip=("$python" -m pip --disable-pip-version-check --quiet)

answers() { # does this index answer within five seconds?
    "$python" - "$1" <<'PY' 2>/dev/null
import sys, urllib.request
urllib.request.urlopen(sys.argv[1] + "/torch/", timeout=5).close()
PY
}

if ! "$python" -c 'import torch' 2>/dev/null; then
    if nvidia-smi -L >/dev/null 2>&1; then
        echo "installing $TORCH_RELEASE for CUDA"
        "${pip[@]}" install "$TORCH_RELEASE"
    elif [ "$(uname -s)" = Linux ] && answers "$TORCH_CPU_INDEX"; then
        echo "installing $TORCH_RELEASE for the CPU"
        "${pip[@]}" install --index-url "$TORCH_CPU_INDEX" "$TORCH_RELEASE"
    else
        echo "installing $TORCH_RELEASE"
        "${pip[@]}" install "$TORCH_RELEASE"
    fi
fi
version() { "$python" -c 'from importlib.metadata import version; print(version("torch"))'; }
torch=$(version)
echo "torch==$torch" >"$venv/torch.txt"
[ "$extras" != torch ] || exit 0

echo "installing the project with [$extras] beside torch $torch"
"${pip[@]}" install --constraint "$venv/torch.txt" --editable ".[$extras]"
[ "$(version)" = "$torch" ] || { echo "torch $torch was replaced by $(version)" >&2; exit 1; }
