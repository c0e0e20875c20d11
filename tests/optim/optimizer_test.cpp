#include "echelon/optim/optimizer.h"

#include <gmock/gmock.h>

#include <cmath>

#include "echelon/optim/clip.h"
#include "tests/support/error_text.h"

namespace echelon::optimizer_test {

using testing::HasSubstr;

OptimizerOptions named(OptimizerKind name) {
  OptimizerOptions options;
  options.name = name;
  options.learning_rate = 0.1;
  return options;
}

torch::Tensor leaf(torch::Tensor values) {
  return values.clone().set_requires_grad(true);
}

void set_gradient(torch::Tensor& parameter, const torch::Tensor& gradient) {
  parameter.mutable_grad() = gradient.clone();
}

TEST(Optimizer, BiasesAndNormsAreNotDecayed) {
  auto options = named(OptimizerKind::sgd);
  options.weight_decay = 0.5;
  auto weight = leaf(torch::ones({2, 2}));
  auto bias = leaf(torch::ones({2}));
  const auto optimizer =
      make_optimizer(options, NamedTensors{{"weight", weight}, {"bias", bias}});
  set_gradient(weight, torch::zeros({2, 2}));
  set_gradient(bias, torch::zeros({2}));
  optimizer->step();
  EXPECT_NEAR(weight[0][0].item<float>(), 0.95, 1e-7);
  EXPECT_EQ(bias[0].item<float>(), 1.0f);
}

TEST(Optimizer, GroupsHaveTheirOwnRates) {
  auto a = leaf(torch::zeros({1}, torch::kFloat64));
  auto b = leaf(torch::zeros({1}, torch::kFloat64));
  const auto optimizer = make_optimizer(
      named(OptimizerKind::sgd),
      std::vector<ParameterGroup>{
          {.parameters = {{"a", a}}},
          {.parameters = {{"b", b}}, .learning_rate_factor = 10.0}});
  set_gradient(a, torch::ones({1}, torch::kFloat64));
  set_gradient(b, torch::ones({1}, torch::kFloat64));
  optimizer->set_learning_rate(0.01);
  optimizer->step();
  EXPECT_DOUBLE_EQ(a.item<double>(), -0.01);
  EXPECT_DOUBLE_EQ(b.item<double>(), -0.1);
}

TEST(Optimizer, AParameterWithoutGradientDoesNotChange) {
  for (const auto name :
       {OptimizerKind::sgd, OptimizerKind::adam, OptimizerKind::adamw}) {
    auto options = named(name);
    options.momentum = 0.9;
    options.weight_decay = 0.1;
    auto used = leaf(torch::ones({3, 3}));
    auto unused = leaf(torch::ones({3, 3}));
    const auto optimizer = make_optimizer(
        options, NamedTensors{{"used", used}, {"unused", unused}});
    set_gradient(used, torch::ones({3, 3}));
    optimizer->step();
    EXPECT_TRUE((unused == 1).all().item<bool>()) << to_string(name);
    EXPECT_TRUE((used != 1).all().item<bool>()) << to_string(name);
    for (const auto& [key, tensor] : optimizer->state()) {
      EXPECT_EQ(key.starts_with("unused"), (tensor == 0).all().item<bool>())
          << key;
    }
  }
}

TEST(Optimizer, GradientsAreFreedOrZeroedInPlace) {
  auto p = leaf(torch::ones({4}));
  const auto optimizer =
      make_optimizer(named(OptimizerKind::sgd), NamedTensors{{"p", p}});
  auto bucket = torch::ones({10});
  p.mutable_grad() = bucket.narrow(0, 3, 4);
  optimizer->zero_grad(ZeroGrad::in_place);
  EXPECT_TRUE(p.grad().defined());
  EXPECT_EQ(p.grad().data_ptr(), bucket.narrow(0, 3, 4).data_ptr());
  EXPECT_EQ(bucket.sum().item<float>(), 6.0f);
  optimizer->zero_grad();
  EXPECT_FALSE(p.grad().defined());
}

// The kernels walk over raw memory.
TEST(Optimizer, MemoryOrderDoesNotMatter) {
  for (const auto name :
       {OptimizerKind::sgd, OptimizerKind::adam, OptimizerKind::adamw}) {
    auto options = named(name);
    options.momentum = 0.9;
    const auto values = torch::rand({3, 4, 5, 6}, torch::kFloat64);
    const auto gradient = torch::rand({3, 4, 5, 6}, torch::kFloat64);
    auto plain = leaf(values);
    auto last = values.contiguous(at::MemoryFormat::ChannelsLast)
                    .set_requires_grad(true);
    auto mixed = leaf(values);
    const auto optimizer = make_optimizer(
        options,
        NamedTensors{{"plain", plain}, {"last", last}, {"mixed", mixed}});
    for (int step = 0; step < 3; ++step) {
      set_gradient(plain, gradient);
      set_gradient(last, gradient.contiguous(at::MemoryFormat::ChannelsLast));
      set_gradient(mixed, gradient.contiguous(at::MemoryFormat::ChannelsLast));
      optimizer->step();
    }
    EXPECT_TRUE(plain.equal(last)) << to_string(name);
    EXPECT_TRUE(plain.equal(mixed)) << to_string(name);
  }
}

// 67 elements: full vectors and a remainder.
TEST(Optimizer, Bfloat16ParametersAreUpdatedThroughout) {
  for (const auto name :
       {OptimizerKind::sgd, OptimizerKind::adam, OptimizerKind::adamw}) {
    for (bool nesterov : {false, true}) {
      auto options = named(name);
      options.momentum = 0.9;
      options.nesterov = nesterov;
      options.weight_decay = 0.1;
      const auto start = torch::rand({1, 67}, torch::kFloat64).add(1);
      auto exact = leaf(start);
      auto rough = leaf(start.to(torch::kBFloat16));
      const auto optimizer = make_optimizer(
          options, NamedTensors{{"exact", exact}, {"rough", rough}});
      for (int step = 0; step < 3; ++step) {
        set_gradient(exact, torch::ones({1, 67}, torch::kFloat64));
        set_gradient(rough, torch::ones({1, 67}, torch::kBFloat16));
        optimizer->step();
      }
      const auto difference = (rough.to(torch::kFloat64) - exact).abs().max();
      EXPECT_LT(difference.item<double>(), 0.03) << to_string(name);
      EXPECT_GT((exact - start).abs().min().item<double>(), 0.2);
    }
  }
}

TEST(Optimizer, StateIsNamedAndLoadsBack) {
  auto options = named(OptimizerKind::adamw);
  const auto values = torch::rand({3, 2}, torch::kFloat64);
  auto run = [&](auto& p, auto& optimizer, int steps) {
    for (int step = 0; step < steps; ++step) {
      set_gradient(p, p.detach() + 1);
      optimizer->step();
    }
  };
  auto whole = leaf(values);
  auto optimizer = make_optimizer(options, NamedTensors{{"p", whole}});
  run(whole, optimizer, 2);
  NamedTensors saved;
  for (const auto& [name, tensor] : optimizer->state()) {
    saved.emplace_back(name, tensor.clone());
  }
  auto resumed = leaf(whole.detach());
  run(whole, optimizer, 3);
  auto second = make_optimizer(options, NamedTensors{{"p", resumed}});
  second->load_state(saved);
  run(resumed, second, 3);
  EXPECT_TRUE(whole.equal(resumed));
  EXPECT_EQ(saved[0].first, "p/exp_avg");
  EXPECT_EQ(saved[2].first, "p/step");
  EXPECT_EQ(saved[2].second.item<float>(), 2.0f);

  saved[0].second = torch::zeros({4});
  saved[1].first = "q/exp_avg_sq";
  const auto before = second->state()[2].second.clone();
  saved[2].second.fill_(77);
  const auto text =
      error_text<CheckpointError>([&] { second->load_state(saved); });
  EXPECT_THAT(text, HasSubstr("p/exp_avg: shape [4], here [3, 2]"));
  EXPECT_THAT(text, HasSubstr("p/exp_avg_sq: missing"));
  EXPECT_THAT(text, HasSubstr("q/exp_avg_sq: not part of"));
  EXPECT_TRUE(before.equal(second->state()[2].second));
}

TEST(Optimizer, TiedParametersAreUpdatedOnce) {
  auto module = std::make_shared<torch::nn::Module>();
  auto a = module->register_module("a", torch::nn::Linear(2, 2));
  module->register_module("b", a);
  {
    const torch::NoGradGuard no_grad;
    a->weight.fill_(1);
  }
  const auto optimizer = make_optimizer(named(OptimizerKind::sgd), *module);
  EXPECT_EQ(optimizer->parameters().size(), 2u);
  set_gradient(a->weight, torch::ones({2, 2}));
  optimizer->step();
  EXPECT_NEAR(a->weight[0][0].item<float>(), 0.9, 1e-6);
}

TEST(Optimizer, RefusesWhatItCannotUpdate) {
  auto p = leaf(torch::ones({4, 4}));
  const std::pair<NamedTensors, const char*> lists[] = {
      {{{"a", p}, {"b", p}}, "\"b\" is the same tensor as \"a\""},
      {{{"a", p}, {"a", leaf(p.detach())}}, "\"a\" is listed twice"},
      {{{"a", p.detach().t().narrow(0, 0, 2)}}, "fills its memory"},
      {{{"a", torch::ones({2}, torch::kInt64)}}, "floating-point"},
      {{{"a", p * 2}}, "leaf"}};
  for (const auto& [list, message] : lists) {
    EXPECT_THAT(
        error_text<ConfigError>(
            [&] { make_optimizer(named(OptimizerKind::sgd), list); }),
        HasSubstr(message));
  }
  auto nesterov = named(OptimizerKind::sgd);
  nesterov.nesterov = true;
  auto beta = named(OptimizerKind::adam);
  beta.beta2 = 1.0;
  const std::pair<OptimizerOptions, const char*> settings[] = {
      {nesterov, "nesterov=true needs momentum"},
      {beta, "beta2=1 must be in [0, 1)"}};
  for (const auto& [options, message] : settings) {
    EXPECT_THAT(
        error_text<ConfigError>(
            [&] { make_optimizer(options, NamedTensors{}); }),
        HasSubstr(message));
  }
  auto sparse =
      make_optimizer(named(OptimizerKind::sgd), NamedTensors{{"a", p}});
  p.mutable_grad() = torch::ones({4, 4}).to_sparse();
  EXPECT_THAT(
      error_text<ConfigError>([&] { sparse->step(); }),
      HasSubstr("sparse gradient"));
}

TEST(Optimizer, NothingToUpdateIsFine) {
  auto p = leaf(torch::ones({0, 3}));
  const auto optimizer =
      make_optimizer(named(OptimizerKind::adamw), NamedTensors{{"p", p}});
  set_gradient(p, torch::ones({0, 3}));
  optimizer->step();
  make_optimizer(named(OptimizerKind::sgd), NamedTensors{})->step();
}

// As a pass over the gradients before the step, whether or not there was one.
TEST(Optimizer, AFactorMultipliesTheGradients) {
  for (const auto name :
       {OptimizerKind::sgd, OptimizerKind::adam, OptimizerKind::adamw}) {
    for (const auto dtype :
         {torch::kFloat64, torch::kFloat32, torch::kBFloat16, torch::kHalf}) {
      auto options = named(name);
      options.momentum = 0.9;
      auto whole = leaf(torch::ones({9}, dtype));
      auto scaled = leaf(torch::ones({9}, dtype));
      const auto first =
          make_optimizer(options, NamedTensors{{"whole", whole}});
      const auto second =
          make_optimizer(options, NamedTensors{{"scaled", scaled}});
      const auto gradient = torch::arange(9).to(dtype);
      // 16 bits have few digits for the second factor, but not for what it
      // leaves of a gradient.
      const auto step = [&](auto& optimizer, double factor) {
        optimizer->step({}, torch::full({}, factor, torch::kFloat64));
      };
      set_gradient(whole, gradient);
      set_gradient(scaled, gradient * 0x1p12);
      step(first, 0.7 * 0x1p-5);
      step(second, 0.7 * 0x1p-17);
      EXPECT_TRUE(whole.equal(scaled)) << to_string(name) << dtype;
      const auto moved = first->state()[0].second;
      EXPECT_TRUE(moved.equal(second->state()[0].second));
      const double share = name == OptimizerKind::sgd ? 1 : 0.1;
      EXPECT_NEAR(
          moved[8].item<double>(), share * 8 * 0.7 * 0x1p-5,
          dtype == torch::kBFloat16 ? 1e-3 : 1e-4);
      // A factor of 1 is none, and a skipped step does not look at it.
      set_gradient(whole, gradient);
      set_gradient(scaled, gradient);
      step(first, 1);
      second->step();
      EXPECT_TRUE(whole.equal(scaled)) << to_string(name) << dtype;
      second->step(torch::ones({}), torch::full({}, NAN, torch::kFloat64));
      EXPECT_TRUE(whole.equal(scaled)) << to_string(name) << dtype;
    }
  }
}

TEST(Clip, ScalesToTheNorm) {
  auto a = leaf(torch::zeros({3}, torch::kFloat64));
  auto b = leaf(torch::zeros({3}, torch::kFloat32));
  auto unused = leaf(torch::zeros({5}));
  set_gradient(a, torch::full({3}, 2.0, torch::kFloat64));
  set_gradient(b, torch::tensor({2.0, 0.0, 0.0}, torch::kFloat32));
  EXPECT_DOUBLE_EQ(gradient_norm({a, b, unused}), 4.0);
  EXPECT_DOUBLE_EQ(clip_gradients({a, b, unused}, 8.0), 4.0);
  EXPECT_EQ(a.grad()[0].item<double>(), 2.0);
  EXPECT_DOUBLE_EQ(clip_gradients({a, b, unused}, 1.0), 4.0);
  EXPECT_DOUBLE_EQ(a.grad()[0].item<double>(), 2.0 / (4.0 + 1e-6));
  EXPECT_NEAR(gradient_norm({a, b, unused}), 1.0, 1e-6);
  EXPECT_EQ(gradient_norm({}), 0.0);
  EXPECT_THROW(clip_gradients({a}, 0.0), ConfigError);
}

TEST(Clip, ItsFactorIsForTheOptimizer) {
  const auto factor = [](double norm, double most) {
    return clip_factor(torch::full({}, norm, torch::kFloat64), most)
        .item<double>();
  };
  EXPECT_DOUBLE_EQ(factor(4, 1), 1 / (4 + 1e-6));
  EXPECT_EQ(factor(4, 8), 1);
  EXPECT_EQ(factor(0, 8), 1);
  EXPECT_EQ(factor(INFINITY, 1), 1);
  EXPECT_EQ(factor(NAN, 1), 1);
  EXPECT_THROW(factor(4, 0), ConfigError);
}

TEST(Clip, SumsOverRanksBeforeTheRoot) {
  auto a = leaf(torch::zeros({1}));
  set_gradient(a, torch::full({1}, 3.0));
  int calls = 0;
  PartitionedGradients shared;
  shared.counted = {a.grad()};
  shared.sum = [&](torch::Tensor& squared) {
    ++calls;
    EXPECT_EQ(squared.scalar_type(), torch::kFloat64);
    squared += 16.0;  // the other rank's part
  };
  const double norm = clip_gradients({a}, 1.0, &shared);
  EXPECT_EQ(calls, 1);
  EXPECT_DOUBLE_EQ(norm, 5.0);
  EXPECT_NEAR(a.grad().item<float>(), 0.6, 1e-6);
}

TEST(Clip, CountsItsPartAndScalesAll) {
  auto a = leaf(torch::zeros({4}));
  auto copy = leaf(torch::zeros({2}));
  set_gradient(a, torch::tensor({3.0f, 4.0f, 100.0f, 100.0f}));
  set_gradient(copy, torch::tensor({7.0f, 7.0f}));
  const PartitionedGradients shared{.counted = {a.grad().narrow(0, 0, 2)}};
  EXPECT_DOUBLE_EQ(gradient_norm({a, copy}, &shared), 5.0);
  EXPECT_DOUBLE_EQ(clip_gradients({a, copy}, 2.5, &shared), 5.0);
  EXPECT_NEAR(a.grad()[3].item<float>(), 50.0f, 1e-4f);
  EXPECT_NEAR(copy.grad()[0].item<float>(), 3.5f, 1e-5f);
  // A rank that counts nothing takes part as well.
  const PartitionedGradients none{
      .sum = [](torch::Tensor& squared) { squared += 9.0; }};
  EXPECT_DOUBLE_EQ(gradient_norm({a}, &none), 3.0);
}

TEST(Clip, DoesNotScaleNonFiniteGradients) {
  auto a = leaf(torch::zeros({2}));
  set_gradient(a, torch::tensor({3.0f, INFINITY}));
  EXPECT_TRUE(std::isinf(clip_gradients({a}, 1.0)));
  EXPECT_EQ(a.grad()[0].item<float>(), 3.0f);
  set_gradient(a, torch::tensor({3.0f, NAN}));
  EXPECT_TRUE(std::isnan(clip_gradients({a}, 1.0)));
  EXPECT_EQ(a.grad()[0].item<float>(), 3.0f);
}

}  // namespace echelon::optimizer_test
