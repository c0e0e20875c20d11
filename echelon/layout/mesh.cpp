#include "echelon/layout/mesh.h"

#include <algorithm>
#include <string>
#include <utility>

#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {

Mesh::Mesh(const Layout& layout) : layout_(layout), size_(layout.num_ranks()) {
  for (const Axis axis : kAxes) {
    if (std::ranges::count(layout.order, axis) == 1) continue;
    throw ConfigError(format(
        "mesh: the order of the axes must have each once, and {} is missing or "
        "repeated",
        to_string(axis)));
  }
  for (const Axis axis : kAxes) {
    degrees_[number(axis)] = layout.degree(axis);
    strides_[number(axis)] = layout.stride(axis);
  }
}

void Mesh::refuse(int64_t rank) const {
  throw ConfigError(format(
      "mesh: rank {} is outside [0, {}) of layout {}", rank, size_,
      to_string(layout_)));
}

int64_t Mesh::first_along(int64_t rank, const std::vector<Axis>& axes) const {
  int64_t first = rank;
  for (const Axis axis : axes) {
    first -= coordinate(rank, axis) * strides_[number(axis)];
  }
  return first;
}

std::vector<int> Mesh::ranks_along(int64_t rank, Axis axis) const {
  return ranks_along(rank, std::vector{axis});
}

std::vector<int>
Mesh::ranks_along(int64_t rank, const std::vector<Axis>& axes) const {
  std::vector<int> ranks = {static_cast<int>(first_along(rank, axes))};
  for (const Axis axis : axes) {
    std::vector<int> further;
    for (const int begin : ranks) {
      for (int64_t i = 0; i < degrees_[number(axis)]; ++i) {
        further.push_back(static_cast<int>(begin + i * strides_[number(axis)]));
      }
    }
    ranks = std::move(further);
  }
  return ranks;
}

std::vector<std::vector<int>>
Mesh::groups_along(const std::vector<Axis>& axes) const {
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
  return (coordinate(rank, Axis::dp_replicate) * layout_.dp_shard +
          coordinate(rank, Axis::dp_shard)) *
             layout_.ep +
         coordinate(rank, Axis::ep);
}

int64_t Mesh::place(int64_t rank) const {
  Layout usual = layout_;
  usual.order = kAxes;
  int64_t place = 0;
  for (const Axis axis : kAxes) {
    place += coordinate(rank, axis) * usual.stride(axis);
  }
  return place;
}

bool Mesh::within_hosts(Axis axis, int64_t host_ranks) const {
  const int64_t stride = layout_.stride(axis);
  const int64_t reach = (layout_.degree(axis) - 1) * stride;
  if (reach == 0) return true;
  // Groups begin at the same places of every block of stride * degree ranks.
  for (int64_t block = 0; block < size_; block += reach + stride) {
    for (int64_t first = block; first < block + stride; ++first) {
      if (first / host_ranks != (first + reach) / host_ranks) return false;
    }
  }
  return true;
}

}  // namespace echelon
