// What a pool must not lose: its jobs, who held what, and past usage, in an
// SQLite file.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "echelon/pool/decide.h"

namespace echelon::pool {

enum class JobState { waiting, running, done, failed, cancelled };

std::string to_string(JobState state);

/// A job as submitted, and how far it is.
struct JobRecord {
  int64_t id = 0;
  std::string key;  // of the submission: sent again, it is the same job
  std::string project;
  int64_t user = 0;  // who submitted it, and whose processes it has
  std::string user_name;
  std::vector<std::string> command;
  std::vector<std::string> environment;  // "NAME=value"
  std::string folder;                    // where the command starts
  int64_t least = 1, most = 1;
  Kept kept = Kept::all;
  int64_t priority = 0;
  std::vector<int64_t> refused;

  JobState state = JobState::waiting;
  /// Devices by name. The scheduler has given it `given`, and its processes
  /// have `used`; they differ while the job starts, ends or changes its size.
  std::vector<std::string> given, used;
  int64_t attempt = 0;  // processes that were started for it, one by one
  bool cancelled = false;
  int64_t exit_code = -1;
  int64_t yielded = 0;   // how often it has ended with 75 unasked, in a row
  double submitted = 0;  // seconds since 1970, as all times
  double waiting_since = 0;
  double not_before = 0;  // when it may start again
  double started = 0;     // the newest attempt
  double stop_sent = 0;   // SIGTERM to that attempt; 0: none
  double ended = 0;
  std::string note;  // why it failed, or what went wrong last
};

/// Devices of a job from one moment to another; ended 0: until now.
struct Allocation {
  int64_t job = 0;
  std::string project;
  int64_t devices = 0;
  /// Which they were; empty where version 1 of the file did not say.
  std::vector<std::string> names;
  double began = 0, ended = 0;
};

/// One process has it open. Every change is on the disk when the call returns;
/// when it throws, nothing of it is.
class Store {
 public:
  /// Opens or makes `folder`/pool.db. Throws ConfigError when another version
  /// of Echelon wrote it, and Error when it cannot be written.
  explicit Store(const std::filesystem::path& folder);
  ~Store();
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  /// Returns the new job's id. Throws Error when the disk is full.
  int64_t add(const JobRecord& job);
  /// Writes several jobs at once. What they use now goes into the history.
  void update(const std::vector<const JobRecord*>& jobs, double now);

  /// The jobs that have not ended, by id.
  std::vector<JobRecord> active_jobs() const;
  /// The newest jobs that have ended, the newest first.
  std::vector<JobRecord> ended_jobs(int64_t most) const;
  /// The job with this id, or with this key; none: an empty list.
  std::vector<JobRecord> find_job(int64_t id) const;
  std::vector<JobRecord> find_job(const std::string& key) const;

  /// Allocations that had not ended at `since`.
  std::vector<Allocation> history(double since) const;

  /// Named values: past usage, whether the pool is drained.
  void keep(const std::vector<std::pair<std::string, std::string>>& values);
  std::string kept(const std::string& name) const;

 private:
  class Database;
  std::unique_ptr<Database> database_;
};

}  // namespace echelon::pool
