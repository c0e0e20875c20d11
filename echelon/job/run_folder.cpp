#include "echelon/job/run_folder.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <vector>

#include "echelon/architecture/weights_source.h"
#include "echelon/checkpoint/files/folder.h"
#include "echelon/checkpoint/files/folder_files.h"
#include "echelon/checkpoint/files/reader.h"
#include "echelon/checkpoint/format/new_file.h"
#include "echelon/checkpoint/remote/object_checkpoints.h"
#include "echelon/checkpoint/remote/remote_checkpoints.h"
#include "echelon/error.h"
#include "echelon/storage/settings.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

namespace fs = std::filesystem;

std::string place(const Job& job) {
  return job.document.name().empty()
             ? format("[train] run = \"{}\"", job.train.run)
             : job.document.where("train.run");
}

// The nearest existing folder above, in which the run's folder would be made.
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
    throw ConfigError(format(
        "{}: {} is a file; name a folder below another one", place(job),
        folder.string()));
  }
  if (::access(folder.c_str(), W_OK | X_OK) != 0) {
    throw ConfigError(format(
        "{}: {} cannot be written: {}; name a folder elsewhere", place(job),
        folder.string(), std::strerror(errno)));
  }
}

// Whether the folder is empty, apart from its lock and what a crash left of its
// first file.
bool holds_nothing(const fs::path& run) {
  std::error_code error;
  const fs::directory_iterator entries(run, error);
  return !error &&
         std::all_of(begin(entries), end(entries), [](const auto& one) {
           const std::string name = one.path().filename().string();
           return name == folder_files::kLock ||
                  name.starts_with("config.toml.part-");
         });
}

// The checkpoints on a disk that checkpoint.resume names, if any. Those on
// object storage are only looked for.
std::vector<CheckpointPlace> named_checkpoints(const Job& job) {
  const std::string& from = job.checkpoint.resume;
  if (from == "auto" || from == "never") return {};
  if (!storage::is_object_url(from)) return find_checkpoints(from);
  find_object_checkpoints(from);
  return {};
}

// Before ranks start: each would wait for the copy.
void fetch_named(const Job& job) {
  const std::string& from = job.checkpoint.resume;
  const auto own = list_checkpoints(fs::path(job.train.run) / "checkpoints");
  if (own.empty() && storage::is_object_url(from)) local_checkpoint(from);
}

// Whether `path` is inside `folder`, also through a link.
bool lies_in(const fs::path& path, const fs::path& folder) {
  std::error_code error;
  const fs::path whole = fs::weakly_canonical(path, error);
  const fs::path outer = fs::canonical(folder, error);
  const auto differ =
      std::mismatch(outer.begin(), outer.end(), whole.begin(), whole.end());
  return !error && differ.first == outer.end();
}

// The text of config.toml. Running that again destroys nothing.
std::string text_of(Job job) {
  job.train.overwrite = false;
  return to_toml(job);
}

// Whether this version of the program wrote the file, and nobody edited it.
bool written_by_a_run(const fs::path& configuration) {
  try {
    return folder_files::read_file(configuration) ==
           text_of(load_job(configuration.string()));
  } catch (const Error&) {
    return false;
  }
}

void check_written_by_a_run(const Job& job) {
  if (written_by_a_run(fs::path(job.train.run) / "config.toml")) return;
  throw ConfigError(
      place(job) +
      ": has a config.toml that this version's runs did not write, so the "
      "folder is left alone, also with --overwrite; name another one");
}

// Lists what --overwrite removes from a run's folder: the entries with names
// that a run gives. config.toml is not among them, because it is replaced.
std::vector<fs::path> files_of_run(const fs::path& run) {
  std::vector<fs::path> found;
  const auto add = [&](const fs::path& folder, const auto& is_ours) {
    std::error_code error;
    fs::directory_iterator entries(folder, error);
    for (; !error && entries != fs::directory_iterator();
         entries.increment(error)) {
      if (is_ours(entries->path().filename().string())) {
        found.push_back(entries->path());
      }
    }
  };
  add(run, [](const std::string& name) {
    static const std::vector<std::string> kNames = {
        kFirstLayout, "layers.json", "metrics.jsonl", "report.html",
        "timeline.json"};
    // A crash leaves NAME.part-….
    const std::string whole = name.substr(0, name.find(".part-"));
    return std::ranges::find(kNames, whole) != kNames.end() ||
           name.starts_with("damaged-metrics.jsonl") ||
           (whole == "config.toml" && name != whole);
  });
  add(run / "log", [](const std::string& name) {
    return name.starts_with("rank-") && name.ends_with(".log");
  });
  add(run / "checkpoints", folder_files::has_name_of_run);
  add(run / "status", [](const std::string& name) {
    return name.starts_with("rank-") && name.find(".json") != name.npos;
  });
  add(run / "tensorboard", [](const std::string& name) {
    return name.starts_with("events.out.tfevents.");
  });
  add(run / "otlp",
      [](const std::string& name) { return name == "traces.jsonl"; });
  add(run / "last_step",
      [](const std::string& name) { return name.starts_with("rank-"); });
  return found;
}

// Called before the files of an older run are removed.
void check_overwrite(const Job& job) {
  const fs::path run = job.train.run;
  check_written_by_a_run(job);
  const auto removed = files_of_run(run);
  const auto keep = [&](const fs::path& path, const std::string& key,
                        const std::string& value) {
    if (value.empty() || std::ranges::none_of(removed, [&](const auto& one) {
          return lies_in(path, one);
        })) {
      return;
    }
    throw ConfigError(format(
        "{}: overwrite would remove what {} = \"{}\" names; leave one of them "
        "out, or name another folder for the run",
        place(job), key, value));
  };
  for (const auto& checkpoint : named_checkpoints(job)) {
    keep(checkpoint.path, "checkpoint.resume", job.checkpoint.resume);
  }
  keep(job.model.weights, "model.weights", job.model.weights);
  keep(job.data.path, "data.path", job.data.path);
  keep(job.data.holdout_path, "data.holdout_path", job.data.holdout_path);
  keep(job.data.tokenizer, "data.tokenizer", job.data.tokenizer);
  for (const auto& source : job.data.sources)
    keep(source, "data.sources", source);
}

void remove_run(const fs::path& run) {
  for (const auto& path : files_of_run(run)) fs::remove_all(path);
  for (const char* folder :
       {"log", "checkpoints", "status", "tensorboard", "otlp", "last_step"}) {
    std::error_code has_more;
    if (!fs::is_symlink(run / folder)) fs::remove(run / folder, has_more);
  }
}

// Whether the same run was killed before its first checkpoint, so that starting
// it again loses nothing.
bool was_killed_early(const Job& job) {
  const fs::path run = job.train.run;
  std::error_code error;
  return saves(job.checkpoint) && job.checkpoint.resume != "never" &&
         !fs::exists(run / "checkpoints/last.safetensors", error) &&
         folder_files::read_file(run / "config.toml") == text_of(job);
}

// Throws unless a run with checkpoints of its own may resume from the newest.
// checkpoint.resume may still name what the run started from, even if that is
// gone, because the same command is queued again unchanged.
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
    throw ConfigError(format(
        "{}: resumes from its newest checkpoint, that of step {}, but resume = "
        "\"{}\" is an older one; name another folder for a run that begins "
        "there",
        place(job), own.front().step, from));
  }
}

// check_run_folder for a process that has the lock.
bool check_locked_folder(const Job& job) {
  const fs::path run = job.train.run;
  std::error_code error;
  const bool is_link = fs::is_symlink(fs::symlink_status(run, error));
  const auto status = fs::status(run, error);
  if (is_link && !fs::exists(status)) {
    throw ConfigError(format(
        "{}: is a link to {}, which is not there; make that folder or name "
        "another one",
        place(job), fs::read_symlink(run, error).string()));
  }
  if (!fs::exists(status)) {
    named_checkpoints(job);
    require_writable(job, existing_parent(run));
    return false;
  }
  if (!fs::is_directory(status)) {
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
  // Ranks that no launcher of ours started may write checkpoints.
  check_unlocked(run / "checkpoints");
  require_writable(job, run);
  if (job.train.overwrite) {
    check_overwrite(job);
    return false;
  }
  const auto own = list_checkpoints(run / "checkpoints");
  if (own.empty()) {
    named_checkpoints(job);
    if (was_killed_early(job)) return true;
    check_written_by_a_run(job);
    throw ConfigError(
        place(job) +
        ": exists and has no checkpoints to resume from; --overwrite replaces "
        "it, or name another folder");
  }
  check_own_checkpoints(job, own);
  return true;
}

std::string remote_place(const Job& job) {
  return job.document.name().empty()
             ? format("[checkpoint] remote = \"{}\"", job.checkpoint.remote)
             : job.document.where("checkpoint.remote");
}

// Asks the storage whether the run may use it.
void check_remote(const Job& job) {
  const auto& options = job.checkpoint;
  if (options.remote.empty()) return;
  if (job.train.overwrite &&
      (options.resume + "/").starts_with(options.remote + "/")) {
    throw ConfigError(format(
        "{}: overwrite would remove what checkpoint.resume = \"{}\" names; "
        "leave one of them out, or name another place",
        remote_place(job), options.resume));
  }
  try {
    RemoteCheckpoints remote(options.remote);
    remote.check();
    if (options.resume != "never" || job.train.overwrite) return;
    if (remote.list().empty()) return;
  } catch (const Error& error) {
    throw ConfigError(format("{}: {}", remote_place(job), error.what()));
  }
  throw ConfigError(
      remote_place(job) +
      ": has checkpoints, which resume = \"never\" does not use; --overwrite "
      "replaces them, or name another place");
}

// What a run on another machine has left there.
void take_over_remote(const Job& job) {
  if (job.checkpoint.remote.empty()) return;
  RemoteCheckpoints remote(job.checkpoint.remote);
  if (job.train.overwrite) {
    remote.clear();
  } else if (job.checkpoint.resume != "never") {
    remote.fetch_newest(job.train.run);
  }
}

}  // namespace

bool check_run_folder(const Job& job) {
  std::error_code error;
  if (fs::is_directory(job.train.run, error)) check_unlocked(job.train.run);
  const bool resumes = check_locked_folder(job);
  check_remote(job);
  return resumes;
}

RunFolder make_run_folder(const Job& job) {
  check_run_folder(job);
  const fs::path run = job.train.run;
  RunFolder made;
  try {
    fs::create_directories(run);
    made.lock = std::make_unique<CheckpointLock>(run);
    if (!check_locked_folder(job)) remove_run(run);
  } catch (const fs::filesystem_error& error) {
    throw ConfigError(format(
        "{}: cannot be made: {}; name a folder elsewhere", place(job),
        error.code().message()));
  }
  made.configuration = write_configuration(job, run);
  take_over_remote(job);
  fetch_named(job);
  return made;
}

std::string write_configuration(const Job& job, const fs::path& folder) {
  const std::string text = text_of(job);
  const std::string path = (folder / "config.toml").string();
  try {
    NewFile file(path, text.size(), NewFile::Under::beside);
    file.append(text.data(), text.size());
    file.move_into_place();
  } catch (const CheckpointError& error) {
    throw ConfigError(place(job) + ": " + error.what());
  }
  return path;
}

Job trained_job(const std::string& place) {
  if (!last_weights(place).empty()) {
    return load_job((fs::path(place) / "config.toml").string());
  }
  const auto checkpoint =
      find_checkpoints(local_checkpoint(place)).front().path.string();
  const CheckpointReader reader(checkpoint);
  return parse_job(
      reader.manifest().config, checkpoint + "/manifest.json: config");
}

}  // namespace echelon
