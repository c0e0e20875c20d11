#include "echelon/comm/trace/hang_report.h"

#include <cmath>
#include <sstream>

namespace echelon {
namespace {

std::string seconds(double value) {
  std::ostringstream text;
  if (value < 10) {
    text.precision(2);
    text << value;
  } else {
    text << std::llround(value);
  }
  return text.str() + " s";
}

}  // namespace

std::string describe(const WaitingCall& call) {
  StatusEntry entry;
  entry.set(call.sequence, call.operation, call.axis, call.label);
  return entry.describe();
}

std::string hang_report(
    const WaitingCall& call,
    const std::vector<std::optional<RankStatus>>& statuses) {
  std::string missing;
  std::string arrived;
  for (size_t i = 0; i < call.ranks.size(); ++i) {
    const int rank = call.ranks[i];
    const auto& status = statuses[i];
    const bool here =
        rank == call.rank || (status && call.group < RankStatus::kGroups &&
                              status->begun[call.group] > call.sequence);
    if (here) {
      arrived += (arrived.empty() ? "" : ", ") + std::to_string(rank);
      continue;
    }
    missing += "\n  rank " + std::to_string(rank);
    if (!status || status->num_finished == 0) {
      missing += " has finished no collective yet";
    } else {
      missing += " last finished " + status->last_finished.describe();
    }
    missing += " and has not called " + describe(call) + " for " +
               seconds(call.waited_seconds);
    if (status && status->num_running > 0) {
      missing += "; it is in " + status->last_begun.describe() + " on axis " +
                 status->last_begun.axis.data();
    }
  }
  if (missing.empty()) return "";
  return missing + "\n  arrived: rank " + arrived;
}

}  // namespace echelon
