#include "echelon/cluster/nvml.h"

#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <optional>

namespace echelon {
namespace {

using Handle = void*;

// As in the driver's nvml.h.
struct Memory {
  unsigned long long total, free, used;
};
constexpr unsigned kMostLinks = 18;
constexpr int kRemoteSwitch = 2;  // NVML_NVLINK_DEVICE_TYPE_SWITCH

// The few functions that we need, by their stable names. A function that an old
// driver lacks reports nothing.
class Library {
 public:
  explicit Library(const char* name)
      : library_(::dlopen(name, RTLD_NOW | RTLD_LOCAL)) {
    if (library_ == nullptr) return;
    error_ = call("nvmlInit_v2").value_or(kMissing);
  }
  ~Library() {
    if (library_ == nullptr) return;
    if (error_ == 0) call("nvmlShutdown");
    ::dlclose(library_);
  }
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  bool present() const { return library_ != nullptr; }
  int error() const { return error_; }

  template <class... Arguments>
  std::optional<int> call(const char* name, Arguments... arguments) const {
    void* function = ::dlsym(library_, name);
    if (function == nullptr) return std::nullopt;
    return reinterpret_cast<int (*)(Arguments...)>(function)(arguments...);
  }

  template <class... Arguments>
  bool ask(const char* name, Arguments... arguments) const {
    return call(name, arguments...) == 0;
  }

 private:
  static constexpr int kMissing = 13;  // NVML_ERROR_FUNCTION_NOT_FOUND

  void* library_;
  int error_ = kMissing;
};

void find_links(const Library& nvml, Handle handle, Gpu& gpu) {
  for (unsigned link = 0; link < kMostLinks; ++link) {
    unsigned active = 0;
    if (!nvml.ask("nvmlDeviceGetNvLinkState", handle, link, &active) ||
        active == 0) {
      continue;
    }
    ++gpu.nvlinks;
    unsigned version = 0;
    if (nvml.ask("nvmlDeviceGetNvLinkVersion", handle, link, &version)) {
      gpu.nvlink_version =
          std::max(gpu.nvlink_version, static_cast<int>(version));
    }
    int remote = 0;
    if (nvml.ask(
            "nvmlDeviceGetNvLinkRemoteDeviceType", handle, link, &remote)) {
      gpu.nvswitch |= remote == kRemoteSwitch;
    }
  }
}

Gpu describe(const Library& nvml, Handle handle) {
  Gpu gpu;
  char text[96] = "";
  if (nvml.ask("nvmlDeviceGetName", handle, text, 96u)) {
    text[sizeof(text) - 1] = '\0';
    gpu.name = text;
  }
  Memory memory{};
  if (nvml.ask("nvmlDeviceGetMemoryInfo", handle, &memory)) {
    gpu.memory_bytes = static_cast<double>(memory.total);
  }
  unsigned number = 0;
  if (nvml.ask("nvmlDeviceGetMaxPcieLinkGeneration", handle, &number)) {
    gpu.pcie_generation = static_cast<int>(number);
  }
  if (nvml.ask("nvmlDeviceGetMaxPcieLinkWidth", handle, &number)) {
    gpu.pcie_lanes = static_cast<int>(number);
  }
  find_links(nvml, handle, gpu);
  return gpu;
}

}  // namespace

NvmlFindings ask_nvml(const char* library) {
  const Library nvml(library);
  NvmlFindings found;
  found.library = nvml.present();
  if (!found.library) return found;
  found.error = nvml.error();
  if (found.error != 0) return found;
  char driver[96] = "";
  if (nvml.ask("nvmlSystemGetDriverVersion", driver, 96u)) {
    driver[sizeof(driver) - 1] = '\0';
    found.driver = driver;
  }
  nvml.ask("nvmlSystemGetCudaDriverVersion_v2", &found.cuda);
  unsigned count = 0;
  if (!nvml.ask("nvmlDeviceGetCount_v2", &count)) count = 0;
  for (unsigned i = 0; i < count; ++i) {
    Handle handle = nullptr;
    if (!nvml.ask("nvmlDeviceGetHandleByIndex_v2", i, &handle)) continue;
    found.gpus.push_back(describe(nvml, handle));
  }
  return found;
}

double nvlink_bytes_per_second(const Gpu& gpu) {
  // Of one link in one direction, by version: NVLink 1 to 5.
  constexpr double kRates[] = {0, 20e9, 25e9, 25e9, 25e9, 50e9};
  const int version = std::clamp(gpu.nvlink_version, 0, 5);
  return gpu.nvlinks * kRates[version];
}

double pcie_bytes_per_second(int generation, int lanes) {
  if (generation < 1 || lanes < 1) return 0;
  // 3: 8 GT/s a lane with 128 of 130 bits; each generation doubles.
  return lanes * 8e9 / 8 * 128 / 130 * std::pow(2.0, generation - 3);
}

}  // namespace echelon
