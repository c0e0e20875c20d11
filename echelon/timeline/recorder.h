// Collects the spans of one rank while it runs.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "echelon/timeline/timeline.h"

namespace echelon::timeline {

/// Nanoseconds of the steady clock: one origin for all processes of a host.
int64_t steady_now_ns();

/// Thread-safe; recording a span costs a lock and a push_back. Spans outside
/// [first_step, first_step + num_steps) are dropped, so a long run stays small.
class Recorder {
 public:
  Recorder(int32_t rank, int64_t first_step, int64_t num_steps);

  /// The step that later spans belong to, and whether it is recorded.
  void begin_step(int64_t step);
  bool active() const;

  void add(Span span);  // rank and step are filled in here
  std::vector<Span> take();

  /// The step that follows the last recorded one, and those after it.
  bool ended() const;

 private:
  mutable std::mutex mutex_;
  int32_t rank_;
  int64_t first_step_;
  int64_t num_steps_;
  int64_t step_ = -1;
  std::vector<Span> spans_;
};

/// Records from construction to destruction; a null recorder costs nothing.
class ScopedSpan {
 public:
  ScopedSpan(
      Recorder* recorder, std::string track, std::string name, SpanKind kind);
  ~ScopedSpan();
  ScopedSpan(const ScopedSpan&) = delete;
  ScopedSpan& operator=(const ScopedSpan&) = delete;

 private:
  Recorder* recorder_;
  Span span_;
};

}  // namespace echelon::timeline
