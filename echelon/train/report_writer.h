// Writes what a run leaves behind: the ranks' timeline and the report page.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "echelon/comm/world.h"
#include "echelon/job/job.h"
#include "echelon/report/prediction_section.h"
#include "echelon/report/tensor_shards.h"
#include "echelon/timeline/metrics.h"
#include "echelon/timeline/timeline.h"
#include "echelon/train/strategies/model_source.h"

namespace echelon {

struct RunSummary {
  double seconds = 0;
  std::vector<StepMetrics> steps;  // rank 0
  std::vector<EvaluationMetrics> evaluations;
  int64_t num_parameters = 0;
  std::vector<std::string> partition;  // ParallelModel::describe()
  TensorShards tensor;                 // of rank 0's group
  RankMemory memory;                   // of this rank; may be empty
  int64_t skipped = 0;                 // samples left out
  int64_t skipped_steps = 0;           // whose gradients overflowed
  std::string outcome;                 // empty: finished
  int64_t checkpoints = 0;             // that were begun
  double checkpoint_seconds = 0;       // that training waited for them
  std::string resumed;                 // "step 69 (dp=2)"; empty: it was not
  std::function<StepPrediction()> predict;  // called by rank 0; may be empty
};

/// Gathers the ranks' spans and writes timeline.json and report.html into
/// `folder`. Every rank of the world calls this.
void write_run_report(
    const Job& job, World& world, const std::filesystem::path& folder,
    std::vector<Span> spans, const RunSummary& summary);

/// What each rank of a tensor-parallel group holds of each parameter. Builds
/// the layers of all ranks, one at a time and on the meta device; nothing is
/// sent, so one rank may ask for it. No layers when job.layout.tp is 1.
TensorShards describe_shards(const Job& job, const ModelSource& source);

}  // namespace echelon
