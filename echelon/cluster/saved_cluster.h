// Where `echelon bench --save` keeps what it measured of this machine, so that
// runs here are predicted without being told what they ran on.
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

/// The file there; nothing when there is none. Throws ConfigError as
/// read_cluster.
std::optional<Cluster> saved_cluster(int64_t ranks);

}  // namespace echelon
