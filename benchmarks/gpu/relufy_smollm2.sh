#!/bin/bash
# usage: relufy_smollm2.sh WORK OUT RUN [--key value ...] - see README.md
# An interrupted run goes on when called again. SECONDS_MAX (default 560) ends it before the machine does.
set -euo pipefail
work=$1 out=$2 run=$3
shift 3
root=$(cd "$(dirname "$0")/../.." && pwd)
export PYTHONPATH=$root/src:$work/site PYTHONUNBUFFERED=1 CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}
begin=$(date +%s)
status=0
cd "$work"
timeout "${SECONDS_MAX:-560}" python3 -m powerinfer_toolkit.convert.relufy \
    --config "$root/recipes/smollm2-135m/reglu.yaml" --model_name_or_path "$work/dense" \
    --output_dir "$work/$run" --token_dir "$work/tokens" "$@" > "$out/$run.path" 2> >(tee "$out/$run.log" >&2) || status=$?
python3 - "$work/$run" "$out/$run.json" "$(($(date +%s) - begin))" "$status" "$*" <<'PYTHON'
import json, pathlib, re, sys
folder, target, seconds, status, changes = sys.argv[1:]
results = pathlib.Path(folder, "relufy_results.json")
log = pathlib.Path(target).with_suffix(".log").read_text()
speeds = [float(found) for found in re.findall(r"tokens_per_second ([\d.e+]+)", log)]
record = {
    "seconds": int(seconds),
    "status": int(status),
    "changes": changes,
    "tokens_per_second": sorted(speeds)[len(speeds) // 2] if speeds else None,
    "results": json.loads(results.read_text()) if results.exists() else None,
}
pathlib.Path(target).write_text(json.dumps(record, indent=1) + "\n")
PYTHON
exit "$status"
