#include "echelon/checkpoint/format/tensor_stream.h"

#include <gmock/gmock.h>

#include <cstring>
#include <filesystem>
#include <span>

#include "echelon/error.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"

namespace echelon::tensor_stream_test {

using testing::ElementsAre;
using testing::HasSubstr;

// Element i of a tensor is its number + i.
class Numbers : public TensorSource {
 public:
  const std::string& path() const override { return path_; }
  const std::vector<TensorFacts>& tensors() const override { return facts_; }
  void read(const std::vector<Piece>& pieces) override {
    int64_t bytes = 0;
    for (const auto& piece : pieces) {
      const auto& facts = facts_.at(piece.tensor);
      for (int64_t i = piece.elements.begin; i < piece.elements.end; ++i) {
        const int64_t at = i - piece.elements.begin;
        const auto number = static_cast<int64_t>(piece.tensor) + i;
        if (facts.dtype == "I64") {
          std::memcpy(piece.to + 8 * at, &number, 8);
        } else {
          const auto value = static_cast<float>(number) * scale;
          std::memcpy(piece.to + 4 * at, &value, 4);
        }
      }
      bytes += piece.elements.size() * (facts.dtype == "I64" ? 8 : 4);
    }
    most_bytes = std::max(most_bytes, bytes);
    reads += 1;
  }

  float scale = 1;
  int64_t most_bytes = 0;
  int reads = 0;

 private:
  std::string path_ = "numbers";
  std::vector<TensorFacts> facts_ = {
      {"a", "F32", {3, 5}},
      {"none", "F32", {0, 4}},
      {"one", "F32", {}},
      {"count", "I64", {2}},
      {"b", "F32", {100}}};
};

std::vector<float> floats(const safetensors::File& file, const char* name) {
  const auto bytes = file.bytes(file.at(name));
  std::vector<float> values(bytes.size() / 4);
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

TEST(TensorStream, WritesTheSameFileWhateverTheMemory) {
  const TempFolder folder;
  const std::vector<TensorToWrite> tensors = {
      {0, "x.a", "F32"},
      {1, "none", "F32"},
      {2, "one", "F32"},
      {3, "count", "I64"},
      {4, "b", "BF16"}};
  std::string first;
  for (const int64_t bytes : {1 << 20, 1000, 100, 16, 1}) {
    Numbers source;
    const auto path = folder.path(std::to_string(bytes));
    write_tensors(path, source, tensors, {{"format", "pt"}}, bytes);
    if (first.empty()) first = read_file(path);
    EXPECT_EQ(read_file(path), first) << bytes;
    EXPECT_LE(source.most_bytes, std::max<int64_t>(bytes, 16));
    if (bytes == 1 << 20) {
      EXPECT_EQ(source.reads, 1);
    }
  }
  const safetensors::File file(folder.path("16"));
  EXPECT_EQ(file.tensors().size(), 5u);
  EXPECT_EQ(file.at("count").dtype, "I64");
  EXPECT_EQ(file.at("x.a").shape, (std::vector<int64_t>{3, 5}));
  EXPECT_EQ(floats(file, "x.a")[14], 14);
  EXPECT_THAT(floats(file, "one"), ElementsAre(2));
  const auto& b = file.at("b");
  EXPECT_EQ(b.dtype, "BF16");
  uint16_t last = 0;
  std::memcpy(&last, file.bytes(b).data() + 198, 2);
  EXPECT_EQ(last, 0x42ce);  // 103
  EXPECT_EQ(file.metadata().at("format"), "pt");
}

TEST(TensorStream, EachTensorHasItsChecksum) {
  const TempFolder folder;
  Numbers source;
  const auto path = folder.path("x.safetensors");
  write_tensors(
      path, source,
      {{0, "a", "F32"}, {1, "none", "F32"}, {4, "b \"q\"", "BF16"}}, {}, 100);
  const auto verify = [&](const char* name) {
    const safetensors::File file(path);
    file.verify(file.at(name));
  };
  for (const char* name : {"a", "none", "b \"q\""}) verify(name);
  auto bytes = read_file(path);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  folder.write("x.safetensors", bytes);
  for (const char* name : {"a", "none"}) verify(name);
  EXPECT_THAT(
      error_text<CheckpointError>([&] { verify("b \"q\""); }),
      HasAll(
          path +
              ": tensor \"b \"q\"\" is damaged: its bytes have the checksum ",
          "; copy or write the file again, or name a checkpoint of the run"));
}

TEST(TensorStream, RefusesWhatDoesNotFitAndLeavesNothing) {
  const TempFolder folder;
  Numbers source;
  source.scale = 10000;
  const auto path = folder.path("x.safetensors");
  folder.write("x.safetensors", "older");
  EXPECT_EQ(
      error_text<DataError>([&] {
        write_tensors(path, source, {{0, "a", "F16"}}, {}, 24);
      }),
      "numbers: tensor \"a\": 70000 at [1, 2] is beyond what F16 can hold, "
      "65504; write a wider dtype (bfloat16 has the range of float32)");
  EXPECT_THAT(
      error_text<ConfigError>([&] {
        write_tensors(path, source, {{3, "n", "F32"}});
      }),
      HasSubstr("tensor \"n\": I64 is not converted to F32"));
  EXPECT_THAT(
      error_text<ConfigError>([&] {
        write_tensors(path, source, {{0, "a", "F32"}, {4, "a", "F32"}});
      }),
      HasSubstr("the name is taken"));
  EXPECT_EQ(read_file(path), "older");
  const std::filesystem::directory_iterator files(folder.path());
  EXPECT_EQ(std::distance(begin(files), end(files)), 1);
}

}  // namespace echelon::tensor_stream_test
