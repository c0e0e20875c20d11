// What a run leaves behind: the ranks' timeline and the report page.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "echelon/comm/world.h"
#include "echelon/job/job.h"
#include "echelon/report/prediction_section.h"
#include "echelon/report/tensor_cut.h"
#include "echelon/timeline/metrics.h"
#include "echelon/timeline/timeline.h"

namespace echelon {

struct RunSummary {
  double seconds = 0;
  std::vector<StepMetrics> steps;  // rank 0
  std::vector<EvaluationMetrics> evaluations;
  int64_t num_parameters = 0;
  std::vector<std::string> cut;   // ParallelModel::describe()
  TensorCut tensor;               // of rank 0's group
  RankMemory memory;              // this rank's; may be empty
  int64_t skipped = 0;            // samples left out
  int64_t skipped_steps = 0;      // whose gradients overflowed
  std::string outcome;            // empty: finished
  int64_t checkpoints = 0;        // that were begun
  double checkpoint_seconds = 0;  // that training stood still for them
  std::string resumed;            // "step 69 (dp=2)"; empty: anew
  std::function<StepPrediction()> predict;  // called by rank 0; may be empty
};

/// Brings the ranks' spans together and writes timeline.json and report.html
/// into `folder`. Every rank of the world calls this.
void write_run_report(
    const Job& job, World& world, const std::filesystem::path& folder,
    std::vector<Span> spans, const RunSummary& summary);

}  // namespace echelon
