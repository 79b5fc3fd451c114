#!/usr/bin/env bash
#SBATCH --job-name=mtp-precompute
#SBATCH --array=0-7
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
# One cache by several nodes: sbatch --array=0-7 jobs/slurm_precompute.sh experiment=llama3_70b run=/shared/llama3_70b
#
# The tasks know nothing of each other but the folder: each claims the next shard that is free, and where one ends well the cache is
# complete. Their numbers mean nothing, so that any array does (--array=0-14:2%3, --array=5, or none), and more tasks may be added
# while others run. They need not run at the same time, nor all of them. A task that dies, or is requeued, makes only what is missing
# then; what it was at is taken over by the others after silence_s seconds.
set -euo pipefail
top=$(dirname "${BASH_SOURCE[0]}")/..
# SLURM runs a copy that lies elsewhere.
[ -f "$top/tools/help.sh" ] || top=${SLURM_SUBMIT_DIR:?this is a SLURM job: sbatch jobs/slurm_precompute.sh ...}
# shellcheck source=/dev/null
. "$top/tools/help.sh"
cd "${SLURM_SUBMIT_DIR:?this is a SLURM job: sbatch jobs/slurm_precompute.sh ...}"

bin=${VENV:-${VIRTUAL_ENV:-.venv}}/bin
srun "$bin/python" -m mtp_train.precompute "$@"
