// What has other kernels on a GPU: norms, rotary positions, SwiGLU, dropout and
// the loss, against the CPU's in float64.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <vector>

#include "echelon/cluster/cuda_driver.h"
#include "echelon/comm/nccl/nccl_backend.h"
#include "echelon/parallel/tensor/dropout.h"
#include "echelon/parallel/tensor/linear.h"
#include "echelon/parallel/tensor/mlp.h"
#include "echelon/parallel/tensor/norm.h"
#include "echelon/parallel/tensor/rotary.h"
#include "echelon/parallel/tensor/vocab.h"
#include "tests/parallel/tensor/parts.h"

namespace echelon::tensor_gpu_test {

using parity::expect_tensor;
using parity::random;
using torch::Tensor;

class TensorGpu : public testing::TestWithParam<torch::Dtype> {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) GTEST_SKIP() << "this machine has no GPU";
    load_accelerator(DeviceKind::cuda);
  }
  double tolerance() const {
    return GetParam() == torch::kFloat32 ? 1e-5 : 0.01;
  }
  // A leaf on the GPU, and one of the same values in float64.
  std::pair<Tensor, Tensor> leaves(at::IntArrayRef shape, uint64_t seed) {
    const auto gpu = random(shape, seed)
                         .to(torch::Device("cuda:0"), GetParam())
                         .requires_grad_();
    return {
        gpu, gpu.detach().cpu().to(torch::kFloat64).detach().requires_grad_()};
  }
};

TEST_P(TensorGpu, RmsNorm) {
  const auto [x, exact_x] = leaves({300, 512}, 1);
  const auto [weight, exact_weight] = leaves({512}, 2);
  const auto [g, exact_g] = leaves({300, 512}, 3);
  const auto y = rms_norm(x, weight, 1e-5);
  EXPECT_EQ(y.scalar_type(), GetParam());
  const auto exact = rms_norm(exact_x, exact_weight, 1e-5);
  expect_tensor("y", exact, y.cpu(), tolerance());
  y.backward(g.detach());
  exact.backward(exact_g.detach());
  expect_tensor("x", exact_x.grad(), x.grad().cpu(), tolerance());
  expect_tensor(
      "weight", exact_weight.grad(), weight.grad().cpu(), tolerance());
}

// With and without a sum before them, in packets and one by one, and where rows
// are too wide for the kernels.
TEST_P(TensorGpu, NormsOfResidualSums) {
  for (const int64_t width : {512, 99, 4096, 8200}) {
    for (const bool adds : {true, false}) {
      const auto check = [&](auto norm, auto exact_norm) {
        SCOPED_TRACE(width);
        const auto [x, exact_x] = leaves({30, width}, 1);
        const auto [added, exact_added] = leaves({30, width}, 2);
        const auto [g, exact_g] = leaves({30, width}, 3);
        const auto [passed, exact_passed] = leaves({30, width}, 4);
        norm->to(torch::Device("cuda:0"), GetParam());
        exact_norm->to(torch::kFloat64);
        const torch::NoGradGuard fixed;
        for (auto& item : norm->named_parameters()) {
          item.value().copy_(random({width}, 5) + 1);
          exact_norm->named_parameters()[item.key()].copy_(item.value());
        }
        const auto run = [&](auto& of, const Tensor& a, const Tensor& b,
                             const Tensor& to_norm, const Tensor& to_sum) {
          const torch::AutoGradMode enabled(true);
          const auto found = of->forward_sum(a, adds ? b : Tensor());
          torch::autograd::backward(
              {found.norm, found.sum}, {to_norm.detach(), to_sum.detach()});
          return found;
        };
        const auto found = run(norm, x, added, g, passed);
        const auto exact =
            run(exact_norm, exact_x, exact_added, exact_g, exact_passed);
        EXPECT_EQ(found.norm.scalar_type(), GetParam());
        expect_tensor("norm", exact.norm, found.norm.cpu(), tolerance());
        expect_tensor("sum", exact.sum, found.sum.cpu(), tolerance());
        expect_tensor("x", exact_x.grad(), x.grad().cpu(), tolerance());
        if (adds) {
          expect_tensor(
              "added", exact_added.grad(), added.grad().cpu(), tolerance());
        }
        for (const auto& item : norm->named_parameters()) {
          expect_tensor(
              item.key(), exact_norm->named_parameters()[item.key()].grad(),
              item.value().grad().cpu(), tolerance());
        }
      };
      check(
          std::make_shared<RMSNorm>(width, 1e-5, TensorParallel{}),
          std::make_shared<RMSNorm>(width, 1e-5, TensorParallel{}));
      check(
          std::make_shared<LayerNorm>(width, 1e-5, TensorParallel{}),
          std::make_shared<LayerNorm>(width, 1e-5, TensorParallel{}));
    }
  }
}

// Enough rows for several groups of blocks, whose order of ending differs.
TEST_P(TensorGpu, NormsGiveTheSameBitsAgain) {
  const auto [x, exact_x] = leaves({6000, 512}, 1);
  const auto [g, exact_g] = leaves({6000, 512}, 2);
  LayerNorm norm(512, 1e-5, TensorParallel{}), exact_norm(512, 1e-5, {});
  norm.to(torch::Device("cuda:0"), GetParam());
  exact_norm.to(torch::kFloat64);
  const auto turn = [](LayerNorm& of, const Tensor& in, const Tensor& to_norm,
                       bool keep) {
    const auto y = of.forward_sum(in, Tensor()).norm;
    const std::vector<Tensor> inputs = {in, of.weight, of.bias};
    const auto found =
        torch::autograd::grad({y}, inputs, {to_norm.detach()}, keep);
    if (!keep) return found;
    for (int i = 0; i < 5; ++i) {
      const auto again =
          torch::autograd::grad({y}, inputs, {to_norm.detach()}, true);
      for (size_t j = 0; j < found.size(); ++j) {
        EXPECT_TRUE(found[j].equal(again[j])) << j;
      }
    }
    return found;
  };
  const auto found = turn(norm, x, g, true);
  const auto exact = turn(exact_norm, exact_x, exact_g, false);
  for (size_t i = 0; i < found.size(); ++i) {
    expect_tensor(std::to_string(i), exact[i], found[i].cpu(), tolerance());
  }
}

TEST_P(TensorGpu, RotaryPositions) {
  for (const auto pairs : {RotaryPairs::halves, RotaryPairs::neighbours}) {
    for (const int64_t size : {64, 6}) {
      // Heads of a wider row, as those of one product of queries and keys.
      const auto [x, exact_x] = leaves({2, 9, 5 * size}, 1);
      const auto [g, exact_g] = leaves({2, 9, 3, size}, 2);
      const auto turn = [&](const Tensor& rows) {
        const auto heads =
            rows.narrow(2, 2 * size, 3 * size).view({2, 9, 3, size});
        return rotate(
            heads, rotary_table({}, size, 4, 9, rows.options()), pairs);
      };
      const auto y = turn(x), exact = turn(exact_x);
      EXPECT_EQ(y.scalar_type(), GetParam());
      expect_tensor("y", exact, y.cpu(), tolerance());
      y.backward(g.detach());
      exact.backward(exact_g.detach());
      expect_tensor("x", exact_x.grad(), x.grad().cpu(), tolerance());
    }
  }
}

// As one matmul makes them, and as attention gives their gradients back.
TEST_P(TensorGpu, RotaryPositionsOfQueriesAndKeys) {
  for (const int64_t size : {64, 6}) {
    const auto [x, exact_x] = leaves({2, 9, 7, size}, 1);
    const auto [g, exact_g] = leaves({2, 7, 9, size}, 2);
    const auto turn = [&](const Tensor& all, const Tensor& gradient) {
      const auto parts = rotate_queries_and_keys(
          all, 4, 2, rotary_table({}, size, 4, 9, all.options()));
      const auto split =
          gradient.detach().transpose(1, 2).split_with_sizes({4, 2, 1}, 2);
      torch::autograd::backward(parts, split);
      return torch::cat(parts, 2);
    };
    const auto y = turn(x, g), exact = turn(exact_x, exact_g);
    expect_tensor("y", exact, y.cpu(), tolerance());
    expect_tensor("x", exact_x.grad(), x.grad().cpu(), tolerance());
  }
}

TEST_P(TensorGpu, Swiglu) {
  for (const int64_t width : {256, 7}) {
    for (const bool together : {false, true}) {
      const auto [both, exact_both] = leaves({30, 2 * width}, 1);
      const auto [g, exact_g] = leaves({30, width}, 3);
      const auto turn = [&](const Tensor& x) {
        const auto parts = split_features(x, {width, width});
        return together ? silu_times(parts[0], parts[1])
                        : silu_times(parts[0].clone(), parts[1].clone());
      };
      const auto y = turn(both), exact = turn(exact_both);
      expect_tensor("y", exact, y.cpu(), tolerance());
      y.backward(g.detach());
      exact.backward(exact_g.detach());
      expect_tensor("both", exact_both.grad(), both.grad().cpu(), tolerance());
    }
  }
}

// In packets and one by one; gradients in any memory order. A second backward
// gives the same bits, whichever block was the last.
TEST_P(TensorGpu, GeluWithItsBias) {
  for (const int64_t width : {1024, 7}) {
    const auto [x, exact_x] = leaves({2, 1500, width}, 1);
    const auto [bias, exact_bias] = leaves({width}, 2);
    const auto [g, exact_g] = leaves({1500, 2, width}, 3);
    const auto turn = [](const Tensor& inner, const Tensor& b,
                         const Tensor& gradient) {
      const auto y = gelu_with_bias(inner, b);
      const auto of_y = gradient.detach().transpose(0, 1);
      const auto found =
          torch::autograd::grad({y}, {inner, b}, {of_y}, /*retain_graph=*/true);
      const auto again = torch::autograd::grad({y}, {inner, b}, {of_y});
      EXPECT_TRUE(found[0].equal(again[0]));
      EXPECT_TRUE(found[1].equal(again[1]));
      return std::vector<Tensor>{y, found[0], found[1]};
    };
    const auto found = turn(x, bias, g);
    const auto exact = turn(exact_x, exact_bias, exact_g);
    expect_tensor("y", exact[0], found[0].cpu(), tolerance());
    expect_tensor("x", exact[1], found[1].cpu(), tolerance());
    expect_tensor("bias", exact[2], found[2].cpu(), tolerance());
  }
}

// The masks are the CPU's, bit by bit.
TEST_P(TensorGpu, Dropout) {
  const auto keys = torch::tensor({int64_t{5}, int64_t{-7}}, torch::kInt64);
  const DropoutSource source{0.3, dropout_stream("transformer.h.0.drop")};
  for (const int64_t width : {1000, 33}) {
    for (const auto& place :
         {DropoutPlace{.rows_per_sample = 3},
          DropoutPlace{
              .first_row = 2, .rows_per_sample = 3, .first_element = 5},
          DropoutPlace{
              .rows_per_sample = 3,
 .rows = {{7, 9}, {1, 2}},
 .row_elements = 2 * width}}) {
      const auto [x, exact_x] = leaves({4, width}, 1);
      const auto [g, exact_g] = leaves({4, width}, 2);
      const auto mask = detail::keep_mask(x.detach(), keys, source, place);
      EXPECT_TRUE(mask.cpu().equal(
          detail::keep_mask(exact_x.detach(), keys, source, place)));
      const auto y = dropout(x, keys, source, place);
      const auto exact = dropout(exact_x, keys, source, place);
      expect_tensor("y", exact, y.cpu(), tolerance());
      y.backward(g.detach());
      exact.backward(exact_g.detach());
      expect_tensor("x", exact_x.grad(), x.grad().cpu(), tolerance());
      expect_tensor(
          "with a residual",
          dropout(exact_x, keys, source, place, exact_g).detach(),
          dropout(x, keys, source, place, g).detach().cpu(), tolerance());
    }
  }
}

TEST_P(TensorGpu, CrossEntropyAndArgmax) {
  const auto [logits, exact] = leaves({2, 50, 5000}, 1);
  const auto targets = torch::arange(100).view({2, 50}).mul(7);
  targets[1][3] = -100;
  const auto there = targets.to(logits.device());
  const auto losses = vocab_cross_entropy(logits, there, 5000, {});
  const auto expected = vocab_cross_entropy(exact, targets, 5000, {});
  expect_tensor("losses", expected, losses.cpu(), 1e-5);
  losses.sum().backward();
  expected.sum().backward();
  expect_tensor("gradient", exact.grad(), logits.grad().cpu(), tolerance());
  EXPECT_TRUE(vocab_argmax(logits, 5000, {}).equal(logits.argmax(-1)));
}

TEST_P(TensorGpu, Embeddings) {
  const auto [weight, exact] = leaves({100, 16}, 1);
  const auto ids = torch::arange(40).view({2, 20}).mul(2);
  VocabParallelEmbedding layer(100, 16, {}, "wte");
  layer.to(weight.device(), GetParam());
  {
    const torch::NoGradGuard no_grad;
    layer.weight.copy_(weight);
  }
  const auto y = layer.forward(ids.to(weight.device()));
  const auto expected = at::embedding(exact, ids);
  expect_tensor("y", expected, y.cpu(), parity::kExact);
  y.sum().backward();
  expected.sum().backward();
  expect_tensor("weight", exact.grad(), layer.weight.grad().cpu(), 1e-3);
}

INSTANTIATE_TEST_SUITE_P(
    Dtypes, TensorGpu, testing::Values(torch::kFloat32, torch::kBFloat16));

// The CPU multiplies the same numbers of 8 bits in float32.
TEST(Fp8Gpu, LayersComputeWhatTheCpuDoes) {
  if (cuda_device_count() == 0) GTEST_SKIP() << "this machine has no GPU";
  load_accelerator(DeviceKind::cuda);
  if (cluster::ask_cuda().capability < 89) {
    GTEST_SKIP() << "this machine's GPU does not multiply in 8 bits";
  }
  TensorParallel parallel;
  parallel.fp8 = true;
  for (const auto layout : {WeightLayout::out_in, WeightLayout::in_out}) {
    const auto run = [&](torch::Device device) {
      ColumnParallelLinear layer(
          {.in = 64, .out = 96, .layout = layout}, parallel, "layer");
      parity::give_parts(layer, 7);
      layer.to(device, torch::kBFloat16);
      // 80 rows are more than a tile of the kernel.
      const auto leaf = [&](int64_t width, uint64_t seed) {
        return random({80, width}, seed).to(device, torch::kBFloat16);
      };
      const auto x = leaf(64, 1).requires_grad_();
      const auto y = layer.forward(x, 80);
      y.backward(leaf(96, 2));
      return std::vector<Tensor>{
          y.detach().cpu(), x.grad().cpu(), layer.weight.grad().cpu(),
          layer.bias.grad().cpu()};
    };
    const auto cpu = run(torch::kCPU), gpu = run(torch::Device("cuda:0"));
    for (size_t i = 0; i < cpu.size(); ++i) {
      const auto exact = cpu[i].to(torch::kFloat64);
      const auto apart =
          (gpu[i].to(torch::kFloat64) - exact).norm() / exact.norm();
      EXPECT_LT(apart.item<double>(), 0.005) << i;
    }
  }
}

}  // namespace echelon::tensor_gpu_test
