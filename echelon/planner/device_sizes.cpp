#include "echelon/planner/device_sizes.h"

#include <algorithm>
#include <limits>

#include "echelon/cost/distinct_pipelines.h"
#include "echelon/cost/step_estimate.h"
#include "echelon/cost/strategy.h"
#include "echelon/layout/partition.h"

namespace echelon::planner {
namespace {

constexpr double kAlike = 0.005;  // speeds that differ by less are one

bool all_alike(const std::vector<double>& numbers) {
  const auto [least, most] = std::ranges::minmax_element(numbers);
  return *least >= (1 - kAlike) * *most;
}

// One sample on a single device.
cost::Strategy strategy_alone(
    int64_t seq_len, cluster::Precision precision,
    const std::string& framework) {
  cost::Strategy alone;
  alone.global_batch = 1;
  alone.seq_len = seq_len;
  alone.precision = precision;
  alone.framework = framework;
  return alone;
}

// Seconds of a sample through all layers on a single device.
double seconds_alone(
    const cost::ModelShape& model, const cluster::NodeGroup& group,
    const cost::Strategy& alone) {
  const cluster::Cluster one{.name = {}, .groups = {group}};
  double seconds = 0;
  for (const auto& stage : cost::stage_times(model, alone, one).stages) {
    seconds += stage.forward + stage.backward;
  }
  return seconds;
}

// For each stage, the least value that its pipeline rank's devices have in any
// pipeline.
std::vector<double> least_of_stages(
    const cost::Strategy& strategy, const cluster::Cluster& cluster,
    const std::vector<double>& of_group) {
  std::vector<double> of_rank(
      static_cast<size_t>(strategy.layout.pp),
      std::numeric_limits<double>::infinity());
  for (const auto& pipeline : cost::distinct_pipelines(strategy, cluster)) {
    for (size_t rank = 0; rank < of_rank.size(); ++rank) {
      of_rank[rank] = std::min(
          of_rank[rank], of_group[static_cast<size_t>(pipeline.groups[rank])]);
    }
  }
  std::vector<double> of_stage;
  for (const int32_t rank : cost::rank_of_stages(strategy)) {
    of_stage.push_back(of_rank[static_cast<size_t>(rank)]);
  }
  return of_stage;
}

// The time of the head next to the blocks, in blocks: what a model of one block
// takes beyond what a second block adds.
std::vector<double> head_in_blocks(
    const SearchJob& job, const cost::Strategy& strategy, size_t stages) {
  cost::ModelShape model = job.model;
  const cost::Strategy alone =
      strategy_alone(strategy.seq_len, strategy.precision, strategy.framework);
  const auto seconds_of = [&](int64_t blocks) {
    model.transformer->layers = blocks;
    return seconds_alone(model, job.cluster.groups.front(), alone);
  };
  const double one = seconds_of(1);
  const double block = seconds_of(2) - one;
  std::vector<double> taken(stages, 0);
  taken.back() = one / block - 1;
  return taken;
}

std::vector<int64_t> partition_by(
    const SearchJob& job, const cost::Strategy& strategy,
    const std::vector<double>& weights, bool time) {
  if (!job.model.transformer) {
    return cost::layers_by_weight(cost::flops_of_layers(job.model), weights);
  }
  return share_out(
      job.model.transformer->layers, weights,
      time ? head_in_blocks(job, strategy, weights.size())
           : std::vector<double>{});
}

}  // namespace

std::vector<double> device_speeds(
    const cost::ModelShape& model, const cluster::Cluster& cluster,
    int64_t seq_len, cluster::Precision precision,
    const std::string& framework) {
  if (!cluster.mixed()) return {};
  const auto alone = strategy_alone(seq_len, precision, framework);
  std::vector<double> speeds;
  for (const auto& group : cluster.groups) {
    speeds.push_back(1 / seconds_alone(model, group, alone));
  }
  if (all_alike(speeds)) return {};
  const double most = *std::ranges::max_element(speeds);
  for (double& speed : speeds) speed /= most;
  return speeds;
}

std::vector<std::vector<int64_t>>
sized_stages(const SearchJob& job, const cost::Strategy& strategy) {
  if (job.speeds.empty() || strategy.layout.pp == 1) return {};
  std::vector<double> bytes;
  for (const auto& group : job.cluster.groups) {
    bytes.push_back(cost::usable_bytes(group.node.device));
  }
  std::vector<std::vector<int64_t>> partitions;
  for (const bool time : {true, false}) {
    const auto weights =
        least_of_stages(strategy, job.cluster, time ? job.speeds : bytes);
    if (all_alike(weights)) continue;
    const auto partition = partition_by(job, strategy, weights, time);
    if (!partition.empty() &&
        (partitions.empty() || partitions[0] != partition))
      partitions.push_back(partition);
  }
  return partitions;
}

std::vector<double>
data_rank_speeds(const SearchJob& job, const cost::Strategy& strategy) {
  if (job.speeds.empty() || strategy.layout.ep > 1) return {};
  std::vector<double> speeds(
      static_cast<size_t>(strategy.layout.data_degree()), 1.0);
  for (const auto& pipeline : cost::all_pipelines(strategy, job.cluster)) {
    double& speed = speeds[static_cast<size_t>(pipeline.data_index)];
    for (const int64_t group : pipeline.groups) {
      speed = std::min(speed, job.speeds[static_cast<size_t>(group)]);
    }
  }
  return all_alike(speeds) ? std::vector<double>{} : speeds;
}

}  // namespace echelon::planner
