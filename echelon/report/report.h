// The run's report: one HTML file that needs neither network nor scripts.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "echelon/report/page.h"
#include "echelon/report/prediction_section.h"
#include "echelon/report/tensor_shards.h"
#include "echelon/timeline/metrics.h"
#include "echelon/timeline/timeline.h"

namespace echelon::report {

/// What held a run back, as a page says it (explain/).
struct ReportFinding {
  std::string title;  // "data loading, 31 % of the step"
  std::string diagnosis;
  std::string fix;
  std::string settings;  // lines of a configuration; may be empty
  std::string why;
  std::string gain;  // "12 % of the step, …"; may be empty
};

struct ReportFindings {
  std::vector<ReportFinding> findings;  // the largest first
  std::string largest_wait;  // a sentence for where there are none; or empty
  /// Sentences about the findings, or about why there are none.
  std::vector<std::string> notes;
};

/// Everything is optional but the title; a part without content is left out.
/// Texts may hold any bytes: they are escaped.
struct ReportInput {
  std::string title;  // "simple_cnn on digits"
  /// Name and value, in the order shown: model, data, layout, ranks, device,
  /// parameters, batch, …
  std::vector<std::pair<std::string, std::string>> facts;
  std::vector<timeline::StepMetrics> metrics;            // by step
  std::vector<timeline::EvaluationMetrics> evaluations;  // by step
  /// If spans are named as a pipeline's actions, or tracks as "device 0" and so
  /// on, the report has their picture too (pipeline_page.h).
  timeline::Timeline timeline;
  /// How the layers' matrices are sharded; drawn when ranks share layers.
  TensorShards tensor;
  /// What the simulator says of the same step (predict/predict_run.h).
  std::optional<StepPrediction> prediction;
  std::optional<ReportFindings> findings;
  std::vector<Tile> tiles;   // headline figures after those of the metrics
  double total_seconds = 0;  // of all steps; 0: the sum of `metrics`
  /// Why the run ended, when it was not finished: "stopped by the user".
  std::string outcome;
  /// The page is made while the run trains, or for one that died, from what its
  /// folder has. Its trainer writes another one at the end.
  bool interim = false;
};

/// The page stays under 500 KB for any length of run and up to 64 ranks: curves
/// keep the least and the greatest of each stretch of steps, the picture shows
/// one typical step.
std::string to_html(const ReportInput& input);

/// Replaces the file at `path`. Throws Error when it cannot be written.
void write_report(const std::filesystem::path& path, const ReportInput& input);

/// Whether a run's folder has the page and the timeline that its trainer writes
/// at the end. An interim page, or one that cannot be read, does not count.
bool has_final_report(const std::filesystem::path& run);

}  // namespace echelon::report
