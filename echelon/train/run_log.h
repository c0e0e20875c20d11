// What a run tells while it trains: metrics.jsonl, event files, traces and the
// progress line, all written by rank 0.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "echelon/comm/world.h"
#include "echelon/error.h"
#include "echelon/job/job.h"
#include "echelon/layout/mesh.h"
#include "echelon/timeline/event_file.h"
#include "echelon/timeline/metrics.h"
#include "echelon/timeline/progress.h"
#include "echelon/timeline/rebalance.h"
#include "echelon/timeline/rollback.h"
#include "echelon/timeline/trace_file.h"
#include "echelon/train/step_sums.h"

namespace echelon {

/// Warns where ranks that compute each layer together, and so communicate
/// several times a layer, are on several hosts of `local_size` ranks.
void print_slow_links(const Layout& layout, const Mesh& mesh, int local_size);

/// Every rank of the world makes one, at the same time: rank 0 reads the
/// roll-backs of earlier processes for all. Ranks other than 0 know the
/// evaluations that they took part in, and write nothing.
class RunLog {
 public:
  RunLog(World& world, const std::filesystem::path& folder, int64_t log_every);

  /// Reads the metrics of an earlier process of this run and truncates the file
  /// after `step`. Every rank calls: all learn which step was evaluated last.
  void restore(int64_t step);
  /// Empties the file of a run that was killed before its first checkpoint.
  /// Rank 0 alone calls, before open().
  void start_over() const;
  /// From now on rank 0 writes; with job.train.log also an event file for
  /// TensorBoard, which gets the steps of earlier processes that it lacks, and
  /// traces. Rank 0 alone calls.
  void open(int64_t total_steps, const Job& job);

  /// Rank 0 alone calls; the step lasted for `time` and was made of `parts`.
  /// Where metrics.jsonl cannot be written, as on a full disk, this warns, and
  /// the lines are written later.
  void
  add(const timeline::StepMetrics& metrics, const StepSums& sums,
      const timeline::Phase& time, const std::vector<timeline::Phase>& parts);
  /// What training stood still for after the last step. Rank 0 alone calls.
  void add(const timeline::Phase& phase);
  /// Every rank calls, with the same metrics but for the epoch.
  void add(const timeline::EvaluationMetrics& metrics);
  /// Rank 0 alone calls.
  void add(const timeline::Rebalance& rebalance);
  /// Training goes on from rollback.step: removes what came after it, and adds
  /// the roll-back to the file. Every rank calls. Throws what
  /// truncate_metrics() and append_rollback() throw.
  void add(const timeline::Rollback& rollback);
  // Rank 0 alone calls these.
  /// Prints a line above the progress line.
  void message(const std::string& text) { progress_->message(text); }
  /// Ends the progress line.
  void finish() { progress_->finish(); }
  /// Writes what metrics.jsonl does not have yet; warns where it cannot.
  void flush();
  /// The same at the end of the run; throws Error where metrics.jsonl cannot be
  /// written.
  void flush_or_throw();

  /// Empty on ranks other than 0.
  const std::vector<timeline::StepMetrics>& steps() const { return steps_; }
  /// Rank 0 alone has those of earlier processes.
  const std::vector<timeline::EvaluationMetrics>& evaluations() const {
    return evaluations_;
  }
  /// Those of earlier processes too. The same on all ranks.
  const std::vector<timeline::Rollback>& rollbacks() const {
    return rollbacks_;
  }
  /// Rank 0 alone has them, those of earlier processes too.
  const std::vector<timeline::Rebalance>& rebalances() const {
    return rebalances_;
  }
  /// The step of the last evaluation, the same on all ranks; -1: none.
  int64_t evaluated_step() const { return evaluated_step_; }

 private:
  void warn(const Error& error);
  /// A file beside metrics.jsonl. The first time that it cannot be written is
  /// a warning.
  template <class File>
  struct Extra {
    std::unique_ptr<File> file;  // null: there is none
    bool warned = false;
  };
  template <class File>
  void with(Extra<File>& extra, const std::function<void(File&)>& write);

  World& world_;
  std::filesystem::path path_;
  int64_t log_every_;
  std::unique_ptr<timeline::MetricsWriter> metrics_;
  Extra<timeline::EventFile> events_;
  Extra<timeline::TraceFile> traces_;
  std::unique_ptr<timeline::Progress> progress_;
  std::vector<timeline::StepMetrics> steps_;
  std::vector<timeline::EvaluationMetrics> evaluations_;
  std::vector<timeline::Rollback> rollbacks_;
  std::vector<timeline::Rebalance> rebalances_;
  bool warned_ = false;  // of lines that are not written yet
  int64_t evaluated_step_ = -1;
  timeline::RecentSteps recent_;  // of this process: those of a line
};

}  // namespace echelon
