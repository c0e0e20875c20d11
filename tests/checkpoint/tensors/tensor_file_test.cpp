#include "echelon/checkpoint/tensors/tensor_file.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include "echelon/checkpoint/format/hashes.h"
#include "tests/support/error_text.h"
#include "tests/support/python.h"
#include "tests/support/temp_folder.h"

namespace echelon::tensor_file_test {

using testing::HasSubstr;

std::vector<NamedTensor> every_dtype() {
  std::vector<NamedTensor> tensors;
  const auto base =
      torch::tensor({0.0, 1.0, 2.5, 100.0, 7.0, 1.0}).view({2, 3});
  for (const auto dtype :
       {torch::kFloat32, torch::kFloat64, torch::kFloat16, torch::kBFloat16,
        torch::kInt64, torch::kInt32, torch::kInt16, torch::kInt8,
        torch::kUInt8, torch::kUInt16, torch::kUInt32, torch::kUInt64,
        torch::kBool, torch::kFloat8_e4m3fn, torch::kFloat8_e5m2}) {
    tensors.emplace_back("t." + dtype_to_safetensors(dtype), base.to(dtype));
  }
  tensors.emplace_back("scalar", torch::tensor(3.25));
  tensors.emplace_back("empty", torch::empty({0, 4}));
  tensors.emplace_back("strided", torch::arange(12).view({3, 4}).t());
  tensors.emplace_back("ünïcode \"quoted\"", torch::ones({1}));
  return tensors;
}

void expect_same(const torch::Tensor& a, const torch::Tensor& b) {
  EXPECT_EQ(a.scalar_type(), b.scalar_type());
  EXPECT_EQ(a.sizes(), b.sizes());
  EXPECT_TRUE(torch::equal(
      a.contiguous().view(torch::kUInt8), b.contiguous().view(torch::kUInt8)));
}

class TensorFile : public testing::Test {
 protected:
  TempFolder folder_;
  const std::string path_ = folder_.path("t.safetensors");
};
using TensorFilePython = TensorFile;

TEST_F(TensorFile, ReadsWhatItWrote) {
  const auto tensors = every_dtype();
  save_tensors(path_, tensors);
  EXPECT_EQ(load_tensors(path_).size(), tensors.size());
  for (const auto& [name, tensor] : tensors) {
    SCOPED_TRACE(name);
    const auto loaded = load_tensors(path_, {name})[0];
    EXPECT_EQ(loaded.sizes(), tensor.sizes());
    if (tensor.dim() > 0 && tensor.numel() > 0) expect_same(loaded, tensor);
  }
  EXPECT_EQ(load_tensors(path_, {"scalar"})[0].item<float>(), 3.25f);
}

TEST_F(TensorFile, TensorsShareTheFileAndOutliveIt) {
  save_tensors(path_, {{"a", torch::arange(4)}, {"b", torch::ones({3})}});
  const auto tensors = load_tensors(path_, {"b", "a"});
  std::filesystem::remove(path_);
  EXPECT_EQ(tensors[0].sum().item<float>(), 3.0f);
  EXPECT_EQ(tensors[1].sum().item<int64_t>(), 6);
}

TEST_F(TensorFile, WritingToATensorChangesNoFile) {
  save_tensors(path_, {{"a", torch::arange(4)}});
  load_tensors(path_, {"a"})[0].zero_();
  EXPECT_EQ(load_tensors(path_, {"a"})[0].sum().item<int64_t>(), 6);
}

TEST_F(TensorFile, CopiesUnalignedTensors) {
  std::string header =
      R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
      R"("b":{"dtype":"I32","shape":[1],"data_offsets":[1,5]}})";
  header.resize(128, ' ');
  std::string file = std::string("\x80\0\0\0\0\0\0\0", 8) + header;
  file += std::string("\x01\x02\0\0\0", 5);
  const auto b = load_tensors(folder_.write("f", file), {"b"})[0];
  EXPECT_EQ(b.item<int32_t>(), 2);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(b.const_data_ptr()) % 4, 0);
}

TEST_F(TensorFile, RefusesImpossibleValues) {
  const auto refused = [&](const torch::Tensor& tensor) {
    return error_text<ConfigError>([&] {
      save_tensors(path_, {{"a", tensor}});
    });
  };
  EXPECT_THAT(refused({}), HasSubstr("\"a\" is undefined or sparse"));
  EXPECT_THAT(refused(torch::ones({2}).to_sparse()), HasSubstr("sparse"));
  EXPECT_THAT(
      refused(torch::ones({2}, torch::kComplexDouble)),
      HasSubstr("no dtype for ComplexDouble"));
  save_tensors(path_, {{"a", torch::tensor({0, 2}, torch::kUInt8)}});
  std::string bytes = read_file(path_);
  bytes.replace(bytes.find("\"U8\""), 4, "\"BOOL\"");
  const size_t spaces = bytes.find("  ");
  bytes.erase(spaces, 2);
  EXPECT_THAT(
      error_text<CheckpointError>(
          [&] { load_tensors(folder_.write("b", bytes)); }),
      HasSubstr("neither 0 nor 1"));
  EXPECT_THAT(
      error_text<CheckpointError>([&] { load_tensors(path_, {"c"}); }),
      HasSubstr("no tensor \"c\""));
}

TEST_F(TensorFile, ATensorThatDiffersFromItsChecksumIsRefused) {
  const std::string sum = checksum("\0\0\x80\x3f", 4);  // of 1.0f
  for (const float value : {1.0F, 2.0F}) {
    save_tensors(
        path_, {{"a", torch::tensor(value)}},
        {{safetensors::checksum_key("a"), sum}});
    const auto said = error_text([&] { load_tensors(path_, {"a"}); });
    EXPECT_EQ(said.find("tensor \"a\" is damaged") == said.npos, value == 1)
        << said;
  }
}

TEST_F(TensorFilePython, ReadsOurs) {
  ECHELON_NEED_PYTHON();
  save_tensors(path_, every_dtype(), {{"made by", "echelon"}});
  const std::string told = run_python(
      R"(
import sys, torch
from safetensors import safe_open
with safe_open(sys.argv[1], "pt") as f:
    print(f.metadata())
    for k in sorted(f.keys()):
        t = f.get_tensor(k)
        print(k, t.dtype, list(t.shape), t.to(torch.float64).flatten().tolist())
)",
      {path_});
  EXPECT_THAT(told, HasSubstr("{'made by': 'echelon'}"));
  EXPECT_THAT(
      told, HasSubstr("t.F32 torch.float32 [2, 3] [0.0, 1.0, 2.5, 100.0, 7.0"));
  EXPECT_THAT(told, HasSubstr("t.BF16 torch.bfloat16 [2, 3] [0.0, 1.0, 2.5"));
  EXPECT_THAT(told, HasSubstr("t.BOOL torch.bool [2, 3] [0.0, 1.0, 1.0"));
  EXPECT_THAT(
      told, HasSubstr("strided torch.int64 [4, 3] [0.0, 4.0, 8.0, 1.0"));
  EXPECT_THAT(told, HasSubstr("scalar torch.float32 [] [3.25]"));
  EXPECT_THAT(told, HasSubstr("empty torch.float32 [0, 4] []"));
  EXPECT_THAT(told, HasSubstr("ünïcode \"quoted\" torch.float32 [1] [1.0]"));
}

TEST_F(TensorFilePython, WritesWhatWeRead) {
  ECHELON_NEED_PYTHON();
  run_python(
      R"(
import sys, torch
from safetensors.torch import save_file
base = torch.tensor([0.0, 1.0, 2.5, 100.0, 7.0, 1.0], dtype=torch.float64).view(2, 3)
names = dict(F32=torch.float32, F64=torch.float64, F16=torch.float16, BF16=torch.bfloat16,
    I64=torch.int64, I32=torch.int32, I16=torch.int16, I8=torch.int8, U8=torch.uint8,
    U16=torch.uint16, U32=torch.uint32, U64=torch.uint64, BOOL=torch.bool,
    F8_E4M3=torch.float8_e4m3fn, F8_E5M2=torch.float8_e5m2)
t = {"t." + k: base.to(v) for k, v in names.items()}
t["odd"] = torch.ones(3, dtype=torch.uint8)
save_file(t, sys.argv[1], metadata={"k": "v"})
)",
      {path_});
  EXPECT_EQ(safetensors::File(path_).metadata().at("k"), "v");
  for (const auto& [name, tensor] : every_dtype()) {
    if (!name.starts_with("t.")) continue;
    SCOPED_TRACE(name);
    expect_same(load_tensors(path_, {name})[0], tensor);
  }
  EXPECT_EQ(load_tensors(path_, {"odd"})[0].numel(), 3);
}

}  // namespace echelon::tensor_file_test
