// What a run does now, read from its folder alone: by whoever may read it, on
// any host that sees it, whether it trains, has ended, or has not begun.
//
//   RunWatch watch("runs/digits");
//   for (;;) show(watch.look());
//
// metrics.jsonl tells what was trained, status/ what the launchers last said of
// themselves and their ranks (monitoring/run_status.h), checkpoints/ what is
// saved, and config.toml how far it is to go.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "echelon/monitoring/run_status.h"
#include "echelon/timeline/metrics.h"

namespace echelon::watch {

enum class RunState {
  not_begun,  // there is no such folder, or nothing in it
  starting,   // its launcher lives, and no step has ended
  training,
  silent,    // its launcher says nothing, and may live on another host
  finished,  // it has all its steps
  stopped,   // by a user or a scheduler; the same command resumes it
  failed,
  died,     // its launcher was killed
  unknown,  // no launcher of ours wrote here
};
/// "not begun", "training", …
std::string_view to_string(RunState state);
/// Whether nothing more is to come by itself.
bool is_over(RunState state);

/// Points of a curve, at most kMost of them: each the mean of as many values as
/// the others.
class CurvePoints {
 public:
  static constexpr size_t kMost = 1024;

  struct Point {
    double x = 0, y = 0;
  };
  /// Values that are not finite are left out.
  void add(double x, double y);
  const std::vector<Point>& points() const { return points_; }

 private:
  std::vector<Point> points_;
  int64_t stride_ = 1;  // values of a point
  int64_t open_ = 0;    // values of the last point so far
};

struct RankView {
  monitoring::RankStatus status;
  std::string host;
  /// "trains", "evaluates", "starts", "ended", "no progress for 42 s".
  std::string state;
  bool in_doubt = false;  // the state needs a look
};

struct Saved {
  int64_t step = 0;
  double age_seconds = 0;
};

struct RunView {
  std::string path;
  std::string name;    // the folder's
  std::string title;   // "simple_cnn on digits"; empty: not known
  std::string layout;  // "dp=2"
  RunState state = RunState::not_begun;
  std::string why;  // of the state, as a sentence; may be empty

  std::optional<timeline::StepMetrics> last;  // the newest step
  int64_t total_steps = 0;                    // 0: not known
  // Over the last steps.
  double loss = 0, samples_per_second = 0, tokens_per_second = 0;
  double step_seconds = 0, data_share = 0;
  std::optional<double> flops_per_second, mfu;
  std::optional<double> eta_seconds;    // while it trains
  std::optional<double> quiet_seconds;  // since it wrote its metrics
  std::optional<timeline::EvaluationMetrics> evaluation;  // the newest
  std::optional<Saved> checkpoint;                        // the newest
  CurvePoints losses, speeds;  // over steps; speeds in samples a second

  std::vector<RankView> ranks;
  int num_hosts = 0;
  uint64_t restarts = 0;
  std::string failure;                // the last one; empty: none
  std::vector<std::string> findings;  // of explain: "data loading, 31 % …"
  std::string note;  // what of the folder cannot be read; may be empty
};

struct WatchOptions {
  bool findings = true;
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
  void decide_state(const std::vector<monitoring::RunStatus>& statuses);
  void take_ranks(const std::vector<monitoring::RunStatus>& statuses);
  bool lives(const monitoring::RunStatus& status);
  void read_checkpoint();
  void read_findings();
  void add_means();
  void add_eta();

  const std::filesystem::path folder_;
  const WatchOptions options_;
  RunView view_;
  std::optional<std::filesystem::file_time_type> configured_;
  int64_t steps_ = 0, epochs_ = 0;  // of the configuration
  int64_t read_ = 0;                // bytes of metrics.jsonl
  std::string last_line_;           // the one that ends there
  std::deque<timeline::StepMetrics> recent_;
  uint64_t beat_ = 0;
  std::optional<Steady::time_point> beat_at_;  // when it changed
  bool looked_ = false;
  std::optional<Steady::time_point> explained_;
  int64_t explained_step_ = -1;
};

/// The runs in a folder and in those inside of it; the folder itself where it
/// is one. The one that wrote last comes first.
std::vector<std::filesystem::path>
find_runs(const std::filesystem::path& folder);
/// Whether the folder has something that a run writes.
bool is_run(const std::filesystem::path& folder);

/// All of a view, for programs. `curves`: with the points of its curves.
std::string to_json(const RunView& view, bool curves);

}  // namespace echelon::watch
