// The hardware of this machine, and the machine as a cluster.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "echelon/cluster/cluster.h"
#include "echelon/cluster/host.h"

namespace echelon::cluster {

struct Gpu {
  std::string name;                 // "NVIDIA H100 80GB HBM3"
  std::string uuid;                 // "GPU-3f2c…", for CUDA_VISIBLE_DEVICES
  std::vector<std::string> slices;  // where it is divided (MIG): "MIG-…"
  double memory_bytes = 0;
  int nvlinks = 0;                          // active ones
  int nvlink_version = 0;                   // of these
  bool nvswitch = false;                    // they end at a switch
  int pcie_generation = 0, pcie_lanes = 0;  // the highest; 0: not known
};

/// NVIDIA's GPUs as reported by the driver's library (NVML), which is loaded at
/// run time if it is installed; the build does not need it.
struct NvmlFindings {
  bool library = false;  // it is installed
  int error = 0;         // of its initialization; 0: none
  std::string driver;    // "560.35.03"
  int cuda = 0;          // the newest that the driver runs: 12060 is 12.6
  std::vector<Gpu> gpus;
};

/// `library`: what to load; tests have another one.
NvmlFindings ask_nvml(const char* library = "libnvidia-ml.so.1");

/// What NVML says is wrong with a GPU.
struct GpuHealth {
  int index = 0;             // as nvidia-smi counts
  bool lost = false;         // the driver no longer reaches it
  bool needs_reset = false;  // it works again after one
  int64_t ecc_errors = 0;    // that could not be corrected, since its start
  /// Pages or rows of its memory are to be taken out of use, by a reset.
  bool bad_memory_pending = false;
  bool no_spare_rows = false;   // its memory has no more to replace bad ones
  bool hot = false;             // it is slowed down by its temperature
  bool short_of_power = false;  // it is slowed down by its power supply
};

/// The GPUs that a process with these visible ones may use.
///
///   visible  CUDA_VISIBLE_DEVICES; none: not set, so that all are visible.
///            Slices of GPUs (MIG) are not looked at
///   library  what to load; tests have another one
std::vector<GpuHealth> ask_gpu_health(
    const std::optional<std::string>& visible,
    const char* library = "libnvidia-ml.so.1");

/// What a GPU does now. None: NVML does not tell.
struct GpuUse {
  int index = 0;               // as nvidia-smi counts
  std::string uuid;            // "GPU-3f2c…"; empty: not known
  std::optional<double> busy;  // 0 to 1: time with a kernel
  std::optional<double> memory_used, memory_total;  // bytes
  std::optional<double> celsius, watts, hertz;      // of its multiprocessors
};

/// Reads what the visible GPUs do, again and again.
class GpuMeter {
 public:
  /// As of ask_gpu_health().
  explicit GpuMeter(
      const std::optional<std::string>& visible,
      const char* library = "libnvidia-ml.so.1");
  ~GpuMeter();
  /// In the order in which they are visible; none without NVML.
  std::vector<GpuUse> read() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

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
