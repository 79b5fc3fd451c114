#!/usr/bin/env bash
#SBATCH --job-name=mtp-train
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
# Training under SLURM, on one node: sbatch jobs/slurm_train.sh experiment=llama3_70b run=/shared/llama3_70b
#                     or on several: sbatch --nodes=4 jobs/slurm_train.sh experiment=llama3_70b run=/shared/llama3_70b
#
# SLURM starts one process per GPU and sends each SIGUSR1 five minutes before the time is up. The trainer then saves, and exits
# with 75 ("try again"), on which this job goes back into the queue; the next turn continues bit for bit. A job that is killed
# without a word, or loses a node, is requeued by SLURM itself and continues from the last state saved (checkpoint.every).
set -euo pipefail
top=$(dirname "${BASH_SOURCE[0]}")/..
# SLURM runs a copy that lies elsewhere.
[ -f "$top/tools/help.sh" ] || top=${SLURM_SUBMIT_DIR:?this is a SLURM job: sbatch jobs/slurm_train.sh ...}
# shellcheck source=/dev/null
. "$top/tools/help.sh"
cd "${SLURM_SUBMIT_DIR:?this is a SLURM job: sbatch jobs/slurm_train.sh ...}"

bin=${VENV:-${VIRTUAL_ENV:-.venv}}/bin
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT

# What torchrun would tell each process; without it between SLURM and them, its signals reach them and their exit status SLURM.
# shellcheck disable=SC2016  # expanded by each task
rank='RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_NNODES)) exec "$@"'
status=0
srun --kill-on-bad-exit=0 --wait=120 bash -c "$rank" rank "$bin/python" -m mtp_train.train "$@" || status=$?

# 138: the signal came before Python could listen, a tenth of a second after its start.
if [ "$status" -eq 75 ] || [ "$status" -eq 138 ]; then
    echo "saved ahead of the time limit: back into the queue" >&2
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
