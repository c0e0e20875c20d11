// Cut linear layers against at::linear of the whole matrices.
#include "echelon/parallel/tensor/linear.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "echelon/parallel/tensor/shared_gradients.h"
#include "tests/parallel/tensor/parts.h"

namespace echelon {
namespace linear_test {

using parity::on_ranks;
using parity::random;
using torch::Tensor;

constexpr int64_t kBatch = 2;
constexpr int64_t kSequence = 5;  // 10 tokens: uneven over 3 and 4 ranks
constexpr int64_t kTokens = kBatch * kSequence;

// Uneven over 2, 3 and 4 ranks.
LinearShape shape(bool bias, WeightLayout layout) {
  return {.in = 7, .out = 11, .bias = bias, .layout = layout};
}

Tensor whole_product(
    const Tensor& x, const parity::NamedTensors& whole, WeightLayout layout) {
  const auto weight = whole.at("weight");
  const auto bias = whole.find("bias");
  return at::linear(
      x, layout == WeightLayout::out_in ? weight : weight.t(),
      bias == whole.end() ? Tensor() : bias->second);
}

class LinearParity : public testing::TestWithParam<
                         std::tuple<parity::Way, bool, WeightLayout>> {
 protected:
  parity::Way way() const { return std::get<0>(GetParam()); }
  bool bias() const { return std::get<1>(GetParam()); }
  WeightLayout layout() const { return std::get<2>(GetParam()); }
  LinearShape linear_shape() const { return shape(bias(), layout()); }
};

// Both sides of a test of one layer: x and gradient of the output, whole.
struct Whole {
  Tensor x;
  Tensor y;
};

Whole on_one_device(
    const parity::NamedTensors& parameters, int64_t in, const Tensor& cotangent,
    WeightLayout layout) {
  auto x = random({kBatch, kSequence, in}, 11).requires_grad_();
  auto y = whole_product(x, parameters, layout);
  y.backward(cotangent);
  return {x, y.detach()};
}

TEST_P(LinearParity, ColumnKeepsItsOutput) {
  on_ranks(way(), [&](const TensorParallel& tp) {
    ColumnParallelLinear layer(linear_shape(), tp, "layer");
    const auto parameters = parity::give_parts(layer, 1);
    const auto cotangent = random({kBatch, kSequence, 11}, 12);
    const auto whole = on_one_device(parameters, 7, cotangent, layout());

    auto x = parity::part_of_tokens(whole.x, tp).detach().requires_grad_();
    const auto y = layer.forward(x, kTokens);
    const auto mine = tp.part_of(11);
    const auto part = [&](const Tensor& all) {
      const auto cut = all.narrow(-1, mine.begin, mine.size());
      return tp.cuts_tokens() ? cut.flatten(0, 1) : cut;
    };
    parity::expect_tensor("y", part(whole.y), y);
    y.backward(part(cotangent));
    SharedGradients(layer, tp).finish();
    parity::expect_parts(layer, parameters);
    parity::expect_tensor(
        "gradient of x", parity::part_of_tokens(whole.x.grad(), tp), x.grad());
  });
}

TEST_P(LinearParity, ColumnGathersItsOutput) {
  on_ranks(way(), [&](const TensorParallel& tp) {
    ColumnParallelLinear layer(linear_shape(), tp, "layer", true);
    const auto parameters = parity::give_parts(layer, 2);
    const auto cotangent = random({kBatch, kSequence, 11}, 13);
    const auto whole = on_one_device(parameters, 7, cotangent, layout());

    auto x = parity::part_of_tokens(whole.x, tp).detach().requires_grad_();
    const auto y = layer.forward(x, kTokens);
    const auto all = [&](const Tensor& tensor) {
      return tp.cuts_tokens() ? tensor.flatten(0, 1) : tensor;
    };
    parity::expect_tensor("y", all(whole.y), y);
    y.backward(all(cotangent));
    parity::expect_parts(layer, parameters);
    parity::expect_tensor(
        "gradient of x", parity::part_of_tokens(whole.x.grad(), tp), x.grad());
  });
}

TEST_P(LinearParity, RowTakesItsInput) {
  on_ranks(way(), [&](const TensorParallel& tp) {
    RowParallelLinear layer(linear_shape(), tp, "layer");
    const auto parameters = parity::give_parts(layer, 3);
    const auto cotangent = random({kBatch, kSequence, 11}, 14);
    const auto whole = on_one_device(parameters, 7, cotangent, layout());

    const auto mine = tp.part_of(7);
    const auto part = [&](const Tensor& all) {
      const auto cut = all.narrow(-1, mine.begin, mine.size());
      return tp.cuts_tokens() ? cut.flatten(0, 1) : cut;
    };
    auto x = part(whole.x).detach().clone().requires_grad_();
    const auto y = layer.forward(x);
    parity::expect_tensor("y", parity::part_of_tokens(whole.y, tp), y);
    y.backward(parity::part_of_tokens(cotangent, tp));
    SharedGradients(layer, tp).finish();
    parity::expect_parts(layer, parameters);
    parity::expect_tensor("gradient of x", part(whole.x.grad()), x.grad());
  });
}

TEST_P(LinearParity, RowScattersItsInput) {
  on_ranks(way(), [&](const TensorParallel& tp) {
    RowParallelLinear layer(linear_shape(), tp, "layer", true);
    const auto parameters = parity::give_parts(layer, 4);
    const auto cotangent = random({kBatch, kSequence, 11}, 15);
    const auto whole = on_one_device(parameters, 7, cotangent, layout());

    const auto all = [&](const Tensor& tensor) {
      return tp.cuts_tokens() ? tensor.flatten(0, 1) : tensor;
    };
    auto x = all(whole.x).detach().clone().requires_grad_();
    const auto y = layer.forward(x);
    parity::expect_tensor("y", parity::part_of_tokens(whole.y, tp), y);
    y.backward(parity::part_of_tokens(cotangent, tp));
    SharedGradients(layer, tp).finish();
    parity::expect_parts(layer, parameters);
    parity::expect_tensor("gradient of x", all(whole.x.grad()), x.grad());
  });
}

// Outputs 0 and 1 on every rank, the others on rank 0 alone.
TEST_P(LinearParity, OutputsOfSeveralRanks) {
  on_ranks(way(), [&](const TensorParallel& tp) {
    Shard outputs{.pieces = {{0, 2}}};
    if (tp.rank() == 0) outputs.pieces = outputs.owned = {{2, 11}, {0, 2}};
    ColumnParallelLinear layer(
        linear_shape(), tp, "layer", outputs, /*shared=*/tp.size() > 1);
    const auto parameters = parity::give_parts(layer, 5);
    // Each rank's loss has a part of its own of the shared outputs' gradient.
    const auto part = [&](const Tensor& whole) {
      const auto rows = tp.cuts_tokens() ? whole.flatten(0, 1) : whole;
      const auto shared = rows.narrow(-1, 0, 2) / tp.size();
      if (tp.rank() > 0) return shared;
      return torch::cat({rows.narrow(-1, 2, 9), shared}, -1);
    };
    const auto cotangent = random({kBatch, kSequence, 11}, 16);
    const auto whole = on_one_device(parameters, 7, cotangent, layout());
    auto x = parity::part_of_tokens(whole.x, tp).detach().requires_grad_();
    layer.forward(x, kTokens).backward(part(cotangent));
    SharedGradients(layer, tp).finish();
    parity::expect_parts(layer, parameters);
    parity::expect_tensor(
        "gradient of x", parity::part_of_tokens(whole.x.grad(), tp), x.grad());
  });
}

std::string
name_of(const testing::TestParamInfo<LinearParity::ParamType>& info) {
  const auto& [way, bias, layout] = info.param;
  return testing::PrintToString(way) + (bias ? "_bias" : "_no_bias") +
         (layout == WeightLayout::out_in ? "_out_in" : "_in_out");
}

INSTANTIATE_TEST_SUITE_P(
    Ways, LinearParity,
    testing::Combine(
        testing::ValuesIn(parity::ways()), testing::Bool(),
        testing::Values(WeightLayout::out_in, WeightLayout::in_out)),
    name_of);

}  // namespace linear_test
}  // namespace echelon
