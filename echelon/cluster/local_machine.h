// This machine: what was found, and the cluster that it is.
#pragma once

#include <string>
#include <vector>

#include "echelon/cluster/cluster.h"
#include "echelon/cluster/host.h"
#include "echelon/cluster/nvml.h"

namespace echelon {

struct Adapter {
  std::string name;  // "mlx5_0", "eth0"
  bool infiniband = false;
  double bytes_per_second = 0;
};

struct LocalMachine {
  Processor processor;
  int cores = 1;
  HostMemory memory;
  NvmlFindings nvml;
  std::vector<Adapter> adapters;  // that are up and tell their rate
};

LocalMachine look_at_machine();

/// Adapters as the kernel lists them below `sys`: infiniband ports, then
/// network interfaces that are hardware.
std::vector<Adapter> find_adapters(const std::string& sys = "/sys");

/// The catalogue's device of a GPU that calls itself so; empty: it has none.
std::string device_of_gpu(const Gpu& gpu);

/// One node. Without GPUs its devices are shares of the processor, `devices` of
/// them (0: one for each core), whose rates are rough guesses until `echelon
/// bench
/// --save` has measured them. Throws ConfigError when there are fewer GPUs than
/// `devices`, GPUs of several kinds, or one that the catalogue has not.
Cluster cluster_of(const LocalMachine& machine, int64_t devices = 0);

}  // namespace echelon
