#!/bin/bash
# usage: relufy_trials.sh WORK OUT - see README.md
set -uo pipefail
work=$1 out=$2
trial() {
    SECONDS_MAX=150 bash "$(dirname "$0")/relufy_smollm2.sh" "$work" "$out" "trial-$1" --max_steps 14 --logging_steps 2 \
        --eval_steps 0 --save_steps 0 "${@:2}"
    python3 -c 'import torch; print(torch.cuda.get_device_name())' > "$out/device.txt"
    rm -rf "$work/trial-$1"
}
trial eager --torch_compile false
trial compiled --torch_compile true
trial compiled-64 --torch_compile true --per_device_train_batch_size 64 --gradient_accumulation_steps 1
