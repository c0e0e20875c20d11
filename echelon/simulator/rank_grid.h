// Rank <-> coordinate without lists of ranks.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "echelon/layout/layout.h"

namespace echelon::simulator {

/// Several axes at once, one bit each, by the number of the Axis.
using AxisMask = uint8_t;
constexpr AxisMask mask_of(Axis axis) {
  return static_cast<AxisMask>(1u << static_cast<unsigned>(axis));
}
/// In the order of kAxes.
std::vector<Axis> axes_of(AxisMask mask);

/// As Mesh (layout/mesh.h), but without lists of ranks: 100,000 are a few
/// numbers.
class RankGrid {
 public:
  explicit RankGrid(const Layout& layout);

  int64_t size() const { return size_; }
  int64_t degree(Axis axis) const { return degrees_[number(axis)]; }
  int64_t coordinate(int64_t rank, Axis axis) const {
    return rank / strides_[number(axis)] % degrees_[number(axis)];
  }
  /// The rank that differs from `rank` in this coordinate.
  int64_t moved(int64_t rank, Axis axis, int64_t coordinate) const {
    return rank +
           (coordinate - this->coordinate(rank, axis)) * strides_[number(axis)];
  }
  /// The first rank of the group of `rank` along `axes`: names the group.
  int64_t base(int64_t rank, AxisMask axes) const;
  int64_t group_size(AxisMask axes) const;
  /// All ranks of that group, ascending.
  std::vector<int64_t> group(int64_t rank, AxisMask axes) const;

 private:
  static size_t number(Axis axis) { return static_cast<size_t>(axis); }

  std::array<int64_t, 6> degrees_{};
  std::array<int64_t, 6> strides_{};
  int64_t size_ = 1;
};

}  // namespace echelon::simulator
