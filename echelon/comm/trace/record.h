// The last collectives of a rank, for errors about hangs and for timelines, the
// labels of the collectives that a thread starts, and those that it would make.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace echelon {

/// One collective as this rank saw it.
struct CollectiveRecord {
  uint64_t sequence = 0;       // of its group, from 0
  std::string operation;       // "all_reduce"
  std::string axis;            // the group's
  std::string label;           // "bucket 0", or empty
  std::vector<int64_t> shape;  // of the (first) input
  std::string dtype;           // "float32"
  int64_t bytes = 0;           // of this rank's input
  int64_t begin_ns = 0;        // steady clock
  int64_t wait_begin_ns = 0;   // a thread waited from here to end_ns
  int64_t end_ns = 0;          // 0 while it runs
  bool failed = false;
  /// Marks of mark_with() in the current stream: where the call was queued,
  /// where the stream began to wait for it, and where it went on. -1: none.
  int64_t begin_mark = -1;
  int64_t wait_mark = -1;
  int64_t end_mark = -1;
};

/// The last 1,024 collectives of one rank, in order of their start.
/// Thread-safe.
class History {
 public:
  static constexpr size_t kCapacity = 1024;

  /// Returns a ticket for end(); tickets count all collectives of the rank.
  uint64_t begin(CollectiveRecord record);
  void end(uint64_t ticket, bool failed = false);
  /// A thread begins to wait for the collective. No effect when it has ended,
  /// or when another thread waits already.
  void begin_wait(uint64_t ticket);
  /// The thread's current stream is about to wait for the collective, or the
  /// collective runs on that stream.
  void mark_wait(uint64_t ticket);
  /// The current stream goes on after it.
  void mark_end(uint64_t ticket);

  /// Oldest first.
  std::vector<CollectiveRecord> snapshot() const;
  /// Collectives begun since the start, including those no longer kept.
  uint64_t count() const;
  /// Also keeps count() there, from now on; null: nowhere else.
  void count_into(std::atomic<uint64_t>* place);

  /// How long threads of this rank have waited for collectives that are over.
  /// Of two threads that wait at once both count.
  int64_t waited_ns() const;

  /// Called with each record when it ends, from the thread that ended it; the
  /// trainer's timeline listens. Null removes it.
  void on_end(std::function<void(const CollectiveRecord&)> listener);
  /// Gives a mark in the current stream, or -1: for devices, whose calls run
  /// later than the host makes them. Null removes it.
  void mark_with(std::function<int64_t()> mark);

 private:
  int64_t mark() const;
  void set_mark(uint64_t ticket, int64_t CollectiveRecord::*which);

  mutable std::mutex mutex_;
  std::vector<CollectiveRecord> ring_;
  uint64_t next_ = 0;
  std::atomic<uint64_t>* count_ = nullptr;  // keeps next_ too
  int64_t waited_ns_ = 0;
  std::shared_ptr<std::function<void(const CollectiveRecord&)>> listener_;
  std::shared_ptr<std::function<int64_t()>> mark_;
};

/// "[2, 3]"
std::string shape_text(const std::vector<int64_t>& shape);

/// Names the collectives started by this thread until it is destroyed; scopes
/// nest. The label appears in the history, the timeline and every error.
class LabelScope {
 public:
  explicit LabelScope(std::string label);
  ~LabelScope();
  LabelScope(const LabelScope&) = delete;
  LabelScope& operator=(const LabelScope&) = delete;

  /// The innermost label of this thread, or "".
  static const std::string& current();

 private:
  std::string previous_;
};

// The collectives that a computation would make, found without making them.
// Calls of silent groups, and calls with tensors on the meta device, send
// nothing (group.h); they are recorded here:
//
//   CollectiveTrace trace;
//   count_layers(layers, inputs);
//   trace.take();              // {"all_reduce", "tp", 4194304}, ...

struct TracedCollective {
  std::string operation;  // "all_reduce"
  std::string axis;       // the group's
  int64_t bytes = 0;      // of this rank's input
  /// Positions of the computation (CollectiveTrace::move_to) where it was
  /// called and where it was waited for. The same for a call that waits.
  int64_t begin = 0;
  std::shared_ptr<int64_t> end;
};

/// While an object of this class lives, it records such calls of its thread.
/// The innermost one records.
class CollectiveTrace {
 public:
  CollectiveTrace();
  ~CollectiveTrace();
  CollectiveTrace(const CollectiveTrace&) = delete;
  CollectiveTrace& operator=(const CollectiveTrace&) = delete;

  /// The calls since the last take(), in the order that they were made.
  std::vector<TracedCollective> take();

  /// Says how far the computation is.
  void move_to(int64_t position) { position_ = position; }

  /// For groups: records a call of this thread, if a trace is active.
  static void record(TracedCollective call);
  /// What is called where the call that was recorded last is waited for.
  static std::function<void()> wait_of_last();
  static bool active();

 private:
  std::vector<TracedCollective> calls_;
  int64_t position_ = 0;
  CollectiveTrace* outer_;
};

}  // namespace echelon
