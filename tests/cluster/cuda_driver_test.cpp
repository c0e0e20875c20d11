#include "echelon/cluster/cuda_driver.h"

#include <gmock/gmock.h>

#include <cstdlib>
#include <initializer_list>
#include <utility>

#include "tests/support/places.h"

namespace echelon::cluster::cuda_driver_test {

using testing::HasSubstr;

class CudaDriver : public testing::Test {
 protected:
  static CudaFindings
  ask(std::initializer_list<std::pair<const char*, const char*>> variables) {
    for (const auto& [name, value] : variables) ::setenv(name, value, 1);
    const auto found = ask_cuda(test_program("fake_cuda/libcuda.so.1").c_str());
    for (const auto& [name, value] : variables) ::unsetenv(name);
    return found;
  }
  static std::string why(const CudaFindings& found, GpuSigns signs = {}) {
    return why_unusable(found, signs, 13);
  }
};

TEST_F(CudaDriver, TellsVisibleGpusByTheirUuids) {
  const auto found = ask({{"FAKE_CUDA_GPUS", "ab"}});
  EXPECT_EQ(found.version, 13000);
  ASSERT_EQ(found.gpus.size(), 2u);
  EXPECT_EQ(found.gpus[0], "61616161616161616161616161616161");
  EXPECT_NE(found.gpus[0], found.gpus[1]);
  EXPECT_EQ(why(found), "");
}

TEST_F(CudaDriver, TellsWhetherEveryGpuHasBf16) {
  const auto with = [](const char* capabilities) {
    return ask(
        {{"FAKE_CUDA_GPUS", "ab"}, {"FAKE_CUDA_CAPABILITIES", capabilities}});
  };
  EXPECT_TRUE(has_bf16(with("9080")));
  EXPECT_FALSE(has_bf16(with("9075")));
  EXPECT_FALSE(has_bf16(with("7590")));
  EXPECT_EQ(with("9089").capability, 89);
  EXPECT_FALSE(has_bf16(ask_cuda("/nowhere/libcuda.so.1")));
}

TEST_F(CudaDriver, ThatIsAbsentMattersWhereAGpuIs) {
  const auto found = ask_cuda("/nowhere/libcuda.so.1");
  EXPECT_FALSE(found.library);
  EXPECT_EQ(why(found), "");
  EXPECT_THAT(why(found, {.device_file = true}), HasSubstr("cannot be loaded"));
  EXPECT_EQ(why(found, {.device_file = true, .visible = "-1"}), "");
}

TEST_F(CudaDriver, ThatDoesNotStartIsUnusable) {
  EXPECT_THAT(
      why(ask({{"FAKE_CUDA_INIT", "802"}})),
      HasSubstr("CUDA_ERROR_SYSTEM_NOT_READY"));
}

TEST_F(CudaDriver, ThatSeesNoGpuIsNotUnlessOneWasNamed) {
  const auto none = ask({{"FAKE_CUDA_INIT", "100"}});
  EXPECT_EQ(why(none), "");
  EXPECT_EQ(why(none, {.visible = "-1"}), "");
  EXPECT_THAT(
      why(none, {.visible = "GPU-12ab"}),
      HasSubstr("CUDA_VISIBLE_DEVICES=GPU-12ab"));
  EXPECT_THAT(
      why(ask({{"FAKE_CUDA_GPUS", ""}}), {.visible = "MIG-7"}),
      HasSubstr("CUDA_VISIBLE_DEVICES=MIG-7"));
}

TEST_F(CudaDriver, ThatIsOldOrAStubIsTold) {
  EXPECT_THAT(
      why(ask({{"FAKE_CUDA_VERSION", "12080"}})), HasSubstr("CUDA 12.8"));
  EXPECT_EQ(why(ask({{"FAKE_CUDA_VERSION", "13010"}})), "");
  EXPECT_EQ(why(ask({{"FAKE_CUDA_INIT", "34"}})), "");
}

}  // namespace echelon::cluster::cuda_driver_test
