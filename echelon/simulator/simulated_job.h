// A model, a strategy and a cluster as a job that event_run.h can run.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "echelon/simulator/event_run.h"
#include "echelon/simulator/rank_grid.h"
#include "echelon/simulator/simulate.h"

namespace echelon::simulator {

struct ModelJob {
  SimulatedJob job;
  RankGrid grid;
  std::vector<std::unique_ptr<Program>> programs;  // that job.ranks point to
  std::vector<int64_t> stragglers;                 // ranks, ascending
};

/// `strategy` is one that check_strategy() accepts.
ModelJob make_job(
    const ModelShape& model, const Strategy& strategy, const Cluster& cluster,
    const SimulationOptions& options);

}  // namespace echelon::simulator
