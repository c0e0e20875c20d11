// The training loop's view of memory: measures it for the timeline, keeps a
// rank on a CPU within memory.limit_bytes, and says what to do when it runs
// out.
#pragma once

#include <c10/util/Exception.h>
#include <torch/types.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "echelon/comm/mesh_groups.h"
#include "echelon/comm/world.h"
#include "echelon/job/job.h"
#include "echelon/profiling/memory_meter.h"
#include "echelon/timeline/recorder.h"
#include "echelon/timeline/timeline.h"
#include "echelon/train/strategies/model_source.h"

namespace echelon {

/// Bytes of this host's memory that processes can still have without swapping:
/// what the kernel says is available (MemAvailable of /proc/meminfo) or, where
/// that is less, what the control group of a container leaves (memory.max less
/// memory.current, without its file cache). None where the kernel does not
/// tell.
///
///   root  of the file system that has proc/ and sys/
std::optional<int64_t>
available_host_bytes(const std::filesystem::path& root = "/");

/// The most bytes that this process has held so far: what torch's allocator has
/// reserved on a GPU, or what was resident on the host.
std::optional<int64_t> peak_memory(torch::Device device);

/// Every rank of the world makes one at once, in the thread that trains, before
/// the model. It borrows its arguments.
class MemoryWatch {
 public:
  /// Throws ConfigError when the job offloads more than this host has left.
  MemoryWatch(
      const Job& job, const ModelSource& source, const World& world,
      const MeshGroups& groups);

  /// Call it after recorder.begin_step(): samples are taken while it records.
  void begin_step(const timeline::Recorder& recorder);

  /// Returns body(). When memory runs out, throws Error: place, kind, the plan,
  /// and which settings help by how much.
  template <class Body>
  auto during(const std::string& place, const Body& body) {
    try {
      return body();
    } catch (const c10::OutOfMemoryError& error) {
      fail(place, error);
    }
  }

  /// The memory of the recorded steps, with the plan's peak; without samples
  /// when nothing was recorded.
  timeline::RankMemory measured();

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
  profiling::MemoryMeter meter_;
  std::unique_ptr<profiling::MemoryMeter::Counting> counting_;
  bool sampling_ = false;
  bool sampled_ = false;
  timeline::RankMemory measured_;
};

}  // namespace echelon
