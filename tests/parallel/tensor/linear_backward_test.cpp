// What backward of the sharded matmuls communicates, also when only a part of
// the gradients is asked for.
#include <gmock/gmock.h>
#include <torch/torch.h>

#include "echelon/counting/meta_mode.h"
#include "echelon/error.h"
#include "echelon/parallel/pipeline/stage_graph.h"
#include "echelon/parallel/tensor/linear.h"
#include "echelon/parallel/tensor/shared_gradients.h"
#include "tests/parallel/tensor/parts.h"
#include "tests/support/error_text.h"

namespace echelon::linear_backward_test {

using parity::on_ranks;
using parity::random;
using testing::ElementsAre;
using testing::HasSubstr;
using torch::Tensor;

constexpr int64_t kTokens = 10;

// A region: two products share the input, the second of them is used twice, and
// a row-parallel one ends it. The weight of `tied` is that of `first`.
//   y = B(tanh(A1 x) * A2 x) ,  z = y + B(A1 y)
class Region : public torch::nn::Module {
 public:
  Region(const TensorParallel& tp, int64_t inner = 7, int64_t tokens = kTokens)
      : tp_(tp), tokens_(tokens) {
    const LinearShape in{.in = 6, .out = inner};
    first = register_module(
        "first", std::make_shared<ColumnParallelLinear>(in, tp, "first"));
    second = register_module(
        "second", std::make_shared<ColumnParallelLinear>(in, tp, "second"));
    last = register_module(
        "last", std::make_shared<RowParallelLinear>(
                    LinearShape{.in = inner, .out = 6}, tp, "last"));
  }

  Tensor forward(const Tensor& x) {
    const auto inner = column_linear(
        x, {first->weights(), second->weights()}, WeightLayout::out_in, tp_,
        tokens_, "both");
    const auto y = last->forward(torch::tanh(inner[0]) * inner[1]);
    return y + last->forward(first->forward(y, tokens_));
  }

  static Tensor plain(const Tensor& x, const parity::NamedTensors& of) {
    const auto product = [&](const char* name, const Tensor& input) {
      const std::string layer = name;
      return at::linear(
          input, of.at(layer + ".weight"), of.at(layer + ".bias"));
    };
    const auto y = product(
        "last", torch::tanh(product("first", x)) * product("second", x));
    return y + product("last", product("first", y));
  }

  std::shared_ptr<ColumnParallelLinear> first;
  std::shared_ptr<ColumnParallelLinear> second;
  std::shared_ptr<RowParallelLinear> last;

 private:
  TensorParallel tp_;
  int64_t tokens_;
};

class LinearBackward : public testing::TestWithParam<parity::Way> {};

TEST_P(LinearBackward, AtOnce) {
  on_ranks(GetParam(), [](const TensorParallel& tp) {
    // With two inner features some ranks have none.
    for (const int64_t inner : {7, 2}) {
      Region region(tp, inner);
      const auto whole = parity::give_parts(region, 1);
      parity::expect_layer(
          region, tp, whole,
          {.x = random({2, 5, 6}, 2), .cotangent = random({2, 5, 6}, 3)},
          [&](const Tensor& x) { return Region::plain(x, whole); },
          [&](const Tensor& x) { return region.forward(x); });
    }
  });
}

// 12 tokens are even over 2, 3 and 4 ranks: the rows of a chunk are one batch.
TEST_P(LinearBackward, OfEvenTokens) {
  on_ranks(GetParam(), [](const TensorParallel& tp) {
    // The weights' gradients copy the narrower of two matrices.
    for (const int64_t inner : {7, 40}) {
      Region region(tp, inner, 12);
      const auto whole = parity::give_parts(region, 1);
      parity::expect_layer(
          region, tp, whole,
          {.x = random({2, 6, 6}, 2), .cotangent = random({2, 6, 6}, 3)},
          [&](const Tensor& x) { return Region::plain(x, whole); },
          [&](const Tensor& x) { return region.forward(x); });
    }
  });
}

TEST_P(LinearBackward, InTwoHalves) {
  on_ranks(GetParam(), [](const TensorParallel& tp) {
    Region region(tp);
    const auto whole = parity::give_parts(region, 1);
    auto x = random({2, 5, 6}, 2).requires_grad_();
    const auto cotangent = random({2, 5, 6}, 3);
    Region::plain(x, whole).backward(cotangent);

    pipeline::StageGraph graph;
    const Tensors input = {parity::part_of_tokens(x, tp).detach()};
    auto shape = pipeline::shape_of(input, "test");
    shape[0].requires_grad = true;
    const auto tracked = graph.track(input, shape);
    graph.set_outputs({region.forward(tracked[0])});
    const auto gradients =
        graph.backward_input({parity::part_of_tokens(cotangent, tp)});
    for (const auto& parameter : region.parameters()) {
      EXPECT_FALSE(parameter.grad().defined());
    }
    parity::expect_tensor(
        "gradient of x", parity::part_of_tokens(x.grad(), tp), gradients[0]);
    graph.backward_weight();
    SharedGradients(region, tp).finish();
    parity::expect_parts(region, whole);
  });
}

TEST_P(LinearBackward, OfInputsThatRequireGradients) {
  on_ranks(GetParam(), [](const TensorParallel& tp) {
    for (const bool of_input : {true, false}) {
      Region region(tp);
      auto whole = parity::give_parts(region, 1);
      for (auto& parameter : region.named_parameters()) {
        const bool frozen = of_input || parameter.key() == "first.weight";
        parameter.value().set_requires_grad(!frozen);
        whole.at(parameter.key()).set_requires_grad(!frozen);
      }
      auto x = random({2, 5, 6}, 2).set_requires_grad(of_input);
      const auto cotangent = random({2, 5, 6}, 3);
      Region::plain(x, whole).backward(cotangent);
      auto mine = parity::part_of_tokens(x, tp).detach();
      mine.set_requires_grad(of_input);
      region.forward(mine).backward(parity::part_of_tokens(cotangent, tp));
      SharedGradients(region, tp).finish();
      parity::expect_parts(region, whole);
      if (!of_input) continue;
      parity::expect_tensor(
          "gradient of x", parity::part_of_tokens(x.grad(), tp), mine.grad());
    }
  });
}

TEST_P(LinearBackward, OfASingleOutput) {
  on_ranks(GetParam(), [](const TensorParallel& tp) {
    ColumnParallelLinear a({.in = 6, .out = 7}, tp, "a");
    ColumnParallelLinear b({.in = 6, .out = 7}, tp, "b");
    const auto whole_a = parity::give_parts(a, 1);
    parity::give_parts(b, 2);
    auto x = random({2, 5, 6}, 2).requires_grad_();
    auto mine = parity::part_of_tokens(x, tp).detach().requires_grad_();
    const auto outputs = column_linear(
        mine, {b.weights(), a.weights()}, WeightLayout::out_in, tp, kTokens,
        "both");
    outputs[1].sum().backward();
    at::linear(x, whole_a.at("weight"), whole_a.at("bias")).sum().backward();
    parity::expect_parts(a, whole_a);
    EXPECT_FALSE(b.weight.grad().defined());
    parity::expect_tensor(
        "gradient of x", parity::part_of_tokens(x.grad(), tp), mine.grad());
  });
}

TEST_P(LinearBackward, MetaTensors) {
  on_ranks(GetParam(), [](const TensorParallel& tp) {
    std::optional<counting::detail::MetaMode> without_memory(std::in_place);
    Region region(tp);
    without_memory.reset();
    const auto x = torch::empty(
        parity::part_of_tokens(torch::empty({2, 5, 6}), tp).sizes(),
        torch::TensorOptions(torch::kMeta).requires_grad(true));
    region.forward(x).sum().backward();
    EXPECT_EQ(x.grad().sizes(), x.sizes());
    for (const auto& parameter : region.parameters()) {
      EXPECT_EQ(parameter.grad().sizes(), parameter.sizes());
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Ways, LinearBackward, testing::ValuesIn(parity::ways()),
    testing::PrintToStringParamName());

// The labels of what `body` communicates on a rank of two.
std::vector<std::string> calls_of(
    const TensorParallelOptions& options,
    const std::function<void(const TensorParallel&)>& body) {
  std::vector<std::string> calls;
  run_ranks(2, [&](World& world) {
    const auto before = world.history().count();
    body({world.group(), options});
    if (world.rank() == 1) return;
    const auto records = world.history().snapshot();
    for (size_t i = before; i < records.size(); ++i) {
      calls.push_back(records[i].operation + " " + records[i].label);
    }
  });
  return calls;
}

void region_step(const TensorParallel& tp) {
  Region region(tp);
  parity::give_parts(region, 1);
  const auto inner = column_linear(
      parity::part_of_tokens(random({2, 5, 6}, 1), tp).requires_grad_(),
      {region.first->weights(), region.second->weights()}, WeightLayout::out_in,
      tp, kTokens, "both");
  region.last->forward(inner[0] * inner[1]).sum().backward();
}

TEST(LinearCalls, WithReplicatedTokens) {
  EXPECT_THAT(
      calls_of({}, region_step),
      ElementsAre("all_reduce last sum", "all_reduce both input gradient"));
}

TEST(LinearCalls, WithShardedTokens) {
  EXPECT_THAT(
      calls_of({.sequence_parallel = true}, region_step),
      ElementsAre(
          "all_gather both gather", "reduce_scatter last scatter",
          "all_gather last gather", "all_gather both gather",
          "reduce_scatter both input gradient"));
}

TEST(LinearCalls, InChunks) {
  EXPECT_THAT(
      calls_of({.sequence_parallel = true, .overlap_chunks = 2}, region_step),
      ElementsAre(
          "all_gather both gather", "all_gather both gather",
          "reduce_scatter last scatter", "reduce_scatter last scatter",
          "all_gather last gather", "all_gather last gather",
          "all_gather both gather", "reduce_scatter both input gradient"));
}

TEST(LinearCalls, InChunksWhereNoWeightNeedsAGradient) {
  EXPECT_THAT(
      calls_of(
          {.sequence_parallel = true, .overlap_chunks = 2},
          [](const TensorParallel& tp) {
            ColumnParallelLinear layer({.in = 6, .out = 7}, tp, "first");
            parity::give_parts(layer, 1);
            for (auto& one : layer.parameters()) one.set_requires_grad(false);
            const auto x = random({2, 5, 6}, 1);
            layer
                .forward(
                    parity::part_of_tokens(x, tp).requires_grad_(), kTokens)
                .sum()
                .backward();
          }),
      ElementsAre(
          "all_gather first gather", "all_gather first gather",
          "reduce_scatter first input gradient",
          "reduce_scatter first input gradient"));
}

TEST(LinearErrors, RowsOfAnotherRank) {
  on_ranks({2, {.sequence_parallel = true}}, [](const TensorParallel& tp) {
    ColumnParallelLinear layer({.in = 6, .out = 7}, tp, "h.0.c_fc");
    EXPECT_THAT(
        error_text<ConfigError>([&] {
          layer.forward(torch::zeros({2, 5, 6}), kTokens);
        }),
        HasSubstr(
            "[h.0.c_fc] rank " + std::to_string(tp.rank()) +
            " of 2 has 5 of 10 tokens, but its input has 2 rows and 3 "
            "dimensions"));
  });
}

TEST(LinearErrors, BackwardIsNotDifferentiatedAgain) {
  on_ranks({2}, [](const TensorParallel& tp) {
    Region region(tp);
    region.to(torch::kFloat64);
    const auto x = random({2, 5, 6}, 1).requires_grad_();
    const auto loss = region.forward(x).sum();
    EXPECT_THAT(
        error_text([&] {
          torch::autograd::grad({loss}, {x}, {}, true, /*create_graph=*/true);
        }),
        HasSubstr("without create_graph"));
  });
}

}  // namespace echelon::linear_backward_test
