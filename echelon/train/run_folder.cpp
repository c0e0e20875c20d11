#include "echelon/train/run_folder.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "echelon/checkpoint/folder.h"
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

bool has_checkpoints(const fs::path& run) {
  return !list_checkpoints(run / "checkpoints").empty();
}

// The run's own are there; whether training goes on from the newest of them.
void check_own_checkpoints(const Job& job) {
  const fs::path run = job.train.run;
  const std::string& from = job.checkpoint.resume;
  if (from == "never") {
    throw ConfigError(
        place(job) +
        ": exists; --overwrite replaces it, or name another folder");
  }
  std::error_code error;
  if (from != "auto" && !fs::equivalent(from, run, error)) {
    throw ConfigError(
        place(job) + ": has checkpoints of its own, but resume = \"" + from +
        "\" names others; --overwrite replaces them, --resume auto goes on from "
        "them, or name another folder");
  }
}

}  // namespace

bool check_run_folder(const Job& job) {
  const fs::path run = job.train.run;
  const std::string& from = job.checkpoint.resume;
  std::error_code unknown;
  const bool same = fs::equivalent(from, run, unknown);
  if (from != "auto" && from != "never" && !same) find_checkpoints(from);
  std::error_code error;
  const auto status = fs::symlink_status(run, error);
  if (!fs::exists(status)) {
    require_writable(job, existing_parent(run));
    return false;
  }
  if (fs::is_symlink(status) || !fs::is_directory(status)) {
    throw ConfigError(
        place(job) + ": is not a folder; name a folder for the run");
  }
  if (!fs::is_empty(run, error)) {
    if (!fs::exists(run / "config.toml", error)) {
      throw ConfigError(
          place(job) +
          ": is a folder without config.toml, so no run of Echelon; it is left "
          "alone: name another one");
    }
    const bool own = has_checkpoints(run);
    // Whoever writes there is not disturbed.
    if (fs::is_directory(run / "checkpoints", error)) {
      const CheckpointLock lock(run / "checkpoints");
    }
    if (!job.train.overwrite) {
      if (!own) {
        throw ConfigError(
            place(job) +
            ": exists and has no checkpoints to go on from; --overwrite replaces "
            "it, or name another folder");
      }
      check_own_checkpoints(job);
      require_writable(job, run);
      return true;
    }
    if (same) {
      throw ConfigError(
          place(job) + ": overwrite would remove what resume = \"" + from +
          "\" names; leave one of them out");
    }
  }
  require_writable(job, run);
  return false;
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
  Job written = job;
  written.train.overwrite = false;
  const fs::path path = run / "config.toml";
  std::ofstream file(path);
  file << to_toml(written);
  file.close();
  if (!file) {
    throw ConfigError(
        place(job) + ": " + path.string() +
        " cannot be written: " + std::strerror(errno) + "; is the disk full?");
  }
  return path.string();
}

}  // namespace echelon
