// A checkpoint, and files of other programs, as sources of tensors.
#include <gmock/gmock.h>

#include "echelon/checkpoint/format/foreign.h"
#include "echelon/checkpoint/weights/checkpoint_tensors.h"
#include "echelon/checkpoint/weights/sharded_files.h"
#include "echelon/error.h"
#include "tests/checkpoint/files/written_checkpoint.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"

namespace echelon::tensor_sources_test {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

/// Reads random ranges of elements of tensor number `i`.
void expect_reads(
    TensorSource& source, size_t i, const WholeTensor& whole, Random& random) {
  const auto& facts = source.tensors()[i];
  const auto width = static_cast<int64_t>(whole.element_bytes());
  for (int round = 0; round < 40; ++round) {
    const int64_t begin = random_below(random, facts.numel());
    const int64_t count = 1 + random_below(random, facts.numel() - begin);
    std::vector<std::byte> bytes(static_cast<size_t>(count * width));
    source.read({{i, {begin, begin + count}, bytes.data()}});
    EXPECT_TRUE(std::equal(
        bytes.begin(), bytes.end(), whole.bytes.begin() + begin * width))
        << facts.name << " from " << begin << ", " << count;
  }
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
            "\": {\"saved_offsets\": " + safetensors::shape_string(box.offset) +
            "}";
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
    expect_reads(source, i, *whole[i], random);
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
  const struct {
    std::vector<std::string> files;
    std::vector<std::string> parts;  // of what is said; none: nothing
  } cases[] = {
      {{}, {}},
      {{"model.safetensors", "config.json", "metadata.json"}, {}},
      {{".metadata", "__0_0.distcp", "__1_0.distcp"},
       {"torch.distributed.checkpoint (DCP)", "are a pickle",
        "dcp_to_torch '"}},
      {{"__0_0.distcp"}, {"(DCP)"}},
      {{"latest_checkpointed_iteration.txt"}, {"Megatron-LM"}},
      {{"mp_rank_00/model_optim_rng.pt"}, {"Megatron-LM"}},
      {{"config.json", "pytorch_model.bin"},
       {"pytorch_model.bin is a pickle of torch.save", "weights_only=True"}}};
  for (const auto& [files, parts] : cases) {
    TempFolder folder;
    for (const auto& file : files) folder.write(file, "{}");
    const auto said = foreign_checkpoint(folder.path());
    EXPECT_EQ(said.empty(), parts.empty()) << said;
    for (const auto& part : parts) EXPECT_THAT(said, HasSubstr(part));
  }
  EXPECT_EQ(foreign_checkpoint("nowhere"), "");
  TempFolder folder;
  EXPECT_THAT(
      foreign_checkpoint(folder.write("a.pt", "")), HasSubstr("is a pickle"));
  for (const char* file : {"common.pt", ".metadata", "__0_0.distcp"}) {
    folder.write(file, "{}");
  }
  folder.write(
      "metadata.json",
      "{\"sharded_backend\": \"torch_dist\", "
      "\"sharded_backend_version\": 1}");
  EXPECT_THAT(
      foreign_checkpoint(folder.path()),
      HasAll("Megatron-LM", "--megatron-path '"));
}

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
    expect_reads(source, i, *whole, random);
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
      HasSubstr("has no parameter or buffer \"d\""));
}

}  // namespace echelon::tensor_sources_test
