// A known GPU gives the catalogue's usual node, in which the figures that the
// driver and the kernel report replace the usual ones. A machine without GPUs
// becomes shares of its processor, whose rates are guessed from clock and
// cores.
#include "echelon/cluster/local_machine.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "echelon/cluster/catalogue.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon::cluster {
namespace {

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
      find_host_processor(), available_cores(), host_memory(), Nvml().find(),
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
