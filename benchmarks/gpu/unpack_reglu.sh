#!/bin/bash
# usage: unpack_reglu.sh PIECES WORK - see README.md
set -euo pipefail
pieces=$1 work=$2
(cd "$pieces" && sha256sum --check --quiet SHA256SUMS)
mkdir -p "$work"
cat "$pieces"/payload.* | tar -C "$work" -xf -
python3 "$work/compact/materialize.py" "$work/reglu"
