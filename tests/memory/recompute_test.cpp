// Recompute gives the same bits and keeps less.
#include "echelon/memory/recompute.h"

#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "echelon/memory/saved_tensors.h"
#include "echelon/profiling/operator_scope.h"
#include "tests/memory/live_bytes.h"
#include "tests/support/error_text.h"
#include "tests/support/parity.h"

namespace echelon::recompute_test {

using testing::HasSubstr;
using torch::Tensor;
using Tensors = std::vector<Tensor>;

// x + W2 gelu(W1 norm(x)), with dropout from torch's generator.
struct Block {
  explicit Block(uint64_t seed, int64_t width = 16)
      : first(parity::random({width, 4 * width}, seed).requires_grad_()),
        second(parity::random({4 * width, width}, seed + 1).requires_grad_()),
        scale(parity::random({width}, seed + 2).requires_grad_()) {}

  LayerForward forward() const {
    return [*this](const Tensors& inputs) -> Tensors {
      const auto& x = inputs[0];
      ++*calls;
      const auto y = torch::layer_norm(x, {x.size(-1)}, scale);
      auto z = torch::gelu(y.matmul(first));
      if (dropout > 0) z = torch::dropout(z, dropout, true);
      return {x + z.matmul(second)};
    };
  }
  Tensors parameters() const { return {first, second, scale}; }

  Tensor first, second, scale;
  double dropout = 0;
  std::shared_ptr<int> calls = std::make_shared<int>(0);
};

std::vector<Block> blocks(size_t count, double dropout = 0) {
  std::vector<Block> all;
  for (size_t i = 0; i < count; ++i) {
    all.emplace_back(10 * i);
    all.back().dropout = dropout;
  }
  return all;
}

struct Outcome {
  Tensor output;
  Tensors gradients;  // of the input, then of all parameters
};

using Wrap = std::function<LayerForward(LayerForward)>;

Outcome run(
    const std::vector<Block>& net, const Wrap& wrap,
    const std::function<void(const Tensor&)>& backward = [](const Tensor& y) {
      y.square().sum().backward();
    }) {
  torch::manual_seed(7);
  auto x = parity::random({3, 5, 16}, 99).requires_grad_();
  Tensor y = x;
  for (const auto& block : net) y = wrap(block.forward())({y})[0];
  backward(y);
  Outcome outcome{y.detach().clone(), {x.grad()}};
  for (const auto& block : net) {
    for (auto& parameter : block.parameters()) {
      outcome.gradients.push_back(parameter.grad());
      parameter.mutable_grad().reset();
    }
  }
  return outcome;
}

LayerForward plain(LayerForward forward) {
  return forward;
}
LayerForward all(LayerForward forward) {
  return recomputed(std::move(forward), {.name = "block"});
}
LayerForward selective(LayerForward forward) {
  return recomputed(
      std::move(forward), {.keep = matmul_operators(), .name = "block"});
}

void expect_equal(const Outcome& expected, const Outcome& actual) {
  EXPECT_TRUE(expected.output.equal(actual.output));
  ASSERT_EQ(expected.gradients.size(), actual.gradients.size());
  for (size_t i = 0; i < expected.gradients.size(); ++i) {
    ASSERT_TRUE(actual.gradients[i].defined()) << i;
    EXPECT_TRUE(expected.gradients[i].equal(actual.gradients[i])) << i;
  }
}

// The gradient of `weight`, which forward uses.
Tensor gradient_of(
    const Tensor& weight, const LayerForward& layer, const Tensor& input) {
  layer({input})[0].square().sum().backward();
  auto gradient = weight.grad().clone();
  weight.mutable_grad().reset();
  return gradient;
}

struct OperatorCount : profiling::OperatorHandler {
  void run(profiling::OperatorCall& call) override {
    if (call.name() == name) ++count;
    call.run();
  }
  explicit OperatorCount(std::string name) : name(std::move(name)) {}
  std::string name;
  int count = 0;
};

class RecomputeWays : public testing::TestWithParam<const char*> {
 protected:
  static LayerForward wrap(LayerForward forward) {
    return with(std::move(forward), {.name = "block"});
  }
  static LayerForward with(LayerForward forward, RecomputeOptions options) {
    if (std::string(GetParam()) != "all") options.keep = matmul_operators();
    return recomputed(std::move(forward), std::move(options));
  }
};
INSTANTIATE_TEST_SUITE_P(
    Ways, RecomputeWays, testing::Values("all", "selective"),
    [](const auto& info) { return std::string(info.param); });

TEST_P(RecomputeWays, SameBits) {
  const auto net = blocks(4);
  expect_equal(run(net, plain), run(net, wrap));
  EXPECT_EQ(*net[0].calls, 3) << "once without, twice with";
}

TEST_P(RecomputeWays, DropoutDrawsTheSameNumbers) {
  const auto net = blocks(4, 0.3);
  const auto expected = run(net, plain);
  const auto after = torch::rand({4});
  const auto actual = run(net, wrap);
  expect_equal(expected, actual);
  EXPECT_TRUE(torch::rand({4}).equal(after))
      << "backward has left the generator as it was";
}

TEST_P(RecomputeWays, OtherGenerators) {
  auto generator = at::detail::createCPUGenerator(3);
  const auto weight = parity::random({8, 8}, 1).requires_grad_();
  const LayerForward forward = [&](const Tensors& in) -> Tensors {
    const auto x = in[0].matmul(weight);
    return {
        torch::tanh(x) * torch::bernoulli(torch::full_like(x, 0.5), generator)};
  };
  const auto gradient = [&](const LayerForward& layer) {
    generator.set_current_seed(5);
    return gradient_of(weight, layer, parity::random({4, 8}, 2));
  };
  const auto expected = gradient(forward);
  EXPECT_TRUE(
      gradient(with(forward, {.generators = {generator}})).equal(expected));
}

TEST_P(RecomputeWays, Nested) {
  const auto net = blocks(4, 0.2);
  const auto expected = run(net, plain);
  const Wrap nested = [](LayerForward forward) {
    return wrap(wrap(wrap(std::move(forward))));
  };
  expect_equal(expected, run(net, nested));
}

// Two regions of two blocks, each recomputed as a whole and block by block.
TEST_P(RecomputeWays, RegionsInRegions) {
  const auto net = blocks(4, 0.2);
  const auto expected = run(net, plain);
  torch::manual_seed(7);
  auto x = parity::random({3, 5, 16}, 99).requires_grad_();
  Tensor y = x;
  for (size_t i = 0; i < 4; i += 2) {
    const auto one = wrap(net[i].forward());
    const auto two = wrap(net[i + 1].forward());
    y = all([=](const Tensors& in) { return two(one(in)); })({y})[0];
  }
  y.square().sum().backward();
  EXPECT_TRUE(x.grad().equal(expected.gradients[0]));
  EXPECT_TRUE(net[3].scale.grad().equal(expected.gradients.back()));
}

TEST_P(RecomputeWays, RetainedGraphs) {
  const auto net = blocks(2, 0.2);
  const auto twice = [](const Tensor& y) {
    const auto loss = y.square().sum();
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
  };
  expect_equal(run(net, plain, twice), run(net, wrap, twice));
}

TEST_P(RecomputeWays, SecondDerivatives) {
  const auto net = blocks(2);
  const auto second = [&](const Tensor& y) {
    const auto first = torch::autograd::grad(
        {y.square().sum()}, net[0].parameters(), {}, true, true);
    first[0].square().sum().backward();
  };
  expect_equal(run(net, plain, second), run(net, wrap, second));
}

TEST_P(RecomputeWays, InputsWithoutGradients) {
  const auto table = parity::random({10, 6}, 1).requires_grad_();
  const auto ids = torch::tensor({1, 5, 5, 9});
  const LayerForward forward = [&](const Tensors& in) -> Tensors {
    EXPECT_TRUE(in[0].is_same(ids)) << "a tensor without history stays itself";
    return {torch::tanh(torch::embedding(table, in[0])), in[0]};
  };
  const auto expected = gradient_of(table, forward, ids);
  EXPECT_TRUE(gradient_of(table, wrap(forward), ids).equal(expected));
}

TEST_P(RecomputeWays, Autocast) {
  const auto net = blocks(2);
  for (const auto& block : net) {
    for (auto& parameter : block.parameters()) {
      parameter.set_data(parameter.detach().to(torch::kFloat32));
    }
  }
  const auto cast = [&](const Wrap& wrap) {
    auto x = parity::random({3, 5, 16}, 9).to(torch::kFloat32).requires_grad_();
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::increment_nesting();
    Tensor y = x;
    for (const auto& block : net) y = wrap(block.forward())({y})[0];
    at::autocast::decrement_nesting();
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::set_autocast_dtype(
        at::kCPU, at::kHalf);  // as others leave it
    y.square().sum().backward();
    Outcome outcome{y.detach(), {x.grad()}};
    for (auto& parameter : net[0].parameters()) {
      outcome.gradients.push_back(parameter.grad());
      parameter.mutable_grad().reset();
    }
    return outcome;
  };
  const auto expected = cast(plain);
  const auto in_float = run(blocks(2), plain);
  EXPECT_FALSE(expected.output.to(torch::kDouble).equal(in_float.output));
  expect_equal(expected, cast(wrap));
}

TEST_P(RecomputeWays, BatchNormCountsOnce) {
  const auto once = [](bool again) {
    torch::nn::BatchNorm1d norm(4);
    norm->to(torch::kDouble);
    std::vector<Tensor> buffers;
    for (const auto& buffer : norm->buffers()) buffers.push_back(buffer);
    LayerForward forward = [norm](const Tensors& in) mutable -> Tensors {
      return {torch::tanh(norm->forward(in[0]))};
    };
    if (again) forward = with(forward, {.buffers = buffers});
    const auto x = parity::random({6, 4}, 3).requires_grad_();
    // Two microbatches are in flight.
    const auto a = forward({x})[0];
    const auto b = forward({x * 2})[0];
    (a.square().sum() + b.square().sum()).backward();
    buffers.push_back(x.grad());
    for (const auto& p : norm->parameters()) buffers.push_back(p.grad());
    return buffers;
  };
  const auto expected = once(false);
  const auto actual = once(true);
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(expected[i].equal(actual[i])) << i << "\n"
                                              << expected[i] << actual[i];
  }
}

TEST_P(RecomputeWays, RanksAsThreads) {
  const auto x = parity::random({3, 5, 16}, 99);
  std::vector<Tensors> expected(2), actual(2);
  const auto gradients = [&](size_t rank, const Wrap& wrap) {
    const Block block(rank);
    wrap(block.forward())({x})[0].square().sum().backward();
    return Tensors{block.first.grad(), block.second.grad()};
  };
  for (size_t rank = 0; rank < 2; ++rank)
    expected[rank] = gradients(rank, plain);
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      for (int i = 0; i < 20; ++i) actual[rank] = gradients(rank, wrap);
    });
  }
  for (auto& thread : threads) thread.join();
  for (size_t rank = 0; rank < 2; ++rank) {
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_TRUE(expected[rank][i].equal(actual[rank][i]));
    }
  }
}

TEST_P(RecomputeWays, NothingHappensWithoutGradients) {
  const auto net = blocks(1);
  const torch::NoGradGuard no_grad;
  const auto x = parity::random({3, 5, 16}, 9);
  const auto y = wrap(net[0].forward())({x})[0];
  EXPECT_TRUE(y.equal(net[0].forward()({x})[0]));
  EXPECT_EQ(*net[0].calls, 2);
}

TEST_P(RecomputeWays, ForwardThatEndsWithAnError) {
  const LayerForward forward = [](const Tensors& in) -> Tensors {
    torch::tanh(in[0]);
    throw ConfigError("this layer is broken");
  };
  const auto x = parity::random({3}, 9).requires_grad_();
  EXPECT_THROW(wrap(forward)({x}), ConfigError);
  x.exp().sum().backward();  // no hooks are left behind
  EXPECT_TRUE(x.grad().equal(x.detach().exp()));
}

TEST(Recompute, KeepsOnlyItsInputs) {
  const auto net = blocks(4);
  const auto x = parity::random({64, 16}, 9).requires_grad_();
  const int64_t input = 64 * 16 * 8;
  const auto kept = [&](const Wrap& wrap, int64_t* peak) {
    LiveBytes live;
    Tensor y = x;
    for (const auto& block : net) y = wrap(block.forward())({y})[0];
    const int64_t bytes = live.now();
    live.reset_peak();
    y.sum().backward();
    *peak = live.peak() - bytes;
    return bytes;
  };
  int64_t peak = 0, peak_all = 0, peak_selective = 0;
  const int64_t without = kept(plain, &peak);
  const int64_t with_all = kept(all, &peak_all);
  const int64_t with_products = kept(selective, &peak_selective);
  // norm's output, its statistics, and 4 inputs' size before and after gelu.
  EXPECT_GE(without, 4 * 10 * input);
  // Outputs, which are the next block's inputs, and small states.
  EXPECT_GE(with_all, 4 * input);
  EXPECT_LE(with_all, 4 * input + 4096);
  // The first product, but not the second, which nothing else needs.
  EXPECT_GE(with_products, 4 * 5 * input);
  EXPECT_LE(with_products, 4 * 5 * input + 4096);
  // The tensors of one block at a time are recomputed.
  EXPECT_LE(peak_all - peak, 2 * 10 * input);
}

TEST(Recompute, TensorsAreFreedAsBackwardUsesThem) {
  const int64_t size = 1 << 20;
  const auto x = torch::rand({size}).requires_grad_();
  const LiveBytes live;
  int64_t near_the_end = 0;
  const LayerForward forward = [&](const Tensors& in) -> Tensors {
    auto y = torch::tanh(in[0]);
    if (!recomputing()) {
      y.register_hook([&](const Tensor&) { near_the_end = live.now(); });
    }
    for (int i = 0; i < 9; ++i) y = torch::tanh(y);
    return {y};
  };
  all(forward)({x})[0].sum().backward();
  // The first result and gradients, but not the other nine results.
  EXPECT_GT(near_the_end, 0);
  EXPECT_LE(near_the_end, 4 * 4 * size);
  EXPECT_EQ(live.now(), 4 * size) << "x's gradient";
}

TEST(Recompute, MatmulsAreNotRecomputed) {
  const auto net = blocks(3, 0.1);
  const auto count = [&](const Wrap& wrap) {
    OperatorCount products("aten::mm");
    const profiling::OperatorScope scope(products);
    run(net, wrap);
    return products.count;
  };
  const int without = count(plain);
  EXPECT_EQ(count(selective), without);
  // The last matmul of a block comes after the last saved tensor.
  EXPECT_EQ(count(all), without + 3);
}

// A result that is changed in place is recomputed, so gradients are right.
TEST(Recompute, KeptResultsThatChangeAreRecomputed) {
  const auto weight = parity::random({8, 8}, 1).requires_grad_();
  const LayerForward forward = [&](const Tensors& in) -> Tensors {
    auto y = in[0].matmul(weight);
    y.mul_(2);
    return {torch::tanh(torch::tanh(y))};
  };
  const auto x = parity::random({4, 8}, 2).requires_grad_();
  const auto expected = gradient_of(weight, forward, x);
  EXPECT_TRUE(gradient_of(weight, selective(forward), x).equal(expected));
}

TEST(Recompute, FusedAttentionIsKept) {
  const auto weight = parity::random({8, 24}, 1).requires_grad_();
  const LayerForward forward = [&](const Tensors& in) -> Tensors {
    const auto parts =
        in[0].matmul(weight).view({2, 7, 3, 2, 4}).permute({2, 0, 3, 1, 4});
    return {torch::tanh(at::scaled_dot_product_attention(
        parts[0], parts[1], parts[2], {}, 0.0, true))};
  };
  const auto x = parity::random({2, 7, 8}, 2).requires_grad_();
  const auto expected = gradient_of(weight, forward, x);
  OperatorCount attention("aten::_scaled_dot_product_flash_attention_for_cpu");
  const profiling::OperatorScope scope(attention);
  EXPECT_TRUE(gradient_of(weight, selective(forward), x).equal(expected));
  EXPECT_EQ(attention.count, 1);
  EXPECT_TRUE(gradient_of(weight, all(forward), x).equal(expected));
  EXPECT_EQ(attention.count, 3);
}

// A kept operator that drew random numbers is not run again; later operators
// draw the same numbers as in the first run.
TEST(Recompute, KeptOperatorsMayDrawRandomNumbers) {
  const auto weight = parity::random({8, 8}, 1).requires_grad_();
  const LayerForward forward = [&](const Tensors& in) -> Tensors {
    const auto x = std::get<0>(at::native_dropout(in[0] * weight, 0.3, true));
    return {torch::tanh(torch::dropout(x, 0.4, true))};
  };
  const auto gradient = [&](const LayerForward& layer) {
    torch::manual_seed(3);
    return gradient_of(weight, layer, parity::random({8, 8}, 2));
  };
  const auto expected = gradient(forward);
  OperatorCount draws("aten::native_dropout");
  const profiling::OperatorScope scope(draws);
  EXPECT_TRUE(gradient(recomputed(forward, {.keep = {"aten::native_dropout"}}))
                  .equal(expected));
  EXPECT_EQ(draws.count, 1);
}

TEST(Recompute, RegionsAreKeptByName) {
  int runs = 0;
  const auto weight = parity::random({8, 8}, 1).requires_grad_();
  struct Twice : torch::autograd::Function<Twice> {
    static Tensor
    forward(torch::autograd::AutogradContext*, const Tensor& x, int* runs) {
      return profiling::as_one_operator("test::twice", [&] {
        ++*runs;
        return Tensors{x.mm(torch::eye(8, x.options())) * 2};
      })[0];
    }
    static torch::autograd::variable_list backward(
        torch::autograd::AutogradContext*,
        const torch::autograd::variable_list& gradients) {
      return {gradients[0] * 2, Tensor()};
    }
  };
  const LayerForward forward = [&](const Tensors& in) -> Tensors {
    return {torch::tanh(Twice::apply(torch::tanh(in[0] * weight), &runs))};
  };
  const auto gradient = [&](std::vector<std::string> keep) {
    runs = 0;
    return gradient_of(
        weight, recomputed(forward, {.keep = std::move(keep)}),
        parity::random({8, 8}, 2));
  };
  const auto expected = gradient({});
  EXPECT_EQ(runs, 2);
  EXPECT_TRUE(gradient({"test::twice", "aten::mm"}).equal(expected));
  EXPECT_EQ(runs, 1);
}

TEST(Recompute, RecomputingIsTrueInTheSecondRun) {
  std::vector<bool> seen;
  const LayerForward forward = [&](const Tensors& in) -> Tensors {
    seen.push_back(recomputing());
    return {torch::tanh(in[0])};
  };
  const auto x = parity::random({3}, 2).requires_grad_();
  all(forward)({x})[0].sum().backward();
  EXPECT_EQ(seen, (std::vector<bool>{false, true}));
  EXPECT_FALSE(recomputing());
}

TEST(Recompute, OuterHooksGetTheInputs) {
  struct Taker : SavedTensorHooks {
    std::function<Tensor()> pack(const Tensor& tensor) override {
      sizes.push_back(tensor.numel());
      return [copy = tensor.clone()] { return copy; };
    }
    std::vector<int64_t> sizes;
  };
  const auto net = blocks(2);
  const auto expected = run(net, plain);
  const auto taker = std::make_shared<Taker>();
  const auto actual = run(net, [&](LayerForward forward) {
    return [=](const Tensors& inputs) {
      const SavedTensorScope scope(taker);
      return all(forward)(inputs);
    };
  });
  expect_equal(expected, actual);
  EXPECT_THAT(taker->sizes, testing::ElementsAre(240, 240));
}

std::string backward_error(const Tensor& y) {
  return error_text<std::exception>([&] { y.sum().backward(); });
}

TEST(Recompute, DifferencesOfTheSecondRunAreFound) {
  const auto x = parity::random({3, 4}, 2).requires_grad_();
  int run = 0;
  const auto after = [&](const LayerForward& forward) {
    run = 0;
    return backward_error(all(forward)({x})[0]);
  };
  EXPECT_THAT(
      after([&](const Tensors& in) -> Tensors {
        return {torch::tanh(run++ == 0 ? in[0] : in[0].narrow(0, 0, 2))};
      }),
      HasAll(
          "recompute of layer \"block\"", "float64 [2, 4]", "float64 [3, 4]"));
  EXPECT_THAT(
      after([&](const Tensors& in) -> Tensors {
        const auto y = torch::tanh(in[0]);
        return {run++ == 0 ? torch::tanh(y) : y};
      }),
      HasSubstr("saved 1 tensors for backward the second time, and 2"));
}

TEST(Recompute, BackwardInForwardIsRefused) {
  const auto x = parity::random({3, 4}, 2).requires_grad_();
  const auto forward = all([](const Tensors& in) -> Tensors {
    const auto y = torch::tanh(in[0]);
    return {y * torch::autograd::grad({y.sum()}, {in[0]}, {}, true)[0]};
  });
  EXPECT_THAT(
      error_text<std::exception>([&] { forward({x}); }),
      HasSubstr("backward within its forward"));
}

TEST(Recompute, ChangedInputsAndParametersAreFound) {
  const auto net = blocks(1);
  const auto x = parity::random({3, 16}, 2).requires_grad_() * 1;
  const auto y = all(net[0].forward())({x})[0];
  {
    const torch::NoGradGuard no_grad;
    net[0].first.add_(1);
  }
  EXPECT_THAT(backward_error(y), HasSubstr("changed in place"));
  auto z = parity::random({3, 16}, 2).requires_grad_() * 1;
  const auto kept = all(net[0].forward())({z})[0];
  z.mul_(2);
  EXPECT_THAT(
      backward_error(kept), HasSubstr("modified by an inplace operation"));
}

TEST_P(RecomputeWays, ForwardMayChangeItsInput) {
  const auto weight = parity::random({16, 16}, 1).requires_grad_();
  const auto layer = [&](const Wrap& wrap) {
    return wrap([&](const Tensors& in) -> Tensors {
      auto input = in[0];
      return {torch::tanh(input.mul_(2).mm(weight))};
    });
  };
  const auto gradients = [&](const LayerForward& forward) -> Tensors {
    const auto x = parity::random({3, 16}, 2).requires_grad_();
    const LayerForward thrice = [&](const Tensors& in) {
      Tensors y = in;
      for (int i = 0; i < 3; ++i) y = forward({y[0] * 1});
      return y;
    };
    const auto of_weight = gradient_of(weight, thrice, x);
    return {x.grad(), of_weight};
  };
  const auto expected = gradients(layer(plain));
  const auto region = all([one = layer(wrap)](const Tensors& in) -> Tensors {
    return {one({in[0] * 1})[0]};
  });
  for (const auto& forward : {layer(wrap), region}) {
    const auto actual = gradients(forward);
    EXPECT_TRUE(expected[0].equal(actual[0]));
    EXPECT_TRUE(expected[1].equal(actual[1]));
  }
}

TEST(Recompute, CopiesOfInputsAreMadeOnceUnlessTheyChange) {
  const auto net = blocks(1);
  const auto layer = all(net[0].forward());
  const auto x = parity::random({64, 16}, 2).requires_grad_() * 1;
  layer({x});
  const LiveBytes live;
  layer({x});
  EXPECT_EQ(live.now(), 0);
}

}  // namespace echelon::recompute_test
