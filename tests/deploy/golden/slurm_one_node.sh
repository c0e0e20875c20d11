#!/bin/bash
# first under Slurm: 1 host of 4 ranks, layout dp=4. Made by `echelon deploy`.
#SBATCH --job-name=first
#SBATCH --output=first-%j.log
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
# Memory of a node: 4 ranks of 1.2 GiB each by the plan, and 37.3 MiB while a
# checkpoint is written. Copies of the state for restarts take 112 MiB of it.
#SBATCH --mem=5G
# Slurm may start the job again: when another job takes its nodes, when a node
# fails, and when this script asks for it.
#SBATCH --requeue
#SBATCH --open-mode=append

srun --ntasks=1 --cpus-per-task=4 --kill-on-bad-exit=0 \
  echelon train first.toml -n 4
code=$?

case $code in
  75) # The state is saved: the job queues again and goes on from there.
    scontrol requeue "$SLURM_JOB_ID" ;;
  93) # Starting again would not help: the job is kept for you to look at.
    scontrol requeuehold "$SLURM_JOB_ID" ;;
esac
exit "$code"
