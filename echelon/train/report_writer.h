// Writes what a run leaves behind: its configuration, its counted layers, the
// ranks' timeline and the report page.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "echelon/comm/world.h"
#include "echelon/cost/model_shape.h"
#include "echelon/job/job.h"
#include "echelon/report/tensor_shards.h"
#include "echelon/timeline/metrics.h"
#include "echelon/timeline/rebalance.h"
#include "echelon/timeline/rollback.h"
#include "echelon/timeline/timeline.h"
#include "echelon/train/strategies/model_source.h"

namespace echelon {

/// Writes config.toml for a program that calls train() itself. `echelon train`
/// has written it before, and the program may have read its job from there:
/// then it stays. One rank alone calls it. Throws ConfigError when it cannot be
/// written.
void write_own_configuration(
    const Job& job, const std::filesystem::path& folder, bool own_layers);

/// The layers that the prediction of a run on this machine uses.
struct RunLayers {
  std::optional<cost::ModelShape> counted;  // empty: formulas stand for them
  std::string missing;  // why there is no prediction; else empty
};

/// Counts the layers (count_job.h) where counts_layers
/// (predict/counted_layers.h) says so, and writes them into the run's folder,
/// for `echelon explain`; without any, removes those of an earlier start of the
/// run. One rank alone may call it. Throws nothing: the result says why nothing
/// was counted, and a file that cannot be written is a warning.
///
///   own_layers  the model is a program's, not the configuration's
RunLayers count_run_layers(
    const Job& job, const ModelSource& source, const World& world,
    bool own_layers, const std::filesystem::path& folder);

/// What a step of the run computes, for its FLOPs per second and their share of
/// the devices' peak (MFU).
struct RunWork {
  double step_flops = 0;  // of the model, all ranks; 0: not known
  double peak_flops = 0;  // a second, of all devices; 0: not known
};

/// One rank alone may call it. Throws nothing: what is not known is 0.
RunWork work_of_run(
    const Job& job, const ModelSource& source, const World& world,
    const RunLayers& layers);

struct RunSummary {
  double seconds = 0;                        // of this process
  std::vector<timeline::StepMetrics> steps;  // rank 0
  std::vector<timeline::EvaluationMetrics> evaluations;
  std::vector<std::string> partition;  // ParallelModel::describe()
  timeline::RankMemory memory;         // of this rank; may be empty
  int64_t skipped = 0;                 // samples left out
  int64_t skipped_steps = 0;           // whose gradients overflowed
  std::vector<timeline::Rollback> rollbacks;
  std::vector<timeline::Rebalance> rebalances;
  std::string outcome;            // empty: finished
  int64_t checkpoints = 0;        // that were begun
  double checkpoint_seconds = 0;  // that training waited for them
  std::string resumed;            // "step 69 (dp=2)"; empty: it was not
  RunLayers layers;               // rank 0
};

/// Gathers the ranks' spans and writes timeline.json and report.html, with a
/// prediction of the step, into `folder`. Every rank of the world calls this.
void write_run_report(
    const Job& job, const ModelSource& source, World& world,
    const std::filesystem::path& folder, std::vector<timeline::Span> spans,
    const RunSummary& summary);

/// What each rank of a tensor-parallel group holds of each parameter. Builds
/// the layers of all ranks, one at a time and on the meta device; nothing is
/// sent, so one rank may ask for it. No layers when job.layout.tp is 1.
report::TensorShards describe_shards(const Job& job, const ModelSource& source);

}  // namespace echelon
