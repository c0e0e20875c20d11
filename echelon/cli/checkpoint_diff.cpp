#include "echelon/cli/checkpoint.h"

#include <cmath>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "echelon/checkpoint/files/diff.h"
#include "echelon/checkpoint/files/reader.h"
#include "echelon/checkpoint/format/safetensors.h"
#include "echelon/checkpoint/remote/object_checkpoints.h"
#include "echelon/cli/terminal.h"
#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/text/plain.h"
#include "echelon/text/table.h"
#include "echelon/text/units.h"

namespace echelon::cli {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

struct Side {
  std::string name;  // a path, or an address on object storage
  std::string path;
};

struct Pair {
  Side a;
  Side b;
};

Side side_of(const NamedCheckpoint& one) {
  return {one.name, local_checkpoint(one.name)};
}

Pair pair_of(const CheckpointArguments& arguments) {
  const auto places = named_checkpoints(arguments.path).checkpoints;
  if (!arguments.other.empty()) {
    const auto others = named_checkpoints(arguments.other).checkpoints;
    return {side_of(places.front()), side_of(others.front())};
  }
  if (places.size() < 2) {
    throw ConfigError(format(
        "{}: has one checkpoint; name another one to compare it with: echelon "
        "checkpoint diff {} OTHER",
        arguments.path, arguments.path));
  }
  return {side_of(places[1]), side_of(places[0])};
}

// "table.key" -> value, from a configuration that the trainer wrote.
std::map<std::string, std::string> settings(const std::string& toml) {
  std::map<std::string, std::string> values;
  std::string table;
  for (const auto& line : split(toml)) {
    if (line.starts_with("[")) {
      table = line.substr(1, line.find(']') - 1);
    } else if (const size_t equal = line.find(" = ");
               equal != std::string::npos && !line.starts_with("#")) {
      values[table + "." + line.substr(0, equal)] = line.substr(equal + 3);
    }
  }
  return values;
}

struct Setting {
  std::string key, a, b;
};

// The settings that differ; "-" where one is missing.
std::vector<Setting>
changed_settings(const CheckpointManifest& a, const CheckpointManifest& b) {
  std::vector<Setting> changed;
  const auto in_a = settings(a.config);
  auto in_b = settings(b.config);
  for (const auto& [key, value] : in_a) {
    const auto other = in_b.find(key);
    if (other == in_b.end()) {
      changed.push_back({key, value, "-"});
    } else if (other->second != value) {
      changed.push_back({key, value, other->second});
    }
    if (other != in_b.end()) in_b.erase(other);
  }
  for (const auto& [key, value] : in_b) changed.push_back({key, "-", value});
  return changed;
}

bool is_model(SavedKind kind) {
  return kind == SavedKind::parameter || kind == SavedKind::buffer;
}

// "[8, 3] F32", or "[8, 3] -> [9, 3] F32" where they differ.
std::string form(const TensorDiff& diff) {
  const auto either = [](const std::string& a, const std::string& b) {
    if (a.empty() || a == b) return b;
    return b.empty() ? a : a + " -> " + b;
  };
  const auto shape = [](const std::string& dtype,
                        const std::vector<int64_t>& sizes) {
    return dtype.empty() ? "" : safetensors::shape_string(sizes);
  };
  return either(
             shape(diff.dtype_a, diff.shape_a),
             shape(diff.dtype_b, diff.shape_b)) +
         " " + either(diff.dtype_a, diff.dtype_b);
}

std::vector<std::string> row_of(const TensorDiff& diff) {
  std::vector<std::string> row = {plain(diff.name), form(diff)};
  if (diff.numbers) {
    for (const double value :
         {diff.norm, diff.change_norm, diff.relative(), diff.largest}) {
      row.push_back(number_text(value));
    }
    return row;
  }
  const auto words = [&]() -> std::string {
    switch (diff.change) {
      case Change::none:
        return "the same";
      case Change::missing:
        return "only in A";
      case Change::added:
        return "only in B";
      case Change::shape:
        return "another shape";
      default:
        return diff.differing > 0
                   ? counted(diff.differing, "element") + " differ"
                   : "another dtype";
    }
  };
  row.push_back(words());
  return row;
}

void print_changes(const std::vector<TensorDiff>& diffs, bool all) {
  Rows rows = {{"tensor", "shape", "norm", "change", "relative", "largest"}};
  for (const auto& diff : diffs) {
    if (all || (is_model(diff.kind) && diff.change != Change::none)) {
      rows.push_back(row_of(diff));
    }
  }
  if (rows.size() == 1) return;
  std::cout << "\n";
  print_table(rows, terminal_style(), std::cout);
}

// "3 of 5 parameters changed"
void print_sums(const std::vector<TensorDiff>& diffs) {
  struct Sum {
    int64_t all = 0;
    int64_t changed = 0;
  };
  std::map<SavedKind, Sum> sums;
  const TensorDiff* most = nullptr;
  for (const auto& diff : diffs) {
    ++sums[diff.kind].all;
    sums[diff.kind].changed += diff.change != Change::none;
    if (diff.kind == SavedKind::parameter && diff.numbers &&
        (most == nullptr || diff.relative() > most->relative())) {
      most = &diff;
    }
  }
  std::cout << "\n";
  const auto name = [](SavedKind kind) {
    return kind == SavedKind::parameter   ? "parameter"
           : kind == SavedKind::buffer    ? "buffer"
           : kind == SavedKind::optimizer ? "optimizer state"
                                          : "random state";
  };
  for (const auto& [kind, sum] : sums) {
    std::cout << sum.changed << " of " << counted(sum.all, name(kind))
              << " changed";
    if (kind == SavedKind::parameter && most != nullptr && sum.changed > 1) {
      std::cout << ", most of all " << plain(most->name) << " (relative "
                << number_text(most->relative()) << ")";
    }
    std::cout << "\n";
  }
}

std::string position(const CheckpointManifest& manifest) {
  return format(
      "step {}, {}, {}", manifest.step, plain(manifest.layout),
      counted(manifest.ranks, "rank"));
}

void print_settings(const std::vector<Setting>& changed) {
  if (changed.empty()) return;
  Rows rows;
  for (const auto& setting : changed) {
    rows.push_back(
        {plain(setting.key), plain(setting.a), "->", plain(setting.b)});
  }
  std::cout << "\n" << aligned(rows);
}

Json json_of(const TensorDiff& diff) {
  Json json = {
      {"name", diff.name},
      {"kind", to_string(diff.kind)},
      {"change", to_string(diff.change)}};
  if (!diff.dtype_a.empty()) {
    json["a"] = {{"dtype", diff.dtype_a}, {"shape", diff.shape_a}};
  }
  if (!diff.dtype_b.empty()) {
    json["b"] = {{"dtype", diff.dtype_b}, {"shape", diff.shape_b}};
  }
  if (diff.numbers || diff.differing > 0) json["differing"] = diff.differing;
  if (diff.numbers) {
    json["norm"] = json_number(diff.norm);
    json["change_norm"] = json_number(diff.change_norm);
    json["relative"] = json_number(diff.relative());
    json["largest"] = json_number(diff.largest);
  }
  return json;
}

Json json_of(
    const Pair& pair, const std::vector<TensorDiff>& diffs,
    const std::vector<Setting>& changed, bool same) {
  Json json = {
      {"a", pair.a.name},
      {"b", pair.b.name},
      {"same_contents", same},
      {"settings", Json::array()},
      {"tensors", Json::array()}};
  for (const auto& setting : changed) {
    json["settings"].push_back(
        {{"key", setting.key}, {"a", setting.a}, {"b", setting.b}});
  }
  for (const auto& diff : diffs) json["tensors"].push_back(json_of(diff));
  return json;
}

}  // namespace

int diff_checkpoints(const CheckpointArguments& arguments) {
  const auto pair = pair_of(arguments);
  CheckpointReader a(pair.a.path), b(pair.b.path);
  ReadingProgress progress("comparing", total_bytes(a.manifest()));
  auto diffs = echelon::diff_checkpoints(
      a, b,
      [&](const SavedTensor& tensor) {
        return arguments.all || is_model(tensor.kind);
      },
      [&](int64_t done) { progress(done); });
  const auto changed = changed_settings(a.manifest(), b.manifest());
  const bool same = a.manifest().content_hash == b.manifest().content_hash;
  if (arguments.json) {
    print_json(json_of(pair, diffs, changed, same), std::cout);
    return 0;
  }
  std::cout << aligned(
      {{"A", pair.a.name, position(a.manifest())},
       {"B", pair.b.name, position(b.manifest())}});
  print_settings(changed);
  if (same) {
    std::cout << "\nthe same contents: " << a.manifest().content_hash << "\n";
    if (!arguments.all) return 0;
  }
  print_changes(diffs, arguments.all);
  print_sums(diffs);
  return 0;
}

}  // namespace echelon::cli
