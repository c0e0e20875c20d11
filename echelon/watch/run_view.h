// What is shown of a run (run_watch.h).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "echelon/monitoring/run_status.h"
#include "echelon/timeline/metrics.h"
#include "echelon/timeline/overlap.h"
#include "echelon/timeline/timeline.h"

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
/// Whether somebody should look at the run.
bool is_bad(RunState state);

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

/// The newest step that ranks have recorded, of those that a page shows.
struct LastStep {
  int64_t step = 0;  // from 1
  double age_seconds = 0;
  timeline::Timeline timeline;
  timeline::Diagnosis diagnosis;  // of it
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
  double loss = 0;  // the newest one where that is not finite: it is the news
  double samples_per_second = 0, tokens_per_second = 0;
  double step_seconds = 0, data_share = 0;
  std::optional<double> flops_per_second, mfu;
  std::optional<double> eta_seconds;    // while it trains
  std::optional<double> quiet_seconds;  // since it wrote its metrics
  std::optional<timeline::EvaluationMetrics> evaluation;  // the newest
  std::optional<Saved> checkpoint;                        // the newest
  CurvePoints losses, speeds;         // over steps; speeds in samples a second
  std::optional<LastStep> last_step;  // WatchOptions::last_step

  std::vector<RankView> ranks;
  int num_hosts = 0;
  uint64_t restarts = 0;
  std::string failure;                // the last one; empty: none
  std::vector<std::string> findings;  // of explain: "data loading, 31 % …"
  std::string note;  // what of the folder cannot be read; may be empty
};

/// "2.37 GFLOP/s"
std::string format_flops(double flops_per_second);

/// All of a view, for programs. `curves`: with the points of its curves.
std::string to_json(const RunView& view, bool curves);

}  // namespace echelon::watch
