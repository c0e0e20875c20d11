// Finds and lists checkpoints.
#include "echelon/checkpoint/files/folder.h"

#include <algorithm>
#include <utility>

#include "echelon/checkpoint/files/folder_files.h"
#include "echelon/checkpoint/format/foreign.h"
#include "echelon/error.h"

namespace echelon {

namespace fs = std::filesystem;
using namespace folder_files;

fs::path checkpoint_path(const fs::path& folder, int64_t step) {
  return folder / step_name(step);
}

fs::path partial_checkpoint(const fs::path& folder, int64_t step) {
  return folder / ("." + step_name(step) + ".partial");
}

std::vector<CheckpointPlace> list_checkpoints(const fs::path& folder) {
  std::vector<CheckpointPlace> found;
  std::error_code error;
  fs::directory_iterator entries(folder, error);
  if (error == std::errc::no_such_file_or_directory) return found;
  for (; !error && entries != fs::directory_iterator();
       entries.increment(error)) {
    const auto& path = entries->path();
    const auto step = step_of(path.filename().string());
    if (step && is_checkpoint(path)) found.push_back({path, *step});
  }
  if (error) fail(folder, "listing the folder", error.value());
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) {
    return a.step > b.step;
  });
  return found;
}

std::optional<CheckpointPlace> latest_checkpoint(const fs::path& folder) {
  for (const char* file : {kNextLatest, kLatest}) {
    const auto step = named_step(folder / file);
    if (!step) continue;
    const auto path = checkpoint_path(folder, *step);
    if (is_checkpoint(path)) return CheckpointPlace{path, *step};
  }
  const auto all = list_checkpoints(folder);
  if (all.empty()) return {};
  return all.front();
}

std::vector<fs::path> list_others(const fs::path& folder) {
  std::vector<fs::path> found;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    const std::string name = entry.path().filename().string();
    if (is_debris(name) || name.starts_with(kAside)) {
      found.push_back(entry.path());
    }
  }
  std::sort(found.begin(), found.end());
  return found;
}

namespace {

// The latest first, then the others as they are listed.
std::vector<CheckpointPlace> in_order_of_trial(const fs::path& folder) {
  auto all = list_checkpoints(folder);
  if (all.empty()) return all;
  const auto latest = latest_checkpoint(folder);
  const auto first = std::find_if(
      all.begin(), all.end(),
      [&](const auto& place) { return latest && place.step == latest->step; });
  if (first != all.end()) std::rotate(all.begin(), first, first + 1);
  return all;
}

// The step of a checkpoint with any name, such as a copy.
int64_t saved_step(const fs::path& checkpoint) {
  if (const auto step = step_of(checkpoint.filename().string())) return *step;
  const auto path = checkpoint / kManifest;
  return parse_manifest(read_file(path), path.string()).step;
}

bool has_unfinished(const fs::path& folder) {
  const auto others = list_others(folder);
  return std::any_of(others.begin(), others.end(), [](const auto& path) {
    return is_debris(path.filename().string());
  });
}

// "path", not "path/", so that the last component is its name.
fs::path without_slash(fs::path path) {
  path = path.lexically_normal();
  return path.has_filename() || !path.has_parent_path() ? path
                                                        : path.parent_path();
}

// "; PATH is a folder of …" where another program's files are recognised, else
// nothing.
std::string what_else(const fs::path& path) {
  const auto foreign = foreign_checkpoint(path);
  return foreign.empty() ? "" : "; " + foreign;
}

}  // namespace

std::vector<CheckpointPlace> find_checkpoints(const fs::path& given) {
  const auto path = without_slash(given);
  std::error_code error;
  const auto kind = fs::status(path, error).type();
  if (kind == fs::file_type::not_found) {
    throw CheckpointError(path.string() + ": there is no such folder");
  }
  if (kind != fs::file_type::directory) {
    throw CheckpointError(
        path.string() +
        ": is a file; a checkpoint is a folder such as "
        "RUN/checkpoints/step-00000100, and RUN leads to its newest" +
        what_else(path));
  }
  if (is_debris(path.filename().string())) {
    throw CheckpointError(
        path.string() +
        ": is what a crash or a running save has left, and no checkpoint; "
        "whole ones are called step-…");
  }
  if (is_checkpoint(path)) return {{path, saved_step(path)}};
  for (const auto& folder : {path, path / "checkpoints"}) {
    if (auto found = in_order_of_trial(folder); !found.empty()) return found;
  }
  for (const auto& folder : {path, path / "checkpoints"}) {
    if (!has_unfinished(folder)) continue;
    throw CheckpointError(
        folder.string() +
        ": has no whole checkpoint, only one that was not finished");
  }
  throw CheckpointError(
      path.string() +
      ": has no checkpoint: neither manifest.json nor a folder step-… nor "
      "checkpoints/step-…" +
      what_else(path));
}

}  // namespace echelon
