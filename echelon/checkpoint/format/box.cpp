// Boxes are compared without looking at elements. Two boxes overlap if their
// ranges do in every dimension; to find overlaps among many, planes that cut no
// box separate them into groups, again and again, and only inseparable groups
// are compared pair by pair. Boxes that do not overlap cover a tensor if their
// sizes add up to its size.
#include "echelon/checkpoint/format/box.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "echelon/checkpoint/format/safetensors.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

using Indices = std::vector<int64_t>;
using safetensors::shape_string;

std::string box_string(const Box& box) {
  return shape_string(box.sizes) + " at " + shape_string(box.offset);
}

int64_t product(const Indices& sizes, size_t from = 0) {
  int64_t numel = 1;
  for (size_t d = from; d < sizes.size(); ++d) numel *= sizes[d];
  return numel;
}

/// Adds the boxes of elements [begin, end) of the part of `box` that begins at
/// `offset` and has size 1 along the dimensions before `dim`.
void add_boxes(
    const Box& box, size_t dim, Indices offset, int64_t begin, int64_t end,
    std::vector<Box>& boxes) {
  if (begin >= end) return;
  const auto add = [&](size_t last, int64_t first, int64_t rows) {
    Box part{offset, box.sizes};
    part.offset[last] += first;
    part.sizes[last] = rows;
    for (size_t d = 0; d < last; ++d) part.sizes[d] = 1;
    boxes.push_back(std::move(part));
  };
  const auto go_down = [&](int64_t row, int64_t from, int64_t to) {
    Indices inner = offset;
    inner[dim] += row;
    add_boxes(box, dim + 1, std::move(inner), from, to, boxes);
  };
  const int64_t row_numel = product(box.sizes, dim + 1);
  int64_t first = begin / row_numel;
  const int64_t last = end / row_numel;
  const int64_t head = begin % row_numel;
  const int64_t tail = end % row_numel;
  if (first == last) return go_down(first, head, tail);
  if (head > 0) go_down(first++, head, row_numel);
  if (first < last) add(dim, first, last - first);
  if (tail > 0) go_down(last, 0, tail);
}

/// Indices along a shard's dimension, and where they are in the local tensor.
struct PlacedRange {
  IndexRange whole;
  int64_t local = 0;

  int64_t local_end() const { return local + whole.size(); }
};

/// The ranges that the shard has, or owns, without empty ones; ranges that are
/// adjacent in both places are joined.
std::vector<PlacedRange> ranges_of(const Shard& shard, bool owned) {
  std::vector<PlacedRange> ranges;
  const auto add = [&](const IndexRange& whole, int64_t local) {
    if (whole.size() <= 0) return;
    if (!ranges.empty() && ranges.back().whole.end == whole.begin &&
        ranges.back().local_end() == local) {
      ranges.back().whole.end = whole.end;
    } else {
      ranges.push_back({whole, local});
    }
  };
  int64_t local = 0;
  for (const auto& piece : shard.pieces) {
    if (!owned) add(piece, local);
    for (const auto& part : shard.owned) {
      if (!owned) break;
      const int64_t begin = std::max(piece.begin, part.begin);
      add({begin, std::min(piece.end, part.end)}, local + begin - piece.begin);
    }
    local += piece.size();
  }
  return ranges;
}

void check_shard(const Indices& shape, const Shard& shard) {
  if (shard.shape != shape) {
    throw Error(
        "placed_boxes: a shard of a tensor " + shape_string(shard.shape) +
        " for one of " + shape_string(shape));
  }
  const size_t dims = std::max<size_t>(shape.size(), 1);
  if (shard.dim < 0 || static_cast<size_t>(shard.dim) >= dims) {
    throw Error(format(
        "placed_boxes: dimension {} of a tensor {}", shard.dim,
        shape_string(shape)));
  }
}

template <size_t kBytes>
void copy_line(
    const std::byte* from, std::byte* to, int64_t count, int64_t from_stride,
    int64_t to_stride) {
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(to, from, kBytes);
    from += from_stride;
    to += to_stride;
  }
}

/// `count` rows along one dimension; strides in bytes.
void copy_line(
    const std::byte* from, std::byte* to, int64_t count, int64_t from_stride,
    int64_t to_stride, size_t row_bytes) {
  switch (row_bytes) {
    case 1:
      return copy_line<1>(from, to, count, from_stride, to_stride);
    case 2:
      return copy_line<2>(from, to, count, from_stride, to_stride);
    case 4:
      return copy_line<4>(from, to, count, from_stride, to_stride);
    case 8:
      return copy_line<8>(from, to, count, from_stride, to_stride);
    case 16:
      return copy_line<16>(from, to, count, from_stride, to_stride);
    default:
      break;
  }
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(to + i * to_stride, from + i * from_stride, row_bytes);
  }
}

/// Copies elements of `sizes`, none of which is 0; strides in elements.
void copy_strided(
    Indices sizes, const std::byte* from, const Indices& from_strides,
    std::byte* to, const Indices& to_strides, size_t element_bytes) {
  // The innermost dimensions that are contiguous on both sides are one row.
  int64_t row = 1;
  while (!sizes.empty()) {
    const size_t d = sizes.size() - 1;
    if (sizes[d] != 1 && (from_strides[d] != row || to_strides[d] != row)) {
      break;
    }
    row *= sizes[d];
    sizes.pop_back();
  }
  const auto bytes = [width = static_cast<int64_t>(element_bytes)](
                         int64_t elements) { return elements * width; };
  const auto row_bytes = static_cast<size_t>(bytes(row));
  if (sizes.empty()) {
    std::memcpy(to, from, row_bytes);
    return;
  }
  const size_t last = sizes.size() - 1;
  Indices index(last, 0);
  while (true) {
    const std::byte* line_from = from;
    std::byte* line_to = to;
    for (size_t d = 0; d < last; ++d) {
      line_from += bytes(index[d] * from_strides[d]);
      line_to += bytes(index[d] * to_strides[d]);
    }
    copy_line(
        line_from, line_to, sizes[last], bytes(from_strides[last]),
        bytes(to_strides[last]), row_bytes);
    size_t d = last;
    while (d > 0 && ++index[d - 1] == sizes[d - 1]) index[--d] = 0;
    if (d == 0) return;
  }
}

/// The first element that two of `boxes` share, found pair by pair.
std::optional<Indices> shared_element(const std::vector<const Box*>& boxes) {
  for (size_t a = 0; a < boxes.size(); ++a) {
    for (size_t b = a + 1; b < boxes.size(); ++b) {
      if (const auto both = overlap(*boxes[a], *boxes[b])) return both->offset;
    }
  }
  return std::nullopt;
}

/// Groups of boxes that planes across `dim` separate; sorts `boxes`.
std::vector<std::vector<const Box*>>
groups_along(size_t dim, std::vector<const Box*>& boxes) {
  std::sort(boxes.begin(), boxes.end(), [&](const Box* a, const Box* b) {
    return a->offset[dim] < b->offset[dim];
  });
  std::vector<std::vector<const Box*>> groups;
  int64_t end = -1;
  for (const Box* box : boxes) {
    if (groups.empty() || box->offset[dim] >= end) groups.emplace_back();
    groups.back().push_back(box);
    end = std::max(end, box->offset[dim] + box->sizes[dim]);
  }
  return groups;
}

// Splits the boxes along any dimension that separates them until no plane does;
// only then compares pairs.
std::optional<Indices> find_shared(size_t dims, std::vector<const Box*> all) {
  std::vector<std::vector<const Box*>> left;  // no recursion: it may go deep
  left.push_back(std::move(all));
  while (!left.empty()) {
    std::vector<const Box*> boxes = std::move(left.back());
    left.pop_back();
    if (boxes.size() < 2) continue;
    bool split = false;
    for (size_t dim = 0; dim < dims && !split; ++dim) {
      auto groups = groups_along(dim, boxes);
      split = groups.size() > 1;
      for (auto& group : groups) {
        if (split && group.size() > 1) left.push_back(std::move(group));
      }
    }
    if (split) continue;
    if (auto found = shared_element(boxes)) return found;
  }
  return std::nullopt;
}

/// The first element of `shape` that none of the boxes, which do not overlap,
/// covers. Fixes one dimension after the other: the first index at which the
/// boxes there have too few elements of the inner dimensions.
Indices first_hole(const Indices& shape, std::vector<const Box*> boxes) {
  Indices hole;
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    std::vector<std::pair<int64_t, int64_t>> changes = {{0, 0}};
    for (const Box* box : boxes) {
      const int64_t numel = product(box->sizes, dim + 1);
      changes.emplace_back(box->offset[dim], numel);
      changes.emplace_back(box->offset[dim] + box->sizes[dim], -numel);
    }
    std::sort(changes.begin(), changes.end());
    int64_t covered = 0;
    int64_t at = 0;
    for (size_t i = 0; i < changes.size();) {
      at = changes[i].first;
      for (; i < changes.size() && changes[i].first == at; ++i) {
        covered += changes[i].second;
      }
      if (covered < product(shape, dim + 1)) break;
    }
    hole.push_back(at);
    std::erase_if(boxes, [&](const Box* box) {
      return at < box->offset[dim] || at >= box->offset[dim] + box->sizes[dim];
    });
  }
  return hole;
}

}  // namespace

std::vector<int64_t> row_major_strides(const std::vector<int64_t>& sizes) {
  Indices strides(sizes.size());
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= sizes[d];
  }
  return strides;
}

bool is_row_major(
    const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  const auto expected = row_major_strides(sizes);
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] != 1 && strides[d] != expected[d]) return false;
  }
  return true;
}

int64_t element_at(
    const std::vector<int64_t>& at, const std::vector<int64_t>& from,
    const std::vector<int64_t>& strides) {
  int64_t element = 0;
  for (size_t d = 0; d < at.size(); ++d) {
    element += (at[d] - from[d]) * strides[d];
  }
  return element;
}

int64_t Box::numel() const {
  return product(sizes);
}

Box whole_box(const std::vector<int64_t>& shape) {
  return {Indices(shape.size(), 0), shape};
}

bool is_inside(const Box& box, const std::vector<int64_t>& shape) {
  if (box.offset.size() != shape.size() || box.sizes.size() != shape.size()) {
    return false;
  }
  for (size_t d = 0; d < shape.size(); ++d) {
    if (box.offset[d] < 0 || box.sizes[d] < 0 || box.offset[d] > shape[d] ||
        box.sizes[d] > shape[d] - box.offset[d]) {
      return false;
    }
  }
  return true;
}

std::optional<Box> overlap(const Box& a, const Box& b) {
  if (a.offset.size() != b.offset.size()) {
    throw Error(format(
        "overlap: boxes {} and {} have different numbers of dimensions",
        box_string(a), box_string(b)));
  }
  for (size_t d = 0; d < a.offset.size(); ++d) {
    if (std::max(a.offset[d], b.offset[d]) >=
        std::min(a.offset[d] + a.sizes[d], b.offset[d] + b.sizes[d])) {
      return std::nullopt;
    }
  }
  Box both = a;
  for (size_t d = 0; d < a.offset.size(); ++d) {
    const int64_t end =
        std::min(a.offset[d] + a.sizes[d], b.offset[d] + b.sizes[d]);
    both.offset[d] = std::max(a.offset[d], b.offset[d]);
    both.sizes[d] = end - both.offset[d];
  }
  return both;
}

std::vector<Box> boxes_of(const Box& box, const IndexRange& range) {
  if (range.begin < 0 || range.begin > range.end || range.end > box.numel()) {
    throw Error(format(
        "boxes_of: elements [{}, {}) of a box {} of {}", range.begin, range.end,
        box_string(box), box.numel()));
  }
  std::vector<Box> boxes;
  if (range.size() == 0) return boxes;
  if (box.sizes.empty()) return {box};
  add_boxes(box, 0, box.offset, range.begin, range.end, boxes);
  return boxes;
}

std::vector<PlacedBox> placed_boxes(
    const std::vector<int64_t>& shape, const Shard* shard,
    const IndexRange* range, bool owned) {
  Indices local = shape;
  std::vector<PlacedRange> ranges;
  size_t dim = 0;
  if (shard != nullptr) {
    check_shard(shape, *shard);
    local = shard->local_shape();
    ranges = ranges_of(*shard, owned);
    dim = static_cast<size_t>(shard->dim);
  } else {
    ranges = {{{0, shape.empty() ? 1 : shape[0]}, 0}};
  }
  const Indices strides = row_major_strides(local);
  const Box part = whole_box(local);
  const IndexRange here =
      range != nullptr ? *range : IndexRange{0, part.numel()};

  std::vector<PlacedBox> placed;
  for (const Box& chunk : boxes_of(part, here)) {
    for (const auto& piece : ranges) {
      PlacedBox next{chunk, -here.begin, strides};
      if (!shape.empty()) {
        const int64_t begin = std::max(chunk.offset[dim], piece.local);
        const int64_t end =
            std::min(chunk.offset[dim] + chunk.sizes[dim], piece.local_end());
        if (begin >= end) continue;
        next.box.offset[dim] = begin;
        next.box.sizes[dim] = end - begin;
      }
      for (size_t d = 0; d < strides.size(); ++d) {
        next.begin += next.box.offset[d] * strides[d];
      }
      if (!shape.empty()) {
        next.box.offset[dim] += piece.whole.begin - piece.local;
      }
      placed.push_back(std::move(next));
    }
  }
  return placed;
}

std::vector<PlacedBox>
elements_of(const std::vector<PlacedBox>& boxes, const IndexRange& range) {
  int64_t before = 0;
  std::vector<PlacedBox> parts;
  for (const auto& from : boxes) {
    const int64_t numel = from.box.numel();
    const int64_t begin = std::max(range.begin - before, int64_t{0});
    const int64_t end = std::min(range.end - before, numel);
    before += numel;
    if (begin >= end) continue;
    for (auto& box : boxes_of(from.box, {begin, end})) {
      PlacedBox part{std::move(box), from.begin, from.strides};
      part.begin += element_at(part.box.offset, from.box.offset, part.strides);
      parts.push_back(std::move(part));
    }
  }
  if (range.begin < 0 || range.begin > range.end || range.end > before) {
    throw Error(format(
        "elements_of: elements [{}, {}) of boxes that have {}", range.begin,
        range.end, before));
  }
  return parts;
}

void copy_overlap(
    const Box& from_box, const std::byte* from, const Box& to_box,
    std::byte* to, const std::vector<int64_t>& to_strides,
    size_t element_bytes) {
  const auto both = overlap(from_box, to_box);
  if (!both) return;
  const auto width = static_cast<int64_t>(element_bytes);
  const auto from_strides = row_major_strides(from_box.sizes);
  from += element_at(both->offset, from_box.offset, from_strides) * width;
  to += element_at(both->offset, to_box.offset, to_strides) * width;
  copy_strided(both->sizes, from, from_strides, to, to_strides, element_bytes);
}

std::string
find_gap(const std::vector<int64_t>& shape, const std::vector<Box>& boxes) {
  int64_t left = 1;
  for (const int64_t size : shape) {
    if (size < 0 || __builtin_mul_overflow(left, size, &left)) {
      return "a tensor cannot have the shape " + shape_string(shape);
    }
  }
  std::vector<const Box*> filled;
  for (const auto& box : boxes) {
    if (!is_inside(box, shape)) {
      return "the slice " + box_string(box) + " is not inside of " +
             shape_string(shape);
    }
    if (box.numel() == 0) continue;
    filled.push_back(&box);
  }
  if (const auto shared = find_shared(shape.size(), filled)) {
    return shape_string(*shared) + " is in two slices";
  }
  for (const Box* box : filled) left -= box->numel();
  if (left == 0) return "";
  return "nothing covers " + shape_string(first_hole(shape, filled));
}

}  // namespace echelon
