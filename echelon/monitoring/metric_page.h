// The page that Prometheus reads: its metrics, and the text of their values
// (exposition format 0.0.4).
//
// Names are in base units, and those of counters end in _total. A metric that
// has no value now is left out.
#pragma once

#include <chrono>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "echelon/cluster/nvml.h"
#include "echelon/monitoring/job_board.h"
#include "echelon/monitoring/metric_text.h"
#include "echelon/monitoring/run_tail.h"

namespace echelon::monitoring {

/// All that a page may have.
std::span<const Metric> metrics();

/// What a page is made from.
struct Observed {
  std::string run;        // the label of all metrics
  std::string host;       // this host's name
  double started = 0;     // when the launcher started: seconds since 1970
  double up_seconds = 0;  // since then
  double now = 0;         // seconds since 1970
  JobFacts job;
  std::vector<std::optional<double>> memory;  // bytes of each rank of job.ranks
  std::optional<RunFigures> figures;  // of a run that `echelon train` makes
  bool saves = false;                 // the run saves checkpoints
  std::vector<cluster::GpuUse> gpus;  // in the order of local ranks
};

std::string metric_page(const Observed& observed);

}  // namespace echelon::monitoring
