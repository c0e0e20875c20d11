#include "benchmarks/published/table_errors.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace echelon {
namespace {

double mean(const std::vector<double>& values) {
  if (values.empty()) return 0;
  return std::accumulate(values.begin(), values.end(), 0.0) /
         static_cast<double>(values.size());
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half]
                                : (values[half - 1] + values[half]) / 2;
}

std::vector<double> absolute(std::vector<double> values) {
  for (auto& value : values) value = std::abs(value);
  return values;
}

std::vector<double> ranks(const std::vector<double>& values) {
  std::vector<size_t> order(values.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return values[a] < values[b];
  });
  std::vector<double> ranks(values.size());
  for (size_t from = 0; from < order.size();) {
    size_t to = from;
    while (to < order.size() && values[order[to]] == values[order[from]]) ++to;
    const double shared = static_cast<double>(from + to - 1) / 2;
    for (; from < to; ++from) ranks[order[from]] = shared;
  }
  return ranks;
}

TableErrors errors_of(
    const std::string& file, const std::vector<RowPrediction>& predictions) {
  TableErrors errors;
  errors.file = file;
  std::vector<double> steps, memory;
  for (const auto& one : predictions) {
    if (one.row.file != file) continue;
    ++errors.rows;
    if (!one.predicted()) {
      ++errors.excluded[one.excluded];
      continue;
    }
    ++errors.predicted;
    if (one.row.step_seconds > 0) steps.push_back(one.step_error());
    if (one.row.memory_gib > 0) memory.push_back(one.memory_error());
  }
  errors.with_step = static_cast<int64_t>(steps.size());
  errors.bias = mean(steps);
  errors.mean = mean(absolute(steps));
  errors.median = median(absolute(steps));
  errors.with_memory = static_cast<int64_t>(memory.size());
  errors.memory_bias = mean(memory);
  errors.memory_mean = mean(absolute(memory));
  return errors;
}

}  // namespace

std::vector<TableErrors>
errors_by_file(const std::vector<RowPrediction>& predictions) {
  std::vector<TableErrors> all;
  for (const auto& one : predictions) {
    const auto same = [&](const TableErrors& e) {
      return e.file == one.row.file;
    };
    if (std::any_of(all.begin(), all.end(), same)) continue;
    all.push_back(errors_of(one.row.file, predictions));
  }
  return all;
}

double rank_correlation(
    const std::vector<double>& left, const std::vector<double>& right) {
  const size_t size = std::min(left.size(), right.size());
  if (size < 2) return 0;
  const auto a = ranks(left);
  const auto b = ranks(right);
  const double middle = mean(a);
  double both = 0, of_a = 0, of_b = 0;
  for (size_t i = 0; i < size; ++i) {
    both += (a[i] - middle) * (b[i] - middle);
    of_a += (a[i] - middle) * (a[i] - middle);
    of_b += (b[i] - middle) * (b[i] - middle);
  }
  return of_a > 0 && of_b > 0 ? both / std::sqrt(of_a * of_b) : 0;
}

}  // namespace echelon
