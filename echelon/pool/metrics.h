// A pool's figures for Prometheus.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "echelon/monitoring/metric_text.h"
#include "echelon/pool/decide.h"
#include "echelon/pool/store.h"

namespace echelon::pool {

inline constexpr std::array kWaitBounds = {
    1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 43200.0, 86400.0};

/// What a project's jobs did since the daemon started.
struct ProjectCounts {
  monitoring::Durations waits{
      std::vector<double>(kWaitBounds.begin(), kWaitBounds.end())};
  double device_seconds = 0;
  int64_t shrunk = 0, stopped = 0;
  std::array<int64_t, 5> ended{};  // by JobState
};

/// A project now.
struct ProjectFigures {
  std::string name;
  bool is_parent = false;  // it has no jobs of its own
  int64_t guaranteed = 0, in_use = 0, fair_share = 0;
  int64_t waiting = 0, running = 0;  // jobs
  double longest_wait = 0;           // seconds; 0: none waits
  ProjectCounts counts;
};

struct PoolFigures {
  int64_t devices = 0, idle = 0, drained = 0;
  std::vector<ProjectFigures> projects;
};

/// All that the page may have.
std::span<const monitoring::Metric> pool_metrics();

std::string metric_page(const PoolFigures& pool);

}  // namespace echelon::pool
