#include "echelon/train/saving/restart_memory.h"

#include <algorithm>
#include <cstdio>
#include <exception>

namespace echelon {

// Threads have the environment of one rank.
RestartMemory::RestartMemory(
    World& world, const RankEnvironment& environment, bool wanted)
    : world_(world),
      index_(wanted ? environment.memory : ""),
      number_(world.rank() - environment.rank + environment.local_rank),
      several_(wanted && world.local_size() < world.size()) {
  if (!several_) return;  // the launcher has listed them
  exchange_hosts();
  const bool all = std::ranges::none_of(
      hosts_, [](const auto& host) { return host.empty(); });
  if (!all) {
    index_.clear();
    return;
  }
  list_common();
}

// The first rank of a host speaks for it.
void RestartMemory::exchange_hosts() {
  std::string own;
  if (leads() && !index_.empty()) own = describe_memory(index_);
  const auto all = world_.exchange((leads() ? "host " : "rank ") + own);
  hosts_.clear();
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (!all[rank].starts_with("host ")) continue;
    if (rank <= static_cast<size_t>(world_.rank())) host_ = hosts_.size();
    hosts_.push_back(all[rank].substr(5));
  }
}

OpenRemote RestartMemory::remote() const {
  return several_ && !index_.empty() ? remote_slots(index_) : OpenRemote();
}

std::unique_ptr<SlotSender> RestartMemory::make_sender() const {
  if (!several_ || hosts_.size() < 2) return nullptr;
  return std::make_unique<SlotSender>(index_, hosts_, host_);
}

void RestartMemory::collect() {
  if (index_.empty()) return;
  if (!several_) {
    if (leads()) collect_checkpoints_in_memory(index_);
    world_.exchange("");
    return;
  }
  exchange_hosts();
  list_common();
}

void RestartMemory::list_common() {
  std::optional<CommonCheckpoints> common;
  if (leads()) common.emplace(index_, hosts_);
  const auto all =
      world_.exchange(leads() ? "host " + common->found() : std::string());
  if (leads()) {
    std::vector<std::string> found;
    for (const auto& one : all) {
      if (one.starts_with("host ")) found.push_back(one.substr(5));
    }
    common->list(found);
  }
  world_.exchange("");
}

void RestartMemory::go_on_from(int generation, int64_t step) {
  if (several_ && leads() && !index_.empty()) {
    echelon::go_on_from(index_, generation, step);
  }
  discard(step);
}

void RestartMemory::discard(int64_t step) {
  if (index_.empty()) return;
  if (leads()) discard_checkpoints_in_memory(index_, step);
  world_.exchange("");
}

}  // namespace echelon
