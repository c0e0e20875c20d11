// The mesh of ranks: coordinates of a rank, and the ranks along each axis.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "echelon/layout/layout.h"

namespace echelon {

/// Ranks in a grid whose innermost axis (the last of the layout's order) varies
/// fastest. A value; copies freely. World size is the product of the degrees.
class Mesh {
 public:
  /// Throws ConfigError unless the layout's order has each axis once.
  explicit Mesh(const Layout& layout);

  const Layout& layout() const { return layout_; }
  int64_t size() const { return size_; }

  /// The coordinate of `rank` along `axis`. Throws ConfigError when the rank is
  /// outside the mesh.
  int64_t coordinate(int64_t rank, Axis axis) const {
    if (rank < 0 || rank >= size_) refuse(rank);
    return rank / strides_[number(axis)] % degrees_[number(axis)];
  }
  /// The rank that differs from `rank` in this coordinate alone.
  int64_t moved(int64_t rank, Axis axis, int64_t coordinate) const {
    return rank +
           (coordinate - this->coordinate(rank, axis)) * strides_[number(axis)];
  }
  /// The rank at 0 along `axes` and the other coordinates of `rank`. It names
  /// the group of `rank` along them.
  int64_t first_along(int64_t rank, const std::vector<Axis>& axes) const;

  /// The ranks that differ from `rank` along `axis` alone, including `rank`, in
  /// the order of their coordinates.
  std::vector<int> ranks_along(int64_t rank, Axis axis) const;

  /// The same for several axes at once (all ranks with different samples, say),
  /// in the order of their coordinates, with the last of `axes` varying
  /// fastest. That is rank order where the layout has `axes` in that order too.
  std::vector<int>
  ranks_along(int64_t rank, const std::vector<Axis>& axes) const;

  /// Every group of ranks along `axes`: a partition of the world, ordered by
  /// its lowest rank.
  std::vector<std::vector<int>>
  groups_along(const std::vector<Axis>& axes) const;

  /// The index of the share of samples that this rank sees, in [0,
  /// data_ranks).
  int64_t data_index(int64_t rank) const;

  /// The rank at the same coordinates when the axes are in the usual order
  /// (kAxes): a number for the place that does not depend on the order.
  int64_t place(int64_t rank) const;

  /// Whether each group along `axis` is on one host, when each host runs
  /// `host_ranks` consecutive ranks.
  bool within_hosts(Axis axis, int64_t host_ranks) const;

 private:
  static size_t number(Axis axis) { return static_cast<size_t>(axis); }
  [[noreturn]] void refuse(int64_t rank) const;

  Layout layout_;
  std::array<int64_t, kAxes.size()> degrees_{}, strides_{};  // by axis
  int64_t size_ = 1;
};

}  // namespace echelon
