// Which checkpoints stay, and how the others go.
#include <algorithm>
#include <cmath>
#include <set>
#include <string>

#include "echelon/checkpoint/files/folder.h"
#include "echelon/checkpoint/files/folder_files.h"
#include "echelon/error.h"

namespace echelon {

namespace fs = std::filesystem;
using namespace folder_files;

namespace {

// Adds to `stay` the best by the rule's metric, the newest of equals, and what
// might be the best for all that can be known.
void keep_best(
    const std::vector<CheckpointPlace>& newest_first, const KeepRule& rule,
    std::set<int64_t>& stay) {
  const CheckpointPlace* best = nullptr;
  double best_value = 0;
  for (const auto& place : newest_first) {
    const auto path = place.path / kManifest;
    CheckpointManifest manifest;
    try {
      manifest = parse_manifest(read_file(path), path.string());
    } catch (const CheckpointError&) {
      stay.insert(place.step);
      continue;
    }
    const auto metric = manifest.metrics.find(rule.best);
    if (metric == manifest.metrics.end() || std::isnan(metric->second)) {
      continue;
    }
    const double value =
        rule.best_is_largest ? -metric->second : metric->second;
    if (best != nullptr && value >= best_value) continue;
    best = &place;
    best_value = value;
  }
  if (best != nullptr) stay.insert(best->step);
}

}  // namespace

std::vector<CheckpointPlace>
keep_checkpoints(const fs::path& folder, const KeepRule& rule) {
  const auto all = list_checkpoints(folder);
  std::set<int64_t> stay;
  const auto newest = static_cast<size_t>(std::max<int64_t>(2, rule.newest));
  for (size_t i = 0; i < std::min(newest, all.size()); ++i) {
    stay.insert(all[i].step);
  }
  if (const auto latest = latest_checkpoint(folder)) stay.insert(latest->step);
  if (!rule.best.empty() && all.size() > stay.size()) {
    keep_best(all, rule, stay);
  }
  std::vector<CheckpointPlace> gone;
  for (const auto& place : all) {
    if (!stay.contains(place.step)) gone.push_back(place);
  }
  // The name first: half a checkpoint is never called one.
  for (const auto& place : gone) {
    const auto removed = removed_path(folder, place.step);
    remove_path(removed);
    rename_path(place.path, removed);
  }
  if (!gone.empty()) sync_folder(folder);
  for (const auto& place : gone) remove_path(removed_path(folder, place.step));
  return gone;
}

fs::path set_aside(const CheckpointPlace& checkpoint) {
  const auto folder = checkpoint.path.parent_path();
  const auto name = kAside + checkpoint.path.filename().string();
  auto path = folder / name;
  std::error_code error;
  for (int copy = 2; fs::exists(fs::symlink_status(path, error)); ++copy) {
    path = folder / (name + "-" + std::to_string(copy));
  }
  rename_path(checkpoint.path, path);
  sync_folder(folder);
  return path;
}

}  // namespace echelon
