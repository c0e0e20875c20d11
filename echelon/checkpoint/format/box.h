// Boxes of tensors: they describe what a checkpoint's files hold of each tensor
// and what a rank needs of it, for any two layouts. Free of LibTorch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "echelon/layout/shard.h"

namespace echelon {

/// Indices [offset[d], offset[d] + sizes[d]) along each dimension d. Both are
/// empty for a scalar. In memory and in files its elements are row-major.
struct Box {
  std::vector<int64_t> offset;
  std::vector<int64_t> sizes;

  int64_t numel() const;
  bool operator==(const Box&) const = default;
};

Box whole_box(const std::vector<int64_t>& shape);

/// Whether the box, which may hold any numbers, lies inside a tensor of that
/// shape. The functions below require it.
bool is_inside(const Box& box, const std::vector<int64_t>& shape);

/// The box that both have in common; none when it is empty.
std::optional<Box> overlap(const Box& a, const Box& b);

/// Splits elements [range.begin, range.end) of `box`, in row-major order, into
/// boxes that are contiguous in `box`, in that order: at most 2 * dimensions -
/// 1 of them, none for an empty range. Throws Error for a range outside.
std::vector<Box> boxes_of(const Box& box, const IndexRange& range);

/// A box of the full tensor, and where a rank stores its elements: element i of
/// the box is element begin + sum(i[d] * strides[d]) of the rank's local
/// tensor.
struct PlacedBox {
  Box box;
  int64_t begin = 0;
  std::vector<int64_t> strides;
  bool operator==(const PlacedBox&) const = default;
};

/// What a rank has of a tensor, as boxes of the full tensor that are not empty.
///
///   shape  the full tensor's
///   shard  the rank's tensor-parallel shard; null: the full tensor
///   range  the elements of the shard, row-major, that the rank has; null: all
///   owned  only what the shard owns: each element is on one rank of the group
std::vector<PlacedBox> placed_boxes(
    const std::vector<int64_t>& shape, const Shard* shard,
    const IndexRange* range, bool owned);

/// Elements [range.begin, range.end) of all boxes, counted through the boxes in
/// their order and through each box row-major. Ranks that all have the same
/// boxes divide the work on them so.
std::vector<PlacedBox>
elements_of(const std::vector<PlacedBox>& boxes, const IndexRange& range);

/// The strides of row-major elements of these sizes.
std::vector<int64_t> row_major_strides(const std::vector<int64_t>& sizes);

/// Whether elements of these sizes with these strides are contiguous,
/// row-major.
bool is_row_major(
    const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides);

/// The number of the element of index `at` in memory with these strides, which
/// begins with the element of index `from`.
int64_t element_at(
    const std::vector<int64_t>& at, const std::vector<int64_t>& from,
    const std::vector<int64_t>& strides);

/// Copies the overlap of the boxes from `from`, the row-major elements of its
/// box, to `to`, which has those of its box with these strides, in elements.
void copy_overlap(
    const Box& from_box, const std::byte* from, const Box& to_box,
    std::byte* to, const std::vector<int64_t>& to_strides,
    size_t element_bytes);

/// Checks that `boxes` cover each element of a tensor of this shape once.
/// Returns what is wrong, with indices ("nothing covers [0, 3]", "[2, 0] is in
/// two slices"), or an empty text. Takes O(n log n) for n boxes that planes
/// separate one after the other, as those of all layouts; boxes that no plane
/// separates are compared pair by pair.
std::string
find_gap(const std::vector<int64_t>& shape, const std::vector<Box>& boxes);

}  // namespace echelon
