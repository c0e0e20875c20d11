// Steps whose gradients are completed by several backward passes.
#include <gmock/gmock.h>

#include "echelon/error.h"
#include "tests/parallel/data/training.h"
#include "tests/support/error_text.h"

namespace echelon::reduction_round_test {

using nets::Mlp;
using testing::HasSubstr;
using torch::Tensor;
using training::Plan;

std::vector<Tensor> parameters_of(const torch::nn::Module& module) {
  return module.parameters();
}

// Gradients of fc3 in one pass, of the rest in another.
void backward_in_two(const Tensor& loss, Mlp& net) {
  torch::autograd::backward(
      {loss}, {}, /*retain_graph=*/true, /*create_graph=*/false,
      parameters_of(*net->fc3));
  auto others = parameters_of(*net->fc1);
  for (const auto& one : parameters_of(*net->fc2)) others.push_back(one);
  torch::autograd::backward({loss}, {}, false, false, others);
}

class Round : public testing::TestWithParam<Ranks> {};
INSTANTIATE_TEST_SUITE_P(
    Ranks, Round, testing::ValuesIn(ranks_of({1, 2, 3, 4})),
    testing::PrintToStringParamName());

TEST_P(Round, SeveralPassesEqualOneDevice) {
  Plan plan;
  plan.microbatches = 3;
  const auto expected =
      training::on_one_device(training::with_values(Mlp(), 3), plan);
  GetParam().run([&](World& world) {
    auto net = training::with_values(Mlp(), 3);
    DistributedDataParallel<Mlp> ddp(net, world.group(), plan.options);
    auto optimizer = training::optimizer_of(*net);
    parity::Record record;
    const int64_t own =
        training::shares_of(plan, world.size())[world.group().rank()];
    for (int step = 0; step < plan.steps; ++step) {
      training::zero(optimizer, plan);
      Tensor loss = torch::zeros({1}, torch::kFloat64);
      const auto guard = ddp.no_sync();
      for (int m = 0; m < plan.microbatches; ++m) {
        const auto [x, y] = training::own_part(
            training::batch_of(plan, step, m), plan, world.group());
        const auto mean = ddp.global_mean(
            training::loss_sum(ddp(x), y), own * plan.microbatches);
        if (m + 1 == plan.microbatches) ddp.begin_reduction();
        backward_in_two(mean, net);
        loss += mean.detach();
      }
      ddp.finish_reduction();
      if (world.size() > 1)
        world.group().all_reduce(loss, ReduceOp::avg).wait();
      record.step(*net, loss.item<double>());
      optimizer.step();
    }
    record.end(*net);
    parity::expect_parity(expected, record, parity::kRounding);
  });
}

TEST(ReductionRound, AMissingGradientIsAnErrorAtItsEnd) {
  training::with_ddp<Mlp>(
      2, Plan().options, [](World& world, Mlp& net, auto& ddp) {
        const auto guard = ddp.no_sync();
        ddp.begin_reduction();
        const auto loss = ddp(parity::random({2, 6}, 1)).sum();
        torch::autograd::backward(
            {loss}, {}, false, false, parameters_of(*net->fc3));
        EXPECT_THAT(
            error_text<ConfigError>([&] { ddp.finish_reduction(); }),
            HasSubstr("4 of 6 parameters got no gradient"));
      });
}

TEST(ReductionRound, AGradientThatComesTwiceIsAnError) {
  training::with_ddp<Mlp>(
      2, Plan().options, [](World& world, Mlp& net, auto& ddp) {
        const auto guard = ddp.no_sync();
        const Tensor x = parity::random({2, 6}, 1);
        ddp.begin_reduction();
        ddp(x).sum().backward();
        EXPECT_THROW(ddp(x).sum().backward(), ConfigError);
      });
}

TEST(ReductionRound, TheNextStepIsAnOrdinaryOne) {
  training::with_ddp<Mlp>(
      2, Plan().options, [](World& world, Mlp& net, auto& ddp) {
        const Tensor x = parity::random({2, 6}, world.rank());
        ddp.begin_reduction();
        ddp(x).sum().backward();
        ddp.finish_reduction();
        const Tensor first = net->fc1->weight.grad().clone();
        net->zero_grad();
        ddp(x).sum().backward();
        EXPECT_TRUE(first.equal(net->fc1->weight.grad()));
      });
}

}  // namespace echelon::reduction_round_test
