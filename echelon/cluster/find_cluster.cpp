#include <sys/stat.h>

#include <charconv>
#include <optional>

#include "echelon/cluster/catalogue.h"
#include "echelon/cluster/cluster_file.h"
#include "echelon/cluster/local_cluster.h"
#include "echelon/config/value.h"
#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/text/nearest.h"

namespace echelon::cluster {
namespace {

bool is_path(const std::string& text) {
  struct stat found {};
  return text.find('/') != std::string::npos || text.ends_with(".toml") ||
         ::stat(text.c_str(), &found) == 0;
}

// A whole number from 1 on, and nothing else.
std::optional<int64_t> count_of(std::string_view text) {
  int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  const bool whole = error == std::errc() && rest == end;
  if (!whole || value < 1 || value > kMaxClusterDevices) return std::nullopt;
  return value;
}

[[noreturn]] void fail(const std::string& text, const std::string& why) {
  throw ConfigError("cluster \"" + config::shortened(text) + "\": " + why);
}

int64_t count_in(const std::string& text, std::string_view number) {
  if (const auto count = count_of(number)) return *count;
  fail(
      text,
      in_quotes(number.substr(0, 30)) +
          " is no number of devices; it is DEVICE:NODESxDEVICES, as in "
          "h100-sxm:64x8, or DEVICE:DEVICES, as in a100-80gb:1024 (from 1 to "
          "10 million)");
}

void add_usual_nodes(Cluster& cluster, const Node& node, int64_t devices) {
  const int64_t nodes = (devices + node.num_devices - 1) / node.num_devices;
  const Cluster usual{.name = {}, .groups = {{node, nodes}}};
  for (auto& group : usual.first(devices).groups) {
    cluster.groups.push_back(std::move(group));
  }
}

// The devices that a name may have meant: "h100" is the beginning of three.
std::string devices_meant(const std::string& device) {
  std::vector<std::string> begun;
  for (const auto& name : device_names()) {
    if (name.starts_with(device + "-")) begun.push_back(name);
  }
  return begun.empty() ? config::did_you_mean(device, device_names())
                       : format("; did you mean {}?", join(begun, " or "));
}

Node node_named(const std::string& text, std::string_view device) {
  if (in_catalogue(device)) return usual_node(device);
  if (device.empty())
    fail(text, "a device's name is missing, as in h100-sxm:8");
  // "8xh100": the number comes last.
  const size_t times = device.find_first_not_of("0123456789");
  if (times != 0 && times != device.npos && device[times] == 'x') {
    fail(
        text, format(
                  "write DEVICE:DEVICES, as in h100-sxm:{}{}",
                  device.substr(0, times),
                  devices_meant(std::string(device.substr(times + 1)))));
  }
  fail(
      text, format(
                "no device \"{}\" in the catalogue, and no file of that "
                "name{} (devices: {})",
                device.substr(0, 60), devices_meant(std::string(device)),
                join(device_names(), ", ")));
}

void add_part(
    Cluster& cluster, const std::string& text, std::string_view part) {
  const size_t colon = part.find(':');
  Node node = node_named(text, part.substr(0, colon));
  if (colon == std::string_view::npos) {
    cluster.groups.push_back({node, 1});
    return;
  }
  const std::string_view counts = part.substr(colon + 1);
  const size_t times = counts.find('x');
  if (times == std::string_view::npos) {
    add_usual_nodes(cluster, node, count_in(text, counts));
    return;
  }
  const int64_t nodes = count_in(text, counts.substr(0, times));
  node.num_devices = count_in(text, counts.substr(times + 1));
  if (node.num_devices > 1 && node.inside.bytes_per_second == 0) {
    fail(
        text,
        format(
            "{} has no link inside a node in the catalogue; write {}:{}, "
            "or a cluster file that says the link",
            node.device.name, node.device.name, nodes * node.num_devices));
  }
  cluster.groups.push_back({node, nodes});
}

}  // namespace

Cluster find_cluster(const std::string& text) {
  if (text.empty()) {
    throw ConfigError(
        "cluster: no name; give DEVICE:NODESxDEVICES, as in h100-sxm:64x8, or "
        "a cluster file");
  }
  if (text == "local") return local_cluster(0).cluster;
  if (text.rfind("local:", 0) == 0) {
    return local_cluster(count_in(text, text.substr(6))).cluster;
  }
  if (is_path(text)) return read_cluster(text);
  Cluster cluster;
  cluster.name = text;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find('+', begin), text.size());
    add_part(cluster, text, std::string_view(text).substr(begin, end - begin));
    begin = end + 1;
  }
  check(cluster);
  return cluster;
}

}  // namespace echelon::cluster
