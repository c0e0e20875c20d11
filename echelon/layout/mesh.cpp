#include "echelon/layout/mesh.h"

#include <algorithm>
#include <string>

#include "echelon/error.h"

namespace echelon {

Mesh::Mesh(const Layout& layout)
    : layout_(layout), size_(layout.num_ranks()) {}

int64_t Mesh::stride(Axis axis) const {
  int64_t stride = 1;
  for (auto it = kAxes.rbegin(); *it != axis; ++it) {
    stride *= layout_.degree(*it);
  }
  return stride;
}

int64_t Mesh::coordinate(int64_t rank, Axis axis) const {
  if (rank < 0 || rank >= size_) {
    throw ConfigError(
        "mesh: rank " + std::to_string(rank) + " is outside [0, " +
        std::to_string(size_) + ") of layout " + to_string(layout_));
  }
  return rank / stride(axis) % layout_.degree(axis);
}

std::vector<int> Mesh::ranks_along(int64_t rank, Axis axis) const {
  const int64_t first = rank - coordinate(rank, axis) * stride(axis);
  std::vector<int> ranks;
  for (int64_t i = 0; i < layout_.degree(axis); ++i) {
    ranks.push_back(static_cast<int>(first + i * stride(axis)));
  }
  return ranks;
}

std::vector<int> Mesh::ranks_along(
    int64_t rank, const std::vector<Axis>& axes) const {
  std::vector<int> ranks;
  for (int64_t other = 0; other < size_; ++other) {
    const bool same = std::all_of(kAxes.begin(), kAxes.end(), [&](Axis axis) {
      return std::find(axes.begin(), axes.end(), axis) != axes.end() ||
             coordinate(rank, axis) == coordinate(other, axis);
    });
    if (same) ranks.push_back(static_cast<int>(other));
  }
  return ranks;
}

std::vector<std::vector<int>> Mesh::groups_along(
    const std::vector<Axis>& axes) const {
  std::vector<std::vector<int>> groups;
  std::vector<bool> seen(static_cast<size_t>(size_), false);
  for (int64_t rank = 0; rank < size_; ++rank) {
    if (seen[static_cast<size_t>(rank)]) continue;
    groups.push_back(ranks_along(rank, axes));
    for (int member : groups.back()) seen[static_cast<size_t>(member)] = true;
  }
  return groups;
}

int64_t Mesh::data_index(int64_t rank) const {
  return coordinate(rank, Axis::dp_replicate) * layout_.dp_shard +
         coordinate(rank, Axis::dp_shard);
}

}  // namespace echelon
