#include "echelon/comm/nccl/nccl_backend.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "echelon/error.h"

namespace echelon {
namespace {

using testing::HasSubstr;
using std::chrono::seconds;

c10::intrusive_ptr<c10d::Backend> make_alone(int device_index) {
  return make_nccl_backend(
      c10::make_intrusive<c10d::HashStore>(), 0, 1, seconds(60), device_index);
}

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no ConfigError";
}

class Gpu : public testing::Test {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) {
      GTEST_SKIP() << "this machine has no GPU";
    }
    load_cuda();
  }
};

TEST_F(Gpu, DriverAndLibTorchCountTheSameDevices) {
  EXPECT_EQ(
      static_cast<size_t>(cuda_device_count()), torch::cuda::device_count());
}

TEST_F(Gpu, DeviceThatDoesNotExistIsRefused) {
  const int count = cuda_device_count();
  EXPECT_THAT(
      message_of([&] { make_alone(count); }),
      HasSubstr("cuda:" + std::to_string(count) + " does not exist"));
  EXPECT_THAT(message_of([] { make_alone(-1); }), HasSubstr("cuda:-1"));
}

TEST_F(Gpu, OneRankReducesAndMeetsItself) {
  auto backend = make_alone(0);
  set_cuda_device(0);
  std::vector<at::Tensor> tensors{torch::arange(5, torch::kCUDA)};
  backend->allreduce(tensors)->wait();
  backend->barrier()->wait();
  synchronize_cuda_stream();
  EXPECT_TRUE(tensors[0].cpu().equal(torch::arange(5)));
}

// One thread and one GPU per rank: sums, gathers and slices across all of them.
TEST_F(Gpu, AllGpusReduceGatherAndScatter) {
  const int size = cuda_device_count();
  if (size < 2) {
    GTEST_SKIP() << "this machine has one GPU";
  }
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::exception_ptr> errors(size);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.emplace_back([&, rank] {
      try {
        set_cuda_device(rank);
        auto backend =
            make_nccl_backend(store, rank, size, seconds(60), rank);
        const auto device = torch::Device(torch::kCUDA, rank);
        std::vector<at::Tensor> sum{torch::full({3}, rank + 1.0, device)};
        backend->allreduce(sum)->wait();
        auto own = torch::full({2}, double(rank), device);
        auto all = torch::empty({2 * size}, device);
        backend->_allgather_base(all, own)->wait();
        auto slice = torch::empty({2}, device);
        backend->_reduce_scatter_base(slice, all)->wait();
        synchronize_cuda_stream();
        EXPECT_TRUE(sum[0].cpu().equal(
            torch::full({3}, size * (size + 1) / 2.0)));
        EXPECT_EQ(all[2 * (size - 1)].item<double>(), size - 1.0);
        EXPECT_EQ(slice[0].item<double>(), double(size) * rank);
      } catch (...) {
        errors[rank] = std::current_exception();
      }
    });
  }
  for (auto& rank : ranks) {
    rank.join();
  }
  for (const auto& error : errors) {
    if (error) {
      std::rethrow_exception(error);
    }
  }
}

}  // namespace
}  // namespace echelon
