// Who had how many devices when.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "echelon/pool/store.h"

namespace echelon::pool {

struct ProjectUse {
  std::string name;
  int parent = -1;  // an index of PoolUse::projects; -1: none
  bool is_parent = false;
  /// From each second on, so many devices; the first is PoolUse::since. Of a
  /// parent: those of its projects together.
  std::vector<std::pair<double, int64_t>> steps;
  double device_seconds = 0;
  double borrowed_seconds = 0;  // of these, beyond the guarantee
};

struct PoolUse {
  double since = 0, until = 0;  // seconds since 1970
  std::vector<ProjectUse> projects;
  double used_seconds = 0;  // of all devices together
  double idle_seconds = 0;
};

/// From `since` to `until`, of `devices` devices. `projects` come first and in
/// their order, those that are known by their allocations alone after them.
/// Guarantees are those of now.
PoolUse use_of(
    const std::vector<Allocation>& allocations,
    const std::vector<Project>& projects, int64_t devices, double since,
    double until);

}  // namespace echelon::pool
