#include "echelon/pool/placement.h"

#include <algorithm>
#include <map>
#include <utility>

#include "echelon/text/check.h"
#include "echelon/text/format.h"

namespace echelon::pool {
namespace {

using ByGroup = std::map<int, std::vector<int>>;

// The groups with most devices first.
std::vector<int> fullest_first(const ByGroup& groups) {
  std::vector<int> order;
  for (const auto& [group, devices] : groups) order.push_back(group);
  std::ranges::stable_sort(order, [&](int a, int b) {
    return groups.at(a).size() > groups.at(b).size();
  });
  return order;
}

std::vector<int> kept(const State& state, const Job& job, int64_t count) {
  if (static_cast<int64_t>(job.devices.size()) == count) return job.devices;
  ByGroup groups;
  for (const int device : job.devices) {
    const Device& one = state.devices[static_cast<size_t>(device)];
    if (one.usable) groups[one.group].push_back(device);
  }
  std::vector<int> devices;
  for (const int group : fullest_first(groups)) {
    for (const int device : groups[group]) {
      if (static_cast<int64_t>(devices.size()) < count) {
        devices.push_back(device);
      }
    }
  }
  return devices;
}

void take(
    ByGroup& idle, const std::vector<int>& groups, size_t count,
    std::vector<int>& devices) {
  for (const int group : groups) {
    auto& from = idle[group];
    while (!from.empty() && devices.size() < count) {
      devices.push_back(from.front());
      from.erase(from.begin());
    }
  }
}

// Adds devices to `devices` until they are `count`.
void add(
    const State& state, ByGroup& idle, size_t count,
    std::vector<int>& devices) {
  // A job that grows stays with its neighbours as far as possible.
  ByGroup own;
  for (const int device : devices) {
    own[state.devices[static_cast<size_t>(device)].group].push_back(device);
  }
  take(idle, fullest_first(own), count, devices);
  for (auto& [group, free] : idle) {
    if (free.size() >= count - devices.size()) {
      take(idle, {group}, count, devices);
      break;
    }
  }
  take(idle, fullest_first(idle), count, devices);
}

}  // namespace

std::vector<std::vector<int>>
place(const State& state, const std::vector<int64_t>& counts) {
  std::vector<std::vector<int>> placed(state.jobs.size());
  std::vector<bool> used(state.devices.size());
  for (size_t j = 0; j < placed.size(); ++j) {
    const auto held = static_cast<int64_t>(state.jobs[j].devices.size());
    if (held == 0 || counts[j] == 0) continue;
    placed[j] = kept(state, state.jobs[j], std::min(held, counts[j]));
    for (const int device : placed[j]) used[static_cast<size_t>(device)] = true;
  }
  ByGroup idle;
  for (size_t d = 0; d < state.devices.size(); ++d) {
    if (state.devices[d].usable && !used[d]) {
      idle[state.devices[d].group].push_back(static_cast<int>(d));
    }
  }
  for (size_t j = 0; j < placed.size(); ++j) {
    const auto count = static_cast<size_t>(counts[j]);
    if (placed[j].size() < count) add(state, idle, count, placed[j]);
    ECHELON_CHECK(
        placed[j].size() == count, "job {} has {} devices, not {}",
        state.jobs[j].id, placed[j].size(), count);
  }
  return placed;
}

}  // namespace echelon::pool
