#include "echelon/pool/history.h"

#include <algorithm>
#include <map>

namespace echelon::pool {
namespace {

// What an allocation adds at each moment.
using Changes = std::map<double, int64_t>;

size_t index_of(std::vector<ProjectUse>& projects, const std::string& name) {
  const auto found = std::ranges::find(projects, name, &ProjectUse::name);
  if (found != projects.end()) {
    return static_cast<size_t>(found - projects.begin());
  }
  projects.push_back({.name = name});
  return projects.size() - 1;
}

void follow(
    ProjectUse& project, const Changes& changes, int64_t guaranteed,
    const PoolUse& use) {
  int64_t held = 0;
  double at = use.since;
  const auto count_until = [&](double end) {
    const double time = end - at;
    project.device_seconds += time * static_cast<double>(held);
    project.borrowed_seconds +=
        time * static_cast<double>(std::max<int64_t>(0, held - guaranteed));
    at = end;
  };
  project.steps = {{use.since, 0}};
  for (const auto& [time, more] : changes) {
    count_until(time);
    held += more;
    if (project.steps.back().first == time) {
      project.steps.back().second = held;
    } else if (project.steps.back().second != held) {
      project.steps.emplace_back(time, held);
    }
  }
  count_until(use.until);
}

}  // namespace

PoolUse use_of(
    const std::vector<Allocation>& allocations,
    const std::vector<Project>& projects, int64_t devices, double since,
    double until) {
  PoolUse use{.since = since, .until = std::max(since, until)};
  for (const Project& project : projects) {
    use.projects.push_back({.name = project.name, .parent = project.parent});
  }
  for (const Project& project : projects) {
    if (project.parent >= 0) {
      use.projects[static_cast<size_t>(project.parent)].is_parent = true;
    }
  }
  std::vector<Changes> changes(projects.size());
  for (const Allocation& one : allocations) {
    const double began = std::max(one.began, use.since);
    const double ended =
        one.ended == 0 ? use.until : std::min(one.ended, use.until);
    if (ended <= began) continue;
    const size_t own = index_of(use.projects, one.project);
    changes.resize(use.projects.size());
    const auto add = [&](size_t p) {
      changes[p][began] += one.devices;
      changes[p][ended] -= one.devices;
    };
    add(own);
    if (const int parent = use.projects[own].parent; parent >= 0) {
      add(static_cast<size_t>(parent));
    }
  }
  for (size_t p = 0; p < use.projects.size(); ++p) {
    ProjectUse& project = use.projects[p];
    const int64_t guaranteed = p < projects.size() ? projects[p].guaranteed : 0;
    follow(project, changes[p], guaranteed, use);
    if (!project.is_parent) use.used_seconds += project.device_seconds;
  }
  use.idle_seconds = std::max(
      0.0, static_cast<double>(devices) * (use.until - use.since) -
               use.used_seconds);
  return use;
}

}  // namespace echelon::pool
