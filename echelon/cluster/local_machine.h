// The hardware of this machine, and the machine as a cluster.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/cluster/cluster.h"
#include "echelon/cluster/host.h"
#include "echelon/cluster/nvml.h"

namespace echelon::cluster {

/// One direction, all links of a GPU together; 0: none.
double nvlink_bytes_per_second(const Gpu& gpu);
double pcie_bytes_per_second(int generation, int lanes);

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
  std::vector<Adapter> adapters;  // those that are up and tell their bandwidth
};

LocalMachine look_at_machine();

/// Adapters as the kernel lists them below `sys`: InfiniBand ports, then
/// network interfaces that are hardware.
std::vector<Adapter> find_adapters(const std::string& sys = "/sys");

/// The catalogue's device for a GPU of this name; empty: there is none.
std::string device_of_gpu(const Gpu& gpu);

/// One node. Without GPUs its devices are `devices` shares of the processor (0:
/// one for each core), whose rates are rough guesses until `echelon bench
/// --save` has measured them. Throws ConfigError when there are fewer GPUs than
/// `devices`, GPUs of several kinds, or one that is not in the catalogue.
Cluster cluster_of(const LocalMachine& machine, int64_t devices = 0);

/// A device's share of the adapters; 0 bytes per second: none is known.
Link network_of(const LocalMachine& machine, int64_t devices);

}  // namespace echelon::cluster
