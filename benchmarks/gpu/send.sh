#!/bin/bash
# usage: send.sh DIRECTORY OUT PART - see README.md
# Back here: cat the parts of all calls in order | xz -d | tar -x
set -euo pipefail
directory=$1 out=$2 part=$3
archive=$(dirname "$directory")/$(basename "$directory").tar.xz
[ -e "$archive" ] || tar -C "$directory" --exclude=tokens --exclude=checkpoints -cf - . | xz -T0 -1 > "$archive.tmp"
[ -e "$archive" ] || mv "$archive.tmp" "$archive"
per_file=15700000
for i in 0 1 2 3; do
    number=$((part * 4 + i))
    dd if="$archive" of="$out/part.$(printf %02d $number)" bs=$per_file skip=$number count=1 status=none
done
find "$out" -name 'part.*' -empty -delete
echo "$(stat -c %s "$archive") bytes in all, $(((($(stat -c %s "$archive") - 1) / per_file) / 4 + 1)) calls" >&2
