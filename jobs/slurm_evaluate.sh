#!/usr/bin/env bash
#SBATCH --job-name=mtp-evaluate
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
# Speculative decoding with a trained head, then its export: sbatch jobs/slurm_evaluate.sh experiment=llama3_70b run=/shared/llama3_70b
#
# The report is written to <run>/report, what an engine loads to <run>/served. What is measured is not measured again: requeued, it
# goes on. STAGES=evaluate (or export) runs one of the two.
set -euo pipefail
top=$(dirname "${BASH_SOURCE[0]}")/..
# SLURM runs a copy that lies elsewhere.
[ -f "$top/tools/help.sh" ] || top=${SLURM_SUBMIT_DIR:?this is a SLURM job: sbatch jobs/slurm_evaluate.sh ...}
# shellcheck source=/dev/null
. "$top/tools/help.sh"
cd "${SLURM_SUBMIT_DIR:?this is a SLURM job: sbatch jobs/slurm_evaluate.sh ...}"

bin=${VENV:-${VIRTUAL_ENV:-.venv}}/bin
for stage in ${STAGES:-evaluate export}; do
    srun "$bin/python" -m "mtp_train.$stage" "$@"
done
