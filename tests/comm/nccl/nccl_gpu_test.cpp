#include "echelon/comm/nccl/nccl_backend.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <functional>
#include <string>
#include <vector>

#include "echelon/error.h"
#include "tests/support/error_text.h"

namespace echelon::nccl_gpu_test {

using std::chrono::seconds;
using testing::HasSubstr;

c10::intrusive_ptr<c10d::Backend> make_alone(int device_index) {
  return make_nccl_backend(
      c10::make_intrusive<c10d::HashStore>(), 0, 1, seconds(60),
      torch::Device(torch::kCUDA, static_cast<c10::DeviceIndex>(device_index)));
}

class Gpu : public testing::Test {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) GTEST_SKIP() << "this machine has no GPU";
    load_accelerator(DeviceKind::cuda);
  }
};

TEST_F(Gpu, DriverAndLibTorchCountTheSameDevices) {
  EXPECT_EQ(
      static_cast<size_t>(cuda_device_count()), torch::cuda::device_count());
}

TEST_F(Gpu, DeviceThatDoesNotExistIsRefused) {
  const int count = cuda_device_count();
  EXPECT_THAT(
      error_text<ConfigError>([&] { make_alone(count); }),
      HasSubstr("cuda:" + std::to_string(count) + " does not exist"));
  EXPECT_THAT(
      error_text<ConfigError>([] { make_alone(-1); }),
      HasSubstr("cuda does not exist"));
}

TEST_F(Gpu, OneRankCommunicatesAlone) {
  auto backend = make_alone(0);
  set_current_device(torch::Device(torch::kCUDA, 0));
  std::vector<at::Tensor> tensors{torch::arange(5, torch::kCUDA)};
  backend->allreduce(tensors)->wait();
  backend->barrier()->wait();
  synchronize_current_stream(torch::kCUDA);
  EXPECT_TRUE(tensors[0].cpu().equal(torch::arange(5)));
  backend->shutdown();
}

}  // namespace echelon::nccl_gpu_test
