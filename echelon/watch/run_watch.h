// Reads what a run does now from its folder alone: for whoever may read it, on
// any host that sees it, whether it trains, has ended, or has not begun.
//
//   RunWatch watch("runs/digits");
//   for (;;) show(watch.look());
//
// metrics.jsonl tells what was trained, status/ what the launchers last said of
// themselves and their ranks (monitoring/run_status.h), last_step/ what each
// rank did in a step (train/step_shots.h), checkpoints/ what is saved, and
// config.toml how far it is to go.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "echelon/monitoring/run_status.h"
#include "echelon/timeline/metrics.h"
#include "echelon/watch/run_view.h"

namespace echelon::watch {

struct WatchOptions {
  bool findings = true;
  /// What each rank did in the newest step that was recorded.
  bool last_step = false;
  /// Of long runs, only the end of metrics.jsonl: for a line of many runs.
  bool brief = false;
};

class RunWatch {
 public:
  explicit RunWatch(std::filesystem::path run, WatchOptions options = {});
  /// Reads what has come. Throws nothing for a folder that is broken: the view
  /// says so.
  const RunView& look();

 private:
  using Steady = std::chrono::steady_clock;

  void read_configuration();
  void read_metrics();
  void restart_metrics();
  void sample_metrics(int file, int64_t size);
  void take(const std::string& lines);
  void read_status();
  void decide_state(const monitoring::RunStatus* coordinator);
  void take_ranks(
      const std::vector<monitoring::RunStatus>& statuses,
      const monitoring::RunStatus& coordinator);
  bool lives(const monitoring::RunStatus& status);
  void read_checkpoint();
  void read_last_step();
  void read_findings();
  void add_means();
  void add_eta();

  const std::filesystem::path folder_;
  const WatchOptions options_;
  RunView view_;
  std::optional<std::filesystem::file_time_type> configured_;
  int64_t steps_ = 0, epochs_ = 0;      // of the configuration
  std::optional<int64_t> epoch_steps_;  // steps of an epoch, once one has ended
  int64_t read_ = 0;                    // bytes of metrics.jsonl
  std::string last_line_;               // the one that ends there
  std::deque<timeline::StepMetrics> recent_;
  uint64_t beat_ = 0;
  std::optional<Steady::time_point> beat_at_;  // when it changed
  bool looked_ = false;
  // When last_step/ was written: as it was read, and at the last look.
  std::optional<std::filesystem::file_time_type> shot_, seen_shot_;
  std::optional<Steady::time_point> explained_;
  int64_t explained_step_ = -1;
};

/// The runs in a folder and in those inside of it; the folder itself where it
/// is one. The one that wrote last comes first.
std::vector<std::filesystem::path>
find_runs(const std::filesystem::path& folder);
/// Whether the folder has something that a run writes.
bool is_run(const std::filesystem::path& folder);

}  // namespace echelon::watch
