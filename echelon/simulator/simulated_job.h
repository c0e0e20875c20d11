// Turns a model, a strategy and a cluster into a job for event_run.h.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "echelon/simulator/event_run.h"
#include "echelon/simulator/simulate.h"

namespace echelon::simulator {

struct ModelJob {
  SimulatedJob job;
  Mesh mesh;
  std::vector<std::unique_ptr<Program>> programs;  // job.ranks points to them
  std::vector<int64_t> stragglers;                 // ranks, ascending
};

/// `strategy` has passed check_strategy().
ModelJob make_job(
    const cost::ModelShape& model, const cost::Strategy& strategy,
    const cluster::Cluster& cluster, const SimulationOptions& options);

}  // namespace echelon::simulator
