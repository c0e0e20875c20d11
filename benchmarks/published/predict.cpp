#include "benchmarks/published/predict.h"

#include "benchmarks/published/row_cluster.h"
#include "benchmarks/published/row_model.h"
#include "benchmarks/published/row_strategy.h"
#include "echelon/error.h"

namespace echelon {

double RowPrediction::memory_gib() const {
  return step.memory.peak_bytes() / (1 << 30);
}

double RowPrediction::step_error() const {
  if (!predicted() || row.step_seconds <= 0) return 0;
  return step.step_seconds / row.step_seconds - 1;
}

double RowPrediction::memory_error() const {
  if (!predicted() || row.memory_gib <= 0) return 0;
  return memory_gib() / row.memory_gib - 1;
}

RowPrediction predict(const StepRow& row) {
  RowPrediction prediction;
  prediction.row = row;
  if (!row.wrong.empty()) {
    prediction.excluded = row.wrong;
    return prediction;
  }
  try {
    const cost::ModelShape model = model_of(row);
    const cluster::Cluster cluster = cluster_of(row);
    prediction.strategy = strategy_of(row, model, cluster);
    prediction.step = cost::estimate_step(model, prediction.strategy, cluster);
  } catch (const Error& error) {
    prediction.excluded = error.what();
  }
  return prediction;
}

std::vector<RowPrediction> predict_table(const std::filesystem::path& path) {
  std::vector<RowPrediction> predictions;
  for (const auto& row : step_rows(read_csv(path))) {
    predictions.push_back(predict(row));
  }
  return predictions;
}

}  // namespace echelon
