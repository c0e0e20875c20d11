// echelon checkpoint: what is in a run's checkpoints, without LibTorch.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <memory>
#include <set>

#include "echelon/checkpoint/files/reader.h"
#include "echelon/cli/checkpoint_text.h"
#include "echelon/cli/command_line.h"
#include "echelon/cli/findings.h"
#include "echelon/error.h"
#include "echelon/text/table.h"

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
  std::string damage;  // of the manifest; empty: none
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

void print_table(const std::vector<Listed>& all) {
  std::set<std::string> metrics;
  for (const auto& entry : all) {
    for (const auto& [name, value] : entry.manifest.metrics) {
      metrics.insert(name);
    }
  }
  std::vector<std::vector<std::string>> rows;
  rows.push_back({"step", "saved", "layout", "ranks", "size"});
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
    row.push_back(bytes_text(static_cast<double>(total_bytes(manifest))));
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
  const std::string text = aligned(rows);
  const size_t end = text.find('\n');
  std::cout << bold(text.substr(0, end)) << text.substr(end);
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

// What is known of a checkpoint after all of it was read.
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
  std::cout << checkpoint.string() << ": "
            << (damages.empty()
                    ? "whole: " +
                          counted(static_cast<int64_t>(verdict.files), "file") +
                          ", " + bytes_text(static_cast<double>(verdict.bytes))
                    : red("damaged: ") +
                          counted(
                              static_cast<int64_t>(damages.size()), "place"))
            << "\n";
  for (const auto& damage : damages) {
    std::cout << "  " << plain(damage.what) << "\n";
  }
  std::cout.flush();
}

}  // namespace

int list_checkpoints(const CheckpointArguments& arguments) {
  const auto all = listed(find_checkpoints(arguments.path));
  const auto folder = all.front().place.path.parent_path();
  const auto others = list_others(folder);
  bool damaged = false;
  for (const auto& entry : all) damaged = damaged || !entry.damage.empty();
  if (arguments.json) {
    Json json = {{"folder", folder.string()}, {"checkpoints", Json::array()}};
    for (const auto& entry : all) json["checkpoints"].push_back(json_of(entry));
    json["others"] = Json::array();
    for (const auto& path : others) {
      json["others"].push_back(path.filename().string());
    }
    std::cout << json.dump(2) << "\n";
    return damaged ? kDamaged : 0;
  }
  std::cout << folder.string() << "\n\n";
  print_table(all);
  if (damaged || !others.empty()) std::cout << "\n";
  for (const auto& entry : all) {
    if (!entry.damage.empty()) {
      std::cout << red("damaged: ") << plain(entry.damage) << "\n";
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
  if (arguments.json) std::cout << rows.dump(2) << "\n";
  return damaged ? kDamaged : 0;
}

namespace {

struct Command {
  const char* name;
  const char* help;
  const char* path_help;
  const char* examples;
  int (*act)(const CheckpointArguments&);
};

CLI::App*
add(CLI::App& group, Action& action, const Command& command,
    const std::shared_ptr<CheckpointArguments>& arguments) {
  auto* app = group.add_subcommand(command.name, command.help);
  app->footer(command.examples);
  app->add_option("PATH", arguments->path, command.path_help)
      ->required()
      ->type_name("");
  app->add_flag("--json", arguments->json, "print JSON");
  app->callback([&action, arguments, act = command.act] {
    action = [arguments, act] { return act(*arguments); };
  });
  return app;
}

}  // namespace

void add_checkpoint(CLI::App& app, Action& action) {
  auto* group = app.add_subcommand(
      "checkpoint",
      "list a run's checkpoints, show what is in one, verify them, compare "
      "two");
  group->require_subcommand(1);
  group->footer(
      "echelon checkpoint list runs/first\n"
      "echelon checkpoint show runs/first\n"
      "echelon checkpoint verify runs/first\n"
      "echelon checkpoint diff runs/first");
  constexpr const char* kRun =
      "a run's folder, its checkpoints, or one of them";
  const auto make = [&](const Command& command) {
    auto arguments = std::make_shared<CheckpointArguments>();
    return std::pair(add(*group, action, command, arguments), arguments);
  };
  make(
      {"list",
       "every checkpoint of a run: step, when, layout, size, metrics. PATH: a "
       "run's folder, or its checkpoints",
       kRun,
       "echelon checkpoint list runs/first\n"
       "echelon checkpoint list runs/first --json",
       list_checkpoints});
  {
    const auto [show, arguments] = make(
        {"show",
         "what is in a checkpoint: step, position in the data, layout, sizes, "
         "tensors, metrics, hash. PATH: a checkpoint, or a run's folder, whose "
         "latest it is",
         kRun,
         "echelon checkpoint show runs/first\n"
         "echelon checkpoint show runs/first/checkpoints/step-00000100 "
         "--tensors\n"
         "echelon checkpoint show runs/first --config > again.toml",
         show_checkpoint});
    show->add_flag("--tensors", arguments->all, "list every tensor");
    show->add_flag(
        "--config", arguments->config,
        "print the configuration that it was trained with, and nothing else");
  }
  make(
      {"verify",
       "read every byte of a checkpoint, or of all of a run, and compare with "
       "its checksums; a line for each damage, and exit code 3. PATH: a "
       "checkpoint, or a run's folder",
       kRun,
       "echelon checkpoint verify runs/first\n"
       "echelon checkpoint verify runs/first/checkpoints/step-00000100",
       verify_checkpoints});
  {
    const auto [diff, arguments] = make(
        {"diff",
         "which parameters changed from A to B, whatever the layouts that "
         "saved "
         "them, and how much. PATH is A, OTHER is B: checkpoints, or runs' "
         "folders, whose latest they are. Of PATH alone, a run: its two newest",
         "A: a checkpoint, or a run (its latest)",
         "echelon checkpoint diff runs/first\n"
         "echelon checkpoint diff runs/first runs/second\n"
         "echelon checkpoint diff runs/first/checkpoints/step-00000100 "
         "runs/first --all",
         diff_checkpoints});
    diff->add_option("OTHER", arguments->other, "B: another one")
        ->type_name("");
    diff->add_flag(
        "--all", arguments->all,
        "the optimizer's and the random state as well, and what is the same");
  }
}

}  // namespace echelon::cli
