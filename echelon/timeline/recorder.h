// Collects the spans of one rank while it runs.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "echelon/timeline/timeline.h"

namespace echelon::timeline {

/// Nanoseconds of the steady clock: one origin for all processes of a host.
int64_t steady_now_ns();

/// The times of a device with streams, where the host only queues work.
class DeviceClock {
 public:
  virtual ~DeviceClock() = default;
  /// Marks what the current stream of `device` (-1: the current one) has been
  /// given so far, and returns the mark's number, from 0. Thread-safe; does not
  /// wait.
  virtual int64_t mark(int device) = 0;
  /// When the stream came to the mark, on the steady clock. Waits for it.
  virtual int64_t time_ns(int64_t mark) = 0;
};

using MakeDeviceClock = std::function<std::unique_ptr<DeviceClock>()>;

/// Stretches of a device's current stream, without a wait for the device.
class DeviceTimer {
 public:
  virtual ~DeviceTimer() = default;
  /// Marks what the current stream has been given so far.
  virtual int64_t mark() = 0;
  /// When the stream came to each of these marks, the oldest first, in
  /// nanoseconds after the first of them. Waits for the last. The marks may
  /// stand for others afterwards.
  virtual std::vector<int64_t> take_ns(const std::vector<int64_t>& marks) = 0;
};

/// A part of a step, such as the forward passes of all microbatches.
struct StepPart {
  /// Without waits for other ranks, and without what came between two passes.
  double seconds = 0;
  /// When the first pass began and the last one ended, by steady_now_ns(); 0:
  /// there was none.
  int64_t begin_ns = 0, end_ns = 0;
};

struct StepParts {
  StepPart forward, backward, update;
};

/// A moment of the host, or of a device, which is known later.
struct Moment {
  int64_t value = 0;  // nanoseconds, or a mark
  bool mark = false;
};

/// Thread-safe; recording a span costs a lock and a push_back. Spans outside
/// [first_step, first_step + num_steps) are dropped, so a long run stays small;
/// later steps are recorded one at a time, for take_step().
///
/// On a device with streams a span begins and ends when the device comes to
/// it: `make_clock` is called at the first recorded step, and marks are read in
/// take() and take_step().
class Recorder {
 public:
  Recorder(
      int32_t rank, int64_t first_step, int64_t num_steps,
      MakeDeviceClock make_clock = nullptr);

  /// The step that later spans belong to, and whether it is recorded.
  void begin_step(int64_t step);
  bool active() const;

  void add(Span span);  // rank and step are filled in here
  /// As add(), between two moments. The step is that of `begin`.
  void add(Span span, Moment begin, Moment end);
  /// Of the device's current stream if there is a clock, else of the host.
  Moment now(int device = -1);
  /// A mark of the current stream; -1 without a clock, or when nothing is
  /// recorded.
  int64_t mark();
  std::vector<Span> take();

  /// That step is recorded too, if it is to begin.
  void also_record(int64_t step);
  /// The spans of a step that has ended on the device. Those of also_record()
  /// are then forgotten, and what is told of them later is dropped.
  std::vector<Span> take_step(int64_t step);

  /// The step that follows the last recorded one, and those after it.
  bool ended() const;

  // The parts of every step, whether or not its spans are recorded.

  /// From now on times spans of the kinds forward, backward and optimizer.
  ///
  ///   timer      on a device with streams; null: the host computes
  ///   waited_ns  how long the host has waited for other ranks so far, which is
  ///              none of a part's time; not called with a timer
  void time_parts(
      std::unique_ptr<DeviceTimer> timer, std::function<int64_t()> waited_ns);
  /// While it is held, passes are not timed: a CUDA graph is captured, whose
  /// marks no device comes to.
  void hold_parts(bool held);
  /// The passes of the step that begin_step() began, once it has been given to
  /// the device.
  struct Pass {
    SpanKind kind = SpanKind::other;
    int64_t begin = 0, end = 0;  // marks, or nanoseconds
    int64_t waited_ns = 0;
  };
  std::vector<Pass> take_passes();
  /// The parts that these passes are, or nothing where there is none. Waits for
  /// the device, whose last pass is taken to have ended at `ended_ns`.
  std::optional<StepParts>
  parts_of(const std::vector<Pass>& passes, int64_t ended_ns);

 private:
  friend class ScopedSpan;
  std::optional<Pass> begin_pass(SpanKind kind);
  void end_pass(Pass pass);
  struct Recorded {
    Span span;
    Moment begin, end;
  };

  bool is_first(int64_t step) const {
    return step >= first_step_ && step < first_step_ + num_steps_;
  }
  bool records() const {
    return is_first(step_) || (step_ >= 0 && step_ == also_);
  }
  int64_t mark_locked(int device);
  int64_t time_of(const Moment& moment);
  Span timed(Recorded one);

  mutable std::mutex mutex_;
  int32_t rank_;
  int64_t first_step_;
  int64_t num_steps_;
  int64_t step_ = -1;
  MakeDeviceClock make_clock_;
  std::unique_ptr<DeviceClock> clock_;
  int64_t first_mark_ = 0;  // of this clock; those of earlier ones are less
  std::vector<int64_t> step_of_mark_;  // from first_mark_
  int64_t also_ = -1;                  // a step of also_record()
  std::vector<Recorded> spans_;
  bool times_parts_ = false;
  bool holds_parts_ = false;
  std::unique_ptr<DeviceTimer> timer_;
  std::function<int64_t()> waited_ns_;
  std::vector<Pass> passes_;
};

/// Records, or times a part of a step, from construction to destruction; a null
/// recorder costs nothing. The span of a device that fails meanwhile is lost.
class ScopedSpan {
 public:
  ScopedSpan(
      Recorder* recorder, std::string track, std::string name, SpanKind kind);
  ~ScopedSpan();
  ScopedSpan(const ScopedSpan&) = delete;
  ScopedSpan& operator=(const ScopedSpan&) = delete;

 private:
  Recorder* recorder_;
  bool records_ = false;
  Span span_;
  Moment begin_;
  std::optional<Recorder::Pass> pass_;
};

}  // namespace echelon::timeline
