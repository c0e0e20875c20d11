// The object LATEST: which checkpoints a run has on the storage, the newest
// first, and who writes there.
//
//   step-00000040-1f3ac27b-2 0.25
//   step-00000020-1f3ac27b-1
//   writer 1f3ac27b process 4711 on host a since 2026-11-28 10:00:00 UTC
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "echelon/checkpoint/files/folder.h"

namespace echelon {

/// A checkpoint that is whole on the storage.
struct RemoteCheckpoint {
  std::string name;  // of its folder: "step-00000040-1f3ac27b-2"
  int64_t step = 0;
  std::optional<double> metric;  // that of KeepRule::best
  bool operator==(const RemoteCheckpoint&) const = default;
};

struct RemoteIndex {
  std::vector<RemoteCheckpoint> checkpoints;  // the newest first
  std::string writer;                         // what follows "writer "
};

/// The name of a checkpoint. No other has it: `writer` is the mark of one
/// process, which counts what it writes.
std::string remote_name(int64_t step, const std::string& writer, int64_t count);
/// The step of such a name; nothing of another one.
std::optional<int64_t> step_of_remote(std::string_view name);

std::string to_text(const RemoteIndex& index);
/// Nothing of any text that to_text() does not write.
std::optional<RemoteIndex> parse_remote_index(const std::string& text);

/// Adds a checkpoint, and leaves out what the rule does not keep.
void add(RemoteIndex& index, RemoteCheckpoint added, const KeepRule& rule);

}  // namespace echelon
