// States of a pool, for tests.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "echelon/pool/decide.h"

namespace echelon::pool {

/// A pool of `devices`, in groups of `neighbours`, at second 1,000,000.
inline State make_pool(int devices, int neighbours = 8) {
  State state;
  state.now = 1e6;
  for (int d = 0; d < devices; ++d) {
    state.devices.push_back({.group = d / neighbours});
  }
  return state;
}

/// Adds a job that waits; returns its index.
inline size_t submit(
    State& state, int project, int64_t least, int64_t most, Kept kept,
    int64_t priority = 0) {
  const int64_t number = state.jobs.empty() ? 0 : state.jobs.back().id;
  const double second = state.now + static_cast<double>(number) * 1e-3;
  state.jobs.push_back(
      {.id = number + 1,
       .project = project,
       .least = least,
       .most = most,
       .kept = kept,
       .priority = priority,
       .submitted = second,
       .waiting_since = second});
  return state.jobs.size() - 1;
}

/// Decides, and carries it out.
inline Decision settle(State& state) {
  Decision decision = decide(state);
  state = after(std::move(state), decision);
  return decision;
}

inline int64_t count_of(const State& state, size_t job) {
  return static_cast<int64_t>(state.jobs[job].devices.size());
}

/// The devices of each job.
inline std::vector<int64_t> counts_of(const State& state) {
  std::vector<int64_t> counts;
  for (size_t j = 0; j < state.jobs.size(); ++j) {
    counts.push_back(count_of(state, j));
  }
  return counts;
}

/// Why a job waits after `decision`; empty: it does not wait.
inline std::string
why(const State& state, const Decision& decision, size_t job) {
  const auto found = std::ranges::find(decision.waiting, job, &Waiting::job);
  return found == decision.waiting.end() ? "" : text_of(state, *found);
}

}  // namespace echelon::pool
