#!/bin/bash
# usage: payload.sh FOLDER PIECES - see README.md
set -euo pipefail
folder=$1 pieces=$2
mkdir -p "$pieces"
tar -C "$folder" -cf - smollm2.gguf corpus wheels | split -b 60000000 -d - "$pieces/payload."
(cd "$pieces" && sha256sum payload.* > SHA256SUMS)
ls -l "$pieces" >&2
