#include "echelon/simulator/rank_grid.h"

#include <algorithm>

namespace echelon::simulator {

std::vector<Axis> axes_of(AxisMask mask) {
  std::vector<Axis> axes;
  for (const Axis axis : kAxes) {
    if (mask & mask_of(axis)) axes.push_back(axis);
  }
  return axes;
}

RankGrid::RankGrid(const Layout& layout) : size_(layout.num_ranks()) {
  for (const Axis axis : kAxes) {
    degrees_[number(axis)] = layout.degree(axis);
    strides_[number(axis)] = layout.stride(axis);
  }
}

int64_t RankGrid::base(int64_t rank, AxisMask axes) const {
  for (const Axis axis : kAxes) {
    if (axes & mask_of(axis)) {
      rank -= coordinate(rank, axis) * strides_[number(axis)];
    }
  }
  return rank;
}

int64_t RankGrid::group_size(AxisMask axes) const {
  int64_t size = 1;
  for (const Axis axis : kAxes) {
    if (axes & mask_of(axis)) size *= degree(axis);
  }
  return size;
}

std::vector<int64_t> RankGrid::group(int64_t rank, AxisMask axes) const {
  std::vector<int64_t> ranks = {base(rank, axes)};
  for (const Axis axis : kAxes) {
    if (!(axes & mask_of(axis))) continue;
    const size_t so_far = ranks.size();
    for (int64_t i = 1; i < degree(axis); ++i) {
      for (size_t r = 0; r < so_far; ++r) {
        ranks.push_back(ranks[r] + i * strides_[number(axis)]);
      }
    }
  }
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

}  // namespace echelon::simulator
