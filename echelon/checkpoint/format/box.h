// Parts of a tensor as boxes: what a checkpoint's files hold of each tensor,
// and what of it a rank needs, whatever the layout of either. Free of LibTorch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "echelon/layout/shard.h"

namespace echelon {

/// Indices [offset[d], offset[d] + sizes[d]) along each dimension d. Of a
/// scalar, both are empty. In memory and in files its elements are row-major.
struct Box {
  std::vector<int64_t> offset;
  std::vector<int64_t> sizes;

  int64_t numel() const;
  bool operator==(const Box&) const = default;
};

Box whole_box(const std::vector<int64_t>& shape);

/// Whether the box, of any numbers, is a box of a tensor of that shape. The
/// functions below take none that is not.
bool is_inside(const Box& box, const std::vector<int64_t>& shape);

/// What both have; none when that is nothing.
std::optional<Box> overlap(const Box& a, const Box& b);

/// The boxes that elements [range.begin, range.end) of `box`, in row-major
/// order, make up, in that order; each of them lies contiguously there. At most
/// 2 * dimensions - 1; none for an empty range. Throws Error for a range
/// outside.
std::vector<Box> boxes_of(const Box& box, const IndexRange& range);

/// A box of the whole tensor, and where its elements lie in the memory of the
/// part that a rank has: element i of the box at begin + sum(i[d] *
/// strides[d]).
struct PlacedBox {
  Box box;
  int64_t begin = 0;
  std::vector<int64_t> strides;
  bool operator==(const PlacedBox&) const = default;
};

/// What a rank has of a tensor, in boxes of the whole one, without empty ones.
///
///   shape  of the whole tensor
///   shard  its tensor-parallel part; null: all of it
///   range  of the part's elements, row-major, that are there; null: all
///   owned  only what the shard owns: each element on one rank of the group
std::vector<PlacedBox> placed_boxes(
    const std::vector<int64_t>& shape, const Shard* shard,
    const IndexRange* range, bool owned);

/// The elements number [range.begin, range.end) of the boxes, counted through
/// all of them in their order (each row-major): for ranks that share the work
/// on what all of them have.
std::vector<PlacedBox>
cut(const std::vector<PlacedBox>& boxes, const IndexRange& range);

/// Copies what both boxes have from `from` to `to`, each the row-major elements
/// of its box.
void copy_overlap(
    const Box& from_box, const std::byte* from, const Box& to_box,
    std::byte* to, size_t element_bytes);

/// Whether `boxes` cover a tensor of this shape, each element once. What is
/// wrong otherwise, with indices: "nothing covers [0, 3]", "[2, 0] is in two
/// slices"; empty when all is well. Cuts made one after the other, as all
/// layouts make them, take a time of the order of n log n for n boxes; boxes
/// that no cut separates are compared pair by pair.
std::string
find_gap(const std::vector<int64_t>& shape, const std::vector<Box>& boxes);

}  // namespace echelon
