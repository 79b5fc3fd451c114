#!/usr/bin/env bash
# All stages on one machine: jobs/node.sh experiment=llama3_8b run=runs/llama3_8b [key=value ...]
#
# The engine answers and reads the prompts on all GPUs from one process (engine.data_parallel_size, tensor_parallel_size), the
# training runs one process per GPU under torchrun. What is done is not done again: killed at any moment, the same call goes
# on. Settings given here go to every stage; STAGES=train (or several) runs those alone, PROCESSES sets how many train.
set -euo pipefail
top=$(dirname "${BASH_SOURCE[0]}")/..
# SLURM runs a copy that lies elsewhere.
[ -f "$top/tools/help.sh" ] || top=${SLURM_SUBMIT_DIR:?expected tools/help.sh beside jobs/, found none: call jobs/node.sh where it lies}
# shellcheck source=/dev/null
. "$top/tools/help.sh"
cd "$top"

bin=${VENV:-${VIRTUAL_ENV:-.venv}}/bin
stages=${STAGES:-regenerate precompute train evaluate export}
if [ -z "${PROCESSES:-}" ] && ! command -v nvidia-smi >/dev/null; then
    echo "jobs/node.sh: expected GPUs that nvidia-smi counts, or PROCESSES, found neither; PROCESSES=1 jobs/node.sh ... trains with one process" >&2
    exit 2
fi
processes=${PROCESSES:-$(nvidia-smi --list-gpus | wc -l)}

for stage in $stages; do
    printf '\n== %s (%s s after the start)\n' "$stage" "$SECONDS" >&2
    if [ "$stage" = train ]; then
        "$bin/python" -m torch.distributed.run --standalone --nproc-per-node "$processes" -m mtp_train.train "$@"
    else
        "$bin/python" -m "mtp_train.$stage" "$@"
    fi
done
