#include "echelon/cluster/local_cluster.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <string>
#include <utility>

#include "echelon/cluster/cluster_file.h"
#include "echelon/text/text_file.h"

namespace echelon::cluster {
namespace {

std::string host_name() {
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0) return "here";
  std::string text = name.data();
  text.resize(std::min(text.size(), text.find('.')));
  for (char& c : text) {
    if (!std::isalnum(static_cast<unsigned char>(c)) && c != '-') c = '_';
  }
  return text.empty() ? "here" : text;
}

bool is_of_processor(const Cluster& cluster) {
  const Device& device = cluster.groups.front().node.device;
  return device.processor || device.name == "cpu";
}

}  // namespace

std::filesystem::path saved_cluster_path(int64_t ranks) {
  const auto folder = configuration_folder();
  if (folder.empty()) return {};
  return folder / "clusters" /
         (host_name() + "-" + std::to_string(ranks) + ".toml");
}

std::optional<Cluster> saved_cluster(int64_t ranks) {
  const auto path = saved_cluster_path(ranks);
  std::error_code error;
  if (path.empty() || !std::filesystem::exists(path, error))
    return std::nullopt;
  return read_cluster(path);
}

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

}  // namespace echelon::cluster
