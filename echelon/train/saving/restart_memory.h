// The checkpoints in memory that outlives the ranks, as the ranks of a job on
// one host or several see them (checkpoint/memory).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "echelon/checkpoint/files/reader.h"
#include "echelon/checkpoint/memory/memory_hosts.h"
#include "echelon/comm/world.h"
#include "echelon/environment/rank_environment.h"

namespace echelon {

class RestartMemory {
 public:
  /// Lists the complete checkpoints. Every rank of the world calls it, and the
  /// other calls that say so. On several hosts there is no such memory unless
  /// all of them have it. Borrows the world.
  ///
  ///   wanted  whether the job keeps checkpoints in memory
  RestartMemory(World& world, const RankEnvironment& environment, bool wanted);

  /// MemorySlots::path(); empty: there is none.
  const std::string& index() const { return index_; }
  /// This rank among those of its host.
  int number() const { return number_; }
  /// For the reader of a checkpoint in memory.
  OpenRemote remote() const;
  /// Sends copies of this rank's slots to the next host; null on one host.
  /// Throws CheckpointError.
  std::unique_ptr<SlotSender> make_sender() const;

  /// The job goes on from `step`, and never resumes from a later step of an
  /// earlier generation, whichever host has it. Every rank calls it; none may
  /// be writing.
  void go_on_from(int generation, int64_t step);
  /// Lists the complete checkpoints again. Every rank calls it; none may be
  /// writing.
  void collect();
  /// Removes those of later steps than `step`, by default all, before any rank
  /// returns. Every rank calls it; none may be writing.
  void discard(int64_t step = -1);

 private:
  bool leads() const { return number_ == 0; }
  void exchange_hosts();
  void list_common();

  World& world_;
  std::string index_;
  const int number_;
  const bool several_;
  std::vector<std::string> hosts_;  // of several: what each has
  size_t host_ = 0;                 // this one
};

}  // namespace echelon
