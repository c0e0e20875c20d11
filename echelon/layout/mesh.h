// The mesh of ranks: rank <-> coordinate, and the ranks along each axis.
#pragma once

#include <cstdint>
#include <vector>

#include "echelon/layout/layout.h"

namespace echelon {

/// Ranks in a grid whose last axis varies fastest (kAxes order: tp innermost).
/// A value; copies freely. World size is the product of the degrees.
class Mesh {
 public:
  explicit Mesh(const Layout& layout);

  const Layout& layout() const { return layout_; }
  int64_t size() const { return size_; }

  /// The coordinate of `rank` along `axis`. Throws ConfigError when the rank is
  /// outside the mesh.
  int64_t coordinate(int64_t rank, Axis axis) const;

  /// The ranks that differ from `rank` along `axis` alone, in order of their
  /// coordinate, `rank` among them.
  std::vector<int> ranks_along(int64_t rank, Axis axis) const;

  /// The same for several axes at once (all ranks with different samples, say),
  /// in rank order.
  std::vector<int> ranks_along(int64_t rank,
                               const std::vector<Axis>& axes) const;

  /// Every group of ranks along `axes`: a partition of the world, ordered by
  /// its first rank. All ranks create groups in this order.
  std::vector<std::vector<int>> groups_along(
      const std::vector<Axis>& axes) const;

  /// Which share of the samples this rank sees, in [0, data_degree).
  int64_t data_index(int64_t rank) const;

 private:
  int64_t stride(Axis axis) const;

  Layout layout_;
  int64_t size_ = 1;
};

}  // namespace echelon
