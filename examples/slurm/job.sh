#!/bin/bash
# A launcher per node, a process per GPU: sbatch examples/slurm/job.sh. Set the three paths and the recipe.
#SBATCH --nodes=4 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=96
# SIGTERM ten minutes before the end leaves time for --log-every steps and a save. The last line requeues the job.
#SBATCH --time=24:00:00 --signal=TERM@600 --requeue --open-mode=append
RUN=/shared/runs/llama
DATA='/shared/text/*.jsonl'
TOKENIZER=/shared/tokenizer.json

export XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 # fraction of a GPU's memory for JAX; default: 0.75
export NCCL_DEBUG=WARN                     # INFO prints hundreds of lines per process
# export NCCL_SOCKET_IFNAME=ib0            # if NCCL chooses the wrong interface

# If a process fails, the processes of all nodes end, and each launcher restarts the processes of its node. Therefore
# srun must not end the step when one task fails.
srun --kill-on-bad-exit=0 --cpus-per-task="$SLURM_CPUS_PER_TASK" \
  jfsdp launch --nproc 8 --max-restarts 3 --log-dir "$RUN-logs" \
  scripts/train.py --recipe llama-8b --global-batch 256 --run-dir "$RUN" --resume auto --fall-back \
  --data "$DATA" --tokenizer "$TOKENIZER"; code=$?
[ $code = 0 ] || [ $code = 143 ] || exit $code # 143: SIGTERM before training began
[ $code = 0 ] && grep -q '"is_done": true' "$RUN/summary.json" || scontrol requeue "$SLURM_JOB_ID"
