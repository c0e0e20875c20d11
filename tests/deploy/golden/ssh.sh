#!/bin/bash
# first over ssh: 2 hosts of 8 ranks, layout dp=16. Made by `echelon deploy`.
set -u
hosts=(node-a node-b)
# The same folder on every host.
folder=/shared/first
# The launchers prove to each other that they have this secret. It goes through
# standard input, because all users of a host can read arguments.
token=$(od -An -vtx1 -N32 /dev/urandom | tr -d ' \n')

start() {  # NUMBER
  local line
  line=$(printf '%q ' echelon train first.toml --set train.steps=10 -n 8 --nnodes 2 \
    --node-rank "$1" --master-addr "${hosts[0]}")
  {
    printf 'export ECHELON_TOKEN=%s\n' "$token"
    printf 'cd %q || exit 2\n' "$folder"
    printf 'exec %s\n' "$line"
  } | ssh -o BatchMode=yes "${hosts[$1]}" bash -s &
  processes+=($!)
}

# A signal to this script ends the job once it has saved.
stop() {
  stopped=yes
  ssh -o BatchMode=yes "${hosts[0]}" \
    "$(printf 'cd %q && echelon job stop %q' "$folder" runs/first)"
}
trap stop INT TERM

processes=()
for number in "${!hosts[@]}"; do start "$number"; done
code=0
for process in "${processes[@]}"; do
  stopped=yes
  while [ -n "$stopped" ]; do stopped=; wait "$process"; one=$?; done
  [ "$code" -ne 0 ] || code=$one
done
# 75: the job has saved, and this script goes on from there.
exit "$code"
