#include "echelon/cli/checkpoint.h"

#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "echelon/checkpoint/format/safetensors.h"
#include "echelon/cli/terminal.h"
#include "echelon/text/format.h"
#include "echelon/text/table.h"
#include "echelon/text/units.h"

namespace echelon::cli {
namespace {

using Json = nlohmann::ordered_json;

int64_t numel(const SavedTensor& tensor) {
  return whole_box(tensor.shape).numel();
}

int64_t bytes_of(const SavedTensor& tensor) {
  return numel(tensor) *
         static_cast<int64_t>(safetensors::dtype_bytes(tensor.dtype));
}

// "29.5 million", "1797"
std::string number_of(int64_t count) {
  if (count < 1'000'000) return std::to_string(count);
  const bool billions = count >= 1'000'000'000;
  return format(
      "{:.4g} {}", static_cast<double>(count) / (billions ? 1e9 : 1e6),
      billions ? "billion" : "million");
}

std::string hash_text(const std::array<uint64_t, 2>& hash) {
  return format("{:016x}{:016x}", hash[0], hash[1]);
}

const char* plural(SavedKind kind) {
  switch (kind) {
    case SavedKind::parameter:
      return "parameters";
    case SavedKind::buffer:
      return "buffers";
    case SavedKind::optimizer:
      return "optimizer";
    case SavedKind::random:
      return "random state";
  }
  return "";
}

struct Sum {
  int64_t tensors = 0;
  int64_t elements = 0;
  int64_t bytes = 0;
  std::set<std::string> dtypes;
};

std::string to_text(const Sum& sum) {
  return format(
      "{}, {} elements of {}, {}", counted(sum.tensors, "tensor"),
      number_of(sum.elements), joined({sum.dtypes.begin(), sum.dtypes.end()}),
      format_bytes(sum.bytes));
}

// Adds a line for each kind of tensors.
void add_sums(const CheckpointManifest& manifest, Rows& rows) {
  std::map<SavedKind, Sum> sums;
  for (const auto& tensor : manifest.tensors) {
    auto& sum = sums[tensor.kind];
    ++sum.tensors;
    sum.elements += numel(tensor);
    sum.bytes += bytes_of(tensor);
    sum.dtypes.insert(tensor.dtype);
  }
  for (const auto& [kind, sum] : sums) {
    rows.push_back({plural(kind), to_text(sum)});
  }
}

// The name of the data (its first line) and the numbers of samples (the last).
std::string in_short(const std::string& data) {
  std::vector<std::string> all;
  std::istringstream lines(data);
  for (std::string line; std::getline(lines, line);) {
    if (!line.empty()) all.push_back(plain(line));
  }
  constexpr size_t kShown = 3;
  if (all.size() > kShown) {
    all.erase(all.begin() + 1, all.end() - (kShown - 1));
  }
  return joined(all);
}

Rows facts(const CheckpointManifest& manifest) {
  Rows rows;
  std::string step = std::to_string(manifest.step);
  if (manifest.total_steps > 0) {
    step += " of " + std::to_string(manifest.total_steps);
  }
  if (manifest.skipped_steps > 0) {
    step += format(", {} of them skipped", manifest.skipped_steps);
  }
  rows.push_back({"step", step});
  std::vector<std::string> metrics;
  for (const auto& [name, value] : manifest.metrics) {
    metrics.push_back(plain(name) + " " + number_text(value));
  }
  if (!metrics.empty()) rows.push_back({"metrics", joined(metrics)});
  rows.push_back(
      {"position", format(
                       "epoch {}, {} of it consumed, seed {}", manifest.epoch,
                       counted(manifest.consumed, "sample"), manifest.seed)});
  if (!manifest.data.empty()) rows.push_back({"data", in_short(manifest.data)});
  rows.push_back(
      {"layout",
       plain(manifest.layout) + ", " + counted(manifest.ranks, "rank")});
  if (const auto& scale = manifest.loss_scale) {
    rows.push_back(
        {"loss scale", format(
                           "{}, {}, {}", number_text(scale->scale),
                           counted(scale->good_steps, "good step"),
                           counted(scale->overflows, "overflow"))});
  }
  add_sums(manifest, rows);
  rows.push_back(
      {"size",
       format_bytes(total_bytes(manifest)) + " in " +
           counted(static_cast<int64_t>(manifest.files.size()), "file")});
  rows.push_back({"configuration", manifest.config_hash});
  rows.push_back({"contents", manifest.content_hash});
  return rows;
}

void print_tensors(const CheckpointManifest& manifest) {
  Rows rows = {{"tensor", "kind", "dtype", "shape", "size", "files", "hash"}};
  for (const auto& tensor : manifest.tensors) {
    std::set<int64_t> files;
    for (const auto& slice : tensor.slices) files.insert(slice.file);
    rows.push_back(
        {plain(tensor.name), to_string(tensor.kind), tensor.dtype,
         safetensors::shape_string(tensor.shape),
         format_bytes(bytes_of(tensor)), std::to_string(files.size()),
         hash_text(tensor.hash).substr(0, 8)});
  }
  std::cout << "\n";
  print_table(rows, terminal_style(), std::cout);
}

Json json_of(const CheckpointManifest& manifest) {
  Json json = {
      {"version", manifest.version},
      {"step", manifest.step},
      {"skipped_steps", manifest.skipped_steps},
      {"total_steps", manifest.total_steps},
      {"epoch", manifest.epoch},
      {"consumed", manifest.consumed},
      {"seed", manifest.seed},
      {"data", manifest.data},
      {"layout", manifest.layout},
      {"ranks", manifest.ranks},
      {"loss_scale", nullptr},
      {"metrics", Json::object()},
      {"bytes", total_bytes(manifest)},
      {"config", manifest.config},
      {"config_hash", manifest.config_hash},
      {"content_hash", manifest.content_hash}};
  if (const auto& scale = manifest.loss_scale) {
    json["loss_scale"] = {
        {"scale", scale->scale},
        {"good_steps", scale->good_steps},
        {"overflows", scale->overflows}};
  }
  for (const auto& [name, value] : manifest.metrics) {
    json["metrics"][name] = json_number(value);
  }
  auto files = Json::array(), tensors = Json::array();
  for (const auto& file : manifest.files) {
    files.push_back({{"name", file.name}, {"bytes", file.bytes}});
  }
  for (const auto& tensor : manifest.tensors) {
    tensors.push_back(
        {{"name", tensor.name},
         {"kind", to_string(tensor.kind)},
         {"dtype", tensor.dtype},
         {"shape", tensor.shape},
         {"bytes", bytes_of(tensor)},
         {"slices", tensor.slices.size()},
         {"hash", hash_text(tensor.hash)}});
  }
  json["files"] = std::move(files);
  json["tensors"] = std::move(tensors);
  return json;
}

}  // namespace

int show_checkpoint(const CheckpointArguments& arguments) {
  const auto place = find_checkpoints(arguments.path).front();
  const auto manifest = read_manifest(place.path);
  if (arguments.config) {
    std::cout << manifest.config;
    return 0;
  }
  if (arguments.json) {
    Json json = {
        {"path", place.path.string()}, {"saved", saved_at(place.path)}};
    json.update(json_of(manifest));
    print_json(json, std::cout);
    return 0;
  }
  std::cout << terminal_style().bold(place.path.string()) << ", saved "
            << saved_at(place.path) << "\n\n";
  std::istringstream lines(aligned(facts(manifest)));
  for (std::string line; std::getline(lines, line);) {
    std::cout << "  " << line << "\n";
  }
  if (arguments.all) print_tensors(manifest);
  return 0;
}

}  // namespace echelon::cli
