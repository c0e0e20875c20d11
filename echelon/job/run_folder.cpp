#include "echelon/job/run_folder.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <vector>

#include "echelon/checkpoint/files/folder.h"
#include "echelon/checkpoint/files/folder_files.h"
#include "echelon/checkpoint/format/new_file.h"
#include "echelon/error.h"

namespace echelon {
namespace {

namespace fs = std::filesystem;

std::string place(const Job& job) {
  return job.document.name().empty() ? "[train] run = \"" + job.train.run + "\""
                                     : job.document.where("train.run");
}

// The nearest folder above that exists: where the run's folder would be made.
fs::path existing_parent(const fs::path& path) {
  fs::path parent = path.lexically_normal();
  std::error_code error;
  do {
    parent = parent.parent_path();
  } while (!parent.empty() && !fs::exists(parent, error));
  return parent.empty() ? "." : parent;
}

void require_writable(const Job& job, const fs::path& folder) {
  std::error_code error;
  if (!fs::is_directory(folder, error)) {
    throw ConfigError(
        place(job) + ": " + folder.string() +
        " is a file; name a folder below another one");
  }
  if (::access(folder.c_str(), W_OK | X_OK) != 0) {
    throw ConfigError(
        place(job) + ": " + folder.string() + " cannot be written: " +
        std::strerror(errno) + "; name a folder elsewhere");
  }
}

// Nothing, or what a crash left of the first file that is written there.
bool holds_nothing(const fs::path& run) {
  std::error_code error;
  const fs::directory_iterator entries(run, error);
  return !error &&
         std::all_of(begin(entries), end(entries), [](const auto& one) {
           return one.path().filename().string().starts_with(
               "config.toml.part-");
         });
}

// What checkpoint.resume names, when it names something.
std::vector<CheckpointPlace> named_checkpoints(const Job& job) {
  const std::string& from = job.checkpoint.resume;
  if (from == "auto" || from == "never") return {};
  return find_checkpoints(from);
}

// Also by a link that leads there.
bool lies_in(const fs::path& path, const fs::path& folder) {
  std::error_code error;
  const fs::path whole = fs::weakly_canonical(path, error);
  const fs::path outer = fs::canonical(folder, error);
  const auto differ =
      std::mismatch(outer.begin(), outer.end(), whole.begin(), whole.end());
  return !error && differ.first == outer.end();
}

// Before all that is in the folder is removed.
void check_overwrite(const Job& job) {
  const fs::path run = job.train.run;
  const auto keep = [&](const fs::path& path, const std::string& key,
                        const std::string& value) {
    if (value.empty() || !lies_in(path, run)) return;
    throw ConfigError(
        place(job) + ": overwrite would remove what " + key + " = \"" + value +
        "\" names; leave one of them out, or name another folder for the run");
  };
  for (const auto& checkpoint : named_checkpoints(job)) {
    keep(job.checkpoint.resume, "checkpoint.resume", job.checkpoint.resume);
    keep(checkpoint.path, "checkpoint.resume", job.checkpoint.resume);
  }
  keep(job.model.weights, "model.weights", job.model.weights);
  keep(job.data.path, "data.path", job.data.path);
  keep(job.data.holdout_path, "data.holdout_path", job.data.holdout_path);
  keep(job.data.tokenizer, "data.tokenizer", job.data.tokenizer);
  for (const auto& source : job.data.sources)
    keep(source, "data.sources", source);
}

// As config.toml has it: running that again destroys nothing.
std::string text_of(Job job) {
  job.train.overwrite = false;
  return to_toml(job);
}

// The same run was killed before its first checkpoint: nothing of it is lost
// when it begins again.
bool was_cut_short(const Job& job) {
  const fs::path run = job.train.run;
  std::error_code error;
  return saves(job.checkpoint) && job.checkpoint.resume != "never" &&
         !fs::exists(run / "checkpoints/last.safetensors", error) &&
         folder_files::read_file(run / "config.toml") == text_of(job);
}

// The run's own are there; whether training goes on from the newest of them.
// What it began with may be named all the same, and be gone: who queues a
// command again changes nothing in it.
void check_own_checkpoints(
    const Job& job, const std::vector<CheckpointPlace>& own) {
  const std::string& from = job.checkpoint.resume;
  if (from == "never") {
    throw ConfigError(
        place(job) +
        ": exists; --overwrite replaces it, or name another folder");
  }
  std::error_code error;
  for (const auto& older : own) {
    if (older.step == own.front().step ||
        !fs::equivalent(from, older.path, error)) {
      continue;
    }
    throw ConfigError(
        place(job) + ": goes on from its newest checkpoint, that of step " +
        std::to_string(own.front().step) + ", but resume = \"" + from +
        "\" is an older one; name another folder for a run that begins there");
  }
}

}  // namespace

bool check_run_folder(const Job& job) {
  const fs::path run = job.train.run;
  std::error_code error;
  const auto status = fs::symlink_status(run, error);
  if (!fs::exists(status)) {
    named_checkpoints(job);
    require_writable(job, existing_parent(run));
    return false;
  }
  if (fs::is_symlink(status) || !fs::is_directory(status)) {
    throw ConfigError(
        place(job) + ": is not a folder; name a folder for the run");
  }
  if (holds_nothing(run)) {
    named_checkpoints(job);
    require_writable(job, run);
    return false;
  }
  if (!fs::exists(run / "config.toml", error)) {
    throw ConfigError(
        place(job) +
        ": is a folder without config.toml, so no run of Echelon; it is left "
        "alone: name another one");
  }
  // Whoever writes there is not disturbed.
  if (fs::is_directory(run / "checkpoints", error)) {
    const CheckpointLock lock(run / "checkpoints");
  }
  require_writable(job, run);
  if (job.train.overwrite) {
    check_overwrite(job);
    return false;
  }
  const auto own = list_checkpoints(run / "checkpoints");
  if (own.empty()) {
    named_checkpoints(job);
    if (was_cut_short(job)) return true;
    throw ConfigError(
        place(job) +
        ": exists and has no checkpoints to go on from; --overwrite replaces "
        "it, or name another folder");
  }
  check_own_checkpoints(job, own);
  return true;
}

std::string make_run_folder(const Job& job) {
  const bool goes_on = check_run_folder(job);
  const fs::path run = job.train.run;
  try {
    if (!goes_on) fs::remove_all(run);
    fs::create_directories(run);
  } catch (const fs::filesystem_error& error) {
    throw ConfigError(
        place(job) + ": cannot be made: " + error.code().message() +
        "; name a folder elsewhere");
  }
  const std::string text = text_of(job);
  const std::string path = (run / "config.toml").string();
  try {
    NewFile file(path, text.size(), NewFile::Under::beside);
    file.append(text.data(), text.size());
    file.move_into_place();
  } catch (const CheckpointError& error) {
    throw ConfigError(place(job) + ": " + error.what());
  }
  return path;
}

}  // namespace echelon
