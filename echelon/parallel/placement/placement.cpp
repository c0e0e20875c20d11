// The layers are counted on the meta device, which gives each its FLOPs and
// bytes. Tied parameters are counted where their first name is, and once more
// as a copy on any other device. layout/partition.h then partitions the list;
// check_fits() compares each share with its device's limit.
#include "echelon/parallel/placement/placement.h"

#include <ATen/DeviceAccelerator.h>

#include <algorithm>
#include <exception>
#include <map>
#include <optional>

#include "echelon/counting/meta_mode.h"
#include "echelon/error.h"
#include "echelon/layers/ties.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon::placement {
namespace {

std::vector<int64_t> limits_of(const PlacementOptions& options) {
  const auto& devices = options.devices;
  if (!options.limits.empty()) {
    if (options.limits.size() != devices.size()) {
      throw ConfigError(format(
          "{} memory limits for {} devices; give one for each, or none",
          options.limits.size(), devices.size()));
    }
    return options.limits;
  }
  std::vector<int64_t> limits;
  for (const auto& device : devices) {
    const auto memory = device_memory(device);
    const auto sharers = std::count(devices.begin(), devices.end(), device);
    limits.push_back(memory ? *memory / sharers : kNoLimit);
  }
  return limits;
}

// A tied parameter other than the first of its group.
struct ExtraName {
  size_t layer;  // its own
  size_t owner;  // the first one's
  int64_t elements;
  int64_t bytes;
};

std::vector<ExtraName> extra_names(const LayerList& layers) {
  std::vector<ExtraName> extras;
  for (const auto& group : tied_groups(layers)) {
    for (size_t i = 1; i < group.names.size(); ++i) {
      const size_t layer = group.layers[i];
      const auto built = counting::build_on_meta(layers[layer]);
      const auto name = group.names[i].substr(layers[layer].name.size() + 1);
      const auto tensor = built.module->named_parameters()[name];
      extras.push_back(
          {layer, group.layers[0], tensor.numel(),
           static_cast<int64_t>(tensor.nbytes())});
    }
  }
  return extras;
}

// Counts a tied parameter only in the layer of its first name.
void count_ties_once(
    std::vector<counting::LayerCost>& costs,
    const std::vector<ExtraName>& extras) {
  for (const auto& extra : extras) {
    costs[extra.layer].parameters -= extra.elements;
    costs[extra.layer].parameter_bytes -= extra.bytes;
  }
}

SliceMemory memory_of(
    const std::vector<counting::LayerCost>& costs,
    const PlacementOptions& options, const std::vector<int64_t>& limits) {
  SliceMemory memory{.limits = limits};
  for (const auto& cost : costs) {
    memory.bytes.push_back(
        2 * cost.parameter_bytes + cost.parameters * options.optimizer_bytes +
        cost.buffer_bytes);
    // A boundary may come before any layer, so each layer is assumed to store
    // its input.
    memory.stored_bytes.push_back(cost.activation_bytes + cost.repeated_bytes);
    memory.names.push_back(cost.name);
  }
  return memory;
}

std::vector<size_t> choose_partition(
    const std::vector<counting::LayerCost>& costs,
    const PlacementOptions& options, const SliceMemory& memory) {
  const size_t slices = options.devices.size();
  if (!options.partition_at.empty()) {
    return partition_at(memory.names, options.partition_at, slices);
  }
  return options.balance == Balance::memory
             ? balance_memory(slices, memory)
             : balance(counting::flops_of(costs), slices, memory);
}

int64_t copied_bytes(
    const std::vector<ExtraName>& extras, const std::vector<size_t>& boundaries,
    const std::vector<torch::Device>& devices, size_t slice) {
  const auto slice_of = [&](size_t layer) {
    return static_cast<size_t>(
        std::ranges::upper_bound(boundaries, layer) - boundaries.begin() - 1);
  };
  std::map<size_t, int64_t> bytes;  // by owner: one copy serves all names
  for (const auto& extra : extras) {
    if (slice_of(extra.layer) == slice &&
        devices[slice_of(extra.owner)] != devices[slice]) {
      bytes[extra.owner] = extra.bytes;
    }
  }
  int64_t sum = 0;
  for (const auto& [owner, each] : bytes) sum += each;
  return sum;
}

DeviceShare share_of(
    const std::vector<counting::LayerCost>& costs, size_t begin, size_t end,
    const PlacementOptions& options) {
  DeviceShare share;
  share.first = costs[begin].name;
  share.last = costs[end - 1].name;
  share.num_layers = end - begin;
  for (size_t i = begin; i < end; ++i) {
    share.parameters += costs[i].parameters;
    share.parameter_bytes += costs[i].parameter_bytes;
    share.buffer_bytes += costs[i].buffer_bytes;
    share.flops += costs[i].flops();
  }
  share.gradient_bytes = share.parameter_bytes;
  share.optimizer_bytes = share.parameters * options.optimizer_bytes;
  share.activation_bytes = counting::activation_bytes(costs, begin, end);
  share.output_bytes = costs[end - 1].output_bytes;
  return share;
}

std::string layers_of(const DeviceShare& share) {
  return share.num_layers == 1 ? "layer " + share.first
                               : format(
                                     "{} layers, {} to {}", share.num_layers,
                                     share.first, share.last);
}

std::string memory_kinds_of(const DeviceShare& share) {
  std::string text;
  const auto add = [&](const char* name, int64_t bytes) {
    if (bytes == 0) return;
    text +=
        format("{}{} {}", text.empty() ? "" : ", ", name, format_bytes(bytes));
  };
  add("parameters", share.parameter_bytes);
  add("gradients", share.gradient_bytes);
  add("optimizer", share.optimizer_bytes);
  add("buffers", share.buffer_bytes);
  add("copies of tied parameters", share.copy_bytes);
  add("activations", share.activation_bytes);
  return text.empty() ? "nothing" : text;
}

std::string need_of(const DeviceShare& share) {
  return format_bytes(share.total_bytes()) +
         (share.limit == kNoLimit ? ""
                                  : " of its " + format_bytes(share.limit));
}

void check_fits(const Placement& placement) {
  std::string text;
  bool fits = true;
  for (size_t i = 0; i < placement.devices.size(); ++i) {
    const auto& share = placement.devices[i];
    fits = fits && share.total_bytes() <= share.limit;
    text += format(
        "\n  device {} ({}, {}) needs {}", i, share.device.str(),
        layers_of(share), need_of(share));
  }
  if (fits) return;
  throw ConfigError(format(
      "the model does not fit on its devices:{}\nuse more devices, a smaller "
      "batch, another partition or an optimizer that keeps less",
      text));
}

}  // namespace

std::optional<int64_t> device_memory(torch::Device device) {
  if (device.is_cpu()) return std::nullopt;
  try {
    auto* allocator = at::getDeviceAllocator(device.type());
    return static_cast<int64_t>(
        allocator->getMemoryInfo(device.has_index() ? device.index() : 0)
            .second);
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    throw ConfigError(format(
        "layers are placed on {}, which is not there: {}; name devices of this "
        "machine, or cpu",
        device.str(), text.substr(0, text.find('\n'))));
  }
}

Placement
plan_placement(const LayerList& given, const PlacementOptions& options) {
  if (options.devices.empty()) {
    throw ConfigError("layers are placed on 0 devices; name at least one");
  }
  const auto limits = limits_of(options);
  LayerList layers = given;
  for (const auto& tie : find_ties(given, counting::build_on_meta)) {
    layers.tie(tie.first, tie.second);
  }
  auto costs = counting::count_layers(layers, options.inputs);
  const auto extras = extra_names(layers);
  count_ties_once(costs, extras);

  Placement placement;
  placement.boundaries =
      choose_partition(costs, options, memory_of(costs, options, limits));
  for (size_t i = 0; i < options.devices.size(); ++i) {
    auto& share = placement.devices.emplace_back(share_of(
        costs, placement.boundaries[i], placement.boundaries[i + 1], options));
    share.device = options.devices[i];
    share.limit = limits[i];
    share.copy_bytes =
        copied_bytes(extras, placement.boundaries, options.devices, i);
  }
  check_fits(placement);
  return placement;
}

std::vector<std::string> describe(const Placement& placement) {
  double flops = 0.0;
  int64_t parameters = 0;
  int64_t bytes = 0;
  for (const auto& share : placement.devices) {
    flops += share.flops;
    parameters += share.parameters;
    bytes += share.total_bytes();
  }
  std::vector<std::string> lines;
  for (size_t i = 0; i < placement.devices.size(); ++i) {
    const auto& share = placement.devices[i];
    lines.push_back(format(
        "device {} ({}): {}; {} of the FLOPs; {}: {}", i, share.device.str(),
        layers_of(share), format_percent(flops > 0 ? share.flops / flops : 0.0),
        need_of(share), memory_kinds_of(share)));
  }
  lines.push_back(format(
      "{}, {} on {}", counted(parameters, "parameter"), format_bytes(bytes),
      counted(std::ssize(placement.devices), "device")));
  return lines;
}

}  // namespace echelon::placement
