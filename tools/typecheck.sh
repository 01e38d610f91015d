#!/usr/bin/env bash
# Usage: tools/typecheck.sh [PYTHON]. mypy --strict on an installed copy of the package.
#
# mypy sees nothing through an editable install, and then reports success. So it gets a copy, and the number of
# files that it says it checked must be the number of files in the tree.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(command -v "${1:-python3}")
python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python")
root=$PWD

# build/lib as well: setuptools would install modules from there that the tree no longer has.
rm -rf build/typed build/lib
"$python" -m pip --disable-pip-version-check --quiet install --no-deps --no-build-isolation --target build/typed .
expected=$(find speculators algorithms kernels -name '*.py' | wc -l)

cd build/typed
status=0
report=$(MYPYPATH=. "$python" -m mypy --config-file "$root/pyproject.toml" --cache-dir "$root/.mypy_cache" --strict -p speculators 2>&1) || status=$?
echo "$report"
checked=$(sed -nE 's/.*(in|checked) ([0-9]+) source files?\)?$/\2/p' <<<"$report" | tail -n 1)
if [ "${checked:-0}" -ne "$expected" ]; then
    echo "mypy checked ${checked:-0} files, but the tree has $expected: is every package listed in pyproject.toml?" >&2
    exit 1
fi
exit "$status"
