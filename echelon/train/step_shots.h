// A step every few seconds as this rank did it, for those who watch the run:
// RUN/last_step/rank-N.msgpack, of the ranks that a page shows. `echelon watch
// --web` lays them side by side.
//
// A thread writes, so that training does not wait for a file system. What fails
// is left out: nobody may be watching.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "echelon/comm/world.h"
#include "echelon/layout/mesh.h"
#include "echelon/timeline/recorder.h"

namespace echelon {

class StepShots {
 public:
  /// Of at most so many ranks a page shows a step.
  static constexpr int64_t kMostRanks = 64;

  /// `seconds` between two steps; 0: none is recorded.
  StepShots(
      const World& world, const Mesh& mesh, timeline::Recorder& recorder,
      std::filesystem::path folder, double seconds);
  ~StepShots();
  StepShots(const StepShots&) = delete;
  StepShots& operator=(const StepShots&) = delete;

  /// Rank 0 asks, once a step: whether a step is wanted now. Writing takes a
  /// 500th of the time at most.
  bool due();
  /// A step, from 0, has been read. Writes it where it was recorded, and where
  /// rank 0 `asks`, has the next one recorded that has not begun.
  ///
  ///   common_ns  a moment of this step that all ranks had at the same time, by
  ///              steady_now_ns(): hosts have other clocks
  void after_step(int64_t step, bool asks, int64_t common_ns);

 private:
  void write(std::vector<timeline::Span> spans);

  timeline::Recorder& recorder_;
  const bool on_device_;
  const bool several_hosts_;
  const bool shown_;
  const int64_t interval_ns_;  // 0: never
  const int32_t rank_;
  const std::string rank_name_;
  const std::filesystem::path folder_, path_;
  int64_t next_ns_ = 0;
  int64_t step_ = -1;      // that is recorded
  int64_t common_ns_ = 0;  // when it was asked for
  std::atomic<int64_t> took_ns_ = 0;
  std::atomic<bool> busy_ = false;
  std::thread writer_;
};

/// Whether a page shows this rank: of a large job, the first pipeline, or the
/// first ranks.
bool is_shown(int64_t rank, const Mesh& mesh);

}  // namespace echelon
