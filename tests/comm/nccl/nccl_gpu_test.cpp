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

TEST_F(Gpu, MemoryIsRegisteredWhereTheGpuHasMulticast) {
  auto backend = make_alone(0);
  set_current_device(torch::Device(torch::kCUDA, 0));
  if (!backend->supportsTensorAlloc(0)) {
    GTEST_SKIP() << "this GPU has no multicast";
  }
  backend->barrier()->wait();  // it connects
  const auto there = torch::TensorOptions().device(torch::kCUDA, 0);
  at::Tensor large = backend->allocateTensor(1 << 20, there);
  const void* const address = large.const_data_ptr();
  at::Tensor sent = torch::arange(1 << 20, there.dtype(torch::kFloat32));
  backend->_allgather_base(large, sent)->wait();
  EXPECT_TRUE(large.cpu().equal(sent.cpu()));
  at::Tensor sum = torch::zeros_like(sent);
  backend->_reduce_scatter_base(sum, large)->wait();
  EXPECT_TRUE(sum.cpu().equal(sent.cpu()));
  // Freed memory stays with the communicator.
  large = at::Tensor();
  EXPECT_NE(torch::empty_like(sent).const_data_ptr(), address);
  large = backend->allocateTensor(1 << 20, there);
  EXPECT_EQ(large.const_data_ptr(), address);
  synchronize_current_stream(torch::kCUDA);
  backend->shutdown();
  backend.reset();
  large.fill_(1);  // the tensor may be freed after the communicator
  EXPECT_EQ(large.sum().item<float>(), 1 << 20);
}

}  // namespace echelon::nccl_gpu_test
