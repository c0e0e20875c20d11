#include "echelon/checkpoint/files/diff.h"

#include <gmock/gmock.h>

#include <cmath>
#include <limits>

#include "tests/checkpoint/files/written_checkpoint.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"

namespace echelon::diff_test {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;

struct Whole : WholeTensor {
  SavedKind kind = SavedKind::parameter;
};

template <typename T>
Whole whole(
    const std::string& name, const std::string& dtype,
    const std::vector<T>& values, SavedKind kind = SavedKind::parameter) {
  return {
      tensor_of<T>(name, dtype, {static_cast<int64_t>(values.size())}, values),
      kind};
}

class Diff : public testing::Test {
 protected:
  // Each tensor is sharded along its first dimension over so many ranks.
  std::string save(const std::vector<Whole>& tensors, int64_t ranks = 1) {
    std::vector<RankSlices> parts(static_cast<size_t>(ranks));
    for (const auto& tensor : tensors) {
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const auto rows = even_range(tensor.shape[0], rank, ranks);
        if (rows.size() == 0) continue;
        Box box = whole_box(tensor.shape);
        box.offset[0] = rows.begin;
        box.sizes[0] = rows.size();
        auto& part = parts[static_cast<size_t>(rank)];
        part.add(tensor, box);
        part.slices.back().kind = tensor.kind;
      }
    }
    const auto path = temp_.path("save-" + std::to_string(++saves_));
    write_checkpoint(path, parts);
    return path;
  }

  TempFolder temp_;
  int saves_ = 0;
};

std::vector<Change> changes(const std::vector<TensorDiff>& diffs) {
  std::vector<Change> found;
  for (const auto& diff : diffs) found.push_back(diff.change);
  return found;
}

TEST_F(Diff, AnotherLayoutIsEqualAndNotRead) {
  const std::vector<Whole> tensors = {
      whole<float>("a", "F32", {1, 2, 3}), whole<double>("b", "F64", {4, 5})};
  CheckpointReader a(save(tensors)), b(save(tensors, 3));
  EXPECT_THAT(
      changes(diff_checkpoints(a, b)), ElementsAre(Change::none, Change::none));
  EXPECT_EQ(a.bytes_read() + b.bytes_read(), 0);
}

TEST_F(Diff, NormsOfChanges) {
  CheckpointReader a(save({whole<float>("a", "F32", {3, 4, 0, 12})}));
  CheckpointReader b(save({whole<float>("a", "F32", {3, 7, -4, 12})}, 2));
  const auto diff = diff_checkpoints(a, b).at(0);
  EXPECT_EQ(diff.name, "a");
  EXPECT_EQ(diff.change, Change::values);
  EXPECT_TRUE(diff.numbers);
  EXPECT_EQ(diff.differing, 2);
  EXPECT_DOUBLE_EQ(diff.norm, 13);
  EXPECT_DOUBLE_EQ(diff.change_norm, 5);
  EXPECT_DOUBLE_EQ(diff.relative(), 5. / 13);
  EXPECT_EQ(diff.largest, 4);
  EXPECT_EQ(diff.shape_a, std::vector<int64_t>{4});
  EXPECT_EQ(diff.dtype_b, "F32");
}

TEST_F(Diff, FromZeroTheChangeIsInfinitelyLarge) {
  CheckpointReader a(save({whole<float>("a", "F32", {0, 0})}));
  CheckpointReader b(save({whole<float>("a", "F32", {0, 1})}));
  EXPECT_TRUE(std::isinf(diff_checkpoints(a, b).at(0).relative()));
}

TEST_F(Diff, AnotherDtypeIsComparedAsNumbers) {
  CheckpointReader a(save(
      {whole<float>("a", "F32", {1, -2, 0.5f}),
       whole<float>("b", "F32", {1.001f})}));
  CheckpointReader b(save(
      {whole<uint16_t>("a", "BF16", {0x3F80, 0xC000, 0x3F00}),
       whole<uint16_t>("b", "F16", {0x3C00})}));
  const auto diffs = diff_checkpoints(a, b);
  EXPECT_THAT(changes(diffs), ElementsAre(Change::dtype, Change::dtype));
  EXPECT_EQ(diffs[0].differing, 0);
  EXPECT_EQ(diffs[0].change_norm, 0);
  EXPECT_EQ(diffs[1].differing, 1);
  EXPECT_DOUBLE_EQ(diffs[1].change_norm, static_cast<double>(1.001f) - 1);
}

TEST_F(Diff, MissingTensorsAndOtherShapes) {
  CheckpointReader a(save(
      {whole<float>("a", "F32", {1}), whole<float>("gone", "F32", {1}),
       whole<float>("longer", "F32", {1, 2})}));
  CheckpointReader b(save(
      {whole<float>("new", "F32", {1}), whole<float>("a", "F32", {1}),
       whole<float>("longer", "F32", {1, 2, 3})}));
  const auto diffs = diff_checkpoints(a, b);
  ASSERT_EQ(diffs.size(), 4u);
  const auto find = [&](const std::string& name) -> const TensorDiff& {
    return *std::find_if(diffs.begin(), diffs.end(), [&](const auto& diff) {
      return diff.name == name;
    });
  };
  EXPECT_EQ(find("a").change, Change::none);
  EXPECT_EQ(find("gone").change, Change::missing);
  EXPECT_EQ(find("gone").dtype_b, "");
  EXPECT_EQ(find("new").change, Change::added);
  EXPECT_EQ(find("new").shape_b, std::vector<int64_t>{1});
  EXPECT_EQ(find("longer").change, Change::shape);
  EXPECT_FALSE(find("longer").numbers);
}

TEST_F(Diff, ANanIsADifferenceUnlessBothHaveIt) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  CheckpointReader a(save({whole<float>("a", "F32", {nan, 1, 2})}));
  CheckpointReader b(save({whole<float>("a", "F32", {nan, 1, 3})}));
  CheckpointReader c(save({whole<float>("a", "F32", {nan, nan, 5})}));
  const auto same = diff_checkpoints(a, b).at(0);
  EXPECT_EQ(same.differing, 1);
  EXPECT_EQ(same.change_norm, 1);
  const auto other = diff_checkpoints(a, c).at(0);
  EXPECT_EQ(other.differing, 2);
  EXPECT_TRUE(std::isnan(other.change_norm));
  EXPECT_TRUE(std::isnan(other.largest));
}

TEST_F(Diff, OtherDtypesAreComparedAsBits) {
  const auto random = SavedKind::random;
  CheckpointReader a(save({whole<int64_t>("a", "I64", {1, 2, 3}, random)}));
  CheckpointReader b(save({whole<int64_t>("a", "I64", {1, 5, 4}, random)}));
  const auto diff = diff_checkpoints(a, b).at(0);
  EXPECT_EQ(diff.change, Change::values);
  EXPECT_EQ(diff.kind, random);
  EXPECT_EQ(diff.differing, 2);
  EXPECT_FALSE(diff.numbers);
  const auto unread = diff_checkpoints(a, b, [](const SavedTensor& tensor) {
                        return tensor.kind != SavedKind::random;
                      }).at(0);
  EXPECT_EQ(unread.change, Change::values);
  EXPECT_EQ(unread.differing, 0);
}

// The result does not depend on how little is in memory at a time.
TEST_F(Diff, IsTheSameInSmallBatches) {
  std::vector<Whole> old, now;
  for (int i = 0; i < 7; ++i) {
    std::vector<float> values(static_cast<size_t>(5 * i + 1));
    for (size_t j = 0; j < values.size(); ++j) {
      values[j] = static_cast<float>(i + 1) + static_cast<float>(j) / 8;
    }
    const std::string name = "tensor" + std::to_string(i);
    old.push_back(whole(name, "F32", values));
    for (auto& value : values) value *= 1.5f;
    now.push_back(whole(name, "F32", values));
    old.back().shape = {static_cast<int64_t>(values.size()), 1};
    now.back().shape = old.back().shape;
  }
  CheckpointReader a(save(old, 2)), b(save(now, 3));
  const auto expected = diff_checkpoints(a, b);
  for (const size_t batch_bytes : {1, 8, 20, 100, 1000}) {
    int64_t done = 0;
    const auto diffs = diff_checkpoints(
        a, b, {}, [&](int64_t bytes) { done = bytes; }, batch_bytes);
    EXPECT_EQ(done, 4 * (7 + 5 * 21));
    ASSERT_EQ(diffs.size(), expected.size());
    for (size_t i = 0; i < diffs.size(); ++i) {
      EXPECT_EQ(diffs[i].differing, expected[i].differing);
      EXPECT_DOUBLE_EQ(diffs[i].norm, expected[i].norm);
      EXPECT_NEAR(diffs[i].change_norm, expected[i].norm / 2, 1e-6);
      EXPECT_EQ(diffs[i].largest, expected[i].largest);
    }
  }
}

TEST_F(Diff, NamesDamage) {
  const auto path = save({whole<float>("a", "F32", {1, 2})});
  CheckpointReader a(path), b(save({whole<float>("a", "F32", {1, 3})}));
  const auto file = fs::path(path) / rank_file_name(0);
  auto bytes = read_file(file.string());
  bytes.back() ^= 1;
  std::ofstream(file, std::ios::binary) << bytes;
  EXPECT_THAT(
      error_text<CheckpointError>([&] { diff_checkpoints(a, b); }),
      HasSubstr(file.string()));
}

}  // namespace echelon::diff_test
