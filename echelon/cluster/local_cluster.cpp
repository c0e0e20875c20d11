#include "echelon/cluster/local_cluster.h"

#include <utility>

#include "echelon/cluster/saved_cluster.h"

namespace echelon {
namespace {

bool is_of_processor(const Cluster& cluster) {
  const Device& device = cluster.groups.front().node.device;
  return device.processor || device.name == "cpu";
}

}  // namespace

LocalCluster local_cluster(
    LocalMachine machine,
    const std::function<std::optional<Cluster>(int64_t devices)>& saved,
    int64_t devices, bool on_processor) {
  if (on_processor) machine.nvml.gpus.clear();
  const bool gpus = !machine.nvml.gpus.empty();
  const auto all = gpus ? static_cast<int64_t>(machine.nvml.gpus.size())
                        : static_cast<int64_t>(machine.cores);
  auto measured = saved(devices > 0 ? devices : all);
  if (measured && is_of_processor(*measured) != gpus) {
    measured->name = "this machine as measured";
    return {std::move(*measured), RatesFrom::bench};
  }
  LocalCluster found{
      cluster_of(machine, devices),
      gpus ? RatesFrom::catalogue : RatesFrom::guess};
  found.cluster.name =
      gpus ? "this machine by the catalogue" : "this machine, rates guessed";
  return found;
}

LocalCluster local_cluster(int64_t devices, bool on_processor) {
  return local_cluster(look_at_machine(), saved_cluster, devices, on_processor);
}

}  // namespace echelon
