// Predictions of published steps stay as near as they are: a part of the rows
// of benchmarks/published, from every source.
#include <gtest/gtest.h>

#include <filesystem>
#include <map>

#include "benchmarks/published/table_errors.h"
#include "tests/support/places.h"

namespace echelon::published_test {

const std::filesystem::path kTable = source_path("tests/published/steps.csv");

TEST(Published, MeanErrorsOfEverySourceStayBelowTheirBounds) {
  // A bound is lowered when a prediction gets better, never raised.
  const std::map<std::string, double> bounds = {
      {"bigscience_a100", 0.06},   {"ddp_scaling", 0.10},
      {"dgxc_benchmarking", 0.10}, {"korthikanti22", 0.04},
      {"llm_foundry", 0.09},       {"megatron_readme_h100", 0.07},
      {"megatron_sc21", 0.055},    {"nemo_h100", 0.10},
      {"nemo_other_gpus", 0.16},   {"torchtitan", 0.11},
      {"vtrain_a100_multi", 0.03}, {"vtrain_a100_single", 0.10},
      {"zero_bubble", 0.055}};
  const auto files = errors_by_file(predict_table(kTable));
  ASSERT_EQ(files.size(), bounds.size());
  for (const auto& file : files) {
    ASSERT_TRUE(bounds.contains(file.file)) << file.file;
    EXPECT_EQ(file.predicted, file.rows) << file.file;
    EXPECT_GT(file.mean, 0) << file.file;
    EXPECT_LE(file.mean, bounds.at(file.file)) << file.file;
  }
}

// Steps that no constant was fitted to: tensor parallelism over two nodes, and
// ZeRO 3 alone on up to 2,240 devices beside pipelines of the same model.
TEST(Published, CollectivesAcrossNodesAreNotPredictedTooFast) {
  const std::map<std::string, double> bounds = {
      {"tp_of_two_nodes", 0.075},
      {"zero3_alone", 0.17},
      {"pipelines_530b", 0.01}};
  const auto files = errors_by_file(
      predict_table(source_path("tests/published/across_nodes.csv")));
  ASSERT_EQ(files.size(), bounds.size());
  for (const auto& file : files) {
    EXPECT_EQ(file.predicted, file.rows) << file.file;
    EXPECT_LE(file.mean, bounds.at(file.file)) << file.file;
  }
}

// Large models of experts on GPUs of two generations. Two constants, the rate
// of 16-bit matmuls on Blackwell and that of experts, were chosen with these
// steps in view.
TEST(Published, LargeMixturesOfExpertsArePredicted) {
  const std::map<std::string, double> bounds = {
      {"deepseek_v3", 0.16}, {"qwen3_235b", 0.24}};
  const auto predictions =
      predict_table(source_path("tests/published/experts.csv"));
  double sum = 0;
  for (const auto& file : errors_by_file(predictions)) {
    EXPECT_EQ(file.predicted, file.rows) << file.file;
    EXPECT_LE(file.mean, bounds.at(file.file)) << file.file;
    sum += file.mean * static_cast<double>(file.rows);
  }
  EXPECT_LE(sum / static_cast<double>(predictions.size()), 0.19);
}

TEST(Published, RowsAreRankedAsTheyWereMeasured) {
  std::vector<double> measured, predicted;
  for (const auto& one : predict_table(kTable)) {
    const auto devices = static_cast<double>(one.row.gpus);
    measured.push_back(one.row.step_seconds * devices);
    predicted.push_back(one.step.step_seconds * devices);
  }
  ASSERT_GT(measured.size(), 100u);
  EXPECT_GE(rank_correlation(measured, predicted), 0.99);
}

/// Mean over the sweeps of a file (one model, cluster and batch; four layouts
/// or more), each counting as many times as it has rows.
double mean_rank_correlation(
    const std::vector<RowPrediction>& predictions, const std::string& file) {
  std::map<std::string, std::pair<std::vector<double>, std::vector<double>>>
      sweeps;
  for (const auto& one : predictions) {
    const StepRow& row = one.row;
    if (row.file != file) continue;
    std::string key = row.precision;
    for (const int64_t number :
         {row.gpus, row.layers, row.hidden, row.heads, row.global_batch,
          row.seq}) {
      key += " " + std::to_string(number);
    }
    sweeps[key].first.push_back(row.step_seconds);
    sweeps[key].second.push_back(one.step.step_seconds);
  }
  double sum = 0, rows = 0;
  for (const auto& [key, sweep] : sweeps) {
    const auto size = static_cast<double>(sweep.first.size());
    if (size < 4) continue;
    sum += size * rank_correlation(sweep.first, sweep.second);
    rows += size;
  }
  return sum / rows;
}

TEST(Published, LayoutsOfASweepAreRankedAsTheyWereMeasured) {
  // A bound is raised when a prediction gets better, never lowered.
  const auto predictions =
      predict_table(source_path("benchmarks/published/step_times.csv"));
  for (const auto& [file, bound] : std::map<std::string, double>{
           {"bigscience_a100", 0.83},
           {"vtrain_a100_multi", 0.87},
           {"vtrain_a100_single", 0.91},
           {"zero_bubble", 0.92}}) {
    EXPECT_GE(mean_rank_correlation(predictions, file), bound) << file;
  }
}

TEST(Published, RowsThatRanOutOfMemoryAreNotSaidToFit) {
  const auto predictions =
      predict_table(source_path("benchmarks/published/out_of_memory.csv"));
  int64_t unfit = 0;
  for (const auto& one : predictions) {
    ASSERT_TRUE(one.predicted()) << one.excluded;
    unfit += one.step.fits ? 0 : 1;
  }
  ASSERT_EQ(predictions.size(), 6u);
  EXPECT_GE(unfit, 5);  // doc/published.md has the other one
}

TEST(Published, EveryRowSaysWhatItNeeds) {
  for (const auto& one : predict_table(kTable)) {
    EXPECT_GT(one.memory_gib(), 0.1) << one.row.number;
    EXPECT_LT(one.memory_gib(), 1000) << one.row.number;
  }
}

}  // namespace echelon::published_test
