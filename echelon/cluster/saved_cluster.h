// Where `echelon bench --save` keeps what it measured of this machine, so that
// reports can predict runs without a cluster file.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

#include "echelon/cluster/cluster.h"

namespace echelon {

/// $XDG_CONFIG_HOME/echelon/clusters/HOST-RANKS.toml, in ~/.config where that
/// is not set: homes are shared by hosts, and ranks share what a host has.
/// Empty without a home.
std::filesystem::path saved_cluster_path(int64_t ranks);

/// Reads that file; empty when there is none. Throws ConfigError as
/// read_cluster does.
std::optional<Cluster> saved_cluster(int64_t ranks);

}  // namespace echelon
