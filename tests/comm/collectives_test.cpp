// One suite for every backend, with ranks as threads, as processes, and as
// processes with GPUs. CTest runs the three as tests of their own, by filter:
// a process is this program again, under the launcher, as `Rank`.
#include <gmock/gmock.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <tuple>

#include "echelon/comm/nccl/nccl_backend.h"
#include "tests/comm/collective_cases.h"
#include "tests/support/process_ranks.h"

namespace echelon::collectives_test {

constexpr const char* kBackend = "ECHELON_TEST_BACKEND";
constexpr const char* kDevice = "ECHELON_TEST_DEVICE";

CommOptions options_of(BackendKind backend) {
  return {.backend = backend, .timeout = std::chrono::seconds(60)};
}

BackendKind backend_of(const std::string& name) {
  if (name == "local") return BackendKind::local;
  return name == "gloo" ? BackendKind::gloo : BackendKind::nccl;
}

// ------------------------------------------------------------ ranks as threads

using ThreadsCase = std::tuple<std::string, int, CollectiveCase>;

class Threads : public testing::TestWithParam<ThreadsCase> {};

TEST_P(Threads, Pass) {
  const auto& [backend, size, test] = GetParam();
  run_ranks(
      size, [&test = test](World& world) { test.run(world, Place{}); },
      options_of(backend_of(backend)));
}

INSTANTIATE_TEST_SUITE_P(
    All, Threads,
    testing::Combine(
        testing::Values("local", "gloo"), testing::Values(1, 2, 3, 4),
        testing::ValuesIn(collective_cases())),
    [](const auto& info) {
      return std::string(std::get<2>(info.param).name) + "_" +
             std::get<0>(info.param) + "_" +
             std::to_string(std::get<1>(info.param));
    });

// ---------------------------------------------------------- ranks as processes

/// The tests of each process: all cases in one world.
class Rank : public testing::TestWithParam<CollectiveCase> {
 protected:
  static void SetUpTestSuite() {
    if (!testing_support::is_rank()) return;
    place_.device = torch::Device(std::getenv(kDevice));
    if (place_.device.is_cuda()) {
      if (!place_.device.has_index()) {
        place_.device.set_index(static_cast<c10::DeviceIndex>(
            std::atoi(std::getenv("LOCAL_RANK"))));
      }
      set_current_device(place_.device);
    }
    world_ = std::make_unique<World>(
        World::from_environment(options_of(backend_of(std::getenv(kBackend)))));
  }
  static void TearDownTestSuite() { world_.reset(); }
  void SetUp() override {
    if (!world_) GTEST_SKIP() << testing_support::kRunByOthers;
  }
  static std::unique_ptr<World> world_;
  static Place place_;
};
std::unique_ptr<World> Rank::world_;
Place Rank::place_;

TEST_P(Rank, Pass) {
  GetParam().run(*world_, place_);
}
INSTANTIATE_TEST_SUITE_P(
    All, Rank, testing::ValuesIn(collective_cases()),
    [](const auto& info) { return info.param.name; });

void run_processes(
    const std::string& backend, const std::string& device, int size,
    bool as_hosts = false) {
  const auto run =
      as_hosts ? testing_support::run_as_hosts : testing_support::run_as_ranks;
  run(size, "All/Rank.*", collective_cases().size(),
      {std::string(kBackend) + "=" + backend,
       std::string(kDevice) + "=" + device});
}

using ProcessesCase = std::tuple<std::string, int>;

std::string name_of(const testing::TestParamInfo<ProcessesCase>& info) {
  return std::get<0>(info.param) + "_" +
         std::to_string(std::get<1>(info.param));
}

class Processes : public testing::TestWithParam<ProcessesCase> {};

TEST_P(Processes, Pass) {
  const auto& [backend, size] = GetParam();
  run_processes(backend, "cpu", size);
}
INSTANTIATE_TEST_SUITE_P(
    All, Processes,
    testing::Combine(
        testing::Values("local", "gloo"), testing::Values(1, 2, 3, 4)),
    name_of);

TEST(Hosts, Pass) {
  run_processes("gloo", "cpu", 3, /*as_hosts=*/true);
}

// -------------------------------------------------------------------- on GPUs

/// nccl with a GPU per rank or, where there are fewer, with ranks that share
/// the first one as hosts of their own; local with all ranks on the first.
class Gpu : public testing::TestWithParam<ProcessesCase> {};

TEST_P(Gpu, Pass) {
  const auto& [backend, size] = GetParam();
  const int devices = cuda_device_count();
  if (devices == 0) GTEST_SKIP() << "this machine has no GPU";
  const bool nccl = backend == "nccl";
  run_processes(
      backend, nccl ? "cuda" : "cuda:0", size, nccl && devices < size);
}
INSTANTIATE_TEST_SUITE_P(
    All, Gpu,
    testing::Combine(
        testing::Values("local", "nccl"), testing::Values(1, 2, 3, 4)),
    name_of);

}  // namespace echelon::collectives_test
