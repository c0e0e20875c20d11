// A run's steps as OpenTelemetry traces, in a file of OTLP/JSON: each line is
// an ExportTraceServiceRequest, as OpenTelemetry's file exporter writes it
// (opentelemetry.io/docs/specs/otel/protocol/file-exporter).
//
// A step is a trace. Its root span, "step", has the step's figures as
// attributes; its children are what the step was made of, and the evaluation
// and the checkpoint that followed it. The root lasts as long as all of them,
// and echelon.step_seconds says how long the step alone took. Passes of several
// microbatches are one child, from the first to the last of them.
//
// Traces tell what was done: a step that was undone, and done again later, is
// there twice.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "echelon/timeline/line_file.h"
#include "echelon/timeline/metrics.h"

namespace echelon::timeline {

/// The file, in the folder of a run.
inline constexpr const char* kTraceFolder = "otlp";
inline constexpr const char* kTraceFile = "traces.jsonl";

/// Names and values as OpenTelemetry has them.
using Attributes = std::vector<
    std::pair<std::string, std::variant<std::string, int64_t, double>>>;

/// A stretch of this process's time, by steady_now_ns().
struct Phase {
  std::string name;
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
  /// How much of it the phase took; absent: all.
  std::optional<double> seconds;
};

/// One process writes, and adds to what is there. Functions that write throw
/// Error with the path and the system's reason; what is not in the file then is
/// kept, up to kMostKept bytes, and the next call tries again.
class TraceFile {
 public:
  static constexpr size_t kMostKept = 16 << 20;

  /// `resource`: of all spans, service.name among them; `version`: of Echelon.
  TraceFile(
      const std::filesystem::path& path, const Attributes& resource,
      const std::string& version);
  /// Writes what is kept; a failure is not reported.
  ~TraceFile();
  TraceFile(const TraceFile&) = delete;
  TraceFile& operator=(const TraceFile&) = delete;

  /// A step that lasted for `time` and was made of `parts`. Writes the steps
  /// before it, at most once a second.
  void
  append(const StepMetrics& step, Phase time, const std::vector<Phase>& parts);
  /// What followed the last step; without one, a trace of its own.
  void append(const Phase& phase, const Attributes& attributes = {});
  /// Writes all that was appended.
  void flush();

 private:
  struct OpenStep {
    std::string trace, span;  // ids
    StepMetrics metrics;
    Phase time;
  };

  std::string new_id(int bytes);
  void add_span(
      const std::string& trace, const std::string& span,
      const std::string& parent, const Phase& time, const std::string& rest);
  void close_step();
  void end_line();
  void write_lines();

  std::filesystem::path path_;
  std::string head_;  // of each line, up to its spans
  LineFile file_;
  std::mt19937_64 random_;
  std::optional<OpenStep> step_;
  int64_t wall_offset_ns_ = 0;  // the wall clock's time less the steady clock's
  std::string spans_;           // of the line that is being made
  std::string unwritten_;       // lines
  std::optional<int64_t> written_ns_;  // the last time
};

}  // namespace echelon::timeline
