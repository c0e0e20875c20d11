// doc/checkpoint_format.md is true: its example is what our code writes, and
// its program reads what our code wrote.
#include <gmock/gmock.h>

#include <fstream>
#include <sstream>

#include "echelon/checkpoint/format/manifest.h"
#include "tests/checkpoint/files/written_checkpoint.h"
#include "tests/support/places.h"
#include "tests/support/python.h"
#include "tests/support/temp_folder.h"

namespace echelon::checkpoint_format_test {

/// The indented block of the document that begins with this line.
std::string block_of_document(const std::string& first_line) {
  std::ifstream file(source_path("doc/checkpoint_format.md"));
  std::string block;
  std::string blank;
  bool is_inside = false;
  for (std::string line; std::getline(file, line);) {
    is_inside = is_inside || line == "    " + first_line;
    if (!is_inside) continue;
    if (line.empty()) {
      blank += "\n";
      continue;
    }
    if (!line.starts_with("    ")) break;
    block += blank + line.substr(4) + "\n";
    blank.clear();
  }
  return block;
}

/// What the document describes.
CheckpointManifest write_example(const std::string& folder) {
  const auto weight = tensor_of<float>(
      "fc.weight", "F32", {3, 4}, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11});
  const auto step = tensor_of<float>("fc.weight/step", "F32", {}, {100});
  const auto random = tensor_of<uint8_t>(
      "random/cpu/0", "U8", {16},
      {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15});
  std::vector<RankSlices> ranks(2);
  ranks[0].add(weight, {{0, 0}, {1, 4}});
  ranks[0].add(weight, {{1, 0}, {1, 2}});
  ranks[0].add(random, whole_box({16}));
  ranks[0].slices.back().kind = SavedKind::random;
  ranks[1].add(weight, {{1, 2}, {1, 2}});
  ranks[1].add(weight, {{2, 0}, {1, 4}});
  ranks[1].add(step, whole_box({}));
  ranks[1].slices.back().kind = SavedKind::optimizer;
  CheckpointManifest manifest{
      .step = 100,
      .skipped_steps = 1,
      .total_steps = 1000,
      .epoch = 2,
      .consumed = 640,
      .seed = 1,
      .loss_scale = SavedLossScale{65536, 12, 3},
      .layout = "fsdp=2",
      .ranks = 2,
      .config = "[train]\nsteps = 1000\n",
      .data = "digits: 1797 images",
      .metrics = {{"loss", 0.125}}};
  add_parts(manifest, write_rank_files(folder, ranks));
  write_manifest(folder, manifest);
  return manifest;
}

TEST(CheckpointFormat, TheDocumentsExampleIsWhatWeWrite) {
  TempFolder folder;
  const auto manifest = write_example(folder.path());
  EXPECT_EQ(block_of_document("{"), to_json(manifest));
  EXPECT_EQ(parse_manifest(block_of_document("{"), "example"), manifest);
  const std::string contents = block_of_document("echelon contents 1");
  EXPECT_EQ(checksum(contents.data(), contents.size()), manifest.content_hash);
}

TEST(CheckpointFormat, TheDocumentsReaderReadsWhatWeWrite) {
  ECHELON_NEED_PYTHON();
  TempFolder folder;
  Random random(3);
  const std::vector<WholeTensor> tensors = {
      random_tensor("a", "F32", {13, 7, 3}, random),
      random_tensor("layers/a#1", "BF16", {50}, random),
      random_tensor("a#1", "F64", {4, 9}, random),
      random_tensor("mask", "BOOL", {2, 3, 1, 5}, random),
      random_tensor("none", "F32", {2, 0}, random),
      random_tensor("step", "I64", {}, random)};
  const auto manifest =
      write_random_checkpoint(folder.path(), tensors, 3, 9, random);
  EXPECT_GT(manifest.tensors[0].slices.size(), 3);
  for (const auto& tensor : tensors) {
    std::string hex;
    for (const std::byte byte : tensor.bytes) {
      hex += "0123456789abcdef"[static_cast<int>(byte) >> 4];
      hex += "0123456789abcdef"[static_cast<int>(byte) & 15];
    }
    const std::string width = std::to_string(tensor.element_bytes());
    EXPECT_EQ(
        run_python(
            block_of_document("import json, struct") + R"(
import sys
folder, name, width = sys.argv[1:]
tensor, data = read_tensor(folder, name)
print(data.hex())
print(content_hash(data, int(width)) == tensor["hash"])
)",
            {folder.path(), tensor.name, width}),
        hex + "\nTrue\n");
  }
}

TEST(RankFileInPython, PythonReadsIt) {
  ECHELON_NEED_PYTHON();
  TempFolder folder;
  Random random(1);
  const auto words = random_tensor("words", "I32", {70, 50}, random);
  const auto half = random_tensor("half", "BF16", {3, 2}, random);
  const auto step = random_tensor("words/step", "I64", {}, random);
  RankSlices rank;
  rank.add(half, whole_box(half.shape));
  rank.add(words, {{0, 0}, {30, 50}});
  rank.add(step, whole_box(step.shape));
  rank.add(words, {{30, 20}, {40, 30}});
  write_rank_file(folder.path(), "f.safetensors", rank.slices);
  for (size_t i = 0; i < rank.slices.size(); ++i) {
    folder.write(
        "bytes" + std::to_string(i),
        {reinterpret_cast<const char*>(rank.memory[i].data()),
         rank.memory[i].size()});
  }
  EXPECT_EQ(
      run_python(
          R"(
import sys, torch
from safetensors.torch import load_file
folder = sys.argv[1]
tensors = load_file(folder + "/f.safetensors")
assert len(tensors) == 4
for i, key in enumerate(["half", "words", "words/step", "words#1"]):
  tensor = tensors[key]
  bytes = open(f"{folder}/bytes{i}", "rb").read()
  expected = torch.frombuffer(bytearray(bytes), dtype=tensor.dtype)
  same = tensor.flatten().view(torch.uint8).equal(expected.view(torch.uint8))
  print(key, tensor.dtype, list(tensor.shape), same)
)",
          {folder.path()}),
      "half torch.bfloat16 [3, 2] True\n"
      "words torch.int32 [30, 50] True\n"
      "words/step torch.int64 [] True\n"
      "words#1 torch.int32 [40, 30] True\n");
}

}  // namespace echelon::checkpoint_format_test
