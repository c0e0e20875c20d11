// NVML is loaded with dlopen and its functions are looked up by name, so that
// one build runs on machines with and without a driver. A function that an old
// driver lacks reports nothing.
#include "echelon/cluster/nvml.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <sstream>

namespace echelon::cluster {
namespace {

using Handle = void*;

// As in the driver's nvml.h.
struct Memory {
  unsigned long long total, free, used;
};
struct Utilization {
  unsigned gpu, memory;  // percent
};
constexpr unsigned kMostLinks = 18;
constexpr int kRemoteSwitch = 2;  // NVML_NVLINK_DEVICE_TYPE_SWITCH
constexpr int kFunctionNotFound = 13;
constexpr int kGpuIsLost = 15;
constexpr int kResetRequired = 16;
constexpr int kUncorrected = 1;  // errors
constexpr int kVolatile = 0;     // since the driver started
constexpr unsigned long long kSlowedByHeat = 0x20 | 0x40;
constexpr unsigned long long kSlowedByPower = 0x80;
constexpr int kOfTheGpu = 0;         // temperature
constexpr int kMultiprocessors = 1;  // clock

class Library {
 public:
  explicit Library(const char* name)
      : library_(::dlopen(name, RTLD_NOW | RTLD_LOCAL)) {
    if (is_installed())
      error_ = call("nvmlInit_v2").value_or(kFunctionNotFound);
  }
  ~Library() {
    if (!is_installed()) return;
    if (error_ == 0) call("nvmlShutdown");
    ::dlclose(library_);
  }
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  bool is_installed() const { return library_ != nullptr; }
  int error() const { return error_; }

  // NVML's error; none: the driver has no such function.
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

  // Empty where the driver does not tell. `of`: a handle, or nothing.
  template <class... Of>
  std::string text(const char* name, Of... of) const {
    std::array<char, 96> text{};
    if (!ask(name, of..., text.data(), 96u)) return "";
    text.back() = '\0';
    return text.data();
  }

  // Calls `take` with the index of each visible GPU, NVML's error for it, and
  // its handle.
  template <typename Take>
  void each_visible(
      const std::optional<std::string>& visible, const Take& take) const;

 private:
  void* library_;
  int error_ = 0;
};

template <typename Take>
void Library::each_visible(
    const std::optional<std::string>& visible, const Take& take) const {
  if (!is_installed() || error_ != 0) return;
  const auto take_number = [&](unsigned index) {
    Handle handle = nullptr;
    const auto error = call("nvmlDeviceGetHandleByIndex_v2", index, &handle);
    if (error) take(static_cast<int>(index), *error, handle);
  };
  if (!visible) {
    unsigned count = 0;
    if (!ask("nvmlDeviceGetCount_v2", &count)) count = 0;
    for (unsigned i = 0; i < count; ++i) take_number(i);
    return;
  }
  std::istringstream names(*visible);
  for (std::string name; std::getline(names, name, ',');) {
    char* end = nullptr;
    const long number = std::strtol(name.c_str(), &end, 10);
    if (end != name.c_str() && *end == '\0') {
      if (number < 0) break;  // as the driver reads the list
      take_number(static_cast<unsigned>(number));
      continue;
    }
    Handle handle = nullptr;
    unsigned index = 0;
    if (!ask("nvmlDeviceGetHandleByUUID", name.c_str(), &handle)) continue;
    ask("nvmlDeviceGetIndex", handle, &index);
    take(static_cast<int>(index), 0, handle);
  }
}

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

void find_slices(const Library& nvml, Handle handle, Gpu& gpu) {
  unsigned now = 0, after_reset = 0, most = 0;
  if (!nvml.ask("nvmlDeviceGetMigMode", handle, &now, &after_reset) ||
      now == 0 || !nvml.ask("nvmlDeviceGetMaxMigDeviceCount", handle, &most)) {
    return;
  }
  for (unsigned i = 0; i < most; ++i) {
    Handle slice = nullptr;
    if (!nvml.ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, i, &slice)) {
      continue;
    }
    const std::string uuid = nvml.text("nvmlDeviceGetUUID", slice);
    if (!uuid.empty()) gpu.slices.push_back(uuid);
  }
}

Gpu describe(const Library& nvml, Handle handle) {
  Gpu gpu;
  gpu.name = nvml.text("nvmlDeviceGetName", handle);
  gpu.uuid = nvml.text("nvmlDeviceGetUUID", handle);
  find_slices(nvml, handle, gpu);
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

void examine(const Library& nvml, Handle handle, GpuHealth& gpu) {
  Memory memory{};
  const auto error = nvml.call("nvmlDeviceGetMemoryInfo", handle, &memory);
  gpu.lost = error == kGpuIsLost;
  gpu.needs_reset = error == kResetRequired;
  unsigned long long number = 0;
  if (nvml.ask(
          "nvmlDeviceGetTotalEccErrors", handle, kUncorrected, kVolatile,
          &number)) {
    gpu.ecc_errors = static_cast<int64_t>(number);
  }
  int pages = 0;
  if (nvml.ask("nvmlDeviceGetRetiredPagesPendingStatus", handle, &pages)) {
    gpu.bad_memory_pending = pages != 0;
  }
  unsigned corrected = 0, uncorrected = 0, pending = 0, failed = 0;
  if (nvml.ask(
          "nvmlDeviceGetRemappedRows", handle, &corrected, &uncorrected,
          &pending, &failed)) {
    gpu.bad_memory_pending |= pending != 0;
    gpu.no_spare_rows = failed != 0;
  }
  if (nvml.ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle, &number)) {
    gpu.hot = (number & kSlowedByHeat) != 0;
    gpu.short_of_power = (number & kSlowedByPower) != 0;
  }
}

void measure(const Library& nvml, Handle handle, GpuUse& gpu) {
  gpu.uuid = nvml.text("nvmlDeviceGetUUID", handle);
  Utilization use{};
  if (nvml.ask("nvmlDeviceGetUtilizationRates", handle, &use)) {
    gpu.busy = use.gpu / 100.0;
  }
  Memory memory{};
  if (nvml.ask("nvmlDeviceGetMemoryInfo", handle, &memory)) {
    gpu.memory_used = static_cast<double>(memory.used);
    gpu.memory_total = static_cast<double>(memory.total);
  }
  unsigned number = 0;
  if (nvml.ask("nvmlDeviceGetTemperature", handle, kOfTheGpu, &number)) {
    gpu.celsius = number;
  }
  if (nvml.ask("nvmlDeviceGetPowerUsage", handle, &number)) {
    gpu.watts = number / 1e3;
  }
  if (nvml.ask("nvmlDeviceGetClockInfo", handle, kMultiprocessors, &number)) {
    gpu.hertz = number * 1e6;
  }
}

}  // namespace

struct Nvml::Impl : Library {
  using Library::Library;
};

Nvml::Nvml(const char* library) : impl_(std::make_unique<Impl>(library)) {}

Nvml::~Nvml() = default;

NvmlFindings Nvml::find() const {
  NvmlFindings found{.library = impl_->is_installed(), .error = impl_->error()};
  if (!found.library || found.error != 0) return found;
  found.driver = impl_->text("nvmlSystemGetDriverVersion");
  impl_->ask("nvmlSystemGetCudaDriverVersion_v2", &found.cuda);
  impl_->each_visible({}, [&](int, int error, Handle handle) {
    if (error == 0) found.gpus.push_back(describe(*impl_, handle));
  });
  return found;
}

std::vector<GpuHealth>
Nvml::health(const std::optional<std::string>& visible) const {
  std::vector<GpuHealth> all;
  impl_->each_visible(visible, [&](int index, int error, Handle handle) {
    GpuHealth gpu{
        .index = index,
        .lost = error == kGpuIsLost,
        .needs_reset = error == kResetRequired};
    if (error == 0) examine(*impl_, handle, gpu);
    all.push_back(gpu);
  });
  return all;
}

std::vector<GpuUse> Nvml::use(const std::optional<std::string>& visible) const {
  std::vector<GpuUse> all;
  impl_->each_visible(visible, [&](int index, int error, Handle handle) {
    GpuUse gpu{.index = index};
    if (error == 0) measure(*impl_, handle, gpu);
    all.push_back(gpu);
  });
  return all;
}

}  // namespace echelon::cluster
