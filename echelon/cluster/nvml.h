// NVIDIA's GPUs as reported by the driver's library (NVML), which is loaded at
// run time if it is installed; the build does not need it.
#pragma once

#include <string>
#include <vector>

namespace echelon {

struct Gpu {
  std::string name;  // "NVIDIA H100 80GB HBM3"
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

/// `library`: what to load; tests have another one.
NvmlFindings ask_nvml(const char* library = "libnvidia-ml.so.1");

/// One direction, all links of a GPU together; 0: none.
double nvlink_bytes_per_second(const Gpu& gpu);
double pcie_bytes_per_second(int generation, int lanes);

}  // namespace echelon
