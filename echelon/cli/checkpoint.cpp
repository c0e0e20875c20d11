#include "echelon/cli/checkpoint.h"

#include <sys/stat.h>

#include <algorithm>
#include <ctime>
#include <fstream>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>

#include "echelon/checkpoint/files/reader.h"
#include "echelon/cli/command_line.h"
#include "echelon/cli/terminal.h"
#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon::cli {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr int kDamaged = static_cast<int>(ExitCode::data);

// One checkpoint of a list.
struct Listed {
  CheckpointPlace place;
  bool latest = false;
  CheckpointManifest manifest;
  std::string damage;  // why the manifest cannot be read; empty: it can
};

std::vector<Listed> listed(const std::vector<CheckpointPlace>& places) {
  std::vector<Listed> all;
  const auto latest = latest_checkpoint(places.front().path.parent_path());
  for (const auto& place : places) {
    Listed entry{.place = place};
    entry.latest = latest && latest->path == place.path;
    try {
      entry.manifest = read_manifest(place.path);
    } catch (const CheckpointError& error) {
      entry.damage = error.what();
    }
    all.push_back(std::move(entry));
  }
  std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) {
    return a.place.step > b.place.step;
  });
  return all;
}

Json json_of(const Listed& entry) {
  Json json = {
      {"path", entry.place.path.string()},
      {"step", entry.place.step},
      {"latest", entry.latest},
      {"saved", saved_at(entry.place.path)}};
  if (!entry.damage.empty()) {
    json["damage"] = entry.damage;
    return json;
  }
  json["layout"] = entry.manifest.layout;
  json["ranks"] = entry.manifest.ranks;
  json["files"] = entry.manifest.files.size();
  json["bytes"] = total_bytes(entry.manifest);
  json["metrics"] = Json::object();
  for (const auto& [name, value] : entry.manifest.metrics) {
    json["metrics"][name] = json_number(value);
  }
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
        std::to_string(entry.place.step), saved_at(entry.place.path)};
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
  size_t files = 0;
  std::vector<Damage> damages;
};

Verdict verify(const fs::path& checkpoint) {
  Verdict verdict;
  try {
    const auto manifest = read_manifest(checkpoint);
    verdict.bytes = total_bytes(manifest);
    verdict.files = manifest.files.size();
    ReadingProgress progress(checkpoint.string(), verdict.bytes);
    verdict.damages = verify_checkpoint(
        checkpoint.string(), [&](int64_t done) { progress(done); });
  } catch (const CheckpointError& error) {
    verdict.damages.push_back({"manifest.json", "", 0, error.what()});
  }
  return verdict;
}

void print(const fs::path& checkpoint, const Verdict& verdict) {
  const auto& damages = verdict.damages;
  std::cout << checkpoint.string() << ": ";
  if (damages.empty()) {
    std::cout << format(
        "whole: {}, {}\n", counted(static_cast<int64_t>(verdict.files), "file"),
        format_bytes(verdict.bytes));
  } else {
    std::cout << terminal_style().red("damaged: ")
              << counted(static_cast<int64_t>(damages.size()), "place") << "\n";
  }
  for (const auto& damage : damages) {
    std::cout << "  " << plain(damage.what) << "\n";
  }
  std::cout.flush();
}

int list_checkpoints(const CheckpointArguments& arguments) {
  const auto all = listed(find_checkpoints(arguments.path));
  const auto folder = all.front().place.path.parent_path();
  const auto others = list_others(folder);
  const bool damaged = std::ranges::any_of(
      all, [](const auto& entry) { return !entry.damage.empty(); });
  if (arguments.json) {
    Json json = {{"folder", folder.string()}, {"checkpoints", Json::array()}};
    for (const auto& entry : all) json["checkpoints"].push_back(json_of(entry));
    json["others"] = Json::array();
    for (const auto& path : others) {
      json["others"].push_back(path.filename().string());
    }
    print_json(json, std::cout);
    return damaged ? kDamaged : 0;
  }
  std::cout << folder.string() << "\n\n";
  print_list(all);
  if (damaged || !others.empty()) std::cout << "\n";
  for (const auto& entry : all) {
    if (!entry.damage.empty()) {
      std::cout << terminal_style().red("damaged: ") << plain(entry.damage)
                << "\n";
    }
  }
  for (const auto& path : others) {
    const std::string name = path.filename().string();
    std::cout << (name.starts_with(".") ? "unfinished: " + name +
                                              ", being saved or left by a crash"
                                        : "set aside: " + name)
              << "\n";
  }
  return damaged ? kDamaged : 0;
}

int verify_checkpoints(const CheckpointArguments& arguments) {
  auto rows = Json::array();
  bool damaged = false;
  for (const auto& place : find_checkpoints(arguments.path)) {
    const auto verdict = verify(place.path);
    damaged = damaged || !verdict.damages.empty();
    if (!arguments.json) {
      print(place.path, verdict);
      continue;
    }
    rows.push_back(
        {{"path", place.path.string()},
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

CheckpointManifest read_manifest(const std::filesystem::path& checkpoint) {
  const auto path = (checkpoint / "manifest.json").string();
  std::ifstream file(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  if (!file) throw CheckpointError(path + ": cannot be read");
  return parse_manifest(text, path);
}

int64_t total_bytes(const CheckpointManifest& manifest) {
  int64_t bytes = 0;
  for (const auto& file : manifest.files) bytes += file.bytes;
  return bytes;
}

std::string saved_at(const std::filesystem::path& checkpoint) {
  struct stat status = {};
  const auto path = checkpoint / "manifest.json";
  if (::stat(path.c_str(), &status) != 0) return "?";
  std::tm time = {};
  ::localtime_r(&status.st_mtime, &time);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%d %H:%M:%S", &time);
  return text;
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
      "echelon checkpoint list runs/first --json",
      list_checkpoints);
  list.positional(
      "PATH", list_arguments.path,
      "a run's folder, or its folder of checkpoints");

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
      "a checkpoint, or a run's folder (its latest checkpoint)");
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
      "PATH", verify_arguments.path, "a checkpoint, or a run's folder");

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
      "a checkpoint, or a run's folder (its latest checkpoint)");
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
