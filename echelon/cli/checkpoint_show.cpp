#include <iostream>
#include <map>
#include <set>
#include <sstream>

#include "echelon/checkpoint/format/safetensors.h"
#include "echelon/cli/checkpoint_text.h"
#include "echelon/cli/findings.h"
#include "echelon/text/table.h"

namespace echelon::cli {
namespace {

using Json = nlohmann::ordered_json;
using Rows = std::vector<std::vector<std::string>>;

int64_t numel(const SavedTensor& tensor) {
  return whole_box(tensor.shape).numel();
}

int64_t bytes_of(const SavedTensor& tensor) {
  return numel(tensor) *
         static_cast<int64_t>(safetensors::dtype_bytes(tensor.dtype));
}

// "29.5 M", "1,797": as people say it.
std::string number_of(int64_t count) {
  if (count < 1'000'000) return std::to_string(count);
  const bool billions = count >= 1'000'000'000;
  char text[32];
  std::snprintf(
      text, sizeof(text), "%.4g %s",
      static_cast<double>(count) / (billions ? 1e9 : 1e6),
      billions ? "billion" : "million");
  return text;
}

std::string hash_text(const std::array<uint64_t, 2>& hash) {
  char text[40];
  std::snprintf(
      text, sizeof(text), "%016llx%016llx",
      static_cast<unsigned long long>(hash[0]),
      static_cast<unsigned long long>(hash[1]));
  return text;
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
  std::string dtypes;
  for (const auto& dtype : sum.dtypes) {
    dtypes += (dtypes.empty() ? "" : ", ") + dtype;
  }
  return counted(sum.tensors, "tensor") + ", " + number_of(sum.elements) +
         " elements of " + dtypes + ", " +
         bytes_text(static_cast<double>(sum.bytes));
}

// A line for each kind of tensors.
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

// What the samples are: the first line says their name, the last ones how many.
std::string in_short(const std::string& data) {
  std::vector<std::string> all;
  std::istringstream lines(data);
  for (std::string line; std::getline(lines, line);) {
    if (!line.empty()) all.push_back(plain(line));
  }
  constexpr size_t kShown = 3;
  std::string text;
  for (size_t i = 0; i < all.size(); ++i) {
    if (i > 0 && i + kShown <= all.size()) continue;
    text += (text.empty() ? "" : ", ") + all[i];
  }
  return text;
}

Rows facts(const CheckpointManifest& manifest) {
  Rows rows;
  std::string step = std::to_string(manifest.step);
  if (manifest.total_steps > 0) {
    step += " of " + std::to_string(manifest.total_steps);
  }
  if (manifest.skipped_steps > 0) {
    step += ", " + std::to_string(manifest.skipped_steps) + " of them skipped";
  }
  rows.push_back({"step", step});
  std::string metrics;
  for (const auto& [name, value] : manifest.metrics) {
    metrics +=
        (metrics.empty() ? "" : ", ") + plain(name) + " " + number_text(value);
  }
  if (!metrics.empty()) rows.push_back({"metrics", metrics});
  rows.push_back(
      {"position", "epoch " + std::to_string(manifest.epoch) + ", " +
                       counted(manifest.consumed, "sample") +
                       " of it taken, seed " + std::to_string(manifest.seed)});
  if (!manifest.data.empty()) rows.push_back({"data", in_short(manifest.data)});
  rows.push_back(
      {"layout",
       plain(manifest.layout) + ", " + counted(manifest.ranks, "rank")});
  if (const auto& scale = manifest.loss_scale) {
    rows.push_back(
        {"loss scale", number_text(scale->scale) + ", " +
                           counted(scale->good_steps, "good step") + ", " +
                           counted(scale->overflows, "overflow")});
  }
  add_sums(manifest, rows);
  rows.push_back(
      {"size",
       bytes_text(static_cast<double>(total_bytes(manifest))) + " in " +
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
         bytes_text(static_cast<double>(bytes_of(tensor))),
         std::to_string(files.size()), hash_text(tensor.hash).substr(0, 8)});
  }
  const std::string text = aligned(rows);
  const size_t end = text.find('\n');
  std::cout << "\n" << bold(text.substr(0, end)) << text.substr(end);
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
    std::cout << json.dump(2) << "\n";
    return 0;
  }
  std::cout << bold(place.path.string()) << ", saved " << saved_at(place.path)
            << "\n\n";
  std::istringstream lines(aligned(facts(manifest)));
  for (std::string line; std::getline(lines, line);) {
    std::cout << "  " << line << "\n";
  }
  if (arguments.all) print_tensors(manifest);
  return 0;
}

}  // namespace echelon::cli
