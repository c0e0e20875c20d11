#include <algorithm>
#include <cctype>
#include <vector>

#include "echelon/cluster/catalogue.h"
#include "echelon/cluster/cluster_file.h"
#include "echelon/cluster/quantity.h"
#include "echelon/config/value.h"

namespace echelon {
namespace {

using config::toml_text;

std::string quoted(const std::string& text) {
  return toml_text(std::string_view(text));
}

std::string key_text(const std::string& name) {
  const bool bare =
      !name.empty() && std::all_of(name.begin(), name.end(), [](char c) {
        return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-' ||
               c == '_';
      });
  return bare ? name : quoted(name);
}

std::string quantity(double value, Unit unit) {
  return quoted(quantity_text(value, unit));
}

std::string line(const std::string& key, const std::string& value) {
  return key + " = " + value + "\n";
}

// A changed device of the catalogue keeps its name, so what the catalogue has
// and this one lacks is written as 0.
Device known_device(const std::string& name) {
  const auto& names = device_names();
  const bool known = std::find(names.begin(), names.end(), name) != names.end();
  return known ? find_device(name) : Device{};
}

std::string peaks_text(const Device& device, const Device& known) {
  std::string text;
  for (Precision precision : kPrecisions) {
    const double peak = device.peak(precision);
    if (peak == 0 && known.peak(precision) == 0) continue;
    text += (text.empty() ? "{ " : ", ") + std::string(to_string(precision)) +
            " = " + quantity(peak, Unit::flops_per_second);
  }
  return text + " }";
}

std::string matrix_rates_text(const Device& device) {
  if (device.matrix_rates.empty()) return "";
  std::string text = "matrix_rates = [\n";
  for (const auto& rate : device.matrix_rates) {
    const std::string of =
        rate.kind == ProductKind::product
            ? ""
            : "of = " + quoted(std::string(to_string(rate.kind))) + ", ";
    text +=
        "  { " + of +
        "precision = " + quoted(std::string(to_string(rate.precision))) +
        ", m = " + std::to_string(rate.m) + ", n = " + std::to_string(rate.n) +
        ", k = " + std::to_string(rate.k) +
        ", rate = " + quantity(rate.flops_per_second, Unit::flops_per_second) +
        " },\n";
  }
  return text + "]\n";
}

std::string launch_rates_text(const Device& device) {
  if (device.launch_rates.empty()) return "";
  std::string text = "launch_rates = [\n";
  for (const auto& rate : device.launch_rates) {
    text += "  { beside = " + quantity(rate.bytes_beside, Unit::bytes) +
            ", launch = " + quantity(rate.seconds, Unit::seconds) +
            ", backward = " + quantity(rate.backward_seconds, Unit::seconds) +
            ", view = " + quantity(rate.view_seconds, Unit::seconds) +
            ", backward_view = " +
            quantity(rate.backward_view_seconds, Unit::seconds) + " },\n";
  }
  return text + "]\n";
}

std::string operator_rates_text(const Device& device) {
  if (device.operator_rates.empty()) return "";
  std::string text = "operator_rates = [\n";
  for (const auto& rate : device.operator_rates) {
    text += "  { name = " + quoted(rate.name) +
            ", bytes = " + quantity(rate.bytes, Unit::bytes) + ", rate = " +
            quantity(rate.bytes_per_second, Unit::bytes_per_second) + " },\n";
  }
  return text + "]\n";
}

std::string device_text(const Device& device) {
  std::string text = "\n[devices." + key_text(device.name) + "]\n";
  const std::string& kind = device.like.empty() ? device.name : device.like;
  if (!device.like.empty()) text += line("like", quoted(device.like));
  text += line("memory", quantity(device.memory_bytes, Unit::bytes));
  text += line(
      "memory_rate",
      quantity(device.memory_bytes_per_second, Unit::bytes_per_second));
  text += line("peak", peaks_text(device, known_device(kind)));
  if (device.price_per_hour != 0) {
    text += line("price_per_hour", toml_text(device.price_per_hour));
  }
  text += line("source", quoted(device.source));
  if (device.launch_seconds != 0) {
    text += line("launch", quantity(device.launch_seconds, Unit::seconds));
  }
  if (device.processor || known_device(device.name).processor) {
    text += line("processor", toml_text(device.processor));
  }
  return text + launch_rates_text(device) + matrix_rates_text(device) +
         operator_rates_text(device);
}

std::string link_text(const Link& link) {
  return "{ name = " + quoted(link.name) +
         ", rate = " + quantity(link.bytes_per_second, Unit::bytes_per_second) +
         ", latency = " + quantity(link.latency_seconds, Unit::seconds) + " }";
}

std::string node_text(const NodeGroup& group) {
  const Node& node = group.node;
  std::string text = "\n[[nodes]]\n";
  text += line("device", quoted(node.device.name));
  text += line("name", quoted(node.name));
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
  std::string text = line("name", quoted(cluster.name));
  text += line("nodes_per_rack", std::to_string(cluster.nodes_per_rack));
  text += line("oversubscription", toml_text(cluster.oversubscription));
  text += line(
      "mean_hours_between_failures",
      toml_text(cluster.mean_hours_between_failures));
  std::vector<std::string> written;
  for (const auto& group : cluster.groups) {
    const Device& device = group.node.device;
    if (device == known_device(device.name) ||
        std::find(written.begin(), written.end(), device.name) !=
            written.end()) {
      continue;
    }
    written.push_back(device.name);
    text += device_text(device);
  }
  for (const auto& group : cluster.groups) text += node_text(group);
  return text;
}

}  // namespace echelon
