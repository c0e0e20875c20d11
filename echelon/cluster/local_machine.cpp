// NVML is loaded with dlopen and its functions are looked up by name, so that
// one build runs on machines with and without a driver; a function that is
// missing reports nothing. A known GPU gives the catalogue's usual node, in
// which the figures that the driver and the kernel report replace the usual
// ones. A machine without GPUs becomes shares of its processor, whose rates are
// guessed from clock and cores.
#include "echelon/cluster/local_machine.h"

#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>

#include "echelon/cluster/catalogue.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon::cluster {
namespace {

// --- NVML

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

std::string uuid_of(const Library& nvml, Handle handle) {
  char text[96] = "";
  if (!nvml.ask("nvmlDeviceGetUUID", handle, text, 96u)) return "";
  text[sizeof(text) - 1] = '\0';
  return text;
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
    const std::string uuid = uuid_of(nvml, slice);
    if (!uuid.empty()) gpu.slices.push_back(uuid);
  }
}

Gpu describe(const Library& nvml, Handle handle) {
  Gpu gpu;
  gpu.uuid = uuid_of(nvml, handle);
  find_slices(nvml, handle, gpu);
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

// As in the driver's nvml.h.
constexpr int kGpuIsLost = 15;
constexpr int kResetRequired = 16;
constexpr int kUncorrected = 1;  // errors
constexpr int kVolatile = 0;     // since the driver started
constexpr unsigned long long kSlowedByHeat = 0x20 | 0x40;
constexpr unsigned long long kSlowedByPower = 0x80;

void look_at(const Library& nvml, Handle handle, GpuHealth& gpu) {
  Memory memory{};
  const int error =
      nvml.call("nvmlDeviceGetMemoryInfo", handle, &memory).value_or(0);
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

// Calls `take` with the index of each GPU that the variable makes visible,
// NVML's error for it, and its handle.
template <typename Take>
void each_visible(
    const Library& nvml, const std::optional<std::string>& visible,
    const Take& take) {
  const auto take_number = [&](unsigned index) {
    Handle handle = nullptr;
    const auto error =
        nvml.call("nvmlDeviceGetHandleByIndex_v2", index, &handle);
    if (error) take(static_cast<int>(index), *error, handle);
  };
  if (!visible) {
    unsigned count = 0;
    if (!nvml.ask("nvmlDeviceGetCount_v2", &count)) count = 0;
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
    const auto error =
        nvml.call("nvmlDeviceGetHandleByUUID", name.c_str(), &handle);
    if (error != 0) continue;
    nvml.ask("nvmlDeviceGetIndex", handle, &index);
    take(static_cast<int>(index), 0, handle);
  }
}

// --- The machine

namespace fs = std::filesystem;

std::string first_line(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::vector<fs::path> entries_of(const fs::path& folder) {
  std::vector<fs::path> entries;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end;
       it.increment(error)) {
    entries.push_back(it->path());
  }
  std::ranges::sort(entries);
  return entries;
}

bool has(const std::string& text, const char* word) {
  return text.find(word) != std::string::npos;
}

// Guesses, as good as can be without measuring: server memory gives a core some
// 10 GB/s; a copy between two ranks goes through it twice.
constexpr double kCoreMemoryRate = 10e9;
constexpr double kSharedMemoryRate = 5e9;
constexpr double kSharedMemoryLatency = 20e-6;
constexpr double kUnknownHertz = 2.5e9;
constexpr int64_t kMostShares = 4096;  // of a processor

double usable_memory(const HostMemory& memory) {
  const bool limited =
      memory.limit_bytes > 0 && memory.limit_bytes < memory.total_bytes;
  return limited ? memory.limit_bytes : memory.total_bytes;
}

Node processor_node(const LocalMachine& machine, int64_t devices) {
  const auto share = static_cast<double>(devices);
  const double hertz =
      machine.processor.hertz > 0 ? machine.processor.hertz : kUnknownHertz;
  const double flops = hertz * machine.cores *
                       std::max(8, machine.processor.fp32_flops_per_cycle);
  Node node;
  node.name = "local";
  node.num_devices = devices;
  node.device.name = "cpu";
  node.device.processor = true;
  node.device.memory_bytes = usable_memory(machine.memory) / share;
  node.device.memory_bytes_per_second = kCoreMemoryRate * machine.cores / share;
  const auto set = [&](Precision precision, double peak) {
    node.device.peak_flops_per_second[static_cast<size_t>(precision)] =
        peak / share;
  };
  set(Precision::fp64, flops / 2);
  set(Precision::fp32, flops);
  set(Precision::bf16, flops);
  const std::string& name = machine.processor.name;
  node.device.source = format(
      "guessed from {}, {} core{}; echelon bench --save measures",
      name.empty() ? "the processor" : name, machine.cores,
      machine.cores == 1 ? "" : "s");
  node.switched = false;
  node.inside = {"shared memory", kSharedMemoryRate, kSharedMemoryLatency};
  node.network = network_of(machine, devices);
  node.host = {"memory", node.device.memory_bytes_per_second, 1e-6};
  node.host_memory_bytes = usable_memory(machine.memory);
  return node;
}

Node gpu_node(const LocalMachine& machine, int64_t devices) {
  const auto& gpus = machine.nvml.gpus;
  const std::string name = device_of_gpu(gpus.front());
  if (name.empty()) {
    throw ConfigError(format(
        "this machine's GPU \"{}\" is not in the catalogue; `echelon bench "
        "--save FILE` measures it, and FILE is then a cluster",
        gpus.front().name));
  }
  for (const auto& gpu : gpus) {
    if (gpu.name == gpus.front().name) continue;
    throw ConfigError(format(
        "this machine has GPUs of several kinds, {} and {}; write a cluster "
        "file with [[nodes]] for each kind",
        gpus.front().name, gpu.name));
  }
  Node node = usual_node(name);
  node.name = "local";
  node.num_devices = devices;
  const Gpu& gpu = gpus.front();
  if (gpu.memory_bytes > 0) node.device.memory_bytes = gpu.memory_bytes;
  const double pcie =
      pcie_bytes_per_second(gpu.pcie_generation, gpu.pcie_lanes);
  const std::string pcie_name = format("PCIe {}", gpu.pcie_generation);
  // A node's usual links stay where the driver tells nothing.
  if (pcie > 0 && node.host.name.rfind("PCIe", 0) == 0) {
    node.host = {pcie_name, pcie, node.host.latency_seconds};
  }
  const double nvlink = nvlink_bytes_per_second(gpu);
  if (nvlink > 0) {
    node.inside = {format("NVLink {}", gpu.nvlink_version), nvlink, 3e-6};
    node.switched = true;
    // A switch that reduces exists only where the links end at a switch.
    node.reduces_in_switch &= gpu.nvswitch;
  } else if (pcie > 0) {
    node.inside = {pcie_name, pcie, 7e-6};
    node.switched = false;
    node.reduces_in_switch = false;
  }
  if (!machine.adapters.empty()) {
    node.network = network_of(machine, static_cast<int64_t>(gpus.size()));
  }
  if (usable_memory(machine.memory) > 0) {
    node.host_memory_bytes = usable_memory(machine.memory);
  }
  return node;
}

}  // namespace

Link network_of(const LocalMachine& machine, int64_t devices) {
  double infiniband = 0, other = 0;
  for (const auto& adapter : machine.adapters) {
    if (adapter.infiniband) {
      // A rank is taken to use all InfiniBand adapters, but one Ethernet.
      infiniband += adapter.bytes_per_second;
    } else {
      other = std::max(other, adapter.bytes_per_second);
    }
  }
  const double rate = infiniband > 0 ? infiniband : other;
  if (rate == 0) return {};
  return {
      infiniband > 0 ? "InfiniBand" : "Ethernet",
      rate / static_cast<double>(devices), infiniband > 0 ? 5e-6 : 30e-6};
}

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

std::vector<GpuHealth>
ask_gpu_health(const std::optional<std::string>& visible, const char* library) {
  std::vector<GpuHealth> all;
  const Library nvml(library);
  if (!nvml.present() || nvml.error() != 0) return all;
  each_visible(nvml, visible, [&](int index, int error, Handle handle) {
    GpuHealth gpu{
        .index = index,
        .lost = error == kGpuIsLost,
        .needs_reset = error == kResetRequired};
    if (error == 0) look_at(nvml, handle, gpu);
    all.push_back(gpu);
  });
  return all;
}

class GpuMeter::Impl {
 public:
  Impl(const std::optional<std::string>& visible, const char* library)
      : visible_(visible), nvml_(library) {}

  std::vector<GpuUse> read() const {
    std::vector<GpuUse> all;
    if (!nvml_.present() || nvml_.error() != 0) return all;
    each_visible(nvml_, visible_, [&](int index, int error, Handle handle) {
      GpuUse gpu{.index = index};
      if (error == 0) measure(handle, gpu);
      all.push_back(gpu);
    });
    return all;
  }

 private:
  void measure(Handle handle, GpuUse& gpu) const {
    gpu.uuid = uuid_of(nvml_, handle);
    Utilization use{};
    if (nvml_.ask("nvmlDeviceGetUtilizationRates", handle, &use)) {
      gpu.busy = use.gpu / 100.0;
    }
    Memory memory{};
    if (nvml_.ask("nvmlDeviceGetMemoryInfo", handle, &memory)) {
      gpu.memory_used = static_cast<double>(memory.used);
      gpu.memory_total = static_cast<double>(memory.total);
    }
    unsigned number = 0;
    if (nvml_.ask("nvmlDeviceGetTemperature", handle, kOfTheGpu, &number)) {
      gpu.celsius = number;
    }
    if (nvml_.ask("nvmlDeviceGetPowerUsage", handle, &number)) {
      gpu.watts = number / 1e3;
    }
    if (nvml_.ask(
            "nvmlDeviceGetClockInfo", handle, kMultiprocessors, &number)) {
      gpu.hertz = number * 1e6;
    }
  }

  // As in the driver's nvml.h.
  struct Utilization {
    unsigned gpu, memory;  // percent
  };
  static constexpr int kOfTheGpu = 0;
  static constexpr int kMultiprocessors = 1;

  const std::optional<std::string> visible_;
  const Library nvml_;
};

GpuMeter::GpuMeter(
    const std::optional<std::string>& visible, const char* library)
    : impl_(std::make_unique<Impl>(visible, library)) {}

GpuMeter::~GpuMeter() = default;

std::vector<GpuUse> GpuMeter::read() const {
  return impl_->read();
}

double nvlink_bytes_per_second(const Gpu& gpu) {
  // The rates of one link in one direction, by version: NVLink 1 to 5.
  constexpr double kRates[] = {0, 20e9, 25e9, 25e9, 25e9, 50e9};
  const int version = std::clamp(gpu.nvlink_version, 0, 5);
  return gpu.nvlinks * kRates[version];
}

double pcie_bytes_per_second(int generation, int lanes) {
  if (generation < 1 || lanes < 1) return 0;
  // 3: 8 GT/s a lane with 128 of 130 bits; each generation doubles.
  return lanes * 8e9 / 8 * 128 / 130 * std::pow(2.0, generation - 3);
}

std::vector<Adapter> find_adapters(const std::string& sys) {
  std::vector<Adapter> adapters;
  for (const auto& device : entries_of(fs::path(sys) / "class/infiniband")) {
    for (const auto& port : entries_of(device / "ports")) {
      if (!has(first_line(port / "state"), "ACTIVE")) continue;
      // "400 Gb/sec (4X NDR)"
      const double gigabits =
          std::strtod(first_line(port / "rate").c_str(), nullptr);
      if (gigabits <= 0) continue;
      adapters.push_back(
          {device.filename().string(), true, gigabits / 8 * 1e9});
    }
  }
  for (const auto& device : entries_of(fs::path(sys) / "class/net")) {
    std::error_code error;
    if (!fs::exists(device / "device", error)) continue;
    const double megabits =
        std::strtod(first_line(device / "speed").c_str(), nullptr);
    if (megabits <= 0 || first_line(device / "operstate") != "up") continue;
    adapters.push_back({device.filename().string(), false, megabits / 8 * 1e6});
  }
  return adapters;
}

LocalMachine look_at_machine() {
  return {
      find_host_processor(), available_cores(), host_memory(), ask_nvml(),
      find_adapters()};
}

std::string device_of_gpu(const Gpu& gpu) {
  const std::string& name = gpu.name;
  const double gib = gpu.memory_bytes / (1 << 30);
  if (has(name, "GB300")) return "gb300";
  if (has(name, "GB200")) return "gb200";
  if (has(name, "B300")) return "b300";
  if (has(name, "B200")) return "b200";
  if (has(name, "GH200")) return "gh200";
  if (has(name, "H200")) return "h200";
  if (has(name, "H100 PCIe")) return "h100-pcie";
  if (has(name, "H100")) return gib > 85 ? "h100-96gb" : "h100-sxm";
  if (has(name, "A100")) return gib > 45 ? "a100-80gb" : "a100-40gb";
  if (has(name, "V100")) return gib > 17 ? "v100" : "v100-16gb";
  if (has(name, "L40S")) return "l40s";
  if (name.ends_with(" L4")) return "l4";
  if (name.ends_with("RTX 4090")) return "rtx-4090";
  return "";
}

Cluster cluster_of(const LocalMachine& machine, int64_t devices) {
  const auto gpus = static_cast<int64_t>(machine.nvml.gpus.size());
  const int64_t most = gpus > 0 ? gpus : kMostShares;
  if (devices > most) {
    throw ConfigError(format(
        "local:{}: this machine has {}; at most {} devices are taken here",
        devices, gpus > 0 ? format("{} GPUs", gpus) : "a processor", most));
  }
  Cluster cluster{.name = "local", .groups = {}};
  cluster.groups.push_back(
      {gpus > 0
           ? gpu_node(machine, devices > 0 ? devices : gpus)
           : processor_node(machine, devices > 0 ? devices : machine.cores),
       1});
  check(cluster);
  return cluster;
}

}  // namespace echelon::cluster
