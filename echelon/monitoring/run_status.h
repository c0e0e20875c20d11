// What a launcher says of its job in the run's folder, for whoever can read
// that: RUN/status/rank-N.json, where N is the launcher's first rank. The file
// is replaced every second while the launcher lives, and a last time when the
// job is over.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "echelon/monitoring/metric_page.h"

namespace echelon::monitoring {

/// The folder, in that of a run.
inline constexpr const char* kStatusFolder = "status";

struct RankStatus {
  int rank = 0;
  pid_t pid = 0;
  bool up = false;
  std::string phase;                     // "step", "evaluation", "other"
  uint64_t progress = 0;                 // 0: it has said nothing yet
  std::optional<double> idle_seconds;    // since it last made progress
  std::optional<double> resident_bytes;  // of the host's memory
  std::optional<int> gpu;
  std::optional<double> gpu_busy, gpu_memory_used, gpu_memory_total;

  bool operator==(const RankStatus&) const = default;
};

struct RunStatus {
  std::string host;
  pid_t pid = 0;            // of the launcher
  std::string process;      // tells that process from all others of its host
  uint64_t beat = 0;        // how often the file was written
  double time = 0;          // when, in seconds since 1970 by the host's clock
  double started = 0;       // the launcher, by that clock
  bool coordinates = true;  // this launcher speaks for the whole job
  int world_size = 0;
  int num_hosts = 1;
  int generation = 0;
  uint64_t restarts = 0;
  std::string failure;           // the last one; empty: none
  std::optional<int> exit_code;  // the job is over
  bool lost = false;             // the launcher has ended without a word
  std::vector<RankStatus> ranks;

  bool operator==(const RunStatus&) const = default;
};

/// Names a process of this host, among all that it has had: its boot, its
/// number and its start. Empty when there is none with this number.
std::string process_name(pid_t pid);

std::string to_json(const RunStatus& status);
/// None for a text that is not such a status.
std::optional<RunStatus> parse_status(const std::string& text);
/// Those in the folder of a run, by their first rank. What cannot be read is
/// left out.
std::vector<RunStatus> read_statuses(const std::filesystem::path& run);

}  // namespace echelon::monitoring
