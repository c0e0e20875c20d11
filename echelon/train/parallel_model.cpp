#include "echelon/train/parallel_model.h"

#include <algorithm>
#include <utility>

#include "echelon/parallel/data/coalesced.h"

namespace echelon {
namespace {

BucketHook hook_of(const TrainOptions& options) {
  if (options.compress == "bf16") return bf16_hook();
  if (options.compress == "fp16") return fp16_hook();
  if (options.compress == "powersgd") {
    return powersgd_hook(
        {.rank = options.powersgd_rank, .seed = options.seed});
  }
  return all_reduce_hook();
}

}  // namespace

DistributedDataParallelOptions data_parallel_options(const Job& job) {
  DistributedDataParallelOptions options;
  options.bucket_bytes = job.train.bucket_bytes;
  options.find_unused_parameters = job.train.find_unused_parameters;
  options.sync_batch_norm = job.model.sync_batch_norm;
  options.hook = hook_of(job.train);
  return options;
}

TensorParallel tensor_parallel(const Job& job, const MeshGroups& groups) {
  return {groups.along(Axis::tp), job.tensor};
}

std::vector<torch::Tensor> counted_gradients(
    const NamedTensors& parameters,
    const std::map<std::string, ParameterShard>& shards,
    const Group& tensor_parallel,
    const std::set<std::string>& leave_out) {
  std::vector<torch::Tensor> counted;
  for (const auto& [name, parameter] : parameters) {
    const auto& gradient = parameter.grad();
    if (!gradient.defined() || leave_out.count(name) > 0) continue;
    const auto shard = shards.find(name);
    if (shard != shards.end()) {
      for (auto& part : owned_parts(gradient, shard->second.shard)) {
        counted.push_back(std::move(part));
      }
    } else if (tensor_parallel.rank() == 0) {
      counted.push_back(gradient);
    }
  }
  return counted;
}

SumOverRanks sum_over(const std::vector<Group>& groups) {
  return [groups](torch::Tensor& squared_norm) {
    for (const auto& group : groups) {
      group.all_reduce(squared_norm, ReduceOp::sum, {.label = "gradient norm"})
          .wait();
    }
  };
}

std::optional<NonFinite> earliest(
    const std::optional<NonFinite>& found,
    const std::vector<std::string>& layers,
    const Group& group,
    torch::Device device) {
  if (group.size() == 1) return found;
  std::vector<std::string> lines;
  if (found) lines = {found->layer, found->what};
  const auto all = gather_lines(lines, group, device, "first NaN");
  // A broken parameter of one rank breaks the output of all.
  const auto position = [&](const NonFinite& one) {
    return std::pair(
        one.layer == "input"
            ? layers.begin()
            : std::find(layers.begin(), layers.end(), one.layer),
        one.what == "output");
  };
  std::optional<NonFinite> first;
  for (const auto& one : all) {
    if (one.empty()) continue;
    const NonFinite here{one[0], one[1]};
    if (!first || position(here) < position(*first)) first = here;
  }
  return first;
}

void announce(
    const ModelPlace& place, const std::vector<std::string>& lines) {
  if (!place.announce) return;
  for (const auto& line : lines) place.announce(line);
}

std::unique_ptr<ParallelModel>
make_parallel_model(const Job& job, const ModelPlace& place) {
  if (job.layout.pp > 1) return make_pipeline_model(job, place);
  if (!job.model.devices.empty()) return make_placed_model(job, place);
  return make_data_parallel_model(job, place);
}

}  // namespace echelon
