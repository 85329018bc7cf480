#!/bin/bash
# A launcher per node, a process per GPU: sbatch scripts/cluster/slurm.sh. Set the three paths and the recipe.
#SBATCH --nodes=4 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=96
# SIGTERM ten minutes before the end: time for --log-every steps and a save. Then the last line queues the job again.
#SBATCH --time=24:00:00 --signal=TERM@600 --requeue --open-mode=append
RUN=/shared/runs/llama
DATA='/shared/text/*.jsonl'
TOKENIZER=/shared/tokenizer.json

export XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 # of a GPU's memory to JAX; its default is 0.75
export NCCL_DEBUG=WARN                     # INFO prints hundreds of lines per process
# export NCCL_SOCKET_IFNAME=ib0            # where NCCL chooses a wrong interface

# A failed process ends those of its node and, by its word or the silence, those of all others. Each launcher then starts
# its own again, so srun must not end the step when one task fails.
srun --kill-on-bad-exit=0 --cpus-per-task="$SLURM_CPUS_PER_TASK" \
  jfsdp launch --nproc 8 --max-restarts 3 --log-dir "$RUN-logs" \
  scripts/train.py --recipe llama-8b --global-batch 256 --run-dir "$RUN" --resume auto --fall-back \
  --data "$DATA" --tokenizer "$TOKENIZER"; code=$?
[ $code = 0 ] || [ $code = 143 ] || exit $code # 143: SIGTERM before training began
[ $code = 0 ] && grep -q '"is_done": true' "$RUN/summary.json" || scontrol requeue "$SLURM_JOB_ID"
