#include <algorithm>
#include <cctype>
#include <vector>

#include "echelon/cluster/catalogue.h"
#include "echelon/cluster/cluster_file.h"
#include "echelon/cluster/quantity.h"
#include "echelon/config/value.h"
#include "echelon/text/format.h"

namespace echelon::cluster {
namespace {

using config::toml_text;

std::string key_text(const std::string& name) {
  const bool bare = !name.empty() && std::ranges::all_of(name, [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-' ||
           c == '_';
  });
  return bare ? name : toml_text(name);
}

std::string quantity(double value, Unit unit) {
  return toml_text(quantity_text(value, unit));
}

std::string line(const char* key, const std::string& value) {
  return format("{} = {}\n", key, value);
}

// A changed device of the catalogue keeps its name, so what the catalogue has
// and this one lacks is written as 0.
Device known_device(const std::string& name) {
  return in_catalogue(name) ? find_device(name) : Device{};
}

std::string peaks_text(const Device& device, const Device& known) {
  std::string text;
  for (Precision precision : kPrecisions) {
    const double peak = device.peak(precision);
    if (peak == 0 && known.peak(precision) == 0) continue;
    text += format(
        "{}{} = {}", text.empty() ? "{ " : ", ", to_string(precision),
        quantity(peak, Unit::flops_per_second));
  }
  return text + " }";
}

// A list of tables, by the keys and values of each.
template <class Rate>
std::string list_text(
    const char* key, const std::vector<Rate>& rates,
    std::string (*text_of)(const Rate&)) {
  if (rates.empty()) return "";
  std::string text = format("{} = [\n", key);
  for (const auto& rate : rates) text += format("  {{ {} }},\n", text_of(rate));
  return text + "]\n";
}

std::string matrix_rate_text(const MatrixRate& rate) {
  return format(
      "{}precision = {}, m = {}, n = {}, k = {}, rate = {}",
      rate.kind == ProductKind::product
          ? ""
          : format("of = {}, ", toml_text(to_string(rate.kind))),
      toml_text(to_string(rate.precision)), rate.m, rate.n, rate.k,
      quantity(rate.flops_per_second, Unit::flops_per_second));
}

std::string launch_rate_text(const LaunchRate& rate) {
  return format(
      "beside = {}, launch = {}, backward = {}, view = {}, backward_view = {}",
      quantity(rate.bytes_beside, Unit::bytes),
      quantity(rate.seconds, Unit::seconds),
      quantity(rate.backward_seconds, Unit::seconds),
      quantity(rate.view_seconds, Unit::seconds),
      quantity(rate.backward_view_seconds, Unit::seconds));
}

std::string operator_rate_text(const OperatorRate& rate) {
  return format(
      "name = {}, bytes = {}, rate = {}", toml_text(rate.name),
      quantity(rate.bytes, Unit::bytes),
      quantity(rate.bytes_per_second, Unit::bytes_per_second));
}

std::string device_text(const Device& device) {
  std::string text = format("\n[devices.{}]\n", key_text(device.name));
  const std::string& kind = device.like.empty() ? device.name : device.like;
  if (!device.like.empty()) text += line("like", toml_text(device.like));
  text += line("memory", quantity(device.memory_bytes, Unit::bytes));
  text += line(
      "memory_rate",
      quantity(device.memory_bytes_per_second, Unit::bytes_per_second));
  text += line("peak", peaks_text(device, known_device(kind)));
  if (device.price_per_hour != 0) {
    text += line("price_per_hour", toml_text(device.price_per_hour));
  }
  text += line("source", toml_text(device.source));
  if (device.launch_seconds != 0) {
    text += line("launch", quantity(device.launch_seconds, Unit::seconds));
  }
  if (device.processor || known_device(device.name).processor) {
    text += line("processor", toml_text(device.processor));
  }
  return text +
         list_text("launch_rates", device.launch_rates, launch_rate_text) +
         list_text("matrix_rates", device.matrix_rates, matrix_rate_text) +
         list_text("operator_rates", device.operator_rates, operator_rate_text);
}

std::string link_text(const Link& link) {
  return format(
      "{{ name = {}, rate = {}, latency = {} }}", toml_text(link.name),
      quantity(link.bytes_per_second, Unit::bytes_per_second),
      quantity(link.latency_seconds, Unit::seconds));
}

std::string node_text(const NodeGroup& group) {
  const Node& node = group.node;
  std::string text = "\n[[nodes]]\n";
  text += line("device", toml_text(node.device.name));
  text += line("name", toml_text(node.name));
  text += line("count", std::to_string(group.count));
  text += line("devices", std::to_string(node.num_devices));
  text += line("inside", link_text(node.inside));
  text += line("switched", toml_text(node.switched));
  text += line("reduces_in_switch", toml_text(node.reduces_in_switch));
  text += line("network", link_text(node.network));
  text += line("host", link_text(node.host));
  text += line("host_memory", quantity(node.host_memory_bytes, Unit::bytes));
  if (node.host_memory_bytes_per_second > 0) {
    text += line(
        "host_memory_rate",
        quantity(node.host_memory_bytes_per_second, Unit::bytes_per_second));
  }
  return text;
}

}  // namespace

std::string to_toml(const Cluster& cluster) {
  std::string text = line("name", toml_text(cluster.name));
  text += line("nodes_per_rack", std::to_string(cluster.nodes_per_rack));
  text += line("oversubscription", toml_text(cluster.oversubscription));
  text += line(
      "mean_hours_between_failures",
      toml_text(cluster.mean_hours_between_failures));
  std::vector<std::string> written;
  for (const auto& group : cluster.groups) {
    const Device& device = group.node.device;
    if (device == known_device(device.name)) continue;
    if (std::ranges::find(written, device.name) != written.end()) continue;
    written.push_back(device.name);
    text += device_text(device);
  }
  for (const auto& group : cluster.groups) text += node_text(group);
  return text;
}

}  // namespace echelon::cluster
