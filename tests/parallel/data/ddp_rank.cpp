// The program of each process that ddp_procs_test launches.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <csignal>
#include <cstdlib>
#include <string>

#include "tests/parallel/data/training.h"

namespace echelon {
namespace {

TEST(Rank, TrainsLikeOneDevice) {
  const char* backend = std::getenv("ECHELON_TEST_BACKEND");
  ASSERT_NE(backend, nullptr);
  World world = World::from_environment(
      {.backend = std::string(backend) == "gloo" ? BackendKind::gloo
                                                 : BackendKind::local});
  EXPECT_EQ(world.backend(), backend);
  training::Plan plan;
  plan.batch = 13;
  plan.microbatches = 2;
  plan.options.find_unused_parameters = true;
  const auto expected =
      training::on_one_device(training::with_values(nets::Conv(), 3), plan);
  const auto actual = training::on_ranks(
      training::with_values(nets::Conv(), 3 + world.rank()), world.group(),
      plan);
  parity::expect_parity(expected, actual, parity::kRounding);
}

// The last rank is killed while the others wait for its gradients.
TEST(Rank, IsKilledInBackward) {
  World world = World::from_environment();
  auto net = training::with_values(nets::Mlp(), 3);
  DistributedDataParallel<nets::Mlp> ddp(net, world.group());
  torch::Tensor y = ddp(parity::random({4, 6}, world.rank()));
  if (world.rank() == world.size() - 1) std::raise(SIGKILL);
  EXPECT_ANY_THROW(y.sum().backward());
}

}  // namespace
}  // namespace echelon
