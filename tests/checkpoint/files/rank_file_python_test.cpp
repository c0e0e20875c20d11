#include <gtest/gtest.h>

#include "tests/checkpoint/files/written_checkpoint.h"
#include "tests/support/python.h"
#include "tests/support/temp_folder.h"

namespace echelon {
namespace rank_file_python_test {

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

}  // namespace rank_file_python_test
}  // namespace echelon
