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

