// The run's figures, one JSON object a line (metrics.jsonl).
//
//   {"step":10,"epoch":0.64,"loss":1.93,"samples_per_second":5120.0,…}
//   {"step":22,"evaluation":{"epoch":1.0,"samples":360,"accuracy":0.91,…}}
//   {"step":22,"rebalance":{"before":[32,32],"seconds":[…],"after":[48,16]}}
//   {"step":22,"rebalance":{"before":[4,4],…,"of":"layers",…}}
//
// For a language model, losses and accuracies are those of tokens, and there
// are tokens_per_second, tokens and perplexity as well.
//
// With a loss scale ([precision]) there are loss_scale and skipped_steps; the
// latter also with [train] on_non_finite = "skip" or "rollback"; the lines of
// roll-backs are those of rollback.h. With [train] layer_norms there is
// layer_grad_norms, {"conv1":0.31,…}. A model with experts has
// expert_imbalance, with [model] capacity_factor also dropped_share, and in at
// most about a hundred steps of a run the loads themselves, expert_loads and
// expert_drops, {"model.layers.0.mlp":[12,9,…],…}.
//
// The lines of a simulation (simulator/) have "simulated":true and no loss.
//
// JSON has no NaN: such a value is null, and a second key says which it is,
// {"loss":null,"loss_is":"nan"} (or "inf", "-inf"). A figure that was not
// measured is absent.
#pragma once

#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "echelon/timeline/expert_loads.h"
#include "echelon/timeline/line_file.h"
#include "echelon/timeline/rebalance.h"
#include "echelon/timeline/recorder.h"

namespace echelon::timeline {

/// What one optimizer step did, over all ranks. Steps count from 1.
struct StepMetrics {
  int64_t step = 0;
  double epoch = 0;               // passes over the data when the step ended
  double loss = 0;                // mean over the global batch
  double samples_per_second = 0;  // all ranks together
  std::optional<double> tokens_per_second;  // language models
  double step_seconds = 0;  // from the end of the step before to its end
  double data_seconds = 0;  // of those, waiting for the batch
  /// Of those, in rank 0's forward and backward passes and its update. On CPUs
  /// without its waits for other ranks; on a GPU what its stream took, waits
  /// included.
  std::optional<double> forward_seconds, backward_seconds, update_seconds;
  /// Of those, rank 0's waits for other ranks. Not measured on a GPU.
  std::optional<double> communication_seconds;
  double learning_rate = 0;
  std::optional<double> grad_norm;  // global 2-norm, before clipping
  std::optional<int32_t> slowest_rank;
  /// FLOPs that the model needs, a second: of all ranks, without what is
  /// recomputed. Where the model's cost is known.
  std::optional<double> flops_per_second;
  /// Those over the peak of all devices, 0 to 1. Where that is known too.
  std::optional<double> mfu;
  /// Rank 0's largest so far: reserved on its GPU, or resident on the host.
  std::optional<int64_t> peak_memory_bytes;
  std::optional<double>
      loss_scale;  // by which the loss of this step was multiplied
  /// So far: steps whose loss or gradients were not finite.
  std::optional<int64_t> skipped_steps;
  bool simulated = false;  // nothing was trained: there is no loss
  /// 2-norms of the gradients of each layer, before clipping, in the order of
  /// the model.
  std::vector<std::pair<std::string, double>> layer_grad_norms;
  /// Models with experts: the largest load of an expert over the mean of its
  /// layer, of the layer where that is the most.
  std::optional<double> expert_imbalance;
  /// With a capacity: the share of the choices that was dropped, 0 to 1.
  std::optional<double> dropped_share;
  std::vector<ExpertLoads> expert_loads;  // by layer; in some steps

  bool operator==(const StepMetrics&) const = default;
};

/// A pass over the held-out samples after `step` steps.
struct EvaluationMetrics {
  int64_t step = 0;
  double epoch = 0;
  int64_t samples = 0;
  /// 0 to 1: samples, or tokens, that are right; none where a loss has no right
  /// answers.
  std::optional<double> accuracy;
  double loss = 0;
  double seconds = 0;
  std::optional<int64_t> tokens;     // language models: those with a next token
  std::optional<double> perplexity;  // exp(loss)
  /// A program's own metrics, by name.
  std::vector<std::pair<std::string, double>> own;

  bool operator==(const EvaluationMetrics&) const = default;
};

/// "accuracy 91.24 % on 360 held-out samples, loss 0.2931"; of
/// tokens "perplexity 12.31, accuracy 41.07 % on 4096 held-out tokens,
/// loss 2.5104"; without right answers "loss 0.2931 on 360 held-out samples".
/// A program's metrics follow: ", mae 0.0512".
std::string to_text(const EvaluationMetrics& metrics);

/// Appends to a metrics file, at most every 50 ms, since a system call in each
/// step slows steps of less than a millisecond: lines that come sooner are kept
/// until the first call after that. A reader of the file of a stalled job may
/// miss the last 50 ms of steps. A process that is killed loses them; one that
/// ends by an error that is caught loses none. A file that ends in half a line
/// (its writer was killed, or the disk was full) is truncated to its last whole
/// line first.
///
/// Functions that write throw Error with the path, the system's reason and the
/// number of lines that the file keeps. The lines that are not in the file are
/// kept, and the next call tries again.
class MetricsWriter {
 public:
  /// `now_ns`: a clock that does not go back.
  explicit MetricsWriter(
      const std::filesystem::path& path,
      std::function<int64_t()> now_ns = steady_now_ns);
  /// Writes the lines that are kept; a failure is not reported.
  ~MetricsWriter();
  MetricsWriter(const MetricsWriter&) = delete;
  MetricsWriter& operator=(const MetricsWriter&) = delete;

  void append(const StepMetrics& metrics);
  /// These write all at once.
  void append(const EvaluationMetrics& metrics);
  void append(const Rebalance& rebalance);
  /// Writes the lines that are kept. Call it before something that relies on
  /// them, as a checkpoint does.
  void flush();

 private:
  void take_kept();
  void write();

  std::filesystem::path path_;
  std::function<int64_t()> now_ns_;
  LineFile file_;
  std::vector<StepMetrics> kept_;
  std::string unwritten_;              // lines
  std::optional<int64_t> written_ns_;  // the last time
};

struct MetricsFile {
  std::vector<StepMetrics> steps;
  std::vector<EvaluationMetrics> evaluations;
  std::vector<Rebalance> rebalances;
  bool truncated = false;  // the last line was incomplete and left out
};

/// The median of what `value` gives, over the steps where it is finite; nothing
/// without any.
std::optional<double> median_of(
    const std::vector<StepMetrics>& steps,
    const std::function<double(const StepMetrics&)>& value);

/// Means over the last steps of a run, at most `most` of them: what a progress
/// line shows. Times and samples are summed first, so that a rate is samples
/// over the time of all these steps.
class RecentSteps {
 public:
  explicit RecentSteps(int64_t most) : most_(most > 1 ? most : 1) {}

  void add(const StepMetrics& step);
  /// 0 before the first step. Losses that are not finite are left out.
  double loss() const { return over(sum_.loss, sum_.losses); }
  double samples_per_second() const { return over(sum_.samples, sum_.seconds); }
  double tokens_per_second() const { return over(sum_.tokens, sum_.seconds); }

 private:
  struct Sum {
    double loss = 0, losses = 0, samples = 0, tokens = 0, seconds = 0;
    void add(const Sum& other, double sign);
  };
  static double over(double a, double b) { return b > 0 ? a / b : 0; }

  int64_t most_;
  std::deque<Sum> steps_;
  Sum sum_;
  int64_t added_ = 0;
};

/// The mean loss of the last kFinalSteps steps: that of one batch is noise.
inline constexpr size_t kFinalSteps = 10;
double final_loss(const std::vector<StepMetrics>& steps);

/// The steps and evaluations in whole lines of a metrics file. Other lines, and
/// what follows the last newline, are left out.
MetricsFile parse_metrics(const std::string& lines);

/// Unknown keys are ignored. Throws DataError with file and line for a line
/// that is not metrics, unless it is the last one and incomplete.
MetricsFile read_metrics(const std::filesystem::path& path);

/// Removes what was written after `step` steps: truncates the file before the
/// first line of a later step. Roll-backs (rollback.h) stay. Lines before it
/// that are not metrics are left out; the file as it was is then kept beside it
/// as damaged-metrics.jsonl, and what is returned warns with file and line.
/// Throws DataError where it cannot read the file, and Error where it cannot
/// write.
[[nodiscard]] std::string
truncate_metrics(const std::filesystem::path& path, int64_t step);

}  // namespace echelon::timeline
