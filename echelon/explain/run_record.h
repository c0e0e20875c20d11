// What a run has left on disk, complete or not.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "echelon/cluster/cluster.h"
#include "echelon/cost/model_shape.h"
#include "echelon/job/job.h"
#include "echelon/timeline/metrics.h"
#include "echelon/timeline/rollback.h"
#include "echelon/timeline/timeline.h"

namespace echelon::explain {

struct RunRecord {
  std::string title;
  timeline::Timeline timeline;               // without spans: there is none
  std::vector<timeline::StepMetrics> steps;  // of metrics.jsonl, by step
  std::vector<timeline::EvaluationMetrics> evaluations;  // as well
  std::vector<timeline::Rollback> rollbacks;             // as well
  std::vector<timeline::Rebalance> rebalances;           // as well
  std::optional<Job> job;                                // config.toml
  std::string configuration;                             // its path
  std::optional<cost::ModelShape> layers;  // as its trainer counted them
  bool simulated = false;  // by `echelon simulate --run`; nothing was trained
  std::optional<cluster::Cluster>
      cluster;                     // on which it was simulated, if it was
  std::vector<std::string> notes;  // what is missing or truncated, a line each
};

/// `run`: a run's folder, or a timeline.json, which may be in one. Parts that
/// cannot be read are left out, and notes say so. Throws DataError when neither
/// the timeline nor the metrics can be read.
RunRecord read_run(const std::filesystem::path& run);

}  // namespace echelon::explain
