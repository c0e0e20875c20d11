// The program of each process that shard_procs_test launches.
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <csignal>
#include <cstdlib>
#include <iostream>
#include <string>

#include "echelon/error.h"
#include "tests/parallel/shard/training.h"

namespace echelon {
namespace {

using namespace sharding_test;

TEST(Rank, TrainsLikeOneDevice) {
  const char* backend = std::getenv("ECHELON_TEST_BACKEND");
  ASSERT_NE(backend, nullptr);
  World world = World::from_environment(
      {.backend = std::string(backend) == "gloo" ? BackendKind::gloo
                                                 : BackendKind::local});
  for (const int stage : {1, 2, 3}) {
    Plan plan = with_stage(stage);
    plan.list = nets::tied();
    plan.microbatches = 2;
    expect_parity_on(world, plan, on_one_device(plan), kTolerance);
  }
}

// The last rank is killed while the others wait for its part of "norm".
TEST(Rank, IsKilledInAGather) {
  World world = World::from_environment();
  Plan plan = with_stage(3);
  plan.options.shard.prefetch = 0;
  size_t layer = 0;
  plan.around = [&](Forward forward) -> Forward {
    const bool killer =
        ++layer == 6 && world.rank() == world.size() - 1;  // "norm"
    return [forward, killer](const Tensors& inputs) {
      if (killer) std::raise(SIGKILL);
      return forward(inputs);
    };
  };
  ShardedNet sharded(world, plan);
  try {
    sharded.forward({rows_of(plan, 0, 0)});
    FAIL() << "nothing was thrown";
  } catch (const CommError& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("gather norm"));
    std::cerr << "said: " << error.what() << std::endl;
    throw;
  }
}

}  // namespace
}  // namespace echelon
