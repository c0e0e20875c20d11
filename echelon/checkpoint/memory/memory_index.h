// The index of the checkpoints in a host's memory, and the records of their
// slots. Private to this folder.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "echelon/checkpoint/format/manifest.h"

namespace echelon::memory_slots {

/// Replaces the text of a file that is there. Throws CheckpointError.
void write_over(const std::string& path, std::string_view text);

/// One of the two places in which a rank writes in turn. Ranks that change
/// hosts get other slots, so `number` counts the ranks of the host.
struct SlotPlace {
  std::string host;  // whose slot it is
  int number = 0;
  int side = 0;        // 0 or 1
  std::string file;    // a rank file
  std::string record;  // what the slot holds; empty: nothing whole
};

/// Its lines: "host ID", "slot NUMBER SIDE FILE RECORD", "manifest FILE", a
/// file for the manifest of a checkpoint, "checkpoint STEP MANIFEST"; on
/// several hosts also "copies INDEX", "server ADDRESS PORT KEY" and "until
/// GENERATION STEP". The index of copies has lines "copy HOST NUMBER SIDE FILE
/// RECORD".
struct Index {
  std::string host;
  std::vector<SlotPlace> slots;  // this host's, and then the copies
  size_t own = 0;                // how many are this host's
  std::vector<std::string> manifests;
  std::vector<std::pair<int64_t, std::string>> checkpoints;
  std::string copies;   // the index of copies; empty: this host has no server
  std::string address;  // of the server
  int port = 0;
  std::string key;  // hexadecimal
  /// Generations and steps: later steps of that generation, and of those before
  /// it, no longer count.
  std::vector<std::pair<int64_t, int64_t>> until;

  /// With the copies. Throws DataError when a file cannot be read.
  static Index read(const std::string& path);
  /// Without the copies, which are the server's. Throws CheckpointError.
  void write(const std::string& path) const;
};

/// What a rank says of a slot that it has written.
struct Record {
  int64_t generation = 0;
  int64_t rank = 0;
  CheckpointManifest manifest;  // without tensors and files
  RankPart part;

  static std::string text(
      int64_t generation, int64_t rank, CheckpointManifest manifest,
      const RankPart& part);
  /// `place`: for errors. Nothing of a text that is not whole, as that of a
  /// rank that was killed.
  static std::optional<Record>
  parse(const std::string& text, const std::string& place);
  /// The record of a slot. Nothing where the file is gone: copies end with
  /// their server, which also drops them.
  static std::optional<Record> read(const std::string& path);
};

/// A file in the memory of this process. Others of this user open it by its
/// path while this process has it.
class MemoryFile {
 public:
  /// Throws ConfigError when the system refuses it.
  explicit MemoryFile(const std::string& name);
  ~MemoryFile();
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  std::string path() const;

 private:
  const int fd_;
};

/// The rank file and the record of one side of a slot.
std::array<std::unique_ptr<MemoryFile>, 2> make_slot(size_t number);

/// Whether these are the records of all ranks of a checkpoint, in their order.
bool are_all(const std::vector<Record>& records);

/// Writes the manifest of the checkpoint that the records of all ranks make up,
/// and lists it in the index. False when they do not make up one, and when the
/// index has no place for another.
bool add_checkpoint(Index& index, const std::vector<Record>& records);

}  // namespace echelon::memory_slots
