#!/bin/bash
# usage: payload_reglu.sh COMPACT CORPUS PIECES - see README.md
set -euo pipefail
compact=$1 corpus=$2 pieces=$3
mkdir -p "$pieces"
tar -c --transform 's,^,compact/,' -C "$compact" $(cd "$compact" && ls) > "$pieces/all.tar"
tar -r -f "$pieces/all.tar" -C "$(dirname "$corpus")" "$(basename "$corpus")"
split -b 60000000 -d "$pieces/all.tar" "$pieces/payload."
rm "$pieces/all.tar"
(cd "$pieces" && sha256sum payload.* > SHA256SUMS)
ls -l "$pieces" >&2
