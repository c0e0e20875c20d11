// The GPUs that this process may use, by CUDA's driver, and why GPUs that are
// there cannot be used.
#pragma once

#include <string>
#include <vector>

namespace echelon::cluster {

/// The driver's library is loaded at run time if it is installed; the build
/// does not need it. CUDA_VISIBLE_DEVICES is the driver's to read: indices,
/// UUIDs of GPUs and of their MIG slices.
struct CudaFindings {
  bool library = false;    // it is installed and loads
  std::string reason;      // why it does not load
  int error = 0;           // of cuInit; 0: none
  std::string error_text;  // "CUDA_ERROR_SYSTEM_NOT_READY, system not …"
  int version = 0;         // the newest CUDA that it runs: 12060 is 12.6
  std::vector<std::string> gpus;  // the visible ones: "GPU-3f2c…", "MIG-…"
  /// The lowest of their compute capabilities: 89 is 8.9; 0: not known.
  int capability = 0;
};

/// `library`: what to load; tests have another one.
CudaFindings ask_cuda(const char* library = "libcuda.so.1");

/// Whether all visible GPUs, of which there is one at least, multiply in bf16.
bool has_bf16(const CudaFindings& found);

/// What a machine shows of its GPUs without the driver's library.
struct GpuSigns {
  bool device_file = false;  // /dev/nvidia0 and its like
  std::string visible;       // CUDA_VISIBLE_DEVICES
};
GpuSigns find_gpu_signs();

/// Why the GPUs of this machine cannot be used, with the way out; empty when
/// they can, and when there are none or none is meant to be visible. `cuda`:
/// the major version of CUDA that LibTorch is built for.
std::string
why_unusable(const CudaFindings& found, const GpuSigns& signs, int cuda);

}  // namespace echelon::cluster
