#!/bin/bash
# first under Slurm: 2 to 4 hosts of 4 ranks, layout dp=16. Made by `echelon
# deploy`.
#SBATCH --job-name=first
#SBATCH --output=first-%j.log
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
# Memory of a node: 4 ranks of 1.09 GiB each by the plan, and 9.32 MiB while a
# checkpoint is written. Copies of the state for restarts take 186 MiB of it.
#SBATCH --mem=5G
# Slurm may start the job again: when another job takes its nodes, when a node
# fails, and when this script asks for it.
#SBATCH --requeue
#SBATCH --open-mode=append
# The job keeps its other nodes when one fails.
#SBATCH --no-kill

# The launchers prove to each other that they have this secret; srun takes it
# along.
ECHELON_TOKEN=$(od -An -vtx1 -N32 /dev/urandom | tr -d ' \n')
export ECHELON_TOKEN
# When a node fails, Slurm ends the step, and another one goes on with the nodes
# that are left, from the newest checkpoint.
while true; do
  nodes=$(squeue -h -j "$SLURM_JOB_ID" -o %D)
  list=$(squeue -h -j "$SLURM_JOB_ID" -o %N)
  master=$(scontrol show hostnames "$list" | head -n 1)
  srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --cpus-per-task=4 --kill-on-bad-exit=0 \
  bash -c 'exec "$@" --node-rank "$SLURM_NODEID"' launcher \
  echelon train first.toml --set comm.device=cpu -n 4 --nnodes 2:4 --master-addr "$master"
  code=$?
  left=$(squeue -h -j "$SLURM_JOB_ID" -o %D)
  [ "$code" -gt 128 ] && [ "$left" -lt "$nodes" ] || break
  [ "$left" -ge 2 ] || { code=75; break; }
done

case $code in
  75) # The state is saved: the job queues again and goes on from there.
    scontrol requeue "$SLURM_JOB_ID" ;;
  93) # Starting again would not help: the job is kept for you to look at.
    scontrol requeuehold "$SLURM_JOB_ID" ;;
esac
exit "$code"
