#!/bin/bash
# usage: recipe_smollm2.sh WORK OUT [--flag value ...] - see README.md
# The whole recipe, from the dense checkpoint to a packed, verified and measured file. An interrupted one goes on when called again.
set -euo pipefail
work=$1 out=$2
shift 2
root=$(cd "$(dirname "$0")/../.." && pwd)
cmake -S "$root" -B "$work/build" -G Ninja -DCMAKE_BUILD_TYPE=Release > "$work/build.log" 2>&1
cmake --build "$work/build" >> "$work/build.log" 2>&1
export PYTHONPATH=$root/src:$work/site PYTHONUNBUFFERED=1 PI_LIB=$work/build/runtime/native/libpi.so
cd "$work"
begin=$(date +%s)
status=0
keep() { # what there is so far: the machine may go before the recipe ends
    for file in "$work"/recipe/model/*.md "$work"/recipe/*/report.json "$work"/recipe/relufy/relufy_results.json; do
        [ ! -e "$file" ] || cp "$file" "$out/$(basename "$(dirname "$file")").$(basename "$file")"
    done
}
while sleep 20; do keep; done &
keeper=$!
trap 'kill $keeper; keep' EXIT
timeout "${SECONDS_MAX:-560}" python3 -m powerinfer_toolkit.recipes.cli run smollm2-135m/reglu --output_dir "$work/recipe" \
    --relufy.model_name_or_path "$work/dense" "$@" > "$out/recipe.table" 2> >(tee "$out/recipe.log" >&2) || status=$?
echo "recipe: $(($(date +%s) - begin)) s, status $status" | tee -a "$out/recipe.log" >&2
cat "$out/recipe.table" >&2
exit "$status"
