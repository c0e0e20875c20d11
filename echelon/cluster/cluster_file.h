// Clusters as TOML; doc/clusters.md explains each key.
//
//   name = "two racks"
//   nodes_per_rack = 4
//   oversubscription = 2.0
//
//   [[nodes]]
//   device = "h100-sxm"            # of the catalogue, or a [devices.NAME] here
//   count = 8                      # nodes
//   devices = 8                    # of each
//   network = { rate = "400 Gbit/s", latency = "5 us" }
#pragma once

#include <filesystem>
#include <string>

#include "echelon/cluster/cluster.h"

namespace echelon::cluster {

/// Keys that a node leaves out default to the usual node of its device. Rates
/// and sizes have units ("400 Gbit/s", "50 GB/s", "80 GiB"). Throws ConfigError
/// with file, line and column for an unknown key, a missing unit or link, or a
/// wrong value.
Cluster read_cluster(const std::filesystem::path& path);
Cluster parse_cluster(const std::string& text, const std::string& name);

/// The text from which read_cluster reads an equal cluster.
std::string to_toml(const Cluster& cluster);

}  // namespace echelon::cluster
