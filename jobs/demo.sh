#!/usr/bin/env bash
# The whole pipeline with a real model on two CPU cores: jobs/demo.sh [engine=vllm] [key=value ...] [stage:key=value ...]
#
# Makes the environment ($VENV, else the active one, else .venv; the first line printed says which), then runs the five stages
# into runs/demo (RUN=... changes it): the target answers the prompts, its hidden states are cached, two heads are trained on
# them side by side, each is decoded with, measured and exported.
# What is done is not done again: an interrupted call goes on where it stopped. conf/experiment/demo.yaml holds the
# settings; those given here win: `engine=...` and `engine.*` go to the stages that have an engine, `train:num_steps=9` to
# that stage, all others to every stage. With engine=vllm, vLLM answers, prefills and speculates, and each head is also
# exported for it.
set -euo pipefail
# shellcheck source=/dev/null
. "$(dirname "${BASH_SOURCE[0]}")/../tools/help.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

engine=hf
for word in "$@"; do
    case "$word" in
        engine=*) engine=${word#engine=} ;;
        regenerate:*=* | precompute:*=* | train:*=* | evaluate:*=* | export:*=*) ;;
        *:*=*)
            # A mapping, such as losses='{topk_kl: 1.0}', has its colon behind the equals sign.
            case "${word%%=*}" in
                *:*)
                    echo "jobs/demo.sh: expected stage:key=value with regenerate, precompute, train, evaluate or export, found '$word'" >&2
                    exit 2
                    ;;
            esac
            ;;
        *=* | ~*) ;;
        *)
            echo "jobs/demo.sh: expected key=value or stage:key=value, found '$word'; jobs/demo.sh --help shows the settings" >&2
            exit 2
            ;;
    esac
done
# vLLM started without compiling, which takes minutes at each start, and on one thread, as two of it run side by side.
given=("$@") setup=()
if [ "$engine" = vllm ]; then
    given=(engine.enforce_eager=true engine.cpu_threads=1 "$@")
    setup=(--engine)
fi

tools/setup.sh ${setup[@]+"${setup[@]}"}
bin=${VENV:-${VIRTUAL_ENV:-.venv}}/bin
run=${RUN:-runs/demo}
heads=(mtp eagle)

# The target comes from a package, the prompts from data/: nothing is asked of a hub.
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# One thread a process, two processes: on two cores this is faster than one process of two threads.
export OMP_NUM_THREADS=1

title() { printf '\n== %s (%s s after the start)\n' "$*" "$SECONDS" >&2; }

# The settings of one stage, into the array `words`.
words_of() {
    local stage=$1 word
    words=(experiment=demo "run=$run")
    for word in ${given[@]+"${given[@]}"}; do
        case "$word" in
            "$stage":*) words+=("${word#"$stage":}") ;;
            regenerate:* | precompute:* | train:* | evaluate:* | export:*) ;;
            engine=* | engine.*) case "$stage" in train | export) ;; *) words+=("$word") ;; esac ;;
            *) words+=("$word") ;;
        esac
    done
}

# One stage on two processes that share its work.
shared() {
    local stage=$1
    local -a words
    title "$stage"
    words_of "$stage"
    "$bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 -m "mtp_train.$stage" "${words[@]}"
}

# One stage for each head, side by side; where one fails the other is stopped too.
each_head() {
    local stage=$1 line=0 failed=0 status head
    local -a pids=() words own
    shift
    title "$stage ${heads[*]} $*"
    words_of "$stage"
    for head in "${heads[@]}"; do
        own=("name=$head" "$@")
        [ "$stage" = train ] && own+=("head=$head")
        TQDM_POSITION=$line "$bin/python" -m "mtp_train.$stage" "${words[@]}" "${own[@]}" &
        pids+=($!)
        line=$((line + 1))
    done
    trap 'kill "${pids[@]}" 2>/dev/null || true' INT TERM
    for _ in "${pids[@]}"; do
        wait -n || {
            status=$?
            [ "$failed" -ne 0 ] || failed=$status
            kill "${pids[@]}" 2>/dev/null || true
        }
    done
    trap - INT TERM
    return "$failed"
}

title "the target"
"$bin/python" -c 'from mtp_train.stage import load_word; from mtp_train.target.resolve import resolve_target
print(resolve_target(load_word("target", "smollm2_135m")))'
shared regenerate
shared precompute
each_head train
each_head evaluate >/dev/null # each prints the tables of all; they stand at the end
each_head export
if [ "$engine" = vllm ]; then each_head export exporter=vllm; fi
title "done"
"$bin/python" tools/render_report.py "$run/report"
