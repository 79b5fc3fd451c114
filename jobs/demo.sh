#!/usr/bin/env bash
# The whole pipeline with a real model on two CPU cores: jobs/demo.sh [key=value ...]
#
# Makes the environment, then runs the five stages one after another into runs/demo (RUN=... changes it). What is done
# is not done again: an interrupted call goes on where it stopped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tools/setup.sh --engine
python=${VENV:-${VIRTUAL_ENV:-.venv}}/bin/python
run=${RUN:-runs/demo}

# The target comes from a package, the prompts from data/: nothing is asked of a hub.
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 WANDB_MODE=${WANDB_MODE:-offline}
command -v nvidia-smi >/dev/null || export DS_ACCELERATOR=cpu

stage() {
    local name=$1
    shift
    printf '\n== %s\n' "$name" >&2
    "$python" -m "mtp_train.$name" "run=$run" "$@"
}

stage regenerate "$@"
stage precompute "$@"
stage train "$@"
stage evaluate "$@"
stage export "$@"
