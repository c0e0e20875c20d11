// Devices and nodes by name. catalogue.cpp has the figures and their sources.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "echelon/cluster/cluster.h"

namespace echelon::cluster {

/// "v100", "a100-40gb", "a100-80gb", "h100-sxm", "h100-pcie", "h200", "b200",
/// "gb200", "l4", "l40s", "rtx-4090", "mi300x", …
const std::vector<std::string>& device_names();

bool in_catalogue(std::string_view device);

/// Throws ConfigError for an unknown name, with the nearest.
Device find_device(std::string_view name);

/// The node that a device is usually sold in: 8 with NVSwitch for h100-sxm, 72
/// for gb200, one with PCIe for l4.
Node usual_node(std::string_view device);

/// "h100-sxm:64x8": 64 nodes of 8; "a100-80gb:1024": 1024 devices in usual
/// nodes, the last one filled in part where that does not divide; "h100-sxm":
/// one node; "a100-80gb:16x8+h100-sxm:8x8": mixed; "local", "local:2": this
/// machine (local_cluster.h); otherwise the path of a cluster file
/// (cluster_file.h). Throws ConfigError that says why it is none of these.
Cluster find_cluster(const std::string& text);

}  // namespace echelon::cluster
