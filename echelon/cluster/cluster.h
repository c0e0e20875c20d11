// What a job runs on: devices, nodes, and the links between them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/cluster/device.h"

namespace echelon::cluster {

/// The most devices that a cluster may have: beyond it, sums of bytes and ranks
/// would lose digits, and no such cluster exists.
inline constexpr int64_t kMaxClusterDevices = 10'000'000;

/// What one device can send (and receive at the same time) over it.
struct Link {
  std::string name;             // "NVLink 4", "InfiniBand NDR", "PCIe 5"
  double bytes_per_second = 0;  // of one device, one direction
  double latency_seconds = 0;   // of one message

  bool operator==(const Link&) const = default;
};

/// Devices of one kind in one host.
struct Node {
  std::string name;  // "dgx-h100"
  Device device;
  int64_t num_devices = 1;
  /// The link between devices of the node. `switched`: every device reaches
  /// every other at full link bandwidth (NVSwitch); otherwise all of them share
  /// the bandwidth of one (PCIe).
  Link inside;
  bool switched = true;
  bool reduces_in_switch = false;  // NVLink SHARP
  /// One device's share of the link to other nodes: the node's adapters over
  /// its devices.
  Link network;
  Link host;  // of one device to its host's memory
  double host_memory_bytes = 0;
  /// One device's share of the host memory's bandwidth; 0: not known.
  double host_memory_bytes_per_second = 0;

  bool operator==(const Node&) const = default;
};

struct NodeGroup {
  Node node;
  int64_t count = 1;

  bool operator==(const NodeGroup&) const = default;
};

/// A value. Ranks fill the groups in order, and each node's devices in order.
struct Cluster {
  std::string name;
  std::vector<NodeGroup> groups;  // one for a cluster of equal nodes
  /// Nodes below one switch; beyond it, each device has its network bandwidth
  /// over `oversubscription`. 0: all nodes are below one switch.
  int64_t nodes_per_rack = 0;
  double oversubscription = 1;
  /// The mean of one node, for effective training time; 0: nodes do not fail.
  double mean_hours_between_failures = 0;

  int64_t num_nodes() const;
  int64_t num_devices() const;
  /// Whether nodes differ; a last node with fewer devices counts as different.
  bool mixed() const { return groups.size() > 1; }
  /// The node that has this rank. Throws ConfigError when the cluster has no
  /// such device.
  const Node& node_of(int64_t rank) const;
  /// Counted over all groups.
  int64_t node_index(int64_t rank) const;
  /// The index into `groups` of that node.
  size_t group_index(int64_t rank) const;
  /// The first `devices` devices, for a job that does not take all.
  Cluster first(int64_t devices) const;

  bool operator==(const Cluster&) const = default;
};

/// Throws ConfigError, with group, key, value and rule, for what no job can run
/// on: no device, a link bandwidth of 0 between devices, a negative figure, two
/// devices of one name.
void check(const Cluster& cluster);

}  // namespace echelon::cluster
