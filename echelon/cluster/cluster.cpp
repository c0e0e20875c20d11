#include "echelon/cluster/cluster.h"

#include <algorithm>
#include <cmath>

#include "echelon/config/value.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon::cluster {
namespace {

class Check {
 public:
  explicit Check(const Cluster& cluster) : cluster_(cluster) {}

  void run() {
    place_ = "cluster";
    if (cluster_.groups.empty()) fail("has no nodes; give it at least one");
    at_least("nodes_per_rack", static_cast<double>(cluster_.nodes_per_rack), 0);
    at_least("oversubscription", cluster_.oversubscription, 1);
    at_least(
        "mean_hours_between_failures", cluster_.mean_hours_between_failures, 0);
    int64_t devices = 0;
    for (size_t i = 0; i < cluster_.groups.size(); ++i) {
      group(i);
      const auto& [node, count] = cluster_.groups[i];
      if (count > kMaxClusterDevices || node.num_devices > kMaxClusterDevices ||
          (devices += count * node.num_devices) > kMaxClusterDevices) {
        fail(format(
            "count = {} nodes of {}: a cluster has at most 10 million devices",
            count, node.num_devices));
      }
    }
  }

 private:
  [[noreturn]] void fail(const std::string& text) const {
    throw ConfigError(place_ + ": " + text);
  }

  void
  refuse(const std::string& key, double value, const std::string& rule) const {
    fail(key + " = " + config::toml_text(value) + " must be " + rule);
  }

  void at_least(const std::string& key, double value, double least) const {
    if (!(value >= least) || std::isinf(value)) {
      refuse(key, value, "at least " + config::toml_text(least));
    }
  }

  void above_zero(
      const std::string& key, double value, const std::string& why) const {
    if (!(value > 0) || std::isinf(value)) {
      refuse(key, value, "above 0" + (why.empty() ? why : ": " + why));
    }
  }

  void link(const std::string& key, const Link& link) const {
    at_least(key + " rate", link.bytes_per_second, 0);
    at_least(key + " latency", link.latency_seconds, 0);
  }

  void device(const Device& device) const {
    above_zero("memory", device.memory_bytes, "");
    above_zero("memory_rate", device.memory_bytes_per_second, "");
    at_least("price_per_hour", device.price_per_hour, 0);
    at_least("launch", device.launch_seconds, 0);
    for (const auto& rate : device.launch_rates) {
      at_least("launch_rates: beside", rate.bytes_beside, 0);
      at_least("launch_rates: launch", rate.seconds, 0);
      at_least("launch_rates: backward", rate.backward_seconds, 0);
      at_least("launch_rates: view", rate.view_seconds, 0);
      at_least("launch_rates: backward_view", rate.backward_view_seconds, 0);
    }
    double most = 0;
    for (Precision precision : kPrecisions) {
      const double peak = device.peak(precision);
      at_least(format("peak of {}", to_string(precision)), peak, 0);
      most = std::max(most, peak);
    }
    above_zero("the highest peak", most, "it computes in some precision");
    for (const auto& rate : device.matrix_rates) {
      for (int64_t extent : {rate.m, rate.n, rate.k}) {
        if (extent <= 0) fail("matrix_rates: m, n and k must be above 0");
      }
      above_zero("matrix_rates: rate", rate.flops_per_second, "");
    }
    for (const auto& rate : device.operator_rates) {
      above_zero("operator_rates: bytes", rate.bytes, "");
      above_zero("operator_rates: rate", rate.bytes_per_second, "");
    }
  }

  void group(size_t index) {
    const auto& [node, count] = cluster_.groups[index];
    place_ = format("nodes {} ({})", index + 1, node.device.name);
    if (count < 1) refuse("count", static_cast<double>(count), "at least 1");
    if (node.num_devices < 1) {
      refuse("devices", static_cast<double>(node.num_devices), "at least 1");
    }
    device(node.device);
    for (size_t i = 0; i < index; ++i) {
      const Device& other = cluster_.groups[i].node.device;
      if (other.name == node.device.name && other != node.device) {
        fail(format(
            "its device differs from that of nodes {}, but has the same name; "
            "give one of them another",
            i + 1));
      }
    }
    link("inside", node.inside);
    link("network", node.network);
    link("host", node.host);
    at_least("host_memory", node.host_memory_bytes, 0);
    at_least("host_memory_rate", node.host_memory_bytes_per_second, 0);
    if (node.num_devices > 1) {
      above_zero(
          "inside rate", node.inside.bytes_per_second,
          format("its {} devices need a link", node.num_devices));
    }
    if (cluster_.groups.size() > 1 || count > 1) {
      above_zero(
          "network rate", node.network.bytes_per_second,
          "the cluster has more than one node");
    }
  }

  const Cluster& cluster_;
  std::string place_;
};

// The group of a rank's node; what stands before it.
struct GroupOfRank {
  const NodeGroup& group;
  int64_t devices, nodes;
};

GroupOfRank group_of(const Cluster& cluster, int64_t rank) {
  int64_t devices = 0, nodes = 0;
  for (const auto& group : cluster.groups) {
    const int64_t next = devices + group.count * group.node.num_devices;
    if (rank >= devices && rank < next) return {group, devices, nodes};
    devices = next;
    nodes += group.count;
  }
  throw ConfigError(format(
      "cluster {}: no device {}, it has {}", cluster.name, rank,
      cluster.num_devices()));
}

}  // namespace

int64_t Cluster::num_nodes() const {
  int64_t nodes = 0;
  for (const auto& group : groups) nodes += group.count;
  return nodes;
}

int64_t Cluster::num_devices() const {
  int64_t devices = 0;
  for (const auto& group : groups) {
    devices += group.count * group.node.num_devices;
  }
  return devices;
}

const Node& Cluster::node_of(int64_t rank) const {
  return group_of(*this, rank).group.node;
}

int64_t Cluster::node_index(int64_t rank) const {
  const auto [group, devices, nodes] = group_of(*this, rank);
  return nodes + (rank - devices) / group.node.num_devices;
}

size_t Cluster::group_index(int64_t rank) const {
  return static_cast<size_t>(&group_of(*this, rank).group - groups.data());
}

Cluster Cluster::first(int64_t devices) const {
  if (devices < 1 || devices > num_devices()) {
    throw ConfigError(format(
        "cluster {}: {} devices wanted, but it has {}", name, devices,
        num_devices()));
  }
  Cluster part = *this;
  part.groups.clear();
  for (const auto& group : groups) {
    const int64_t whole =
        std::min(group.count, devices / group.node.num_devices);
    if (whole > 0) part.groups.push_back({group.node, whole});
    devices -= whole * group.node.num_devices;
    if (whole < group.count) {
      if (devices > 0) {
        part.groups.push_back({group.node, 1});
        part.groups.back().node.num_devices = devices;
      }
      break;
    }
  }
  return part;
}

void check(const Cluster& cluster) {
  Check(cluster).run();
}

}  // namespace echelon::cluster
