#!/bin/bash
# usage: unpack.sh PIECES WORK - see README.md
set -euo pipefail
pieces=$1 work=$2
(cd "$pieces" && sha256sum --check --quiet SHA256SUMS)
mkdir -p "$work"
cat "$pieces"/payload.* | tar -C "$work" -xf -
python3 -m pip install -q --no-index --no-deps --no-compile --target "$work/site" "$work"/wheels/*.whl
root=$(cd "$(dirname "$0")/../.." && pwd)
PYTHONPATH=$root/src:$work/site python3 "$root/recipes/smollm2-135m/make_checkpoint.py" "$work/dense" --gguf "$work/smollm2.gguf"
