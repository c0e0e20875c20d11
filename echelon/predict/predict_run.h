// The simulator's prediction of a run's own configuration, for comparison with
// what was measured.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "echelon/cluster/cluster.h"
#include "echelon/predict/configured.h"
#include "echelon/report/prediction_section.h"
#include "echelon/simulator/simulate.h"
#include "echelon/timeline/timeline.h"

namespace echelon::predict {

/// The cluster that a run ran on, as far as it is known.
struct RunCluster {
  std::optional<cluster::Cluster> cluster;
  std::string missing;  // why it is not known, and what to do
};

/// This machine as `ranks` devices: as `echelon bench --save` measured it
/// (cluster/local_cluster.h), otherwise its GPUs by the catalogue. A processor
/// that was not measured is not known. `on_processor`: the run used no GPU.
RunCluster cluster_of_run(int64_t ranks, bool on_processor);

/// Whether the ranks of a measured timeline computed on the processor, as their
/// names say ("rank 0 (cpu)"); false without names.
bool ran_on_processor(const timeline::Timeline& timeline);

/// Predicts a step of `what`. Throws ConfigError as simulate does.
report::StepPrediction
predict_step(const Configured& what, const cluster::Cluster& cluster);

/// The prediction of an earlier simulation, whose timeline has the spans of all
/// ranks to compare.
report::StepPrediction prediction_of(
    const simulator::SimulatedRun& run, const cost::Strategy& strategy,
    const cluster::Cluster& cluster);

}  // namespace echelon::predict
