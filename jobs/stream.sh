#!/usr/bin/env bash
# Engine and trainer at once: PRECOMPUTE=max_bytes=500GB jobs/stream.sh mode=stream experiment=llama3_8b run=runs/llama3_8b
#
# For a cache that is larger than the disk (mode=stream: what was trained on is dropped) or that nobody wants to wait for
# (mode=hybrid: everything is kept). The training says what it reads next, the precompute makes it, each on its own GPUs: PROCESSES
# train on the first ones, the engine has the others. Settings of one stage only are given in PRECOMPUTE and TRAIN, the rest goes to both.
# Killed at any moment, on either side, the same call goes on; a precompute that ends before the training is started again.
set -euo pipefail
top=$(dirname "${BASH_SOURCE[0]}")/..
# SLURM runs a copy that lies elsewhere.
[ -f "$top/tools/help.sh" ] || top=${SLURM_SUBMIT_DIR:?expected tools/help.sh beside jobs/, found none: call jobs/stream.sh where it lies}
# shellcheck source=/dev/null
. "$top/tools/help.sh"
cd "$top"

bin=${VENV:-${VIRTUAL_ENV:-.venv}}/bin
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)
processes=${PROCESSES:-$((gpus > 1 ? gpus / 2 : 1))}
read -ra precompute <<< "${PRECOMPUTE:-}"
read -ra train <<< "${TRAIN:-}"
training=() making=()
if [ "$gpus" -gt 1 ]; then
    training=(env "CUDA_VISIBLE_DEVICES=$(seq -s, 0 $((processes - 1)))")
    making=(env "CUDA_VISIBLE_DEVICES=$(seq -s, "$processes" $((gpus - 1)))")
fi

"${training[@]}" "$bin/python" -m torch.distributed.run --standalone --nproc-per-node "$processes" -m mtp_train.train "$@" "${train[@]}" &
trainer=$! maker=""
# shellcheck disable=SC2086 # no maker is no word
trap 'kill $trainer $maker 2>/dev/null || true; wait' EXIT # a training that is ended saves its state
trap 'exit 130' INT
trap 'exit 143' TERM
while kill -0 "$trainer" 2>/dev/null; do
    "${making[@]}" "$bin/python" -m mtp_train.precompute "$@" "${precompute[@]}" &
    maker=$! status=0
    wait "$maker" || status=$?
    if [ "$status" -eq 2 ]; then exit 2; fi # it said what is wrong; the training would wait for ever
    sleep 1
done
wait "$trainer"
