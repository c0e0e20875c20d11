// The training loop of one rank.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <filesystem>
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

struct TrainResult {
  int64_t steps = 0;         // done
  bool interrupted = false;  // stopped by a signal, at a whole step
  bool preempted = false;    // that signal was SIGTERM
  /// The last one; samples 0 when nothing is held out. One of an earlier run,
  /// where there was nothing left to do, rank 0 alone has.
  EvaluationMetrics evaluation;
};

/// Trains as the job says. Every rank of the world calls this, with the same
/// job and `folder`, the run's folder, which exists. Writes layers.json at the
/// beginning (predict_step_here.h), metrics.jsonl while it runs; at the end
/// checkpoints/last.safetensors, timeline.json, report.html.
///
/// Throws ConfigError for a value that a configuration must not have (a
/// checkpoint keeps the job as one), NumericError (step, rank, first layer)
/// when the loss is not finite, DataError for a broken sample, CommError when a
/// peer is lost, CheckpointError when no checkpoint can be read, or too many
/// not written.
///
/// `layers`: a list of the caller's own in place of job.model; its first layer
/// takes the data's samples, its last returns a score for each class (or for
/// each word, of each token). Given as a function of the tensor-parallel ranks,
/// it may be cut over them (model_source.h).
TrainResult train(
    const Job& job, World& world, const std::filesystem::path& folder,
    const LayerList* layers = nullptr);
TrainResult train(
    const Job& job, World& world, const std::filesystem::path& folder,
    const LayerFactory& layers);

/// From now on SIGINT and SIGTERM ask the loop to save and to end after the
/// current step, SIGUSR1 to save alone; a second one of the first two ends the
/// process at once.
void install_stop_signals();

}  // namespace echelon
