// Several processes, one device: CUDA tensors on the local backend, which stages
// them through the host. The same with CPU tensors runs everywhere, so that the
// way the ranks are started is tested without a GPU.
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "echelon/comm/nccl/nccl_backend.h"
#include "echelon/comm/world.h"

namespace echelon {
namespace {

constexpr int kRanks = 3;
constexpr const char* kDevice = "ECHELON_TEST_DEVICE";

int free_port() {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  bind(listener, reinterpret_cast<sockaddr*>(&address), length);
  getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length);
  close(listener);
  return ntohs(address.sin_port);
}

/// This program again, as one rank that runs SharedDevice.DISABLED_Rank.
pid_t start_rank(int rank, int port, const std::string& device) {
  const pid_t child = fork();
  if (child != 0) {
    return child;
  }
  const auto text = [](int value) { return std::to_string(value); };
  setenv("RANK", text(rank).c_str(), 1);
  setenv("LOCAL_RANK", text(rank).c_str(), 1);
  setenv("WORLD_SIZE", text(kRanks).c_str(), 1);
  setenv("LOCAL_WORLD_SIZE", text(kRanks).c_str(), 1);
  setenv("MASTER_ADDR", "127.0.0.1", 1);
  setenv("MASTER_PORT", text(port).c_str(), 1);
  setenv(kDevice, device.c_str(), 1);
  execl(
      "/proc/self/exe",
      "rank",
      "--gtest_filter=SharedDevice.DISABLED_Rank",
      "--gtest_also_run_disabled_tests",
      nullptr);
  _exit(127);
}

void run_processes(const std::string& device) {
  const int port = free_port();
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.push_back(start_rank(rank, port, device));
  }
  for (const pid_t rank : ranks) {
    int status = -1;
    ASSERT_EQ(waitpid(rank, &status, 0), rank);
    EXPECT_EQ(status, 0) << "a rank failed; its own output is above";
  }
}

TEST(SharedDevice, ProcessesOnTheCpu) {
  run_processes("cpu");
}

TEST(SharedDevice, ProcessesOnOneGpu) {
  if (cuda_device_count() == 0) {
    GTEST_SKIP() << "this machine has no GPU";
  }
  run_processes("cuda:0");
}

// Not a test by itself: what each process does.
TEST(SharedDevice, DISABLED_Rank) {
  const char* name = std::getenv(kDevice);
  ASSERT_NE(name, nullptr);
  const torch::Device device(name);
  if (device.is_cuda()) {
    load_cuda();
  }
  auto world =
      World::from_environment({.backend = BackendKind::local,
                               .timeout = std::chrono::seconds(60)});
  const auto options = torch::dtype(torch::kFloat32).device(device);
  const int rank = world.rank();

  auto sum = torch::full({1000}, rank + 1.0, options);
  world.group().all_reduce(sum).wait();
  EXPECT_TRUE(sum.cpu().equal(torch::full({1000}, 6.0)));

  const auto own = torch::full({4}, static_cast<double>(rank), options);
  auto all = torch::empty({4 * kRanks}, options);
  world.group().all_gather(all, own).wait();
  const auto expected = torch::arange(kRanks, torch::kFloat32)
                            .repeat_interleave(4);
  EXPECT_TRUE(all.cpu().equal(expected));

  auto slice = torch::empty({4}, options);
  world.group().reduce_scatter(slice, all).wait();
  EXPECT_TRUE(slice.cpu().equal(torch::full({4}, 3.0 * rank)));

  auto value = torch::full({2}, static_cast<double>(rank), options);
  world.group().broadcast(value, 2).wait();
  EXPECT_TRUE(value.cpu().equal(torch::full({2}, 2.0)));
}

}  // namespace
}  // namespace echelon
