#include "echelon/cost/stored_microbatches.h"

#include <algorithm>

namespace echelon {
namespace {

bool comes_back(const std::string& schedule) {
  return schedule == "zb-v" || schedule == "dualpipev";
}

// Warm-up takes p microbatches through the first stage of a rank, then through
// the second, and so on, and begins again.
std::vector<double> interleaved(const PipelineShape& shape, int64_t rank) {
  const int64_t p = shape.ranks, v = shape.stages_per_rank;
  int64_t left =
      std::min(shape.microbatches * v, 2 * (p - rank - 1) + (v - 1) * p + 1);
  std::vector<double> stored(static_cast<size_t>(v));
  while (left > 0) {
    for (double& stage : stored) {
      const int64_t taken = std::min(left, p);
      stage += static_cast<double>(taken);
      left -= taken;
    }
  }
  return stored;
}

// Stages of one rank that fill up together.
std::vector<double> even(int64_t all, int64_t stages) {
  return std::vector<double>(
      static_cast<size_t>(stages),
      static_cast<double>(all) / static_cast<double>(stages));
}

}  // namespace

std::vector<int64_t> stages_of_rank(const PipelineShape& shape, int64_t rank) {
  const int64_t p = shape.ranks;
  if (comes_back(shape.schedule)) return {rank, 2 * p - 1 - rank};
  std::vector<int64_t> stages;
  for (int64_t i = 0; i < shape.stages_per_rank; ++i) {
    stages.push_back(i * p + rank);
  }
  return stages;
}

std::vector<double>
stored_microbatches(const PipelineShape& shape, int64_t rank) {
  const int64_t p = shape.ranks, v = shape.stages_per_rank,
                m = shape.microbatches;
  const std::string& kind = shape.schedule;
  if (p == 1) return even(v, v);  // one at a time, whatever the schedule
  if (kind == "1f1b") return even(v * std::min(m, p - rank), v);
  if (kind == "interleaved") return interleaved(shape, rank);
  if (kind == "zb-h1") return even(std::min(m, p), 1);
  if (kind == "zb-h2") return even(std::min(m, 2 * p - 1), 1);
  if (kind == "zb-v") return even(std::min(2 * m, 2 * p), 2);
  if (kind == "dualpipev") return even(std::min(2 * m, 2 * p + 1), 2);
  return even(v * m, v);  // gpipe, breadth_first
}

}  // namespace echelon
