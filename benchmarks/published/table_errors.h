// How far predictions of a table are from what was measured, by the rows'
// files.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "benchmarks/published/predict.h"

namespace echelon {

/// Shares of the measured values: 0.08 is 8 %.
struct TableErrors {
  std::string file;  // the column's text; "" when there is none
  int64_t rows = 0;
  int64_t predicted = 0;
  int64_t with_step = 0;  // predicted, and the step was measured
  double mean = 0;        // of the step's absolute errors
  double median = 0;
  double bias = 0;  // mean of the errors with their signs
  int64_t with_memory = 0;
  double memory_mean = 0;
  double memory_bias = 0;
  std::map<std::string, int64_t> excluded;  // reason: rows
};

/// One for each file, in the order in which files appear.
std::vector<TableErrors>
errors_by_file(const std::vector<RowPrediction>& predictions);

/// Spearman's rank correlation, ties with their mean rank; 0 for fewer than two
/// pairs or when all of one side are equal.
double rank_correlation(
    const std::vector<double>& left, const std::vector<double>& right);

}  // namespace echelon
