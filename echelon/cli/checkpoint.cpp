// The subcommands work from manifests; `verify` alone reads the files that a
// manifest lists (`diff` is in checkpoint_diff.cpp). For `list` and `verify` a
// damaged checkpoint is a row like the others, and the exit code tells of it,
// so that one bad checkpoint does not hide the good ones. Names in a manifest
// may be anything: they pass through plain() before they reach a terminal.
#include "echelon/cli/checkpoint.h"

#include <sys/stat.h>

#include <algorithm>
#include <ctime>
#include <functional>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "echelon/checkpoint/files/checked_file.h"
#include "echelon/checkpoint/files/folder.h"
#include "echelon/checkpoint/files/reader.h"
#include "echelon/checkpoint/format/safetensors.h"
#include "echelon/checkpoint/remote/object_checkpoints.h"
#include "echelon/cli/command_line.h"
#include "echelon/cli/terminal.h"
#include "echelon/error.h"
#include "echelon/storage/settings.h"
#include "echelon/text/format.h"
#include "echelon/text/plain.h"
#include "echelon/text/table.h"
#include "echelon/text/units.h"

namespace echelon::cli {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr int kDamaged = static_cast<int>(ExitCode::data);

// "2026-11-21 10:04:28" in this host's time zone; "?" when unknown.
std::string saved_at(const fs::path& checkpoint) {
  struct stat status = {};
  const auto path = checkpoint / "manifest.json";
  if (::stat(path.c_str(), &status) != 0) return "?";
  std::tm time = {};
  ::localtime_r(&status.st_mtime, &time);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%d %H:%M:%S", &time);
  return text;
}

Json json_of(const std::map<std::string, double>& metrics) {
  auto json = Json::object();
  for (const auto& [name, value] : metrics) json[name] = json_number(value);
  return json;
}

NamedCheckpoints on_storage(const std::string& given) {
  auto found = find_object_checkpoints(given);
  NamedCheckpoints named{.folder = found.folder};
  for (const auto& one : found.checkpoints) {
    NamedCheckpoint added{.name = one.url, .step = one.step};
    added.files = files_of(one);
    try {
      added.path = copy_manifest(one);
    } catch (const CheckpointError& error) {
      added.damage = error.what();
    }
    named.checkpoints.push_back(std::move(added));
  }
  named.checkpoints.front().latest = true;
  for (const auto& name : found.unfinished) {
    named.others.push_back("unfinished: " + name);
  }
  return named;
}

NamedCheckpoints on_disk(const std::string& given) {
  const auto places = find_checkpoints(given);
  // All places are in one folder: a run's, or that of the one checkpoint.
  const fs::path folder = places.front().path.parent_path();
  NamedCheckpoints named{.folder = folder.string()};
  const auto latest = latest_checkpoint(folder);
  for (const auto& place : places) {
    named.checkpoints.push_back(
        {.name = place.path.string(),
         .step = place.step,
         .path = place.path,
         .latest = latest && latest->path == place.path});
  }
  for (const auto& place : list_incomplete(folder)) {
    named.incomplete.push_back(
        {.name = place.path.string(), .step = place.step, .path = place.path});
  }
  for (const auto& path : list_others(folder)) {
    const std::string name = path.filename().string();
    named.others.push_back(
        (name.starts_with(".") ? "unfinished: " : "set aside: ") + name);
  }
  return named;
}

// --- list -------------------------------------------------------------------

// One checkpoint of a list.
struct Listed : NamedCheckpoint {
  CheckpointManifest manifest;
};

std::vector<Listed> listed(const std::vector<NamedCheckpoint>& named) {
  std::vector<Listed> all;
  for (const auto& one : named) {
    Listed& entry = all.emplace_back(Listed{one, {}});
    if (!entry.damage.empty()) continue;
    try {
      entry.manifest = read_manifest(one.path.string());
    } catch (const CheckpointError& error) {
      entry.damage = error.what();
    }
  }
  std::ranges::sort(all, std::greater(), &Listed::step);
  return all;
}

Json json_of(const Listed& entry) {
  Json json = {
      {"path", entry.name},
      {"step", entry.step},
      {"latest", entry.latest},
      {"saved", saved_at(entry.path)}};
  if (!entry.damage.empty()) {
    json["damage"] = entry.damage;
    return json;
  }
  json["layout"] = entry.manifest.layout;
  json["ranks"] = entry.manifest.ranks;
  json["files"] = entry.manifest.files.size();
  json["bytes"] = total_bytes(entry.manifest);
  json["metrics"] = json_of(entry.manifest.metrics);
  json["content_hash"] = entry.manifest.content_hash;
  return json;
}

void print_list(const std::vector<Listed>& all) {
  std::set<std::string> metrics;
  for (const auto& entry : all) {
    for (const auto& [name, value] : entry.manifest.metrics) {
      metrics.insert(name);
    }
  }
  Rows rows = {{"step", "saved", "layout", "ranks", "size"}};
  for (const auto& name : metrics) rows.front().push_back(plain(name));
  for (const auto& entry : all) {
    std::vector<std::string> row = {
        std::to_string(entry.step), saved_at(entry.path)};
    if (!entry.damage.empty()) {
      row.push_back("damaged");
      rows.push_back(std::move(row));
      continue;
    }
    const auto& manifest = entry.manifest;
    row.push_back(plain(manifest.layout));
    row.push_back(std::to_string(manifest.ranks));
    row.push_back(format_bytes(total_bytes(manifest)));
    for (const auto& name : metrics) {
      const auto value = manifest.metrics.find(name);
      row.push_back(
          value == manifest.metrics.end() ? "" : number_text(value->second));
    }
    if (entry.latest) {
      row.resize(rows.front().size());
      row.push_back("latest");
    }
    rows.push_back(std::move(row));
  }
  print_table(rows, terminal_style(), std::cout);
}

int list_checkpoints(const CheckpointArguments& arguments) {
  const auto named = named_checkpoints(arguments.path);
  const auto all = listed(named.checkpoints);
  const bool damaged = !named.incomplete.empty() ||
                       std::ranges::any_of(all, [](const auto& entry) {
                         return !entry.damage.empty();
                       });
  if (arguments.json) {
    Json json = {{"folder", named.folder}, {"checkpoints", Json::array()}};
    for (const auto& entry : all) json["checkpoints"].push_back(json_of(entry));
    json["incomplete"] = Json::array();
    for (const auto& one : named.incomplete) {
      json["incomplete"].push_back(one.path.filename().string());
    }
    json["others"] = Json::array();
    for (const auto& other : named.others) {
      json["others"].push_back(other.substr(other.find(": ") + 2));
    }
    print_json(json, std::cout);
    return damaged ? kDamaged : 0;
  }
  std::cout << named.folder << "\n\n";
  print_list(all);
  if (damaged || !named.others.empty()) std::cout << "\n";
  for (const auto& entry : all) {
    if (!entry.damage.empty()) {
      std::cout << terminal_style().red("damaged: ") << plain(entry.damage)
                << "\n";
    }
  }
  for (const auto& one : named.incomplete) {
    std::cout << terminal_style().red("damaged: ") << plain(one.name)
              << " has no manifest.json\n";
  }
  for (const auto& other : named.others) {
    std::cout << plain(other)
              << (other.starts_with("unfinished")
                      ? ", being saved or left by a crash"
                      : "")
              << "\n";
  }
  return damaged ? kDamaged : 0;
}

// --- show -------------------------------------------------------------------

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
  return kind == SavedKind::parameter   ? "parameters"
         : kind == SavedKind::buffer    ? "buffers"
         : kind == SavedKind::optimizer ? "optimizer"
                                        : "random state";
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
      number_of(sum.elements), join(sum.dtypes, ", "), format_bytes(sum.bytes));
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
  for (const auto& line : split(data)) {
    if (!line.empty()) all.push_back(plain(line));
  }
  constexpr size_t kShown = 3;
  if (all.size() > kShown) {
    all.erase(all.begin() + 1, all.end() - (kShown - 1));
  }
  return join(all, ", ");
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
  if (!metrics.empty()) rows.push_back({"metrics", join(metrics, ", ")});
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
      {"size", format_bytes(total_bytes(manifest)) + " in " +
                   counted(std::ssize(manifest.files), "file")});
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
      {"metrics", json_of(manifest.metrics)},
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

int show_checkpoint(const CheckpointArguments& arguments) {
  const auto place = named_checkpoints(arguments.path).checkpoints.front();
  if (!place.damage.empty()) throw CheckpointError(place.damage);
  const auto manifest = read_manifest(place.path.string());
  if (arguments.config) {
    std::cout << manifest.config;
    return 0;
  }
  if (arguments.json) {
    Json json = {{"path", place.name}, {"saved", saved_at(place.path)}};
    json.update(json_of(manifest));
    print_json(json, std::cout);
    return 0;
  }
  std::cout << terminal_style().bold(place.name) << ", saved "
            << saved_at(place.path) << "\n\n";
  for (const auto& line : split(aligned(facts(manifest)))) {
    std::cout << "  " << line << "\n";
  }
  if (arguments.all) print_tensors(manifest);
  return 0;
}

// --- verify -----------------------------------------------------------------

Json json_of(const std::vector<Damage>& damages) {
  auto rows = Json::array();
  for (const auto& damage : damages) {
    rows.push_back(
        {{"file", damage.file},
         {"tensor", damage.tensor},
         {"offset", damage.offset},
         {"what", damage.what}});
  }
  return rows;
}

// The result of reading a whole checkpoint.
struct Verdict {
  int64_t bytes = 0;
  int64_t files = 0;
  std::vector<Damage> damages;
};

Verdict verify(const NamedCheckpoint& checkpoint) {
  Verdict verdict;
  try {
    if (!checkpoint.damage.empty()) throw CheckpointError(checkpoint.damage);
    const auto manifest = read_manifest(checkpoint.path.string());
    verdict.bytes = total_bytes(manifest);
    verdict.files = std::ssize(manifest.files);
    ReadingProgress progress(checkpoint.name, verdict.bytes);
    verdict.damages = verify_files(
        manifest, checkpoint.name, checkpoint.files,
        [&](int64_t done) { progress(done); });
  } catch (const CheckpointError& error) {
    verdict.damages.push_back({"manifest.json", "", 0, error.what()});
  }
  return verdict;
}

void print(const std::string& checkpoint, const Verdict& verdict) {
  const auto& damages = verdict.damages;
  std::cout << checkpoint << ": ";
  if (damages.empty()) {
    std::cout << format(
        "whole: {}, {}\n", counted(verdict.files, "file"),
        format_bytes(verdict.bytes));
  } else {
    std::cout << terminal_style().red("damaged: ")
              << counted(std::ssize(damages), "place") << "\n";
  }
  for (const auto& damage : damages) {
    std::cout << "  " << plain(damage.what) << "\n";
  }
  std::cout.flush();
}

int verify_checkpoints(const CheckpointArguments& arguments) {
  auto rows = Json::array();
  bool damaged = false;
  const auto named = named_checkpoints(arguments.path);
  auto places = named.checkpoints;
  std::error_code error;
  if (!std::filesystem::equivalent(
          places.front().path, arguments.path, error)) {
    places.insert(
        places.end(), named.incomplete.begin(), named.incomplete.end());
  }
  for (const auto& place : places) {
    const auto verdict = verify(place);
    damaged = damaged || !verdict.damages.empty();
    if (!arguments.json) {
      print(place.name, verdict);
      continue;
    }
    rows.push_back(
        {{"path", place.name},
         {"step", place.step},
         {"whole", verdict.damages.empty()},
         {"files", verdict.files},
         {"bytes", verdict.bytes},
         {"damages", json_of(verdict.damages)}});
  }
  if (arguments.json) print_json(rows, std::cout);
  return damaged ? kDamaged : 0;
}

}  // namespace

NamedCheckpoints named_checkpoints(const std::string& given) {
  return storage::is_object_url(given) ? on_storage(given) : on_disk(given);
}

int64_t total_bytes(const CheckpointManifest& manifest) {
  int64_t bytes = 0;
  for (const auto& file : manifest.files) bytes += file.bytes;
  return bytes;
}

void add_checkpoint(Command& root) {
  Command group = root.add(
      "checkpoint",
      "list a run's checkpoints, show one, verify them, compare two",
      "echelon checkpoint list runs/first\n"
      "echelon checkpoint show runs/first\n"
      "echelon checkpoint verify runs/first\n"
      "echelon checkpoint diff runs/first");
  group.require_subcommand();

  auto [list, list_arguments] = group.add(
      "list", "every checkpoint of a run: step, time, layout, size, metrics",
      "echelon checkpoint list runs/first\n"
      "echelon checkpoint list runs/first --json\n"
      "echelon checkpoint list s3://models/runs/first",
      list_checkpoints);
  list.positional(
      "PATH", list_arguments.path,
      "a run's folder, its folder of checkpoints, or an address on object "
      "storage: s3://BUCKET/PREFIX");

  auto [show, show_arguments] = group.add(
      "show",
      "what a checkpoint contains: step, position in the data, layout, sizes, "
      "tensors, metrics, hash",
      "echelon checkpoint show runs/first\n"
      "echelon checkpoint show runs/first/checkpoints/step-00000100 "
      "--tensors\n"
      "echelon checkpoint show runs/first --config > again.toml",
      show_checkpoint);
  show.positional(
      "PATH", show_arguments.path,
      "a checkpoint, or a run's folder (its latest checkpoint), also "
      "s3://BUCKET/PREFIX");
  show.flag("--tensors", show_arguments.all, "list every tensor");
  show.flag(
      "--config", show_arguments.config,
      "print the configuration of the training, and nothing else");

  auto [verify, verify_arguments] = group.add(
      "verify",
      "read every byte of a checkpoint, or of all of a run, and compare it "
      "with "
      "its checksums; prints a line for each damage and exits with 3",
      "echelon checkpoint verify runs/first\n"
      "echelon checkpoint verify runs/first/checkpoints/step-00000100",
      verify_checkpoints);
  verify.positional(
      "PATH", verify_arguments.path,
      "a checkpoint, or a run's folder, also s3://BUCKET/PREFIX, of which "
      "nothing is kept here");

  auto [diff, diff_arguments] = group.add(
      "diff",
      "which parameters changed between two checkpoints, and how much; they "
      "may have been saved with different layouts",
      "echelon checkpoint diff runs/first\n"
      "echelon checkpoint diff runs/first runs/second\n"
      "echelon checkpoint diff runs/first/checkpoints/step-00000100 "
      "runs/first --all",
      diff_checkpoints);
  diff.positional(
      "PATH", diff_arguments.path,
      "a checkpoint, or a run's folder (its latest checkpoint), also "
      "s3://BUCKET/PREFIX, of which a copy is kept here");
  diff.optional_positional(
      "OTHER", diff_arguments.other,
      "another one; without it, the two newest checkpoints of a run are "
      "compared");
  diff.flag(
      "--all", diff_arguments.all,
      "include the optimizer's and the random state, and unchanged tensors");

  list.flag("--json", list_arguments.json, "print JSON");
  show.flag("--json", show_arguments.json, "print JSON");
  verify.flag("--json", verify_arguments.json, "print JSON");
  diff.flag("--json", diff_arguments.json, "print JSON");
}

}  // namespace echelon::cli
