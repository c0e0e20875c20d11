#include "echelon/checkpoint/weights/checkpoint_tensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "echelon/error.h"
#include "tests/checkpoint/files/written_checkpoint.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"

namespace echelon {
namespace weights_file_test {

std::vector<WholeTensor> some_tensors(Random& random) {
  return {
      random_tensor("a", "F32", {5, 7, 3}, random),
      random_tensor("b", "BF16", {11}, random),
      random_tensor("c", "I64", {}, random)};
}

TEST(CheckpointTensors, AnyElementsOfAnySlices) {
  TempFolder folder;
  Random random(1);
  const auto tensors = some_tensors(random);
  write_random_checkpoint(folder.path(), tensors, 3, 6, random);
  CheckpointReader reader(folder.path());
  CheckpointTensors source(reader, "; look elsewhere");
  ASSERT_EQ(source.tensors().size(), tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& facts = source.tensors()[i];
    const auto whole = std::find_if(
        tensors.begin(), tensors.end(),
        [&](const auto& tensor) { return tensor.name == facts.name; });
    ASSERT_NE(whole, tensors.end());
    const auto width = static_cast<int64_t>(whole->element_bytes());
    for (int round = 0; round < 40; ++round) {
      const int64_t begin = random_below(random, facts.numel());
      const int64_t count = 1 + random_below(random, facts.numel() - begin);
      std::vector<std::byte> bytes(static_cast<size_t>(count * width));
      source.read({{i, {begin, begin + count}, bytes.data()}});
      EXPECT_TRUE(std::equal(
          bytes.begin(), bytes.end(), whole->bytes.begin() + begin * width))
          << facts.name << " from " << begin << ", " << count;
    }
  }
}

TEST(WeightsFile, IsTheSameWhateverTheMemory) {
  TempFolder folder;
  Random random(2);
  const auto tensors = some_tensors(random);
  write_random_checkpoint(folder.path("saved"), tensors, 2, 5, random);
  CheckpointReader reader(folder.path("saved"));
  for (const int64_t bytes : {1, 40, 1 << 20}) {
    const auto path = folder.path("weights");
    write_weights(reader, path, {}, bytes);
    const safetensors::File file(path);
    ASSERT_EQ(file.tensors().size(), tensors.size());
    for (const auto& tensor : tensors) {
      const auto& info = file.at(tensor.name);
      EXPECT_EQ(info.shape, tensor.shape);
      const auto found = file.bytes(info);
      EXPECT_TRUE(std::equal(
          found.begin(), found.end(), tensor.bytes.begin(), tensor.bytes.end()))
          << tensor.name << " by " << bytes;
    }
  }
  write_weights(reader, folder.path("one"), {"b"});
  EXPECT_EQ(safetensors::File(folder.path("one")).tensors().size(), 1u);
  EXPECT_THAT(
      error_text<CheckpointError>([&] {
        write_weights(reader, folder.path("two"), {"b", "d"});
      }),
      testing::HasSubstr("has no parameter or buffer \"d\""));
}

}  // namespace weights_file_test
}  // namespace echelon
