// One page for several runs of the same model, each with another strategy: a
// table that compares them, and for each the picture of a typical step.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "echelon/timeline/metrics.h"
#include "echelon/timeline/timeline.h"

namespace echelon::report {

struct StrategyRun {
  std::string link;  // its own report, relative to the page; may be empty
  std::vector<timeline::StepMetrics> metrics;
  std::vector<timeline::EvaluationMetrics> evaluations;
  timeline::Timeline timeline;
};

struct StrategyPage {
  std::string title;  // "digits, three ways"
  std::vector<StrategyRun> runs;
};

/// The page stays under 500 KB with four runs of up to 16 ranks.
std::string to_html(const StrategyPage& page);

/// The run in a folder that `echelon train` wrote: timeline.json, and
/// metrics.jsonl when it is there. `page_folder` is where the page will be, for
/// the link to the run's report. Throws DataError when there is no timeline.
StrategyRun read_strategy_run(
    const std::filesystem::path& run_folder,
    const std::filesystem::path& page_folder);

/// Reads the runs and replaces the file at `path`.
void write_strategy_page(
    const std::filesystem::path& path, const std::string& title,
    const std::vector<std::filesystem::path>& run_folders);

}  // namespace echelon::report
