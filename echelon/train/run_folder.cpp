#include "echelon/train/run_folder.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

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

}  // namespace

void check_run_folder(const Job& job) {
  const fs::path run = job.train.run;
  std::error_code error;
  const auto status = fs::symlink_status(run, error);
  if (!fs::exists(status)) {
    require_writable(job, existing_parent(run));
    return;
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
    if (!job.train.overwrite) {
      throw ConfigError(
          place(job) +
          ": exists; --overwrite replaces it, or name another folder");
    }
  }
  require_writable(job, run);
}

std::string make_run_folder(const Job& job) {
  check_run_folder(job);
  const fs::path run = job.train.run;
  try {
    fs::remove_all(run);
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
