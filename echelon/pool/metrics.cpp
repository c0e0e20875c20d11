#include "echelon/pool/metrics.h"

#include <algorithm>

namespace echelon::pool {
namespace {

using monitoring::Metric;

constexpr auto kMetrics = std::to_array<Metric>({
    {"echelon_pool_capacity_devices", "gauge", "kind",
     "Devices of the pool; kind all, idle, or drained."},
    {"echelon_pool_devices", "gauge", "project, kind",
     "Devices of the project; kind guaranteed, in_use, over_quota (in use "
     "beyond the guarantee), or fair_share (what the scheduler divides now)."},
    {"echelon_pool_jobs", "gauge", "project, state",
     "Jobs that have not ended; state waiting or running."},
    {"echelon_pool_longest_wait_seconds", "gauge", "project",
     "How long the job that has waited longest waits; 0 where none does."},
    {"echelon_pool_wait_seconds", "histogram", "project",
     "How long jobs had waited when they started."},
    {"echelon_pool_device_seconds_total", "counter", "project",
     "Devices in use, times how long."},
    {"echelon_pool_ended_jobs_total", "counter", "project, state",
     "Jobs that have ended; state done, failed or cancelled."},
    {"echelon_pool_taken_back_total", "counter", "project, how",
     "How often the scheduler took devices from a job; how shrunk or stopped."},
});

}  // namespace

std::span<const Metric> pool_metrics() {
  return kMetrics;
}

std::string metric_page(const PoolFigures& pool) {
  monitoring::MetricText page(kMetrics, {});
  const auto number = [](int64_t value) { return static_cast<double>(value); };
  page.begin("echelon_pool_capacity_devices");
  page.value(number(pool.devices), {{"kind", "all"}});
  page.value(number(pool.idle), {{"kind", "idle"}});
  page.value(number(pool.drained), {{"kind", "drained"}});
  page.begin("echelon_pool_devices");
  for (const auto& one : pool.projects) {
    const auto add = [&](const char* kind, int64_t devices) {
      page.value(number(devices), {{"project", one.name}, {"kind", kind}});
    };
    add("guaranteed", one.guaranteed);
    add("in_use", one.in_use);
    add("over_quota", std::max<int64_t>(0, one.in_use - one.guaranteed));
    add("fair_share", one.fair_share);
  }
  // Parents take no jobs; their figures would count their projects' twice.
  const auto each = [&](const char* name, const auto& write) {
    page.begin(name);
    for (const auto& one : pool.projects) {
      if (!one.is_parent) write(one, monitoring::Labels{{"project", one.name}});
    }
  };
  const auto with = [](monitoring::Labels labels, const char* name,
                       const std::string& value) {
    labels.emplace_back(name, value);
    return labels;
  };
  each("echelon_pool_jobs", [&](const auto& one, const auto& labels) {
    page.value(number(one.waiting), with(labels, "state", "waiting"));
    page.value(number(one.running), with(labels, "state", "running"));
  });
  each(
      "echelon_pool_longest_wait_seconds",
      [&](const auto& one, const auto& labels) {
        page.value(one.longest_wait, labels);
      });
  each("echelon_pool_wait_seconds", [&](const auto& one, const auto& labels) {
    page.value(one.counts.waits, labels);
  });
  each(
      "echelon_pool_device_seconds_total",
      [&](const auto& one, const auto& labels) {
        page.value(one.counts.device_seconds, labels);
      });
  each(
      "echelon_pool_ended_jobs_total",
      [&](const auto& one, const auto& labels) {
        for (const auto state :
             {JobState::done, JobState::failed, JobState::cancelled}) {
          page.value(
              number(one.counts.ended[static_cast<size_t>(state)]),
              with(labels, "state", to_string(state)));
        }
      });
  each(
      "echelon_pool_taken_back_total",
      [&](const auto& one, const auto& labels) {
        page.value(number(one.counts.shrunk), with(labels, "how", "shrunk"));
        page.value(number(one.counts.stopped), with(labels, "how", "stopped"));
      });
  return page.take();
}

}  // namespace echelon::pool
