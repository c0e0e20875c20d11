// Any sharding of a tensor has the same hash, other contents have another.
#include "echelon/checkpoint/format/hashes.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <set>
#include <utility>

#include "echelon/error.h"
#include "tests/support/error_text.h"

namespace echelon::content_hash_test {

using testing::HasSubstr;
using Shape = std::vector<int64_t>;

std::vector<std::byte> random_bytes(size_t size, uint32_t seed) {
  std::mt19937 bits(seed);
  std::vector<std::byte> bytes(size);
  for (auto& byte : bytes) byte = static_cast<std::byte>(bits());
  return bytes;
}

ContentHash hash_all(
    const Shape& shape, const std::vector<std::byte>& bytes, size_t width) {
  return hash_elements(shape, whole_box(shape), bytes.data(), width);
}

ContentHash hash_of_boxes(
    const Shape& shape, const std::vector<Box>& boxes,
    const std::vector<std::byte>& bytes, size_t width) {
  ContentHash sum{};
  for (const auto& box : boxes) {
    std::vector<std::byte> part(static_cast<size_t>(box.numel()) * width);
    copy_overlap(
        whole_box(shape), bytes.data(), box, part.data(),
        row_major_strides(box.sizes), width);
    sum = sum + hash_elements(shape, box, part.data(), width);
  }
  return sum;
}

/// The definition in hashes.h, word for word.
ContentHash by_definition(const std::vector<std::byte>& bytes, size_t width) {
  ContentHash hash{};
  for (uint64_t i = 0; i < bytes.size() / width; ++i) {
    const uint64_t key = (i + 1) * 0x9e3779b97f4a7c15;
    uint64_t bits = 0;
    for (size_t b = 0; b < width; ++b) {
      bits |= static_cast<uint64_t>(bytes[i * width + b]) << (8 * b);
    }
    uint64_t z = key ^ bits;
    z = (z ^ (z >> 32)) * 0xd6e8feb86659fd93;
    z = (z ^ (z >> 32)) * 0xd6e8feb86659fd93;
    z = z ^ (z >> 32);
    hash[0] += z;
    hash[1] += (key | 1) * z;
  }
  return hash;
}

TEST(ContentHash, IsWhatTheHeaderSays) {
  const auto bytes = random_bytes(240, 1);
  for (const size_t width : {1, 2, 4, 8}) {
    const Shape shape = {3, 2, static_cast<int64_t>(40 / width)};
    EXPECT_EQ(hash_all(shape, bytes, width), by_definition(bytes, width));
  }
  // Written down, so that old checkpoints keep their hashes.
  EXPECT_EQ(
      hash_all({}, std::vector<std::byte>(4), 4),
      (ContentHash{0x4e17cf67001b3979, 0xf6132a52d60c52ed}));
}

TEST(ContentHash, IsTheSameForAnySharding) {
  std::mt19937 bits(2);
  const Shape shape = {5, 4, 3, 6};
  for (const size_t width : {1, 2, 4, 8}) {
    const auto bytes = random_bytes(360 * width, 3);
    const ContentHash whole = hash_all(shape, bytes, width);
    for (int i = 0; i < 50; ++i) {
      // Along a plane, and each side into flat ranges.
      const size_t dim = bits() % 4;
      std::vector<Box> sides(2, whole_box(shape));
      sides[0].sizes[dim] = static_cast<int64_t>(bits() % (shape[dim] + 1));
      sides[1].offset[dim] = sides[0].sizes[dim];
      sides[1].sizes[dim] -= sides[0].sizes[dim];
      std::vector<Box> boxes;
      for (const auto& side : sides) {
        const auto at = static_cast<int64_t>(bits() % (side.numel() + 1));
        for (const IndexRange& range :
             {IndexRange{0, at}, IndexRange{at, side.numel()}}) {
          for (auto& box : boxes_of(side, range)) boxes.push_back(box);
        }
      }
      std::shuffle(boxes.begin(), boxes.end(), bits);
      EXPECT_EQ(hash_of_boxes(shape, boxes, bytes, width), whole);
    }
  }
  EXPECT_EQ(hash_all({3, 0}, {}, 4), ContentHash{});
}

TEST(ContentHash, EveryFlippedBitShowsInBothSums) {
  auto bytes = random_bytes(512, 4);
  for (const size_t width : {1, 2, 4, 8}) {
    const Shape shape = {static_cast<int64_t>(512 / width)};
    const ContentHash whole = hash_all(shape, bytes, width);
    std::set<ContentHash> all = {whole};
    for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
      bytes[bit / 8] ^= std::byte{1} << (bit % 8);
      const ContentHash flipped = hash_all(shape, bytes, width);
      bytes[bit / 8] ^= std::byte{1} << (bit % 8);
      EXPECT_NE(flipped[0], whole[0]);
      EXPECT_NE(flipped[1], whole[1]);
      EXPECT_TRUE(all.insert(flipped).second);
    }
  }
}

TEST(ContentHash, SwappedElementsShow) {
  // Values of a few kinds, as masks and biases have.
  std::vector<float> values(200);
  for (size_t i = 0; i < values.size(); ++i) values[i] = float(i % 3) - 1;
  const auto hash = [&] {
    return hash_elements(
        {10, 20}, whole_box({10, 20}),
        reinterpret_cast<const std::byte*>(values.data()), sizeof(float));
  };
  std::set<uint64_t> first = {hash()[0]};
  std::set<uint64_t> second = {hash()[1]};
  for (size_t a = 0; a < values.size(); ++a) {
    for (size_t b = 0; b < a; ++b) {
      if (values[a] == values[b]) continue;
      std::swap(values[a], values[b]);
      EXPECT_TRUE(first.insert(hash()[0]).second);
      EXPECT_TRUE(second.insert(hash()[1]).second);
      std::swap(values[a], values[b]);
    }
  }
}

TEST(ContentHash, PairsOfChangedSignsShow) {
  std::vector<double> values(120, 0.5);
  const auto hash = [&] {
    return hash_elements(
        {120}, whole_box({120}),
        reinterpret_cast<const std::byte*>(values.data()), sizeof(double));
  };
  std::set<uint64_t> first = {hash()[0]};
  std::set<uint64_t> second = {hash()[1]};
  for (size_t a = 0; a < values.size(); ++a) {
    for (size_t b = 0; b < a; ++b) {
      values[a] = values[b] = -0.5;
      EXPECT_TRUE(first.insert(hash()[0]).second);
      EXPECT_TRUE(second.insert(hash()[1]).second);
      values[a] = values[b] = 0.5;
    }
  }
}

TEST(ContentHash, OtherWidthsAreRefused) {
  const std::byte bytes[16] = {};
  EXPECT_THAT(
      error_text([&] { hash_elements({}, Box{}, bytes, 16); }),
      HasSubstr("elements of 16 bytes"));
}

}  // namespace echelon::content_hash_test
