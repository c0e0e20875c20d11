#include "echelon/checkpoint/weights/sharded_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <span>

#include "echelon/checkpoint/format/foreign.h"
#include "echelon/error.h"
#include "tests/checkpoint/files/written_checkpoint.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"

namespace echelon {
namespace sharded_files_test {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

std::string offsets_of(const Box& box) {
  std::string text = "[";
  for (size_t d = 0; d < box.offset.size(); ++d) {
    text += (d == 0 ? "" : ", ") + std::to_string(box.offset[d]);
  }
  return text + "]";
}

// Files named as by DCP's HuggingFaceStorageWriter, one for each rank.
std::string write_rank(
    const TempFolder& folder, int rank,
    const std::vector<std::pair<const WholeTensor*, Box>>& parts) {
  std::vector<std::vector<std::byte>> memory;
  std::vector<safetensors::TensorBytes> tensors;
  std::string info;
  for (const auto& [tensor, box] : parts) {
    memory.push_back(part_of(*tensor, box));
    tensors.push_back({tensor->name, tensor->dtype, box.sizes, memory.back()});
    info += (info.empty() ? "{\"" : ", \"") + tensor->name +
            "\": {\"saved_offsets\": " + offsets_of(box) + "}";
  }
  const auto path = folder.path(
      "shard-0000" + std::to_string(rank + 1) +
      "-model-00001-of-00001.safetensors");
  safetensors::write(
      path, tensors,
      {{"format", "pt"},
       {"DCP_VERSION", "1.0"},
       {"DCP_SHARDING_INFO", info + "}"}});
  return path;
}

std::string rename(const std::string& name) {
  return name == "old.bias" ? "" : "model." + name;
}

std::string refused(const TempFolder& folder) {
  return error_text<CheckpointError>(
      [&] { ShardedFiles(folder.path(), rename); });
}

TEST(ShardedFiles, ReadsAnyElements) {
  TempFolder folder;
  Random random(1);
  const auto words = random_tensor("words", "F32", {7, 5}, random);
  const auto half = random_tensor("half", "BF16", {4, 6}, random);
  const auto step = random_tensor("step", "I64", {}, random);
  const auto old = random_tensor("old.bias", "F32", {2}, random);
  EXPECT_FALSE(has_sharded_files(folder.path()));
  write_rank(
      folder, 0,
      {{&words, {{0, 0}, {4, 5}}},
       {&half, {{0, 0}, {4, 1}}},
       {&step, {}},
       {&old, {{0}, {2}}}});
  write_rank(
      folder, 1, {{&words, {{4, 0}, {3, 5}}}, {&half, {{0, 1}, {4, 5}}}});
  EXPECT_TRUE(has_sharded_files(folder.path()));
  ShardedFiles source(folder.path(), rename);
  ASSERT_EQ(source.tensors().size(), 3u);
  const std::vector<const WholeTensor*> whole = {&half, &step, &words};
  for (size_t i = 0; i < 3; ++i) {
    const auto& facts = source.tensors()[i];
    EXPECT_EQ(facts.name, "model." + whole[i]->name);
    EXPECT_EQ(facts.dtype, whole[i]->dtype);
    EXPECT_EQ(facts.shape, whole[i]->shape);
    const auto width = static_cast<int64_t>(whole[i]->element_bytes());
    for (int round = 0; round < 30; ++round) {
      const int64_t begin = random_below(random, facts.numel());
      const int64_t count = 1 + random_below(random, facts.numel() - begin);
      std::vector<std::byte> bytes(static_cast<size_t>(count * width));
      source.read({{i, {begin, begin + count}, bytes.data()}});
      const auto expected =
          std::span(whole[i]->bytes)
              .subspan(static_cast<size_t>(begin * width), bytes.size());
      EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), expected.begin()))
          << facts.name << " from " << begin << ", " << count;
    }
  }
}

TEST(ShardedFiles, NamesShardsThatDoNotFit) {
  Random random(1);
  const auto words = random_tensor("words", "F32", {6, 4}, random);
  {
    TempFolder folder;
    write_rank(folder, 0, {{&words, {{0, 0}, {2, 4}}}});
    write_rank(folder, 2, {{&words, {{4, 0}, {2, 4}}}});
    EXPECT_THAT(
        refused(folder),
        AllOf(
            StartsWith(folder.path() + ": tensor \"model.words\": nothing "),
            HasSubstr("all ranks' files must be there")));
    write_rank(folder, 1, {{&words, {{1, 0}, {3, 4}}}});
    EXPECT_THAT(refused(folder), HasSubstr("in two slices"));
    auto other = words;
    other.dtype = "I32";
    write_rank(folder, 1, {{&other, {{2, 0}, {2, 4}}}});
    EXPECT_THAT(refused(folder), HasAll("I32", "F32"));
  }
  for (const char* info :
       {"", "[]", "{}", "{\"words\": {}}",
        "{\"words\": {\"saved_offsets\": [0]}}",
        "{\"words\": {\"saved_offsets\": [0, -1]}}",
        "{\"words\": {\"saved_offsets\": [0, 1e3]}}",
        "{\"words\": {\"saved_offsets\": [0, 9223372036854775807]}}"}) {
    TempFolder folder;
    safetensors::write(
        folder.path("shard-00001.safetensors"),
        {{"words", "F32", {6, 4}, words.bytes}}, {{"DCP_SHARDING_INFO", info}});
    EXPECT_THAT(
        refused(folder),
        HasAll("shard-00001.safetensors: ", "DCP_SHARDING_INFO"))
        << info;
  }
  // Shards that reach so far that the full size overflows.
  TempFolder folder;
  safetensors::write(
      folder.path("shard-00001.safetensors"),
      {{"words", "F32", {6, 4}, words.bytes}},
      {{"DCP_SHARDING_INFO",
        "{\"words\": {\"saved_offsets\": [70368744177664, 70368744177664]}}"}});
  EXPECT_THAT(refused(folder), HasSubstr("too much"));
}

TEST(ForeignCheckpoint, IsRecognisedByItsFiles) {
  const auto said = [](const std::vector<std::string>& files,
                       const std::string& text = "{}") {
    TempFolder folder;
    for (const auto& file : files) folder.write(file, text);
    return foreign_checkpoint(folder.path());
  };
  EXPECT_EQ(said({}), "");
  EXPECT_EQ(said({"model.safetensors", "config.json", "metadata.json"}), "");
  EXPECT_EQ(foreign_checkpoint("nowhere"), "");
  EXPECT_THAT(
      said({".metadata", "__0_0.distcp", "__1_0.distcp"}),
      HasAll(
          "torch.distributed.checkpoint (DCP)", "are a pickle",
          "dcp_to_torch '"));
  EXPECT_THAT(said({"__0_0.distcp"}), HasSubstr("(DCP)"));
  const std::string megatron =
      "{\"sharded_backend\": \"torch_dist\", "
      "\"sharded_backend_version\": 1}";
  EXPECT_THAT(
      said(
          {"metadata.json", "common.pt", ".metadata", "__0_0.distcp"},
          megatron),
      HasAll("Megatron-LM", "--megatron-path '"));
  EXPECT_THAT(
      said({"latest_checkpointed_iteration.txt"}), HasSubstr("Megatron-LM"));
  EXPECT_THAT(
      said({"mp_rank_00/model_optim_rng.pt"}), HasSubstr("Megatron-LM"));
  EXPECT_THAT(
      said({"config.json", "pytorch_model.bin"}),
      HasAll(
          "pytorch_model.bin is a pickle of torch.save", "weights_only=True"));
  TempFolder folder;
  EXPECT_THAT(
      foreign_checkpoint(folder.write("a.pt", "")), HasSubstr("is a pickle"));
}

}  // namespace sharded_files_test
}  // namespace echelon
