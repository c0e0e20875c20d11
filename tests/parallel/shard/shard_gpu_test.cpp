// Sharded data parallelism with ranks, as processes, that share one GPU,
// against one rank on the CPU, in float64: every stage, hybrid, offload,
// accumulation. Registered buffers need NCCL.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "echelon/parallel/shard/fully_sharded.h"
#include "tests/parallel/shard/training.h"
#include "tests/support/gpu.h"
#include "tests/support/process_ranks.h"

namespace echelon::shard_gpu_test {

using namespace sharding_test;
using testing_support::is_rank;
using testing_support::kRunByOthers;

struct Case {
  std::string name;
  Plan plan;
};

// Covers what differs on a GPU: streams, pinned memory, copies.
std::vector<Case> cases(int ranks) {
  std::vector<Case> all;
  for (const int stage : {1, 2, 3}) {
    const auto add = [&](const std::string& name) -> Plan& {
      all.push_back(
          {"stage " + std::to_string(stage) + ", " + name, with_stage(stage)});
      return all.back().plan;
    };
    add("mlp").optimizer = OptimizerKind::adamw;
    add("convolutions").list = nets::conv();
    auto& tied = add("tied, evaluated");
    tied.list = nets::tied();
    tied.evaluate = true;
    add("accumulation").microbatches = 3;
    auto& whole = add("accumulation, kept whole");
    whole.microbatches = 3;
    whole.keep_unsharded = true;
    auto& optimizer = add("optimizer on the host");
    optimizer.options.offload_optimizer = true;
    optimizer.optimizer = OptimizerKind::adamw;
    auto& shards = add("shards on the host");
    shards.options.offload_shards = true;
    shards.microbatches = 2;
    add("gathered once").options.unshard_once = true;
    auto& ahead = add("two gathered ahead");
    ahead.options.shard.prefetch = 2;
    ahead.list = nets::skip();
    if (ranks % 2 == 0 && ranks > 2) add("hybrid").replicate = 2;
  }
  return all;
}

class Rank : public GpuTest {
 protected:
  static void SetUpTestSuite() {
    if (!is_rank()) return;
    world_ = std::make_unique<World>(World::from_environment(
        {.backend = BackendKind::local, .timeout = std::chrono::minutes(1)}));
  }
  static void TearDownTestSuite() { world_.reset(); }
  void SetUp() override {
    if (!is_rank()) GTEST_SKIP() << kRunByOthers;
    GpuTest::SetUp();
  }
  static std::unique_ptr<World> world_;
};
std::unique_ptr<World> Rank::world_;

TEST_F(Rank, MatchesTheCpu) {
  for (auto& [name, plan] : cases(world_->size())) {
    SCOPED_TRACE(name);
    const auto expected = on_one_device(plan);
    plan.device = test_gpu();
    expect_parity_on(*world_, plan, expected, 1e-9);
  }
}

// Master copies in float64, the rest in float32.
TEST_F(Rank, LowPrecisionFollowsTheCpu) {
  for (const int stage : {1, 2, 3}) {
    for (const bool offload : {false, true}) {
      SCOPED_TRACE("stage " + std::to_string(stage));
      Plan plan = with_stage(stage);
      const auto expected = on_one_device(plan);
      plan.device = test_gpu();
      plan.options.compute = torch::kFloat32;
      plan.options.offload_optimizer = offload;
      plan.input = [plan](int step, int microbatch) {
        Plan plain = plan;
        plain.input = [](int, int) { return Tensor(); };
        return rows_of(plain, step, microbatch).to(torch::kFloat32);
      };
      expect_parity_on(*world_, plan, expected, 1e-4);
    }
  }
}

// ------------------------------------------------------------- any module

constexpr int64_t kRows = 8;

std::shared_ptr<torch::nn::SequentialImpl> make_module() {
  torch::nn::Sequential module(
      torch::nn::Linear(6, 16), torch::nn::GELU(),
      torch::nn::LayerNorm(torch::nn::LayerNormOptions({16})),
      torch::nn::Linear(16, 9), torch::nn::Tanh(), torch::nn::Linear(9, 1));
  parity::give_values(*module, 7);
  return module.ptr();
}

// Three steps of SGD; `loss_of` computes, `update` ends a step.
void train_module(
    std::vector<Tensor> parameters,
    const std::function<Tensor(const Tensor& x)>& loss_of,
    const std::function<void()>& update) {
  torch::optim::SGD optimizer(
      std::move(parameters), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (uint64_t step = 0; step < 3; ++step) {
    loss_of(parity::random({kRows, 6}, step)).backward();
    optimizer.step();
    optimizer.zero_grad();
    update();
  }
}

parity::NamedTensors values_of(const torch::nn::Module& module) {
  parity::NamedTensors values;
  for (const auto& item : module.named_parameters()) {
    values[item.key()] = item.value().detach().cpu();
  }
  return values;
}

void expect_module_matches_the_cpu(
    World& world, torch::Device device, bool registered_buffers) {
  const auto alone = make_module();
  train_module(
      alone->parameters(),
      [&](const Tensor& x) { return alone->forward(x).square().mean(); },
      [] {});
  for (const int stage : {1, 2, 3}) {
    SCOPED_TRACE("stage " + std::to_string(stage));
    const auto module = make_module();
    module->to(device);
    FullyShardedOptions options{.shard = world.group(), .units = {"0", "3"}};
    options.sharding.shard.stage = stage;
    options.sharding.shard.registered_buffers = registered_buffers;
    FullyShardedDataParallel<torch::nn::SequentialImpl> sharded(
        module, options);
    const int64_t rows = kRows / world.size();
    train_module(
        sharded.parameters(),
        [&](const Tensor& x) {
          const Tensor own = x.narrow(0, world.rank() * rows, rows);
          return sharded(own.to(device)).square().mean();
        },
        [&] { sharded.after_update(); });
    const auto gathered = sharded.units().unshard();
    parity::expect_same(
        "parameter", values_of(*alone), values_of(*module), 1e-9);
  }
}

TEST_F(Rank, AnyModuleMatchesTheCpu) {
  expect_module_matches_the_cpu(*world_, test_gpu(), false);
}

/// A rank of a job over NCCL.
class NcclRank : public GpuTest {
 protected:
  void SetUp() override {
    if (!is_rank()) GTEST_SKIP() << kRunByOthers;
    if (!test_gpu().is_cuda()) GTEST_SKIP() << "NCCL is for GPUs";
    GpuTest::SetUp();
  }
};

// Where the GPU has no multicast, with ordinary buffers.
TEST_F(NcclRank, RegisteredBuffersMatchTheCpu) {
  World world = World::from_environment(
      {.device = DeviceKind::cuda, .timeout = std::chrono::minutes(1)});
  std::printf(
      "why not registered: \"%s\"\n",
      world.group().why_not_registered().c_str());
  expect_module_matches_the_cpu(world, world.device(), true);
}

class ShardGpu : public GpuTest {};

// NCCL takes two ranks on one GPU for ranks of two hosts.
TEST_F(ShardGpu, RegisteredBuffersOverNccl) {
  if (!test_gpu().is_cuda()) GTEST_SKIP() << "NCCL is for GPUs";
  const bool one = cuda_device_count() < 2;
  (one ? testing_support::run_as_hosts : testing_support::run_as_ranks)(
      2, "NcclRank.*", 1, {});
}

TEST_F(ShardGpu, TwoRanksShareTheGpu) {
  testing_support::run_as_ranks(2, "Rank.*", 3);
}

TEST_F(ShardGpu, FourRanksShareTheGpu) {
  testing_support::run_as_ranks(4, "Rank.*", 3);
}

// Nothing is sharded: tests low precision and offload alone.
TEST_F(ShardGpu, OneRank) {
  testing_support::run_as_ranks(1, "Rank.*", 3);
}

}  // namespace echelon::shard_gpu_test
