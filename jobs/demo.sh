#!/usr/bin/env bash
# The whole pipeline with a real model on two CPU cores: jobs/demo.sh [key=value ...]
#
# Makes the environment, then runs the five stages into runs/demo (RUN=... changes it): the target answers the prompts, its
# hidden states are cached, two heads are trained on them side by side, each is decoded with, measured and exported.
# What is done is not done again: an interrupted call goes on where it stopped. conf/experiment/demo.yaml holds the
# settings; those given here go to every stage and win.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tools/setup.sh
bin=${VENV:-${VIRTUAL_ENV:-.venv}}/bin
run=${RUN:-runs/demo}
heads=(mtp eagle)

# The target comes from a package, the prompts from data/: nothing is asked of a hub.
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# One thread a process, two processes: on two cores this is faster than one process of two threads.
export OMP_NUM_THREADS=1

title() { printf '\n== %s (%s s after the start)\n' "$*" "$SECONDS" >&2; }

# One stage on two processes that share its work.
shared() {
    local stage=$1
    shift
    title "$stage"
    "$bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 -m "mtp_train.$stage" experiment=demo "run=$run" "$@"
}

# One stage for each head, side by side; where one fails the other is stopped too.
each_head() {
    local stage=$1 line=0 failed=0 head
    local -a pids=()
    shift
    title "$stage ${heads[*]}"
    for head in "${heads[@]}"; do
        local -a words=("name=$head")
        [ "$stage" = train ] && words+=("head=$head")
        TQDM_POSITION=$line "$bin/python" -m "mtp_train.$stage" experiment=demo "run=$run" "${words[@]}" "$@" &
        pids+=($!)
        line=$((line + 1))
    done
    trap 'kill "${pids[@]}" 2>/dev/null || true' INT TERM
    for _ in "${pids[@]}"; do
        wait -n || {
            failed=$?
            kill "${pids[@]}" 2>/dev/null || true
        }
    done
    trap - INT TERM
    return "$failed"
}

title "the target"
"$bin/python" -c 'from mtp_train.stage import load_word; from mtp_train.target.resolve import resolve_target
print(resolve_target(load_word("target", "smollm2_135m")))'
shared regenerate "$@"
shared precompute "$@"
each_head train "$@"
each_head evaluate "$@"
each_head export "$@"
title "done"
"$bin/python" tools/render_report.py "$run/report"
