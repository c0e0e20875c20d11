// Checkpoints in the memory of several hosts: each host has the slots of its
// own ranks, and its MemoryServer holds copies of those of the host before it.
// Free of LibTorch; the ranks exchange what they need to know.
//
//   one rank of each host                 all ranks
//   describe_memory(index)            ->  the hosts' descriptions
//   CommonCheckpoints common(…);
//   common.found()                    ->  what all hosts have found
//   common.list(…);
//                                         checkpoints_in_memory(index)
//                                         CheckpointReader(…, remote_slots(…))
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "echelon/checkpoint/files/reader.h"
#include "echelon/checkpoint/memory/memory_slots.h"

namespace echelon {

/// What this host has, for the ranks of the others: where its server is, and
/// which slots are whole, of which ranks. Throws DataError when the index
/// cannot be read.
std::string describe_memory(const std::string& index);

/// The job goes on from `step`, as generation `generation`. Later steps of
/// earlier generations no longer count, even if a host that is away now brings
/// them back. Throws DataError or CheckpointError.
void go_on_from(const std::string& index, int64_t generation, int64_t step);

/// The checkpoints of which every rank's slot, or a copy of it, is on some
/// host.
class CommonCheckpoints {
 public:
  /// Reads the records, those of later generations first. `hosts`: the
  /// descriptions, the same on all hosts. One that cannot be read is left out.
  CommonCheckpoints(
      const std::string& index, const std::vector<std::string>& hosts);
  ~CommonCheckpoints();
  CommonCheckpoints(const CommonCheckpoints&) = delete;
  CommonCheckpoints& operator=(const CommonCheckpoints&) = delete;

  /// A word for each checkpoint.
  std::string found() const;
  /// Lists those that all hosts have found in this host's index, and returns
  /// the newest one's step. `found`: the same on all hosts. Throws
  /// CheckpointError.
  std::optional<int64_t> list(const std::vector<std::string>& found);

 private:
  struct Found;

  const std::string index_;
  std::vector<Found> found_;
};

/// Opens files of other hosts, for the reader of a checkpoint that list() has
/// listed. Connects to a host when a file of it is needed.
OpenRemote remote_slots(const std::string& index);

/// Sends this rank's slots to the next host. Throws CheckpointError.
class SlotSender {
 public:
  /// `hosts`: the descriptions of all hosts, of which this is number `own`.
  SlotSender(
      const std::string& index, const std::vector<std::string>& hosts,
      size_t own);
  ~SlotSender();

  /// Returns when the copy is complete. One thread at a time.
  void send(const WrittenSlot& slot);

 private:
  struct Target;
  std::unique_ptr<Target> target_;
};

}  // namespace echelon
