// NVRTC, where the machine has it. It needs no GPU.
#include "echelon/comm/nvrtc/kernel_compiler.h"

#include <gmock/gmock.h>

#include <filesystem>
#include <memory>
#include <string>

#include "echelon/comm/nvrtc/kernel_cache.h"
#include "tests/support/error_text.h"
#include "tests/support/places.h"
#include "tests/support/temp_folder.h"

namespace echelon::kernel_compiler_test {

using nvrtc::KernelCompiler;
using nvrtc::KernelRecipe;
using nvrtc::KernelsUnavailable;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::StartsWith;

constexpr const char* kNvrtc = "/usr/local/cuda/lib64/libnvrtc.so";

class Compiler : public testing::Test {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists(kNvrtc)) GTEST_SKIP() << "no " << kNvrtc;
    compiler_ = std::make_unique<KernelCompiler>(kNvrtc);
  }
  KernelRecipe
  recipe(std::string_view source, const std::string& architecture) {
    return {
        .source = source,
        .architecture = architecture,
        .compiler = compiler_->version(),
        .options = {"--std=c++17"}};
  }

  std::unique_ptr<KernelCompiler> compiler_;
};

std::string norm_source() {
  const auto text = [](const char* file) {
    return read_file(source_path("echelon/kernels/" + std::string(file)));
  };
  return text("numbers.cu") + text("norm.cu");
}

TEST_F(Compiler, CompilesAKernelOnceForAllProcesses) {
  const TempFolder folder;
  const std::string source = norm_source();
  const auto norm = recipe(source, "sm_80");
  int compiled = 0;
  std::string first, second;
  for (auto* code : {&first, &second}) {
    nvrtc::KernelCache cache(folder.path("kernels"), {});
    cache.load(
        norm,
        [&] {
          ++compiled;
          return compiler_->compile(norm);
        },
        [&](const std::string& loaded) {
          *code = loaded;
          return true;
        });
  }
  EXPECT_EQ(compiled, 1);
  EXPECT_EQ(first, second);
  EXPECT_THAT(
      first, StartsWith("\x7f"
                        "ELF"));
  EXPECT_THAT(first, HasSubstr("rms_norm_gradient_bfloat16_packets"));
}

TEST_F(Compiler, KnowsItsVersion) {
  EXPECT_THAT(compiler_->version(), ContainsRegex("^NVRTC [0-9]+\\.[0-9]+$"));
}

TEST_F(Compiler, AGpuThatItDoesNotKnowIsAReason) {
  const auto text = error_text<KernelsUnavailable>(
      [&] { compiler_->compile(recipe("", "sm_999")); });
  EXPECT_THAT(text, StartsWith(compiler_->version()));
  EXPECT_THAT(text, HasSubstr("cannot compile for sm_999"));
  EXPECT_THAT(text, HasSubstr("invalid value for --gpu-architecture"));
  EXPECT_THAT(text, HasSubstr("\nthis NVRTC does not know the GPU"));
}

TEST_F(Compiler, AMistakeIsAReasonWithTheCompilersFirstLines) {
  std::string source = "__global__ void kernel() { wrong; }\n";
  for (int i = 0; i < 50; ++i) source += "also_wrong();\n";
  const auto text = error_text<KernelsUnavailable>(
      [&] { compiler_->compile(recipe(source, "sm_80")); });
  EXPECT_THAT(text, HasSubstr("kernel.cu(1): error"));
  EXPECT_THAT(text, HasSubstr("\"wrong\" is undefined"));
  EXPECT_THAT(text, testing::Not(HasSubstr("kernel.cu(20)")));
}

TEST(WithoutNvrtc, TheReasonSaysWhatIsMissing) {
  const auto missing = error_text<KernelsUnavailable>(
      [] { const KernelCompiler none("libno_such_library.so"); });
  EXPECT_THAT(missing, HasSubstr("cannot load libno_such_library.so"));
  EXPECT_THAT(missing, HasSubstr("\nLibTorch needs all the CUDA wheels"));
  const auto other = error_text<KernelsUnavailable>(
      [] { const KernelCompiler none("libm.so.6"); });
  EXPECT_THAT(other, HasSubstr("libm.so.6 lacks NVRTC's function"));
}

}  // namespace echelon::kernel_compiler_test
