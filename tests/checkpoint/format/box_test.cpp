// Boxes against brute force: small tensors whose elements are their own
// indices.
#include "echelon/checkpoint/format/box.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <set>

#include "echelon/checkpoint/format/safetensors.h"
#include "echelon/error.h"
#include "tests/support/error_text.h"

namespace echelon::box_test {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using Shape = std::vector<int64_t>;

/// Row-major numbers, within `shape`, of the elements of `box`, in its order.
std::vector<int64_t> elements(const Shape& shape, const Box& box) {
  std::vector<int64_t> numbers = {0};
  for (size_t d = 0; d < shape.size(); ++d) {
    std::vector<int64_t> next;
    for (const int64_t number : numbers) {
      for (int64_t i = 0; i < box.sizes[d]; ++i) {
        next.push_back(number * shape[d] + box.offset[d] + i);
      }
    }
    numbers = std::move(next);
  }
  return numbers;
}

std::vector<int64_t>
elements(const Shape& shape, const std::vector<Box>& boxes) {
  std::vector<int64_t> all;
  for (const auto& box : boxes) {
    const auto more = elements(shape, box);
    all.insert(all.end(), more.begin(), more.end());
  }
  return all;
}

/// The elements of a placed box in the shard's memory, in its order.
std::vector<int64_t>
values_at(const std::vector<int64_t>& memory, const PlacedBox& placed) {
  std::vector<int64_t> places = {placed.begin};
  for (size_t d = 0; d < placed.strides.size(); ++d) {
    std::vector<int64_t> next;
    for (const int64_t place : places) {
      for (int64_t i = 0; i < placed.box.sizes[d]; ++i) {
        next.push_back(place + i * placed.strides[d]);
      }
    }
    places = std::move(next);
  }
  std::vector<int64_t> values;
  for (const int64_t place : places) {
    values.push_back(memory.at(static_cast<size_t>(place)));
  }
  return values;
}

int64_t numel(const Shape& shape) {
  return whole_box(shape).numel();
}

class Draw {
 public:
  explicit Draw(uint32_t seed) : bits_(seed) {}

  int64_t between(int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(bits_);
  }
  IndexRange range(int64_t end) {
    const int64_t a = between(0, end);
    const int64_t b = between(0, end);
    return {std::min(a, b), std::max(a, b)};
  }
  /// A shape of up to four dimensions, sometimes with a size of 0.
  Shape shape() {
    Shape shape(static_cast<size_t>(between(0, 4)));
    for (auto& size : shape) size = between(between(0, 9) == 0 ? 0 : 1, 5);
    return shape;
  }
  Box box(const Shape& shape) {
    Box box = whole_box(shape);
    for (size_t d = 0; d < shape.size(); ++d) {
      const IndexRange along = range(shape[d]);
      box.offset[d] = along.begin;
      box.sizes[d] = along.size();
    }
    return box;
  }
  /// Splits `box` into disjoint boxes along random planes.
  std::vector<Box> tiles(const Box& box, int depth) {
    if (depth == 0 || box.sizes.empty()) return {box};
    const auto dim = static_cast<size_t>(
        between(0, static_cast<int64_t>(box.sizes.size()) - 1));
    const int64_t at = between(0, box.sizes[dim]);
    Box low = box;
    Box high = box;
    low.sizes[dim] = at;
    high.offset[dim] += at;
    high.sizes[dim] -= at;
    auto all = tiles(low, depth - 1);
    for (auto& more : tiles(high, depth - 1)) all.push_back(std::move(more));
    return all;
  }
  template <typename T>
  void shuffle(std::vector<T>& values) {
    std::shuffle(values.begin(), values.end(), bits_);
  }

 private:
  std::mt19937 bits_;
};

/// Tensor-parallel shards as attention makes them: for each of some fused
/// matrices a range for each rank; ranges of one matrix may overlap, owned ones
/// do not.
std::vector<Shard> fused_shards(Draw& draw, const Shape& shape) {
  const int64_t ranks = draw.between(1, 3);
  const auto dim = static_cast<size_t>(
      draw.between(0, static_cast<int64_t>(shape.size()) - 1));
  std::vector<Shard> shards(
      static_cast<size_t>(ranks),
      Shard{.shape = shape, .dim = static_cast<int64_t>(dim)});
  std::vector<int64_t> bounds = {0, shape[dim]};
  for (int64_t i = draw.between(0, 2); i > 0; --i) {
    bounds.push_back(draw.between(0, shape[dim]));
  }
  std::sort(bounds.begin(), bounds.end());
  for (size_t m = 0; m + 1 < bounds.size(); ++m) {
    const int64_t begin = bounds[m];
    const int64_t size = bounds[m + 1] - begin;
    int64_t owned_until = 0;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      IndexRange own = even_range(size, rank, ranks);
      own.begin = owned_until;
      own.end = std::max(own.begin, own.end);
      IndexRange here = own;
      here.begin = draw.between(0, own.begin);  // a copy of others' indices
      owned_until = own.end;
      auto& shard = shards[static_cast<size_t>(rank)];
      shard.pieces.push_back({begin + here.begin, begin + here.end});
      if (own.size() > 0) {
        shard.owned.push_back({begin + own.begin, begin + own.end});
      }
    }
  }
  return shards;
}

/// The memory of a shard: row-major numbers of the full tensor's elements.
std::vector<int64_t> part_memory(const Shape& shape, const Shard& shard) {
  const auto dim = static_cast<size_t>(shard.dim);
  int64_t inner = 1;
  for (size_t d = dim + 1; d < shape.size(); ++d) inner *= shape[d];
  const int64_t block = inner * shape[dim];
  std::vector<int64_t> memory;
  if (block == 0) return memory;
  for (int64_t outer = 0; outer < numel(shape) / block; ++outer) {
    for (const auto& piece : shard.pieces) {
      for (int64_t i = piece.begin * inner; i < piece.end * inner; ++i) {
        memory.push_back(outer * block + i);
      }
    }
  }
  return memory;
}

/// The full tensor's elements in the boxes, which are where they should be in
/// the memory.
std::vector<int64_t> placed_elements(
    const Shape& shape, const std::vector<PlacedBox>& boxes,
    const std::vector<int64_t>& memory) {
  std::vector<int64_t> all;
  for (const auto& placed : boxes) {
    EXPECT_GT(placed.box.numel(), 0);
    const auto indices = elements(shape, placed.box);
    EXPECT_EQ(values_at(memory, placed), indices);
    all.insert(all.end(), indices.begin(), indices.end());
  }
  return all;
}

TEST(Box, OverlapIsWhatBothHave) {
  Draw draw(1);
  for (int i = 0; i < 500; ++i) {
    const Shape shape = draw.shape();
    const Box a = draw.box(shape);
    const Box b = draw.box(shape);
    const auto in_a = elements(shape, a);
    const auto in_b = elements(shape, b);
    std::vector<int64_t> both;
    std::set_intersection(
        in_a.begin(), in_a.end(), in_b.begin(), in_b.end(),
        std::back_inserter(both));
    const auto found = overlap(a, b);
    EXPECT_EQ(found.has_value(), !both.empty());
    EXPECT_EQ(
        elements(shape, found.value_or(Box{shape, Shape(shape.size())})), both);
  }
  EXPECT_EQ(overlap(Box{}, Box{}), Box{});
  EXPECT_THAT(
      error_text([] { overlap(Box{}, whole_box({2})); }),
      HasSubstr("numbers of dimensions"));
}

TEST(Box, AFlatRangeIsAFewBoxesInItsOrder) {
  Draw draw(2);
  for (int i = 0; i < 2000; ++i) {
    const Shape shape = draw.shape();
    const Box box = draw.box(shape);
    const IndexRange range = draw.range(box.numel());
    const auto boxes = boxes_of(box, range);
    const auto all = elements(shape, box);
    EXPECT_EQ(
        elements(shape, boxes),
        std::vector(all.begin() + range.begin, all.begin() + range.end));
    EXPECT_LE(boxes.size(), shape.empty() ? 1 : 2 * shape.size() - 1);
    for (const auto& part : boxes) EXPECT_GT(part.numel(), 0);
  }
  // Complete rows are one box.
  EXPECT_THAT(
      boxes_of(whole_box({4, 3}), {3, 9}), ElementsAre(Box{{1, 0}, {2, 3}}));
  EXPECT_THAT(
      boxes_of(whole_box({4, 3}), {2, 10}),
      ElementsAre(
          Box{{0, 2}, {1, 1}}, Box{{1, 0}, {2, 3}}, Box{{3, 0}, {1, 1}}));
}

TEST(Box, AScalarIsOneBox) {
  EXPECT_EQ(whole_box({}).numel(), 1);
  EXPECT_THAT(boxes_of(Box{}, {0, 1}), ElementsAre(Box{}));
  EXPECT_THAT(boxes_of(Box{}, {0, 0}), IsEmpty());
  EXPECT_THAT(boxes_of(Box{}, {1, 1}), IsEmpty());
  const Shard second = replicated({}, 1);
  const IndexRange none{0, 0};
  EXPECT_THAT(
      placed_boxes({}, nullptr, nullptr, true), ElementsAre(PlacedBox{}));
  EXPECT_THAT(placed_boxes({}, nullptr, &none, true), IsEmpty());
  EXPECT_THAT(placed_boxes({}, &second, nullptr, true), IsEmpty());
  EXPECT_THAT(
      placed_boxes({}, &second, nullptr, false), ElementsAre(PlacedBox{}));
}

TEST(Box, RangesOutsideAreRefused) {
  for (const IndexRange& range :
       {IndexRange{-1, 2}, IndexRange{2, 1}, IndexRange{0, 7}}) {
    EXPECT_THAT(
        error_text([&] {
          boxes_of(whole_box({2, 3}), range);
        }),
        HasSubstr("of a box [2, 3] at [0, 0] of 6"));
    EXPECT_THAT(
        error_text([&] {
          elements_of(placed_boxes({2, 3}, nullptr, nullptr, false), range);
        }),
        HasSubstr("of boxes that have 6"));
  }
  const Shard other = replicated({3, 2}, 0);
  EXPECT_THAT(
      error_text([&] {
        placed_boxes({2, 3}, &other, nullptr, false);
      }),
      HasSubstr("a tensor [3, 2] for one of [2, 3]"));
}

TEST(Box, ShardsOfAllRanksAreTheFullTensor) {
  Draw draw(3);
  for (int i = 0; i < 2000; ++i) {
    Shape shape = draw.shape();
    if (shape.empty()) shape = {draw.between(1, 9)};
    std::vector<int64_t> owned_by_all;
    for (const Shard& shard : fused_shards(draw, shape)) {
      const auto memory = part_memory(shape, shard);
      ASSERT_EQ(
          static_cast<int64_t>(memory.size()), numel(shard.local_shape()));
      const int64_t ranks = draw.between(1, 4);
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const IndexRange range =
            even_range(static_cast<int64_t>(memory.size()), rank, ranks);
        std::vector<int64_t> flat(
            memory.begin() + range.begin, memory.begin() + range.end);
        auto found = placed_elements(
            shape, placed_boxes(shape, &shard, &range, false), flat);
        const auto owned = placed_elements(
            shape, placed_boxes(shape, &shard, &range, true), flat);
        owned_by_all.insert(owned_by_all.end(), owned.begin(), owned.end());
        std::sort(found.begin(), found.end());
        std::sort(flat.begin(), flat.end());
        EXPECT_EQ(found, flat);
      }
      // Without a range: the part as it is, a box for each of its pieces.
      const auto whole_part = placed_boxes(shape, &shard, nullptr, false);
      EXPECT_LE(whole_part.size(), shard.pieces.size());
      EXPECT_EQ(
          placed_elements(shape, whole_part, memory).size(), memory.size());
    }
    std::sort(owned_by_all.begin(), owned_by_all.end());
    std::vector<int64_t> all(static_cast<size_t>(numel(shape)));
    std::iota(all.begin(), all.end(), 0);
    EXPECT_EQ(owned_by_all, all);
  }
}

TEST(Box, AdjacentPiecesAreOneBox) {
  const Shard all{
      .shape = {6, 2}, .pieces = {{0, 3}, {3, 5}, {5, 6}}, .owned = {{0, 6}}};
  EXPECT_THAT(
      placed_boxes({6, 2}, &all, nullptr, false),
      ElementsAre(PlacedBox{whole_box({6, 2}), 0, {2, 1}}));
  EXPECT_EQ(
      placed_boxes({6, 2}, &all, nullptr, true),
      placed_boxes({6, 2}, nullptr, nullptr, true));
}

TEST(Box, RangesDivideAllElements) {
  Draw draw(4);
  for (int i = 0; i < 1000; ++i) {
    Shape shape = draw.shape();
    if (shape.empty()) shape = {3};
    const Shard shard = fused_shards(draw, shape)[0];
    const auto memory = part_memory(shape, shard);
    const auto boxes = placed_boxes(shape, &shard, nullptr, true);
    const auto all = placed_elements(shape, boxes, memory);
    std::vector<int64_t> together;
    const int64_t ranks = draw.between(1, 5);
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const auto range =
          even_range(static_cast<int64_t>(all.size()), rank, ranks);
      const auto some =
          placed_elements(shape, elements_of(boxes, range), memory);
      together.insert(together.end(), some.begin(), some.end());
    }
    EXPECT_EQ(together, all);
  }
}

TEST(Box, CopiesTheOverlapAndNothingElse) {
  Draw draw(5);
  for (int i = 0; i < 2000; ++i) {
    const Shape shape = draw.shape();
    const Box from = draw.box(shape);
    const Box to = draw.box(shape);
    const auto width = static_cast<size_t>(1) << draw.between(0, 3);
    const auto bytes_of = [&](const std::vector<int64_t>& numbers) {
      std::vector<std::byte> bytes;
      for (const int64_t number : numbers) {
        for (size_t b = 0; b < width; ++b) {
          bytes.push_back(static_cast<std::byte>(number * 31 + 7 * b));
        }
      }
      return bytes;
    };
    const auto in_from = elements(shape, from);
    const auto in_to = elements(shape, to);
    const std::set<int64_t> there(in_from.begin(), in_from.end());
    auto expected = bytes_of(in_to);
    for (size_t e = 0; e < in_to.size(); ++e) {
      if (there.contains(in_to[e])) continue;
      std::fill_n(expected.begin() + e * width, width, std::byte{0xee});
    }
    std::vector<std::byte> copied(expected.size(), std::byte{0xee});
    const auto source = bytes_of(in_from);
    copy_overlap(
        from, source.data(), to, copied.data(), row_major_strides(to.sizes),
        width);
    ASSERT_EQ(copied, expected);
  }
}

TEST(Box, ACompleteCoverHasNoGap) {
  Draw draw(6);
  for (int i = 0; i < 500; ++i) {
    const Shape shape = draw.shape();
    auto boxes = draw.tiles(whole_box(shape), 4);
    draw.shuffle(boxes);
    EXPECT_EQ(find_gap(shape, boxes), "");
  }
  EXPECT_EQ(find_gap({}, {Box{}}), "");
  EXPECT_EQ(find_gap({3, 0}, {}), "");
  // Five boxes that no plane separates.
  EXPECT_EQ(
      find_gap(
          {3, 3}, {{{0, 0}, {1, 2}},
                   {{0, 2}, {2, 1}},
                   {{2, 1}, {1, 2}},
                   {{1, 0}, {2, 1}},
                   {{1, 1}, {1, 1}}}),
      "");
}

TEST(Box, HolesAndOverlapsAreNamed) {
  Draw draw(7);
  int holes = 0;
  int overlaps = 0;
  for (int i = 0; i < 2000; ++i) {
    const Shape shape = draw.shape();
    std::vector<Box> boxes = draw.tiles(whole_box(shape), 3);
    draw.shuffle(boxes);
    if (draw.between(0, 1) == 0) boxes.pop_back();
    if (draw.between(0, 1) == 0) boxes.push_back(draw.box(shape));
    std::vector<int> count(static_cast<size_t>(numel(shape)));
    for (const int64_t e : elements(shape, boxes)) ++count[e];
    const auto index_of = [&](size_t e) {
      Shape index(shape.size());
      for (size_t d = shape.size(); d-- > 0;) {
        index[d] = static_cast<int64_t>(e) % shape[d];
        e /= static_cast<size_t>(shape[d]);
      }
      return safetensors::shape_string(index);
    };
    const std::string gap = find_gap(shape, boxes);
    std::set<std::string> twice;
    for (size_t e = 0; e < count.size(); ++e) {
      if (count[e] > 1) twice.insert(index_of(e) + " is in two slices");
    }
    const auto hole = std::find(count.begin(), count.end(), 0);
    if (!twice.empty()) {
      EXPECT_TRUE(twice.contains(gap)) << gap;
      ++overlaps;
    } else if (hole != count.end()) {
      EXPECT_EQ(
          gap, "nothing covers " +
                   index_of(static_cast<size_t>(hole - count.begin())));
      ++holes;
    } else {
      EXPECT_EQ(gap, "");
    }
  }
  EXPECT_GT(holes, 100);
  EXPECT_GT(overlaps, 100);
}

TEST(Box, SlicesOutsideAreNamed) {
  for (const Box& outside :
       {Box{{0}, {3}}, Box{{0, 0}, {3, 1}}, Box{{2, 1}, {1, 1}},
        Box{{-1, 0}, {1, 1}}, Box{{0, 0}, {-1, 1}},
        Box{{1, INT64_MAX}, {1, INT64_MAX}}}) {
    EXPECT_THAT(find_gap({2, 2}, {outside}), HasSubstr("not inside of [2, 2]"));
  }
  EXPECT_EQ(
      find_gap({INT64_MAX, 2}, {}),
      "a tensor cannot have the shape [9223372036854775807, 2]");
}

}  // namespace echelon::box_test
