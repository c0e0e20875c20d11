// This machine as a cluster, by the best that is known of it.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "echelon/cluster/cluster.h"
#include "echelon/cluster/local_machine.h"

namespace echelon {

enum class RatesFrom {
  bench,      // `echelon bench --save` measured them here: saved_cluster.h
  catalogue,  // of its GPUs
  guess,      // of its processor
};

struct LocalCluster {
  Cluster cluster;  // its name says where its rates are from
  RatesFrom rates = RatesFrom::guess;
};

/// This machine as `devices` devices: its GPUs, or shares of its processor; 0:
/// all GPUs, or one share for each core. `on_processor`: what runs uses no GPU.
/// Throws ConfigError as cluster_of does, and as read_cluster for a saved file
/// that is broken.
LocalCluster local_cluster(int64_t devices, bool on_processor = false);

/// The same of any machine, and of what `saved` says was measured of so many
/// devices; a file that is of GPUs says nothing of a processor, nor the other
/// way around.
LocalCluster local_cluster(
    LocalMachine machine,
    const std::function<std::optional<Cluster>(int64_t devices)>& saved,
    int64_t devices, bool on_processor);

}  // namespace echelon
