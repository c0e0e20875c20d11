#include "echelon/checkpoint/files/reader.h"

#include <gmock/gmock.h>

#include <set>

#include "echelon/error.h"
#include "tests/checkpoint/files/written_checkpoint.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"

namespace echelon::reader_test {

using testing::HasSubstr;

constexpr int64_t kBlock = kChecksumBlockBytes;

std::vector<std::byte>
read(CheckpointReader& reader, const std::string& name, const Box& box) {
  const SavedTensor& tensor = *reader.manifest().find(name);
  std::vector<std::byte> bytes(
      static_cast<size_t>(box.numel()) *
      safetensors::dtype_bytes(tensor.dtype));
  reader.read(tensor, box, bytes.data());
  return bytes;
}

class ReaderTest : public testing::Test {
 protected:
  TempFolder folder_;
  Random random_;
};

TEST_F(ReaderTest, AnyBoxesFromAnyBoxes) {
  const std::vector<std::string> dtypes = {"F64", "F32", "BF16", "U8", "I64"};
  for (int round = 0; round < 60; ++round) {
    SCOPED_TRACE(round);
    TempFolder folder;
    std::vector<WholeTensor> tensors;
    for (size_t i = 0; i < 6; ++i) {
      std::vector<int64_t> shape;
      for (int64_t d = random_below(random_, 5); d-- > 0;) {
        shape.push_back(1 + random_below(random_, 9));
      }
      tensors.push_back(random_tensor(
          "t" + std::to_string(i), dtypes[i % dtypes.size()], shape, random_));
    }
    write_random_checkpoint(
        folder.path(), tensors, 1 + random_below(random_, 5),
        1 + random_below(random_, 12), random_);
    CheckpointReader reader(folder.path());
    for (const auto& tensor : tensors) {
      const Box whole = whole_box(tensor.shape);
      EXPECT_EQ(read(reader, tensor.name, whole), tensor.bytes);
      for (int i = 0; i < 5; ++i) {
        const Box box = random_box(tensor.shape, random_);
        EXPECT_EQ(read(reader, tensor.name, box), part_of(tensor, box));
      }
    }
    EXPECT_TRUE(verify_checkpoint(folder.path()).empty());
  }
}

/// Reads boxes of all tensors by one call, each into strided memory.
void expect_strided_reads(
    CheckpointReader& reader, const std::vector<WholeTensor>& tensors,
    Random& random) {
  struct Target {
    const WholeTensor* tensor;
    Box box;
    std::vector<std::byte> memory;
    std::vector<int64_t> strides;
  };
  std::vector<Target> targets;
  for (const auto& tensor : tensors) {
    Target target{&tensor, random_box(tensor.shape, random), {}, {}};
    // Dimensions in any order, with room between them.
    std::vector<size_t> order(tensor.shape.size());
    for (size_t d = 0; d < order.size(); ++d) order[d] = d;
    if (random_below(random, 2) == 0) {
      std::shuffle(order.begin(), order.end(), random);
    }
    target.strides.resize(order.size());
    int64_t stride = 1;
    for (size_t i = order.size(); i-- > 0;) {
      target.strides[order[i]] = stride;
      stride *= target.box.sizes[order[i]] + random_below(random, 2);
    }
    target.memory.assign(
        static_cast<size_t>(stride) * tensor.element_bytes(), std::byte{7});
    targets.push_back(std::move(target));
  }
  std::shuffle(targets.begin(), targets.end(), random);
  std::vector<BoxRead> reads;
  for (auto& target : targets) {
    reads.push_back(
        {reader.manifest().find(target.tensor->name), target.box,
         target.memory.data(), target.strides});
  }
  reader.read(reads);
  for (const auto& target : targets) {
    const size_t width = target.tensor->element_bytes();
    std::vector<std::byte> expected(target.memory.size(), std::byte{7});
    each_element(target.tensor->shape, target.box, [&](size_t i, size_t whole) {
      int64_t rest = static_cast<int64_t>(i), at = 0;
      for (size_t d = target.strides.size(); d-- > 0;) {
        at += rest % target.box.sizes[d] * target.strides[d];
        rest /= target.box.sizes[d];
      }
      std::memcpy(
          expected.data() + static_cast<size_t>(at) * width,
          target.tensor->bytes.data() + whole * width, width);
    });
    ASSERT_EQ(target.memory, expected) << target.tensor->name;
  }
}

TEST_F(ReaderTest, IntoStridedMemory) {
  for (int round = 0; round < 30; ++round) {
    SCOPED_TRACE(round);
    TempFolder folder;
    std::vector<WholeTensor> tensors;
    for (int i = 0; i < 4; ++i) {
      tensors.push_back(random_tensor(
          "t" + std::to_string(i), i % 2 == 0 ? "F32" : "BF16",
          {1 + random_below(random_, 6), 5, 1 + random_below(random_, 9)},
          random_));
    }
    write_random_checkpoint(folder.path(), tensors, 3, 7, random_);
    CheckpointReader reader(folder.path());
    expect_strided_reads(reader, tensors, random_);
  }
}

TEST_F(ReaderTest, TensorsOfManyBlocks) {
  const std::vector<WholeTensor> tensors = {
      random_tensor("wide", "F32", {3, 1'100'000}, random_),
      random_tensor("small", "F64", {11}, random_),
      random_tensor("high", "F32", {2'000'000, 2}, random_),
      random_tensor("bytes", "U8", {3 * kBlock + 17}, random_)};
  for (const int threads : {1, 3}) {
    SCOPED_TRACE(threads);
    TempFolder folder;
    write_random_checkpoint(folder.path(), tensors, 2, 3, random_);
    CheckpointReader reader(folder.path(), threads);
    for (const auto& tensor : tensors) {
      EXPECT_TRUE(
          read(reader, tensor.name, whole_box(tensor.shape)) == tensor.bytes);
      const Box box = random_box(tensor.shape, random_);
      EXPECT_TRUE(read(reader, tensor.name, box) == part_of(tensor, box));
    }
    expect_strided_reads(reader, tensors, random_);
    int64_t done = 0;
    EXPECT_TRUE(verify_checkpoint(
                    folder.path(),
                    [&](int64_t bytes) {
                      EXPECT_GE(bytes, done);
                      done = bytes;
                    },
                    threads)
                    .empty());
    int64_t total = 0;
    for (const auto& file : reader.manifest().files) total += file.bytes;
    EXPECT_EQ(done, total);
  }
}

TEST_F(ReaderTest, ReadsEachBlockOnceByOneCall) {
  std::vector<WholeTensor> tensors;
  for (int i = 0; i < 40; ++i) {
    tensors.push_back(random_tensor(
        "t" + std::to_string(i), "F32", {100, 1 + 37 * i}, random_));
  }
  tensors.push_back(random_tensor("large", "F32", {5, 500'000}, random_));
  write_random_checkpoint(folder_.path(), tensors, 3, 5, random_);
  CheckpointReader reader(folder_.path());
  int64_t total = 0;
  for (const auto& file : reader.manifest().files) total += file.bytes;
  EXPECT_EQ(reader.bytes_read(), 0);
  std::vector<std::vector<std::byte>> memory;
  std::vector<BoxRead> reads;
  for (const auto& tensor : tensors) {
    memory.emplace_back(tensor.bytes.size());
    reads.push_back(
        {.tensor = reader.manifest().find(tensor.name),
         .box = whole_box(tensor.shape),
         .to = memory.back().data()});
  }
  std::shuffle(reads.begin(), reads.end(), random_);
  reader.read(reads);
  EXPECT_EQ(reader.bytes_read(), total);
  for (size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_TRUE(memory[i] == tensors[i].bytes) << tensors[i].name;
  }
}

TEST_F(ReaderTest, ReadsEachBlockOnceInTheOrderOfTheFile) {
  std::vector<WholeTensor> tensors;
  for (int i = 0; i < 30; ++i) {
    tensors.push_back(
        random_tensor("t" + std::to_string(i), "F32", {123'456}, random_));
  }
  write_checkpoint(folder_.path(), {RankSlices(tensors)});
  CheckpointReader reader(folder_.path());
  for (const auto& tensor : tensors) {
    EXPECT_TRUE(
        read(reader, tensor.name, whole_box(tensor.shape)) == tensor.bytes);
  }
  EXPECT_EQ(reader.bytes_read(), reader.manifest().files[0].bytes);
}

TEST_F(ReaderTest, ReadsOnlyWhatIsNeeded) {
  // Four ranks with a quarter of the rows each, of 12 tensors of 8 MiB.
  std::vector<RankSlices> ranks(4);
  std::vector<std::string> names;
  for (int i = 0; i < 12; ++i) {
    const auto tensor =
        random_tensor("t" + std::to_string(i), "F32", {64, 32'768}, random_);
    names.push_back(tensor.name);
    for (int64_t rank = 0; rank < 4; ++rank) {
      ranks[static_cast<size_t>(rank)].add(
          tensor, {{16 * rank, 0}, {16, 32'768}});
    }
  }
  write_checkpoint(folder_.path(), ranks);
  const int64_t tensor_bytes = 8 << 20;
  const auto bytes_for = [&](const std::vector<size_t>& wanted,
                             const Box& box) {
    CheckpointReader reader(folder_.path());
    std::vector<std::byte> memory(
        wanted.size() * static_cast<size_t>(tensor_bytes));
    std::vector<BoxRead> reads;
    for (const size_t i : wanted) {
      auto* to =
          memory.data() + reads.size() * static_cast<size_t>(tensor_bytes);
      reads.push_back(
          {.tensor = reader.manifest().find(names[i]), .box = box, .to = to});
    }
    reader.read(reads);
    return reader.bytes_read();
  };
  // A quarter of the tensors: in each file a piece of three slices, and the
  // block with the header.
  EXPECT_LE(
      bytes_for({3, 4, 5}, whole_box({64, 32'768})),
      3 * tensor_bytes + 4 * 3 * kBlock);
  // A quarter of each tensor's rows, those of one file: all of it and no other.
  EXPECT_LE(
      bytes_for(
          {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, {{16, 0}, {16, 32'768}}),
      3 * tensor_bytes + 2 * kBlock);
  // A few elements: the headers' blocks and the one with them.
  EXPECT_LE(bytes_for({7}, {{20, 5}, {1, 3}}), 2 * kBlock);
  EXPECT_EQ(bytes_for({7}, {{20, 5}, {0, 3}}), 0);
}

TEST_F(ReaderTest, TheSameTwiceByOneCall) {
  // "b" and "c" have half of a block each: "b" twice is as many bytes.
  const auto checkpoint = [&](const std::string& path, int64_t first,
                              std::vector<WholeTensor>& tensors) {
    tensors = {
        random_tensor("a", "U8", {first}, random_),
        random_tensor("b", "U8", {kBlock / 2}, random_),
        random_tensor("c", "U8", {kBlock / 2}, random_)};
    return write_checkpoint(path, {RankSlices(tensors)}).files[0].bytes;
  };
  std::vector<WholeTensor> tensors;
  TempFolder probe;
  const int64_t over =
      checkpoint(probe.path(), 2 * kBlock - 1000, tensors) % kBlock;
  ASSERT_EQ(
      checkpoint(folder_.path(), 3 * kBlock - 1000 - over, tensors),
      3 * kBlock);
  for (size_t i = 0; i < tensors.size(); ++i) {
    CheckpointReader reader(folder_.path());
    const SavedTensor& tensor = *reader.manifest().find(tensors[i].name);
    std::vector<std::byte> a(tensors[i].bytes.size()), b(a.size());
    reader.read(
        {{&tensor, whole_box(tensor.shape), a.data(), {}},
         {&tensor, whole_box(tensor.shape), b.data(), {}}});
    EXPECT_TRUE(a == tensors[i].bytes);
    EXPECT_TRUE(b == tensors[i].bytes);
  }
}

TEST_F(ReaderTest, ReadsNoBlocksBetweenRows) {
  // Rows of 12 MiB: some columns of all are in one or two blocks of each.
  const auto tensor = random_tensor("t", "F32", {3, 3 << 20}, random_);
  write_random_checkpoint(folder_.path(), {tensor}, 1, 1, random_);
  CheckpointReader reader(folder_.path());
  const Box box{{0, 1000}, {3, 77}};
  EXPECT_TRUE(read(reader, "t", box) == part_of(tensor, box));
  EXPECT_LE(reader.bytes_read(), 3 * kBlock);
}

TEST_F(ReaderTest, TensorsWithoutElements) {
  const auto none = random_tensor("none", "F32", {0, 4}, random_);
  const auto some = random_tensor("some", "F32", {2}, random_);
  write_checkpoint(folder_.path(), {RankSlices({none, some})});
  CheckpointReader reader(folder_.path());
  EXPECT_TRUE(read(reader, "none", whole_box(none.shape)).empty());
  EXPECT_EQ(read(reader, "some", whole_box(some.shape)), some.bytes);
  EXPECT_TRUE(verify_checkpoint(folder_.path()).empty());
}

TEST_F(ReaderTest, RefusesBoxesThatAreNotInside) {
  const auto a = random_tensor("a", "F32", {2, 3}, random_);
  write_random_checkpoint(folder_.path(), {a}, 1, 1, random_);
  CheckpointReader reader(folder_.path());
  for (const Box& box :
       {Box{{0, 0}, {2, 4}}, Box{{0, -1}, {2, 3}}, Box{{1, 0}, {2, 3}},
        Box{{0, 0}, {2, -1}}, Box{{INT64_MAX, 0}, {INT64_MAX, 1}},
        Box{{0}, {2}}}) {
    EXPECT_THAT(
        error_text<ConfigError>([&] {
          std::byte to[64];
          reader.read(*reader.manifest().find("a"), box, to);
        }),
        HasAll("tensor \"a\" of shape [2, 3]", "not inside"));
  }
  EXPECT_THAT(
      error_text<ConfigError>([&] { CheckpointReader(folder_.path(), -1); }),
      HasSubstr("threads = -1"));
}

TEST_F(ReaderTest, RefusesWhatIsNoCheckpoint) {
  for (const auto& path : {folder_.path(), folder_.path("none")}) {
    EXPECT_THAT(
        error_text<CheckpointError>([&] { CheckpointReader reader(path); }),
        HasAll(
            path + " is no checkpoint",
            "manifest.json cannot be opened: No such file"));
  }
  folder_.make_folder("manifest.json");
  EXPECT_THAT(
      error_text<CheckpointError>([&] { verify_checkpoint(folder_.path()); }),
      HasSubstr("manifest.json cannot be read: Is a directory"));
}

}  // namespace echelon::reader_test
