// Who did not come to a collective, and what each of them did last.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "echelon/comm/trace/status_board.h"

namespace echelon {

/// The collective that a rank waits in.
struct WaitingCall {
  uint64_t sequence = 0;
  std::string operation;
  std::string axis;
  std::string label;
  size_t group = 0;        // its number in the world
  std::vector<int> ranks;  // world ranks of the group
  int rank = 0;            // world rank of the one that waits
  double waited_seconds = 0;
};

/// `all_reduce "bucket 0" (#119)`
std::string describe(const WaitingCall& call);

/// One sentence per rank of the group that had not arrived, e.g.
///   rank 2 last finished all_gather "layer3" (#118) and has not called
///   all_reduce "bucket 0" (#119) for 31 s
/// then the ranks that had. `statuses` are by position in call.ranks. Empty
/// when all had arrived.
std::string hang_report(
    const WaitingCall& call,
    const std::vector<std::optional<RankStatus>>& statuses);

}  // namespace echelon
