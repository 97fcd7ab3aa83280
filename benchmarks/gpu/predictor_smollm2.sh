#!/bin/bash
# usage: predictor_smollm2.sh WORK OUT MODEL RUN [--key value ...] - see README.md
# A finished profile is kept, a training begins anew. SECONDS_MAX (default 560) ends both.
set -euo pipefail
work=$1 out=$2 model=$3 run=$4
shift 4
root=$(cd "$(dirname "$0")/../.." && pwd)
export PYTHONPATH=$root/src PYTHONUNBUFFERED=1
name=$(basename "$model")
results=$work/results
mkdir -p "$results"
deadline=$(($(date +%s) + ${SECONDS_MAX:-560}))
within() { timeout "$((deadline - $(date +%s)))" "$@"; }
finish() { tar -C "$work" -cf "$out/results.tar" results && cp "$results/runs.log" "$out/"; }
trap finish EXIT
cat > "$work/texts.yaml" <<YAML
dataset_mixture: [{path: $work/corpus/train/*.jsonl.xz}]
eval_mixture: [{path: $work/corpus/held_out.jsonl.xz}]
separator_token: <|endoftext|>
max_length: 1024
max_tokens: ${MAX_TOKENS:-13000000}
per_device_batch_size: ${BLOCKS:-32}
token_dir: $work/tokens
YAML
if [ ! -e "$work/$name.statistics/statistics.safetensors" ]; then
    within python3 "$root/benchmarks/profile_throughput.py" "$model" "${THROUGHPUT_BLOCKS:-256}" 3 \
        | tee "$results/$name.throughput.json" >&2
    within python3 -m powerinfer_toolkit.profile_activations.cli "$model" "$work/$name.statistics" \
        --config "$work/texts.yaml" 2> >(tee "$results/$name.profile.log" >&2)
    cp "$work/$name.statistics/statistics.safetensors" "$results/$name.statistics.safetensors"
fi
rm -rf "${work:?}/$run"
begin=$(date +%s)
status=0
within python3 -m powerinfer_toolkit.train_predictor.cli "$model" "$work/$name.statistics" "$work/$run" \
    --config "$work/texts.yaml" --target_perplexity_loss '[0.03, 0.01, 0.05]' "$@" -v \
    > "$results/$run.table" 2> >(tee "$results/$run.log" >&2) || status=$?
echo "$run: $(($(date +%s) - begin)) s, status $status, $*" | tee -a "$results/runs.log" >&2
[ "$status" = 0 ] || exit "$status"
cat "$results/$run.table" >&2
cp "$work/$run/report.json" "$results/$run.report.json"
[ -z "${KEEP:-}" ] || tar -C "$work" -cf "$out/$run.tar" "$run"
python3 - "$work/$run/report.json" <<'PYTHON' | tee -a "$results/runs.log" >&2
import json, sys
report = json.load(open(sys.argv[1]))
for target in report["targets"]:
    o = target["overall"]
    exact = target["ranks"].count(0)
    print(
        f"  allowed {target['allowed']:+.1%}: F {o['bytes']:.4f} at {o['perplexity_loss']:+.2%}, recall {o['recall']:.3f}, "
        f"precision {o['precision']:.3f}, predicted {o['predicted_density']:.3f}, lost mass {o['lost_mass']:.3f}, exact layers {exact}"
    )
print(f"  peak {(report['peak_bytes'] or 0) / 2**30:.1f} GiB, training {report['train_seconds']:.0f} s")
PYTHON
