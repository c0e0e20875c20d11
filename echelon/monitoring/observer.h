// What can be seen of a job from a process beside its launcher: the board, the
// memory of its ranks, its GPUs, and the figures of its run.
#pragma once

#include <chrono>
#include <filesystem>
#include <optional>
#include <string>

#include "echelon/cluster/nvml.h"
#include "echelon/monitoring/job_board.h"
#include "echelon/monitoring/metric_page.h"
#include "echelon/monitoring/run_tail.h"

namespace echelon::monitoring {

class JobObserver {
 public:
  /// `run`: the label of its metrics. `folder`: where `echelon train` writes;
  /// empty: a program of the user's. `saves`: the run saves checkpoints.
  JobObserver(
      const std::string& run, const std::filesystem::path& folder, bool saves,
      const JobBoard& board);

  /// Reads all of it now.
  const Observed& look();
  /// Reads what the run has written: steps that are lost between two looks are
  /// not seen.
  void follow_run();

 private:
  const JobBoard& board_;
  const std::chrono::steady_clock::time_point began_ =
      std::chrono::steady_clock::now();
  std::optional<RunTail> tail_;
  std::optional<std::string> visible_;  // the launcher's CUDA_VISIBLE_DEVICES
  const cluster::Nvml nvml_;
  Observed observed_;
};

}  // namespace echelon::monitoring
