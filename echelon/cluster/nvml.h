// NVIDIA's GPUs as the driver's library (NVML) reports them. It is loaded at
// run time if it is installed; the build does not need it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

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

struct NvmlFindings {
  bool library = false;  // it is installed
  int error = 0;         // of its initialization; 0: none
  std::string driver;    // "560.35.03"
  int cuda = 0;          // the newest that the driver runs: 12060 is 12.6
  std::vector<Gpu> gpus;
};

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

/// What a GPU does now. None: NVML does not tell.
struct GpuUse {
  int index = 0;               // as nvidia-smi counts
  std::string uuid;            // "GPU-3f2c…"; empty: not known
  std::optional<double> busy;  // 0 to 1: time with a kernel
  std::optional<double> memory_used, memory_total;  // bytes
  std::optional<double> celsius, watts, hertz;      // of its multiprocessors
};

class Nvml {
 public:
  /// `library`: what to load; tests have another one.
  explicit Nvml(const char* library = "libnvidia-ml.so.1");
  ~Nvml();

  /// All GPUs of this machine.
  NvmlFindings find() const;

  // The GPUs that a process may use, in the order in which they are visible;
  // none without NVML. Slices of GPUs (MIG) are left out.
  //
  //   visible  CUDA_VISIBLE_DEVICES; none: not set, so that all are visible

  std::vector<GpuHealth>
  health(const std::optional<std::string>& visible) const;
  std::vector<GpuUse> use(const std::optional<std::string>& visible) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace echelon::cluster
