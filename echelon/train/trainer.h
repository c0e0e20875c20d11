// The training loop of one rank.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "echelon/comm/world.h"
#include "echelon/data/dataset.h"
#include "echelon/data/loader.h"
#include "echelon/job/job.h"
#include "echelon/layers/layer_list.h"
#include "echelon/timeline/metrics.h"
#include "echelon/timeline/progress.h"
#include "echelon/timeline/recorder.h"
#include "echelon/train/strategies/model_source.h"
#include "echelon/train/strategies/step.h"

namespace echelon {

/// What tests put in the place of measurements.
struct TrainDoors {
  /// How long a rank works in a step (from 1) for so many samples, in seconds.
  std::function<double(int rank, int64_t step, int64_t samples)> work_seconds;
};

struct TrainResult {
  int64_t steps = 0;         // done
  bool interrupted = false;  // stopped by a signal, after a complete step
  bool preempted = false;    // that signal was SIGTERM
  /// The last one; samples is 0 when nothing is held out. When an earlier
  /// process had finished the run, only rank 0 has it.
  timeline::EvaluationMetrics evaluation;
};

/// Trains as the job says. Every rank of the world calls this with the same job
/// and `folder`, the run's folder, which exists. Writes config.toml (unless a
/// run of a configuration has one) and layers.json at the beginning
/// (report_writer.h), metrics.jsonl while it runs, and at the end
/// checkpoints/last.safetensors, timeline.json and report.html. A run that has
/// all its steps already keeps the timeline and the report that it has.
///
/// Throws ConfigError for a value that no configuration may have (a checkpoint
/// stores the job as one), NumericError (step, rank, first layer) when the loss
/// is not finite, DataError for a broken sample, CommError when a peer is lost,
/// CheckpointError when no checkpoint can be read or too many cannot be
/// written.
///
/// `own` replaces what the job names: layers, data, loss, metrics
/// (model_source.h).
///
///   echelon::train(job, world, {.layers = my_model(), .dataset = my_data});
///
/// This form also makes and locks the run's folder, job.train.run, and stops
/// after a step, with a checkpoint, when a signal asks it to
/// (stop_signals.h).
TrainResult train(const Job& job, World& world, const OwnParts& own);
TrainResult train(
    const Job& job, World& world, const std::filesystem::path& folder,
    const OwnParts& own, const TrainDoors& doors = {});
/// The same with layers of one's own alone, or without.
TrainResult train(
    const Job& job, World& world, const std::filesystem::path& folder,
    const LayerList* layers = nullptr);
TrainResult train(
    const Job& job, World& world, const std::filesystem::path& folder,
    const LayerFactory& layers, const TrainDoors& doors = {});

}  // namespace echelon
