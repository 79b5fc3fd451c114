#!/usr/bin/env bash
# All checks with one command: installs what they need, then format, lint, types and every test.
#
#   tools/test.sh [pytest words]       e.g. tools/test.sh tests/cache -k writer
#
# The environment is the one that tools/setup.sh makes. WORKERS sets how many tests run side by side (default 2).
set -euo pipefail
# shellcheck source=/dev/null
. "$(dirname "${BASH_SOURCE[0]}")/help.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tools/setup.sh --engine
bin=${VENV:-${VIRTUAL_ENV:-.venv}}/bin

# One thread a process: two busy OpenMP teams on two cores slow each other down tenfold, and sums stay in one order.
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
command -v nvidia-smi >/dev/null || export DS_ACCELERATOR=cpu

"$bin/ruff" format --check .
"$bin/ruff" check .
"$bin/mypy"
"$bin/python" -m pytest -n "${WORKERS:-2}" --dist loadfile --no-loadscope-reorder --durations 15 "$@"
