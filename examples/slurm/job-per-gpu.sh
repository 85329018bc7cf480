#!/bin/bash
# One Slurm task per GPU, without a launcher: sbatch examples/slurm/job-per-gpu.sh. Slurm requeues it, but not after an error.
#SBATCH --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=12
#SBATCH --time=24:00:00 --signal=TERM@600 --requeue --open-mode=append
RUN=/shared/runs/llama
DATA='/shared/text/*.jsonl'
TOKENIZER=/shared/tokenizer.json

export XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 NCCL_DEBUG=WARN NCCL_LAUNCH_ORDER_IMPLICIT=1 # see job.sh

# A failed task ends the step. Each task uses the GPU with its number on the node, so all GPUs must be visible.
srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" \
  python scripts/train.py --recipe llama-8b --global-batch 256 --run-dir "$RUN" --resume auto --fall-back \
  --data "$DATA" --tokenizer "$TOKENIZER"; code=$?
[ $code = 0 ] || [ $code = 143 ] || exit $code # 143: SIGTERM before training began
[ $code = 0 ] && grep -q '"is_done": true' "$RUN/summary.json" || scontrol requeue "$SLURM_JOB_ID"
