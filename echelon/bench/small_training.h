// Training of networks that compute next to nothing, step by step.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "echelon/bench/elsewhere.h"
#include "echelon/data/loader.h"
#include "echelon/timeline/metrics.h"
#include "echelon/train/strategies/objective.h"
#include "echelon/train/strategies/step.h"

namespace echelon {

/// How a small network is trained: a sample for each microbatch of each rank.
struct SmallSetting {
  Layout layout;
  int64_t layers = 1;
  int64_t microbatches = 1;

  int64_t stages() const { return layout.pp; }
  bool begins_stage(int64_t layer) const {
    return layer % (layers / stages()) == 0;
  }
};

Job job_of(const SmallSetting& setting);

/// As the training loop has it, without a run's folder. Collective, as its
/// steps are. Each microbatch of a stage begins `elsewhere`, which outlives it.
class SmallTraining {
 public:
  SmallTraining(
      const SmallSetting& setting, const Elsewhere& elsewhere, World& world);

  /// Seconds of a step.
  double step();
  /// Seconds of forwards and backwards of one sample through all layers by
  /// themselves, of this rank alone.
  double pass();

 private:
  Batch next_batch();

  const Job job_;
  World& world_;
  const TrainingData data_;
  MeshGroups groups_;
  ModelSource source_;
  std::unique_ptr<Objective> objective_;
  std::vector<BuiltLayer> built_;
  TrainingState state_;
  Loader loader_;
  std::unique_ptr<MetricsWriter> metrics_;
  int64_t epoch_ = 0;
};

}  // namespace echelon
