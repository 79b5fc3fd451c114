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
# Each task writes the shards of its number, knowing nothing of the others but the folder; the one that finds all shards written
# writes the manifest. They need not run at the same time. A task that dies, or is requeued, makes only its missing shards; the
# same command after all have ended makes what some of them left, and says so where nothing is missing.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?this is a SLURM job: sbatch jobs/slurm_precompute.sh ...}"

bin=${VENV:-${VIRTUAL_ENV:-.venv}}/bin
worker=$((SLURM_ARRAY_TASK_ID - SLURM_ARRAY_TASK_MIN))
srun "$bin/python" -m mtp_train.precompute "worker=$worker" "num_workers=$SLURM_ARRAY_TASK_COUNT" "$@"
