// Checkpoints in the memory of a host, which a job that is restarted resumes
// from: newer than those on disk, and gone with the launcher. Free of LibTorch.
//
//   launcher                             rank
//   MemorySlots slots(num_ranks);
//   ECHELON_MEMORY = slots.path()   ->   checkpoints_in_memory(path)
//                                        MemorySlot slot(path, rank, step);
//                                        slot.write(slices, manifest, …);
//   slots.collect();  // ranks ended
//
// The launcher holds the files, so they outlive ranks that are killed. Each
// rank has two slots and writes them in turn, so one of them is always whole.
// No rank waits for another: a checkpoint is complete when all ranks have
// written its step, which the launcher finds out. A rank may begin a copy only
// when all have written the one before (MemorySaver), so that the whole slots
// of two ranks are at most one copy apart.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "echelon/checkpoint/files/folder.h"
#include "echelon/checkpoint/files/rank_file.h"
#include "echelon/checkpoint/format/manifest.h"

namespace echelon {

/// The launcher's side.
class MemorySlots {
 public:
  /// Throws ConfigError when the system refuses a file, or its path.
  explicit MemorySlots(int num_ranks);
  ~MemorySlots();
  MemorySlots(const MemorySlots&) = delete;
  MemorySlots& operator=(const MemorySlots&) = delete;

  /// For the variable ECHELON_MEMORY of every rank: an index of the slots,
  /// which ranks of this user can open while this process lives.
  const std::string& path() const { return path_; }

  /// Adds slots, so that there are as many as `num_ranks`; collect() lists them
  /// in the index. Throws ConfigError when the system refuses a file.
  void grow(int num_ranks);

  /// Lists the complete checkpoints in the index, for the next generation of
  /// ranks, and returns the newest one's step; none when there is none. No rank
  /// may be running.
  std::optional<int64_t> collect();
  /// The newest step that some rank of this host has written whole; none when
  /// there is none. On several hosts, no host has all of a checkpoint.
  std::optional<int64_t> newest_step() const;

  // For MemoryServer.

  /// This host's name among those of the job, which no other one has.
  const std::string& host() const { return host_; }
  /// The index of the copies of other hosts' slots, which the server writes.
  std::string begin_copies();
  /// The server listens there, for ends that know the key (hexadecimal).
  void serve_at(const std::string& address, int port, const std::string& key);

 private:
  struct Files;

  void write_index() const;

  const std::string host_;
  std::unique_ptr<Files> files_;
  std::string path_;
};

/// What MemorySlot::write() has written.
struct WrittenSlot {
  int number = 0;
  int side = 0;
  int generation = 0;
  std::string file;    // its path
  std::string record;  // its text
};

/// A rank's side: where it writes.
class MemorySlot {
 public:
  /// Throws DataError when the index cannot be read, and CheckpointError when
  /// it lacks the rank.
  ///
  ///   index      MemorySlots::path()
  ///   kept_step  of the checkpoint in memory that training resumed from, whose
  ///              slot is written last; -1: none
  ///   number     of the rank among those of its host; -1: `rank`
  MemorySlot(
      const std::string& index, int rank, int64_t kept_step, int number = -1);

  /// Writes this rank's slices of the checkpoint that `manifest` describes,
  /// whose `ranks` is the number of ranks that write it. Returns when they are
  /// complete; the older slot's checkpoint is gone then. Throws
  /// CheckpointError; the older slot is then empty.
  ///
  ///   generation  of the job; slots of different generations never make up one
  ///               checkpoint
  WrittenSlot write(
      const std::vector<SliceBytes>& slices, CheckpointManifest manifest,
      int generation);

 private:
  struct Paths {
    std::string file;
    std::string record;
  };
  const int rank_;
  const int number_;
  std::array<Paths, 2> sides_;
  size_t next_ = 0;
};

/// The complete checkpoints that collect() found last, the newest first. Each
/// path is that of a manifest, as CheckpointReader takes it. Throws
/// DataError when the index cannot be read.
std::vector<CheckpointPlace> checkpoints_in_memory(const std::string& index);

/// As MemorySlots::collect(), but by a rank of a job that goes on: one rank
/// calls it; none may be writing. Throws DataError or CheckpointError.
std::optional<int64_t> collect_checkpoints_in_memory(const std::string& index);

/// Removes the checkpoints in memory of later steps than `step` (by default
/// all), so that nothing resumes from them. One rank calls it; none may be
/// writing. On several hosts, one rank of each host calls it. Throws DataError
/// or CheckpointError.
void discard_checkpoints_in_memory(const std::string& index, int64_t step = -1);

}  // namespace echelon
