// The golden files: what `echelon deploy` writes for tests/deploy/first.toml.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace echelon {

/// A file of golden/, and the options that make it.
inline const std::vector<std::pair<std::string, std::string>>& golden_cases() {
  static const std::string kPods =
      "--image registry.example/echelon:0.1 --volume shared ";
  static const std::vector<std::pair<std::string, std::string>> cases = {
      {"slurm.sh",
       "--to slurm -n 8 --nnodes 2 --layout fsdp=4,tp=4 --time 12:00:00 "
       "--account vision --partition gpu --qos normal --gpu-type h100 "
       "--volume /shared/first"},
      {"slurm_one_node.sh", "--to slurm -n 4 --gpus-per-node 0"},
      {"slurm_elastic.sh",
       "--to slurm -n 4 --nnodes 2:4 --set comm.device=cpu"},
      {"slurm_remote.sh",
       "--to slurm -n 2 --nnodes 2 --gpus-per-node 0 --volume /shared/first "
       "--time 12:00:00 --set checkpoint.remote=s3://models/{name} "
       "--upload-seconds 90"},
      {"jobset.yaml",
       "--to jobset -n 8 --nnodes 2 --layout fsdp=4,tp=4 --namespace vision "
       "--topology nvidia.com/gpu.clique --metrics-port 9400 " +
           kPods},
      {"jobset_one_node.yaml",
       "--to jobset -n 2 --gpus-per-node 0 --image "
       "registry.example/echelon:0.1 "
       "--save-seconds 45"},
      {"jobset_remote.yaml",
       "--to jobset -n 2 --gpus-per-node 0 --image "
       "registry.example/echelon:0.1 --namespace vision --set "
       "checkpoint.remote=s3://models/{name}"},
      {"kueue.yaml",
       "--to kueue -n 4 --nnodes 4 --layout dp=2,tp=8 --queue vision --pool "
       "pool.toml --namespace vision --topology nvidia.com/gpu.clique " +
           kPods},
      {"kueue_elastic.yaml",
       "--to kueue -n 4 --nnodes 2:4 --queue vision " + kPods},
      {"kai.yaml",
       "--to kai -n 8 --nnodes 2 --queue vision --pool pool.toml " + kPods},
      {"kai_elastic.yaml",
       "--to kai -n 4 --nnodes 1:4 --queue vision " + kPods},
      {"trainer.yaml", "--to trainer -n 8 --nnodes 2 " + kPods},
      {"lws.yaml",
       "--to lws -n 8 --nnodes 2 --image registry.example/echelon:0.1 --volume "
       "/shared/first"},
      {"ray.py", "--to ray -n 8 --nnodes 2 --volume /shared/first"},
      {"ssh.sh",
       "--to ssh -n 8 --hosts node-a,node-b --volume /shared/first --set "
       "train.steps=10"}};
  return cases;
}

}  // namespace echelon
