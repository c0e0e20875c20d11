#!/bin/bash
# first under Slurm: 2 hosts of 2 ranks, layout dp=4. Made by `echelon deploy`.
#SBATCH --job-name=first
#SBATCH --output=first-%j.log
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
# Memory of a node: 2 ranks of 1.2 GiB each by the plan, and 18.6 MiB while a
# checkpoint is written. Copies of the state for restarts take 186 MiB of it.
#SBATCH --mem=3G
# Slurm may start the job again: when another job takes its nodes, when a node
# fails, and when this script asks for it.
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --time=12:00:00
# The launchers are told to save 2 min 10 s before the time is up: 97.7 ms for a
# checkpoint of 37.3 MiB from 2 hosts at 200 MB/s each, 90 s to upload it to
# s3://models/first (--upload-seconds), and 30 s for the ranks to end.
#SBATCH --signal=TERM@130

# The folder that all nodes share.
cd /shared/first || exit 2
# The launchers prove to each other that they have this secret; srun takes it
# along.
ECHELON_TOKEN=$(od -An -vtx1 -N32 /dev/urandom | tr -d ' \n')
export ECHELON_TOKEN
nodes=$SLURM_JOB_NUM_NODES
master=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --cpus-per-task=2 --kill-on-bad-exit=0 \
  bash -c 'exec "$@" --node-rank "$SLURM_NODEID"' launcher \
  echelon train first.toml --set 'checkpoint.remote=s3://models/{name}' -n 2 --nnodes 2 --master-addr "$master"
code=$?

case $code in
  75) # The state is saved: the job queues again and goes on from there.
    scontrol requeue "$SLURM_JOB_ID" ;;
  93) # Starting again would not help: the job is kept for you to look at.
    scontrol requeuehold "$SLURM_JOB_ID" ;;
esac
exit "$code"
