// One page for several runs of a model: a table that compares them, their loss
// curves in one chart, what differs in their configurations, and for each the
// picture of a typical step.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "echelon/layout/layout.h"
#include "echelon/timeline/metrics.h"
#include "echelon/timeline/timeline.h"

namespace echelon::report {

struct StrategyRun {
  std::string name;  // unique in the page; empty: the strategy stands for it
  std::string link;  // its own report, relative to the page; may be empty
  /// Without a layout, the axes of the timeline's collectives say the strategy.
  std::optional<Layout> layout;
  int64_t zero_stage = 3;  // read when layout->dp_shard > 1
  /// "train.batch" and its value, in the order of the configuration; empty: not
  /// known.
  std::vector<std::pair<std::string, std::string>> settings;
  std::vector<std::string> notes;  // what is missing, a line each
  std::vector<timeline::StepMetrics> metrics;
  std::vector<timeline::EvaluationMetrics> evaluations;
  timeline::Timeline timeline;  // without spans: there is none
};

/// What `echelon verify` found of one layout.
struct VerifiedLayout {
  std::string layout;  // "fsdp=2"
  bool passed = false;
  int64_t steps = 0;
  int64_t num_compared = 0;
  double largest = 0;  // relative difference to one device
};

/// The best plan of `echelon plan` for a model on a cluster.
struct PlannedLayout {
  std::string model;
  std::string cluster;  // "h100-sxm:8"
  std::string layout;
  double step_seconds = 0;
  double mfu = 0;         // model FLOPs utilisation, 0 to 1
  double peak_bytes = 0;  // of the fullest device
};

struct StrategyPage {
  std::string title;  // "digits, three ways"
  std::vector<StrategyRun> runs;
  std::vector<VerifiedLayout> verified;
  std::vector<PlannedLayout> planned;
};

/// The page stays under 500 KB with four runs of up to 16 ranks.
std::string to_html(const StrategyPage& page);

/// Replaces the file at `path`.
void write_strategy_page(
    const std::filesystem::path& path, const StrategyPage& page);

}  // namespace echelon::report
