// A Table hands out keys and remembers which were asked for; finish() then
// refuses the others, so that a misspelled key is an error with its place and
// the nearest known key. A table is read field by field into a device or node
// that has the catalogue's figures already, and a key that is left out keeps
// them. Links are checked last, since only the number of nodes tells which ones
// are needed.
#include "echelon/cluster/cluster_file.h"

#include <algorithm>
#include <fstream>
#include <map>
#include <sstream>

#include "echelon/cluster/catalogue.h"
#include "echelon/cluster/quantity.h"
#include "echelon/config/value.h"
#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/text/nearest.h"

namespace echelon::cluster {
namespace {

using config::Member;
using config::Place;
using config::Value;
using Kind = Value::Kind;

constexpr std::streamoff kLargestFile = 16 << 20;

[[noreturn]] void fail(const Place& place, const std::string& text) {
  throw ConfigError(place.text() + ": " + text);
}

// One table; finish() refuses the keys that nobody asked for.
class Table {
 public:
  // `title` as errors name it: "[[nodes]] 2".
  Table(const Value& value, Place place, std::string title)
      : value_(value), place_(std::move(place)), title_(std::move(title)) {
    if (value.kind != Kind::table) {
      fail(
          place_, format(
                      "{} = {} is {}; it must be a table", title_,
                      config::shortened(value.text()), value.kind_name()));
    }
  }

  const Place& place() const { return place_; }
  const std::string& title() const { return title_; }
  const std::vector<Member>& members() const { return value_.members; }

  const Member* find(const std::string& key) {
    known_.push_back(key);
    for (const auto& member : value_.members) {
      if (member.name == key) return &member;
    }
    return nullptr;
  }

  // Accepts the key with any value.
  void drop(const std::string& key) { known_.push_back(key); }

  // Reads a key into `target`, which stays as it is without the key; whether it
  // is there.
  bool read(const std::string& key, std::string& target) {
    const Member* member =
        find(key, Kind::string, "a string, as in \"h100-sxm\"");
    if (member != nullptr) target = member->value.string;
    return member != nullptr;
  }

  bool read(const std::string& key, bool& target) {
    const Member* member = find(key, Kind::boolean, "true or false");
    if (member != nullptr) target = member->value.boolean;
    return member != nullptr;
  }

  bool read(const std::string& key, int64_t& target, int64_t least) {
    const Member* member = find(key, Kind::integer, "a whole number");
    if (member == nullptr) return false;
    if (member->value.integer < least) {
      refuse(*member, "at least " + std::to_string(least));
    }
    target = member->value.integer;
    return true;
  }

  bool read(const std::string& key, double& target, double least) {
    const Member* member = find(key);
    if (member == nullptr) return false;
    const Value& value = member->value;
    if (value.kind != Kind::real && value.kind != Kind::integer) {
      refuse(*member, "a number");
    }
    const double number = value.kind == Kind::real
                              ? value.real
                              : static_cast<double>(value.integer);
    if (!(number >= least) || number > 1e18) {
      refuse(*member, "at least " + config::toml_text(least));
    }
    target = number;
    return true;
  }

  bool read(const std::string& key, double& target, Unit unit) {
    const Member* member = find(key);
    if (member == nullptr) return false;
    const Value& value = member->value;
    const std::string example(quantity_example(unit));
    if (value.kind == Kind::integer || value.kind == Kind::real) {
      refuse(*member, "a string with a unit, as in \"" + example + "\"");
    }
    if (value.kind != Kind::string) {
      refuse(*member, "a string with a unit: " + example);
    }
    const auto quantity = parse_quantity(value.string, unit);
    if (!quantity) {
      refuse(*member, "a number with a unit, as in " + example);
    }
    if (!(*quantity >= 0)) refuse(*member, "at least 0");
    target = *quantity;
    return true;
  }

  void finish() const {
    for (const auto& member : value_.members) {
      if (std::ranges::find(known_, member.name) != known_.end()) continue;
      fail(
          member.place,
          format(
              "{} has no key {}{}", title_, config::shortened(member.name),
              config::did_you_mean(member.name, known_)));
    }
  }

  // Throws when keys are missing.
  void need(bool whole, const char* keys) const {
    if (!whole) fail(place_, format("{} needs {}", title_, keys));
  }

  [[noreturn]] void refuse(const Member& member, const std::string& rule) {
    fail(
        member.value.place, format(
                                "{} {} = {} must be {}", title_, member.name,
                                config::shortened(member.value.text()), rule));
  }

 private:
  const Member*
  find(const std::string& key, Kind kind, const std::string& rule) {
    const Member* member = find(key);
    if (member != nullptr && member->value.kind != kind) refuse(*member, rule);
    return member;
  }

  const Value& value_;
  Place place_;
  std::string title_;
  std::vector<std::string> known_;
};

MatrixRate read_matrix_rate(const Value& value, const std::string& title) {
  Table table(value, value.place, title + " matrix_rates");
  MatrixRate rate;
  std::string precision, kind(to_string(rate.kind));
  table.read("of", kind);
  // Not `&&`: all keys must be asked for, or finish() refuses those that come
  // after a missing one.
  bool whole = table.read("precision", precision);
  whole &= table.read("m", rate.m, 1);
  whole &= table.read("n", rate.n, 1);
  whole &= table.read("k", rate.k, 1);
  whole &= table.read("rate", rate.flops_per_second, Unit::flops_per_second);
  table.finish();
  table.need(whole, "precision, m, n, k and rate");
  try {
    rate.precision = precision_from_name(precision);
    rate.kind = product_kind_from_name(kind);
  } catch (const ConfigError& error) {
    fail(table.place(), table.title() + ": " + error.what());
  }
  return rate;
}

OperatorRate read_operator_rate(const Value& value, const std::string& title) {
  Table table(value, value.place, title + " operator_rates");
  OperatorRate rate;
  bool whole = table.read("name", rate.name);
  whole &= table.read("bytes", rate.bytes, Unit::bytes);
  whole &= table.read("rate", rate.bytes_per_second, Unit::bytes_per_second);
  table.finish();
  table.need(whole, "name, bytes and rate");
  return rate;
}

LaunchRate read_launch_rate(const Value& value, const std::string& title) {
  Table table(value, value.place, title + " launch_rates");
  LaunchRate rate;
  bool whole = table.read("beside", rate.bytes_beside, Unit::bytes);
  whole &= table.read("launch", rate.seconds, Unit::seconds);
  whole &= table.read("backward", rate.backward_seconds, Unit::seconds);
  rate.view_seconds = rate.seconds;
  rate.backward_view_seconds = rate.backward_seconds;
  table.read("view", rate.view_seconds, Unit::seconds);
  table.read("backward_view", rate.backward_view_seconds, Unit::seconds);
  table.finish();
  table.need(whole, "beside, launch and backward");
  return rate;
}

// The items of a list of tables; what was there before is replaced.
template <class Rate>
void read_rates(
    Table& table, const std::string& key, std::vector<Rate>& rates,
    Rate (*read)(const Value&, const std::string&)) {
  const Member* member = table.find(key);
  if (member == nullptr) return;
  if (member->value.kind != Kind::array) {
    table.refuse(
        *member, "a list; `echelon bench --save` measures and writes it");
  }
  rates.clear();
  for (const auto& item : member->value.items) {
    rates.push_back(read(item, table.title()));
  }
}

// Devices of the file by name, and the catalogue's device whose usual node they
// take (empty: none).
struct FileDevice {
  Device device;
  std::string like;
};

class Reader {
 public:
  Reader(const Value& root, const std::string& file, const std::string& name)
      : root_(root, Place{file, 1, 1, ""}, "a cluster"), file_(file) {
    cluster_.name = name;
  }

  Cluster read() {
    root_.read("name", cluster_.name);
    root_.read("nodes_per_rack", cluster_.nodes_per_rack, int64_t{0});
    root_.read("oversubscription", cluster_.oversubscription, 1.0);
    root_.read(
        "mean_hours_between_failures", cluster_.mean_hours_between_failures,
        0.0);
    read_devices();
    read_nodes();
    root_.finish();
    require_links();
    try {
      check(cluster_);
    } catch (const ConfigError& error) {
      throw ConfigError(file_ + ": " + error.what());
    }
    return cluster_;
  }

 private:
  void read_devices() {
    const Member* member = root_.find("devices");
    if (member == nullptr) return;
    Table table(member->value, member->place, "[devices]");
    for (const auto& inner : table.members()) {
      devices_[inner.name] = read_device(inner);
    }
  }

  FileDevice read_device(const Member& member) {
    const std::string title =
        "[devices." + config::shortened(member.name) + "]";
    Table table(member.value, member.place, title);
    FileDevice made;
    // A table with the name of a device of the catalogue changes that device.
    if (in_catalogue(member.name)) made.like = member.name;
    if (table.read("like", made.like) && !in_catalogue(made.like)) {
      table.refuse(
          *table.find("like"),
          "a device of the catalogue" +
              config::did_you_mean(made.like, device_names()));
    }
    if (!made.like.empty()) made.device = find_device(made.like);
    Device& device = made.device;
    device.name = member.name;
    if (made.like != member.name) device.like = made.like;
    table.read("memory", device.memory_bytes, Unit::bytes);
    table.read(
        "memory_rate", device.memory_bytes_per_second, Unit::bytes_per_second);
    table.read("price_per_hour", device.price_per_hour, 0.0);
    table.read("source", device.source);
    table.read("launch", device.launch_seconds, Unit::seconds);
    read_rates(table, "launch_rates", device.launch_rates, read_launch_rate);
    // Files of earlier versions have these; nothing is predicted from them.
    table.drop("host_work");
    table.drop("jitter");
    read_peaks(table, device);
    table.read("processor", device.processor);
    read_rates(table, "matrix_rates", device.matrix_rates, read_matrix_rate);
    read_rates(
        table, "operator_rates", device.operator_rates, read_operator_rate);
    table.finish();
    require_figures(table, device);
    return made;
  }

  void read_peaks(Table& table, Device& device) {
    const Member* member = table.find("peak");
    if (member == nullptr) return;
    Table peaks(member->value, member->place, table.title() + " peak");
    for (Precision precision : kPrecisions) {
      peaks.read(
          std::string(to_string(precision)),
          device.peak_flops_per_second[static_cast<size_t>(precision)],
          Unit::flops_per_second);
    }
    peaks.finish();
  }

  void require_figures(const Table& table, const Device& device) {
    const auto missing = [&](const char* key, const char* example) {
      fail(
          table.place(),
          format(
              "{} needs {}, as in {} = {}; or like = \"h100-sxm\", a device "
              "of the catalogue",
              table.title(), key, key, example));
    };
    if (device.memory_bytes <= 0) missing("memory", "\"80 GiB\"");
    if (device.memory_bytes_per_second <= 0) {
      missing("memory_rate", "\"3 TB/s\"");
    }
    if (std::ranges::max(device.peak_flops_per_second) <= 0) {
      missing("peak", "{ bf16 = \"312 TFLOP/s\" }");
    }
  }

  void read_nodes() {
    const Member* member = root_.find("nodes");
    if (member == nullptr) {
      fail(
          root_.place(),
          "a cluster needs [[nodes]], with device = \"h100-sxm\" and count = "
          "8");
    }
    const Value& list = member->value;
    if (list.kind != Kind::array || list.items.empty()) {
      fail(member->place, "nodes must be written as [[nodes]], each with keys");
    }
    for (size_t i = 0; i < list.items.size(); ++i) {
      Table table(
          list.items[i], list.items[i].place, format("[[nodes]] {}", i + 1));
      cluster_.groups.push_back(read_node(table));
      places_.push_back(table.place());
    }
  }

  NodeGroup read_node(Table& table) {
    NodeGroup group;
    std::string device;
    table.need(
        table.read("device", device), "device, as in device = \"h100-sxm\"");
    Node& node = group.node;
    node = node_with(table, device);
    table.read("name", node.name);
    table.read("count", group.count, int64_t{1});
    table.read("devices", node.num_devices, int64_t{1});
    table.read("switched", node.switched);
    table.read("reduces_in_switch", node.reduces_in_switch);
    table.read("host_memory", node.host_memory_bytes, Unit::bytes);
    table.read(
        "host_memory_rate", node.host_memory_bytes_per_second,
        Unit::bytes_per_second);
    read_link(table, "inside", node.inside);
    read_link(table, "network", node.network);
    read_link(table, "host", node.host);
    table.finish();
    return group;
  }

  Node node_with(Table& table, const std::string& name) {
    const auto own = devices_.find(name);
    if (own == devices_.end() && !in_catalogue(name)) {
      std::vector<std::string> names = device_names();
      for (const auto& [known, device] : devices_) names.push_back(known);
      table.refuse(
          *table.find("device"),
          "a device of the catalogue, or of a table [devices." +
              config::shortened(name, 30) + "] in this file" +
              config::did_you_mean(name, names));
    }
    if (own == devices_.end()) return usual_node(name);
    Node node;
    if (!own->second.like.empty()) node = usual_node(own->second.like);
    node.device = own->second.device;
    return node;
  }

  void read_link(Table& table, const std::string& key, Link& link) {
    const Member* member = table.find(key);
    if (member == nullptr) return;
    Table inner(member->value, member->place, table.title() + " " + key);
    Link made = link;
    const bool rate =
        inner.read("rate", made.bytes_per_second, Unit::bytes_per_second);
    // The usual link's name would be wrong for another rate.
    if (rate) made.name.clear();
    inner.read("name", made.name);
    inner.read("latency", made.latency_seconds, Unit::seconds);
    inner.finish();
    inner.need(
        rate || link.bytes_per_second > 0, "rate, as in rate = \"400 Gbit/s\"");
    link = made;
  }

  void require_links() {
    const auto& groups = cluster_.groups;
    for (size_t i = 0; i < groups.size(); ++i) {
      const Node& node = groups[i].node;
      if (node.num_devices > 1 && node.inside.bytes_per_second <= 0) {
        fail(
            places_[i],
            format(
                "[[nodes]] {} has {} devices and no link between them; add "
                "inside = {{ rate = \"64 GB/s\", latency = \"5 us\" }}",
                i + 1, node.num_devices));
      }
      if ((groups.size() > 1 || groups[i].count > 1) &&
          node.network.bytes_per_second <= 0) {
        fail(
            places_[i],
            format(
                "[[nodes]] {} has no link to the other nodes; add network = {{ "
                "rate = \"400 Gbit/s\", latency = \"5 us\" }}",
                i + 1));
      }
    }
  }

  Table root_;
  std::string file_;
  Cluster cluster_;
  std::map<std::string, FileDevice> devices_;
  std::vector<Place> places_;  // of the groups
};

std::string text_of(const std::filesystem::path& path) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) {
    throw ConfigError(path.string() + " is a folder; name a cluster file");
  }
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw ConfigError(
        path.string() +
        ": no such cluster file, or it cannot be read; a cluster is a file or "
        "DEVICE:NODESxDEVICES, as in h100-sxm:64x8");
  }
  std::string text;
  char block[1 << 16];
  while (file.read(block, sizeof(block)) || file.gcount() > 0) {
    text.append(block, static_cast<size_t>(file.gcount()));
    if (text.size() > kLargestFile) {
      throw ConfigError(
          path.string() + ": more than 16 MiB; no cluster file is that large");
    }
  }
  return text;
}

}  // namespace

Cluster parse_cluster(const std::string& text, const std::string& name) {
  const Value root = config::parse_nested_toml(text, name);
  return Reader(root, name, std::filesystem::path(name).stem().string()).read();
}

Cluster read_cluster(const std::filesystem::path& path) {
  return parse_cluster(text_of(path), path.string());
}

}  // namespace echelon::cluster
