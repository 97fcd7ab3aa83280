#!/bin/bash
# Tokens a second of whole models on the GPU, with and without graphs, beside the times of single operations.
# benchmarks/gpu/speeds.sh OUT [SHAPE:TYPE ...]: on a machine with a GPU, cmake, ninja and nvcc, from the repository's root.
# Models are written to $WORK (default /tmp/speeds) and removed one after the other. OUT/speeds.log has everything.
set -uo pipefail
out=$1
shift
cases=("$@")
[ ${#cases[@]} -gt 0 ] || cases=(7b:q4_0 7b:q4_0:dense 13b:f16)
work=${WORK:-/tmp/speeds}
export PYTHONPATH=src:tests PI_LIB=$PWD/build/gpu/runtime/native/libpi.so
mkdir -p "$out" "$work"
exec > >(tee "$out/speeds.log") 2>&1

make gpu-build >"$work/build.log" 2>&1 || { tail -30 "$work/build.log"; exit 1; }
echo "==== single operations"
timeout 200 python3 -m gpu.speeds || echo "FAILED: operations"

bench() {
    timeout 200 python3 -m powerinfer_toolkit.runtime.bench "$@" --vram-budget -1 --json || echo "FAILED: $*"
}
for case in "${cases[@]}"; do
    IFS=: read -r shape type twin <<<"$case"
    model=$work/$shape-$type.gguf
    echo "==== $case"
    python3 -m powerinfer_toolkit.runtime.bench synth "$shape" "$model" --outtype "$type" ${twin:+--dense-twin} -q ||
        continue
    modes=(exact predicted dense)
    [ -z "$twin" ] || modes=(dense)
    for ffn in "${modes[@]}"; do
        echo "-- $ffn, graphs"
        bench -m "$model" --ffn "$ffn" -p 512 -n 128 -r 3
        echo "-- $ffn, without graphs"
        PI_GPU_GRAPHS=0 bench -m "$model" --ffn "$ffn" -p 0 -n 128 -r 2
    done
    rm -f "$model"
done
