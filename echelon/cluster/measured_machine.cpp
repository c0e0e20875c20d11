// A measurement becomes a cluster file of one node: the node of
// local_machine.h, in which measured rates replace the published or guessed
// ones. The rates are those of one rank while all ranks were busy, so that what
// they share (memory, links) is divided already. A device without published
// figures takes its fastest matmul as its peak.
#include "echelon/cluster/measured_machine.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "echelon/cluster/catalogue.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon::cluster {
namespace {

// "NVIDIA T4" -> "nvidia-t4"
std::string slug(const std::string& name) {
  std::string text;
  for (char c : name) {
    const auto byte = static_cast<unsigned char>(c);
    if (std::isalnum(byte) != 0) {
      text += static_cast<char>(std::tolower(byte));
    } else if (!text.empty() && text.back() != '-') {
      text += '-';
    }
  }
  while (!text.empty() && text.back() == '-') text.pop_back();
  return text.empty() ? "gpu" : text;
}

bool known_gpus(const LocalMachine& machine) {
  return machine.nvml.gpus.empty() ||
         !device_of_gpu(machine.nvml.gpus.front()).empty();
}

// The processor's node with the figures of a GPU that is not in the catalogue.
Node unknown_gpu_node(LocalMachine machine, int64_t ranks) {
  const Gpu gpu = machine.nvml.gpus.front();
  machine.nvml.gpus.clear();
  Node node = cluster_of(machine, ranks).groups.front().node;
  node.device.name = slug(gpu.name);
  node.device.memory_bytes = gpu.memory_bytes;
  const double pcie =
      pcie_bytes_per_second(gpu.pcie_generation, gpu.pcie_lanes);
  if (pcie > 0) node.host = {"PCIe", pcie, 7e-6};
  return node;
}

// A processor's share, or an unknown GPU, has no published peak; its fastest
// matmul stands for it.
void set_peaks(Device& device) {
  device.peak_flops_per_second.fill(0);
  for (const auto& rate : device.matrix_rates) {
    if (rate.kind != ProductKind::product) continue;
    double& peak =
        device.peak_flops_per_second[static_cast<size_t>(rate.precision)];
    peak = std::max(peak, rate.flops_per_second);
  }
}

// To four digits: no measurement has more, and people read the file.
double rounded(double value) {
  if (!(value > 0)) return value;
  const double scale = std::pow(10.0, 3 - std::floor(std::log10(value)));
  return std::round(value * scale) / scale;
}

std::string
source_of(const MachineMeasurement& measured, const LocalMachine& machine) {
  const std::string& processor = machine.processor.name;
  return format(
      "measured by echelon bench --save with {} rank{} on {}", measured.ranks,
      measured.ranks == 1 ? "" : "s",
      !machine.nvml.gpus.empty()
          ? machine.nvml.gpus.front().name
          : format(
                "{}, {} core{}", processor.empty() ? "a processor" : processor,
                machine.cores, machine.cores == 1 ? "" : "s"));
}

std::string microseconds(std::string_view what, double seconds) {
  return format("  {:<36} {:9.2f} us\n", what, seconds * 1e6);
}

// A shorter label for tables: "max_pool2d backward, channels last".
std::string label_of(std::string name) {
  for (const auto& [part, label] :
       {std::pair("native_", ""), std::pair("_with_indices", ""),
        std::pair("_backward", " backward"),
        std::pair(" channels last", ", channels last")}) {
    const size_t at = name.find(part);
    if (at != std::string::npos) name.replace(at, std::strlen(part), label);
  }
  return name;
}

// The rates of one kind of work.
struct Spread {
  std::string name;
  double least = 0, most = 0;
  int count = 0;
};

void add(std::vector<Spread>& all, const std::string& name, double rate) {
  const auto known = std::ranges::find(all, name, &Spread::name);
  Spread& one = known == all.end()
                    ? all.emplace_back(Spread{name, rate, rate, 0})
                    : *known;
  one.least = std::min(one.least, rate);
  one.most = std::max(one.most, rate);
  ++one.count;
}

// In billions a second.
std::string
to_text(const std::vector<Spread>& all, const char* unit, const char* what) {
  std::string text;
  for (const Spread& one : all) {
    text += format(
        "  {:<36} {:9.2f} to {:.2f} {}, {} {}\n", label_of(one.name),
        one.least / 1e9, one.most / 1e9, unit, one.count, what);
  }
  return text;
}

}  // namespace

Link link_of(const MachineMeasurement& measured) {
  const MeasuredCall* least = nullptr;
  const MeasuredCall* most = nullptr;
  for (const auto& call : measured.calls) {
    if (call.operation != "all_reduce") continue;
    if (least == nullptr || call.bytes < least->bytes) least = &call;
    if (most == nullptr || call.bytes > most->bytes) most = &call;
  }
  if (least == nullptr || least->bytes == most->bytes || measured.ranks < 2) {
    throw Error(
        "a link is measured by all_reduces of two sizes, 2 ranks or more");
  }
  const auto ranks = static_cast<double>(measured.ranks);
  // A ring all-reduce moves 2 (n - 1) / n of the bytes over each link. The
  // difference between two sizes gives the rate, and the rest of the smaller
  // one's time is the latency.
  const double share = 2 * (ranks - 1) / ranks;
  // Noise may make the larger one faster; the latency then counts as 0.
  const double seconds = most->seconds > least->seconds
                             ? most->seconds - least->seconds
                             : most->seconds;
  const double rate =
      share * static_cast<double>(most->bytes - least->bytes) / seconds;
  const double latency = std::max(
      0.0, least->seconds - share * static_cast<double>(least->bytes) / rate);
  return {"measured", rate, latency};
}

Cluster
cluster_of(const MachineMeasurement& measured, const LocalMachine& machine) {
  Cluster cluster;
  cluster.name = "measured";
  const bool known = known_gpus(machine);
  Node node = known ? cluster_of(machine, measured.ranks).groups.front().node
                    : unknown_gpu_node(machine, measured.ranks);
  node.name = "measured";
  Device& device = node.device;
  device.matrix_rates = measured.matrix_rates;
  for (auto& rate : device.matrix_rates) {
    rate.flops_per_second = rounded(rate.flops_per_second);
  }
  device.operator_rates = measured.operator_rates;
  for (auto& rate : device.operator_rates) {
    rate.bytes_per_second = rounded(rate.bytes_per_second);
  }
  device.memory_bytes_per_second = rounded(measured.memory_bytes_per_second);
  device.launch_seconds = rounded(measured.launch_seconds);
  device.launch_rates = measured.launch_rates;
  for (auto& rate : device.launch_rates) {
    rate.seconds = rounded(rate.seconds);
    rate.backward_seconds = rounded(rate.backward_seconds);
    rate.view_seconds = rounded(rate.view_seconds);
    rate.backward_view_seconds = rounded(rate.backward_view_seconds);
  }
  device.source = source_of(measured, machine);
  if (!known || machine.nvml.gpus.empty()) set_peaks(device);
  if (measured.ranks > 1) {
    node.inside = link_of(measured);
    node.inside.bytes_per_second = rounded(node.inside.bytes_per_second);
    node.inside.latency_seconds = rounded(node.inside.latency_seconds);
    // All ranks sent at once, so this is the bandwidth of each.
    node.switched = true;
    node.reduces_in_switch = false;
  }
  cluster.groups.push_back({node, 1});
  check(cluster);
  return cluster;
}

std::string to_text(const MachineMeasurement& measured) {
  std::string text = format(
      "of one rank, {} {}:\n", measured.ranks,
      measured.ranks == 1 ? "rank" : "ranks at once");
  text += format(
      "  {:<36} {:9.2f} GB/s\n", "memory, read and written",
      measured.memory_bytes_per_second / 1e9);
  text += microseconds("an operator, launched", measured.launch_seconds);
  for (const auto& rate : measured.launch_rates) {
    const std::string where =
        format(" beside {} KiB", std::llround(rate.bytes_beside / 1024));
    for (const auto& [what, seconds] :
         {std::pair("launched", rate.seconds),
          std::pair("of a gradient,", rate.backward_seconds),
          std::pair("a view", rate.view_seconds),
          std::pair("a gradient's view", rate.backward_view_seconds)}) {
      text += microseconds(what + where, seconds);
    }
  }
  std::vector<Spread> products, operators;
  for (const auto& rate : measured.matrix_rates) {
    add(products,
        format("{}, {}", to_string(rate.kind), to_string(rate.precision)),
        rate.flops_per_second);
  }
  for (const auto& rate : measured.operator_rates) {
    add(operators, rate.name, rate.bytes_per_second);
  }
  text += to_text(products, "GFLOP/s", "shapes") +
          to_text(operators, "GB/s", "sizes");
  for (const auto& call : measured.calls) {
    text += format(
        "  {:<36} {:9.1f} us\n",
        format("{} of {} bytes", call.operation, call.bytes),
        call.seconds * 1e6);
  }
  return text;
}

std::string to_json(const MachineMeasurement& measured) {
  auto rates = nlohmann::ordered_json::array();
  for (const auto& rate : measured.matrix_rates) {
    rates.push_back(
        {{"of", to_string(rate.kind)},
         {"precision", to_string(rate.precision)},
         {"m", rate.m},
         {"n", rate.n},
         {"k", rate.k},
         {"flops_per_second", rate.flops_per_second}});
  }
  auto operators = nlohmann::ordered_json::array();
  for (const auto& rate : measured.operator_rates) {
    operators.push_back(
        {{"name", rate.name},
         {"bytes", rate.bytes},
         {"bytes_per_second", rate.bytes_per_second}});
  }
  auto launches = nlohmann::ordered_json::array();
  for (const auto& rate : measured.launch_rates) {
    launches.push_back(
        {{"bytes_beside", rate.bytes_beside},
         {"seconds", rate.seconds},
         {"backward_seconds", rate.backward_seconds},
         {"view_seconds", rate.view_seconds},
         {"backward_view_seconds", rate.backward_view_seconds}});
  }
  auto calls = nlohmann::ordered_json::array();
  for (const auto& call : measured.calls) {
    calls.push_back(
        {{"operation", call.operation},
         {"bytes", call.bytes},
         {"seconds", call.seconds}});
  }
  return nlohmann::ordered_json{
      {"ranks", measured.ranks},
      {"memory_bytes_per_second", measured.memory_bytes_per_second},
      {"launch_seconds", measured.launch_seconds},
      {"launch_rates", launches},
      {"matrix_rates", rates},
      {"operator_rates", operators},
      {"calls", calls}}
      .dump(2);
}

}  // namespace echelon::cluster
