// The program of each process that pipeline_procs_test launches.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <csignal>

#include "echelon/error.h"
#include "tests/parallel/pipeline/schedules.h"
#include "tests/parallel/pipeline/training.h"

namespace echelon {
namespace {

void train(World& world, const char* kind) {
  const training::Plan plan{
      .steps = 3, .uneven = true, .growing = true, .evaluate = true};
  const LayerList list = nets::tied();
  const auto schedule = schedules::named(kind, world.size(), plan.microbatches);
  const auto expected = training::on_one_device(list, plan);
  const auto actual = training::on_ranks(list, plan, schedule, world.group());
  training::expect_part(
      expected, actual, schedule.rank_of_stage.back() == world.rank(),
      parity::kRounding);
}

TEST(Rank, TrainsLikeOneDevice) {
  World world = World::from_environment();
  for (const char* kind : {"1f1b", "zb-v"}) train(world, kind);
}

TEST(Rank, TrainsLikeOneDeviceOverGloo) {
  CommOptions options;
  options.backend = BackendKind::gloo;
  World world = World::from_environment(options);
  train(world, "interleaved");
}

// The middle stage is killed while it computes its third forward of the second
// step; the others wait for its outputs and gradients.
TEST(Rank, IsKilledMidStep) {
  World world = World::from_environment();
  const training::Plan plan{.steps = 2, .microbatches = 4};
  LayerList list;
  nets::add_linear(list, "fc1", 6, 8);
  int forwards = 0;
  list.add_function("fatal", [&forwards](const torch::Tensor& x) {
    if (++forwards == 4 + 3) std::raise(SIGKILL);
    return x * 1.0;
  });
  nets::add_linear(list, "head", 8, 4);
  EXPECT_THROW(
      training::on_ranks(
          list, plan, schedules::named("1f1b", 3, plan.microbatches),
          world.group()),
      CommError);
}

}  // namespace
}  // namespace echelon
