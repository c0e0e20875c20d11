// A tensor-parallel region as a row of the report: X, the matrices, Z, and the
// collectives between them.
#pragma once

#include <cstdint>
#include <string>

#include "echelon/report/markup.h"
#include "echelon/report/tensor_shards.h"

namespace echelon::report::detail {

constexpr int kNumRankColors = 8;

/// The class of a rank's colour; the ninth rank has that of the first.
std::string rank_color(int64_t rank);

/// Measured means of one layer and step, where a tensor enters a region and
/// where it leaves it.
struct RegionCosts {
  struct Cost {
    double seconds = 0;
    double bytes = 0;
  };
  Cost enter_forward;
  Cost enter_backward;
  Cost leave_forward;
  Cost leave_backward;
};

/// What draw_region needs besides the region.
struct RegionContext {
  const TensorShards& model;
  const ShardedBlock& block;
  std::string id;                         // unique in the page
  const ShardedRegion* before = nullptr;  // in the order of computation
  const ShardedRegion* after = nullptr;
  bool input_is_data = false;  // which has no gradient
  bool is_last = false;        // its output goes into the loss
  RegionCosts costs;
};

void draw_region(
    Markup& page, const ShardedRegion& region, const RegionContext& context);

}  // namespace echelon::report::detail
