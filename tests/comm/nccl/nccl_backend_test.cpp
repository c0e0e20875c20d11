#include "echelon/comm/nccl/nccl_backend.h"

#include <gmock/gmock.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <functional>
#include <string>
#include <vector>

#include "echelon/error.h"
#include "tests/support/error_text.h"

namespace echelon::nccl_backend_test {

using std::chrono::seconds;
using testing::HasSubstr;

c10::intrusive_ptr<c10d::Backend> make_alone(int device_index) {
  return make_nccl_backend(
      c10::make_intrusive<c10d::HashStore>(), 0, 1, seconds(60),
      torch::Device(torch::kCUDA, static_cast<c10::DeviceIndex>(device_index)));
}

TEST(WithoutGpu, EveryCallSaysWhyAndWhatToUse) {
  if (cuda_device_count() > 0) GTEST_SKIP() << "this machine has a GPU";
  for (const auto& call : std::vector<std::function<void()>>{
           [] { make_alone(0); },
           [] { set_current_device(torch::Device(torch::kCUDA, 0)); },
           [] { synchronize_current_stream(torch::kCUDA); },
           [] { load_accelerator(DeviceKind::cuda); }}) {
    const auto message = error_text<ConfigError>(call);
    EXPECT_THAT(
        message, HasSubstr("backend nccl: the CUDA driver reports no GPU"));
    EXPECT_THAT(message, HasSubstr("use backend \"local\""));
  }
}

}  // namespace echelon::nccl_backend_test
