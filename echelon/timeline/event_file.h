// A run's figures as TensorBoard reads them: one event file, of records as
// TensorFlow's TFRecord frames them, each an Event of tensorboard's event.proto
// with the scalars of a step.
//
// Names are torchtitan's where it has the figure: loss_metrics/global_avg_loss,
// throughput(tps), tflops, mfu(%), memory/max_reserved(GiB),
// time_metrics/end_to_end(s), time_metrics/data_loading(s), lr, grad_norm.
// Throughput and tflops are those of one rank, as there.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "echelon/timeline/metrics.h"

namespace echelon::timeline {

/// The folder, in that of a run.
inline constexpr const char* kEventFolder = "tensorboard";

/// CRC-32C (RFC 3720, appendix B.4), which frames the records.
uint32_t crc32c(std::string_view bytes);

using Scalars = std::vector<std::pair<std::string, double>>;

/// The scalars of a step and of an evaluation. `ranks` of the run.
Scalars scalars_of(const StepMetrics& step, int ranks);
Scalars scalars_of(const EvaluationMetrics& evaluation);

/// One process writes. Functions that write throw Error with the path and the
/// system's reason; what is not in the file then is kept, and the next call
/// tries again.
class EventFile {
 public:
  /// Goes on with the newest event file in the folder, without what may be
  /// broken at its end, or makes one.
  EventFile(const std::filesystem::path& folder, int ranks);
  /// Writes what is kept; a failure is not reported.
  ~EventFile();
  EventFile(const EventFile&) = delete;
  EventFile& operator=(const EventFile&) = delete;

  /// Gives the file the same steps as metrics.jsonl has: removes later ones,
  /// and adds those that it lacks at its end.
  void go_on_from(
      const std::vector<StepMetrics>& steps,
      const std::vector<EvaluationMetrics>& evaluations);
  /// Writes at most once a second.
  void append(const StepMetrics& step);
  void append(const EvaluationMetrics& evaluation);
  /// Removes what was written after `step`.
  void truncate(int64_t step);
  void flush();

  const std::filesystem::path& path() const { return path_; }

 private:
  void open();
  void
  add(double wall_time, int64_t step, const Scalars& scalars, bool evaluation);
  void write();

  std::filesystem::path path_;
  int ranks_;
  int file_ = -1;
  int64_t size_ = 0;       // bytes of whole records
  int64_t last_step_ = 0;  // in the file, or kept
  int64_t last_evaluation_ = 0;
  std::string unwritten_;
  std::optional<int64_t> written_ns_;
};

}  // namespace echelon::timeline
