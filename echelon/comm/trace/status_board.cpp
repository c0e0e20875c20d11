#include "echelon/comm/trace/status_board.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "echelon/text/format.h"

namespace echelon {
namespace {

template <size_t N>
void copy_text(std::array<char, N>& to, const std::string& from) {
  const size_t length = std::min(from.size(), N - 1);
  std::memcpy(to.data(), from.data(), length);
  std::memset(to.data() + length, 0, N - length);
}

std::string seconds(double value) {
  return value < 10 ? format("{:.2g} s", value)
                    : format("{} s", std::llround(value));
}

}  // namespace

StatusEntry::StatusEntry(const CollectiveRecord& record)
    : sequence(record.sequence) {
  copy_text(operation, record.operation);
  copy_text(axis, record.axis);
  copy_text(label, record.label);
}

std::string StatusEntry::describe() const {
  const std::string name = label[0] == 0 ? "" : format(" \"{}\"", label.data());
  return format("{}{} (#{})", operation.data(), name, sequence);
}

void MemoryBoard::publish(int rank, const RankStatus& status) {
  std::lock_guard lock(mutex_);
  slots_[static_cast<size_t>(rank)] = status;
}

std::optional<RankStatus> MemoryBoard::read(int rank) {
  std::lock_guard lock(mutex_);
  return slots_[static_cast<size_t>(rank)];
}

std::string to_bytes(const RankStatus& status) {
  static_assert(std::is_trivially_copyable_v<RankStatus>);
  return {reinterpret_cast<const char*>(&status), sizeof(status)};
}

std::optional<RankStatus> status_from_bytes(const std::string& bytes) {
  if (bytes.size() < sizeof(RankStatus)) return std::nullopt;
  RankStatus status;
  std::memcpy(&status, bytes.data(), sizeof(status));
  return status;
}

std::string hang_report(
    const WaitingCall& waiting,
    const std::vector<std::optional<RankStatus>>& statuses) {
  std::string missing;
  std::vector<int> arrived;
  for (size_t i = 0; i < waiting.ranks.size(); ++i) {
    const int rank = waiting.ranks[i];
    const auto& status = statuses[i];
    const bool here = rank == waiting.rank ||
                      (status && waiting.group < RankStatus::kGroups &&
                       status->begun[waiting.group] > waiting.call.sequence);
    if (here) {
      arrived.push_back(rank);
      continue;
    }
    const std::string before =
        !status ? " has published no status yet"
        : status->num_finished == 0
            ? " has finished no collective yet"
            : " last finished " + status->last_finished.describe();
    missing += format(
        "\n  rank {}{} and has not called {} for {}", rank, before,
        waiting.call.describe(), seconds(waiting.waited_seconds));
    if (status && status->num_running > 0) {
      missing += format(
          "; it is in {} on axis {}", status->last_begun.describe(),
          status->last_begun.axis.data());
    }
  }
  if (missing.empty()) return "";
  return format("{}\n  arrived: rank {}", missing, join(arrived, ", "));
}

}  // namespace echelon
