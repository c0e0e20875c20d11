// This machine as a cluster, by the best rates that are known.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>

#include "echelon/cluster/cluster.h"
#include "echelon/cluster/local_machine.h"

namespace echelon::cluster {

/// Where `echelon bench --save` keeps what it measured of this machine, so that
/// reports can predict runs without a cluster file:
/// $XDG_CONFIG_HOME/echelon/clusters/HOST-RANKS.toml, in ~/.config where that
/// is not set: homes are shared by hosts, and ranks share what a host has.
/// Empty without a home.
std::filesystem::path saved_cluster_path(int64_t ranks);

/// Reads that file; empty when there is none. Throws ConfigError as
/// read_cluster does.
std::optional<Cluster> saved_cluster(int64_t ranks);

enum class RatesFrom {
  bench,      // `echelon bench --save` measured them here
  catalogue,  // of its GPUs
  guess,      // of its processor
};

struct LocalCluster {
  Cluster cluster;  // its name says where its rates are from
  RatesFrom rates = RatesFrom::guess;
};

/// This machine as `devices` devices: its GPUs, or shares of its processor; 0:
/// all GPUs, or one share for each core. `on_processor`: ignores the GPUs.
/// Throws ConfigError as cluster_of does, and as read_cluster does for a broken
/// saved file.
LocalCluster local_cluster(int64_t devices, bool on_processor = false);

/// The same of any machine; `saved` returns what was measured with so many
/// devices. A file of GPUs is not used for a processor, nor the other way
/// around.
LocalCluster local_cluster(
    LocalMachine machine,
    const std::function<std::optional<Cluster>(int64_t devices)>& saved,
    int64_t devices, bool on_processor);

}  // namespace echelon::cluster
