// What a row's step takes and needs, by the cost model.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "benchmarks/published/step_row.h"
#include "echelon/cost/step_estimate.h"

namespace echelon {

struct RowPrediction {
  StepRow row;
  cost::Strategy strategy;
  cost::StepEstimate step;
  /// Why there is no prediction; empty: there is one.
  std::string excluded;

  bool predicted() const { return excluded.empty(); }
  double memory_gib() const;
  /// Predicted over measured, less one; 0 where nothing was measured.
  double step_error() const;
  double memory_error() const;
};

/// Never throws for what the row says; `excluded` then has the reason.
RowPrediction predict(const StepRow& row);

/// Predicts every row, in the file's order. Throws DataError as read_csv and
/// step_rows do.
std::vector<RowPrediction> predict_table(const std::filesystem::path& path);

}  // namespace echelon
