// The cluster of a row: usual nodes of its GPU, with the network that the row
// states.
#pragma once

#include "benchmarks/published/step_row.h"
#include "echelon/cluster/cluster.h"

namespace echelon {

/// The device of the catalogue that a cell such as "A100-SXM-80GB",
/// "V100-32GB (DGX-2)" or "H100" means: the one that has most of the cell's
/// words; an H100 with HBM2e is the one of 96 GB. Throws ConfigError when there
/// is none.
std::string device_of(const std::string& gpu);

/// Its usual nodes (16 devices in a DGX-2; of an NVL72 rack 64 when the devices
/// are no multiple of 72). "4x Omni-Path 100 Gb/s per node", "1600 Gbps
/// node-node" or "400Gb/s RDMA per GPU" in the row's texts sets the network.
cluster::Cluster cluster_of(const StepRow& row);

}  // namespace echelon
