// What the training loop does about memory: counts it from the start until its
// timeline has what it needs, keeps a CPU's rank within memory.limit_bytes, and
// says what to do when it does not suffice.
#pragma once

#include <c10/util/Exception.h>

#include <memory>
#include <string>

#include "echelon/comm/mesh_groups.h"
#include "echelon/comm/world.h"
#include "echelon/job/job.h"
#include "echelon/profiling/memory_meter.h"
#include "echelon/timeline/recorder.h"
#include "echelon/timeline/timeline.h"
#include "echelon/train/strategies/model_source.h"

namespace echelon {

/// Made by the thread that trains, before the model, on every rank of the world
/// at once. What it is given outlives it.
class MemoryWatch {
 public:
  /// Throws ConfigError when what is to be offloaded is more than this host has
  /// left.
  MemoryWatch(
      const Job& job, const ModelSource& source, const World& world,
      const MeshGroups& groups);

  /// After recorder.begin_step(): samples are taken while it records.
  void begin_step(const Recorder& recorder);

  /// `body`'s result. When memory does not suffice, throws Error: place, kind,
  /// the plan, and which settings help by how much.
  template <class Body>
  auto during(const std::string& place, const Body& body) {
    try {
      return body();
    } catch (const c10::OutOfMemoryError& error) {
      fail(place, error);
    }
  }

  /// Of the recorded steps, with the plan's peak; without samples when nothing
  /// was recorded.
  RankMemory measured();

 private:
  void check_host(const World& world) const;
  [[noreturn]] void
  fail(const std::string& place, const c10::OutOfMemoryError& error);
  void end_samples();

  const Job& job_;
  const ModelSource& source_;
  int rank_;
  int pipeline_rank_;
  int64_t limit_bytes_ = 0;
  MemoryMeter meter_;
  std::unique_ptr<MemoryMeter::Counting> counting_;
  bool sampling_ = false;
  bool sampled_ = false;
  RankMemory measured_;
};

}  // namespace echelon
