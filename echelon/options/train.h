// Settings of the training loop.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace echelon {

/// How gradients are compressed where ranks reduce them.
enum class Compression { none, bf16, fp16, powersgd };

/// Ranks are processes, or threads of one process.
enum class RankKind { processes, threads };

/// What follows a step whose loss or gradients are not finite: the run ends, or
/// no rank makes the update and training goes on with the next batch; after
/// some of these in a row, the run ends, or training goes back to a saved state
/// and leaves out the samples since.
enum class OnNonFinite { stop, skip, rollback };

/// Whether steps are captured as CUDA graphs: where it is known to be safe,
/// always, or never.
enum class CudaGraphs { automatic, on, off };

/// Their names in a configuration.
std::string to_string(Compression compression);
std::string to_string(RankKind kind);
std::string to_string(OnNonFinite reaction);
std::string to_string(CudaGraphs graphs);

struct TrainOptions {
  int64_t steps = 0;  // exactly one of steps and epochs is above 0
  int64_t epochs = 0;
  int64_t batch = 64;  // global: all ranks, all microbatches
  /// Samples per data-parallel rank instead of an equal share; sums to `batch`.
  std::vector<int64_t> rank_batch;
  /// Steps after which the batch may be divided anew among the data-parallel
  /// ranks, or the layers among pipeline stages, by the measured speed of
  /// ranks; 0: never.
  int64_t rebalance_every = 0;
  int64_t accumulate = 1;        // backward passes per optimizer step
  uint64_t seed = 0;             // initial values, order of samples, dropout
  std::string run = "runs/run";  // the folder that the run writes
  bool overwrite = false;        // replace the run folder
  int64_t log_every = 10;        // steps between two lines
  /// What is written besides metrics.jsonl: "tensorboard", "otlp".
  std::vector<std::string> log;
  /// Seconds between two steps that are recorded for `echelon watch --web`; 0:
  /// none is.
  double watch_seconds = 5;
  int64_t eval_every = 0;    // steps between two evaluations; 0: each epoch
  bool layer_norms = false;  // gradient norms of each layer, with each line
  int64_t threads = 0;  // compute threads per rank; 0: the job's cores / ranks
  Compression compress = Compression::none;
  int64_t powersgd_rank = 1;        // rank of the approximation
  int64_t bucket_bytes = 25 << 20;  // gradients reduced by one collective
  bool find_unused_parameters = false;
  RankKind ranks = RankKind::processes;
  /// On GPUs, after the first steps and those of the timeline.
  CudaGraphs cuda_graphs = CudaGraphs::automatic;
  int64_t timeline_steps = 20;  // steps that the timeline records; 0: none
  OnNonFinite on_non_finite = OnNonFinite::stop;
  /// Steps between two comparisons of parameters that several ranks hold; 0:
  /// never.
  int64_t check_replicas_every = 100;
};

}  // namespace echelon
