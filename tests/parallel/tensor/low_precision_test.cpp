// Layers in bf16 and fp16: sums are taken in float32, whatever their length,
// and results are rounded once. Expected values are those of the same numbers
// in float64.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "echelon/parallel/tensor/attention.h"
#include "echelon/parallel/tensor/conv.h"
#include "echelon/parallel/tensor/dropout.h"
#include "echelon/parallel/tensor/linear.h"
#include "echelon/parallel/tensor/norm.h"
#include "echelon/parallel/tensor/rotary.h"
#include "echelon/parallel/tensor/shared_gradients.h"
#include "echelon/parallel/tensor/vocab.h"
#include "tests/parallel/tensor/parts.h"

namespace echelon::low_precision_test {

using parity::on_ranks;
using parity::random;
using torch::Tensor;

class LowPrecision : public testing::TestWithParam<torch::Dtype> {
 protected:
  static torch::Dtype dtype() { return GetParam(); }
  // Half of the distance between neighbouring numbers, relative.
  static double rounding() {
    return dtype() == torch::kHalf ? 0x1p-11 : 0x1p-8;
  }
  // `x` as numbers of the dtype; exact() has the same ones in float64.
  static Tensor low(const Tensor& x) {
    return x.detach().to(dtype(), false, /*copy=*/true).requires_grad_();
  }
  static Tensor exact(const Tensor& x) {
    return x.detach().to(torch::kFloat64).requires_grad_();
  }

  // Within `roundings` of the largest value.
  static void expect_near(
      const std::string& what, const Tensor& expected, const Tensor& actual,
      double roundings) {
    EXPECT_EQ(actual.scalar_type(), dtype()) << what;
    const auto value = actual.detach().to(torch::kFloat64);
    ASSERT_TRUE(value.isfinite().all().item<bool>()) << what;
    const double scale = expected.abs().max().item<double>();
    const double error = (value - expected).abs().max().item<double>();
    EXPECT_LE(error, roundings * rounding() * scale)
        << what << ": error " << error << ", largest value " << scale
        << ", a rounding is " << rounding();
  }

  // The tensors of `run` in the dtype, and in float64.
  template <class Run>
  static void expect_all_near(const Run& run, double roundings) {
    const std::vector<Tensor> actual = run(dtype());
    const std::vector<Tensor> expected = run(torch::kFloat64);
    for (size_t i = 0; i < expected.size(); ++i) {
      SCOPED_TRACE(i);
      expect_near("gradient", expected[i], actual[i], roundings);
    }
  }
};

INSTANTIATE_TEST_SUITE_P(
    Dtypes, LowPrecision, testing::Values(torch::kBFloat16, torch::kHalf),
    [](const auto& info) { return std::string(c10::toString(info.param)); });

// 4096 features around a mean whose square, and whose sum, fp16 does not reach.
TEST_P(LowPrecision, NormsOfManyFeaturesWithALargeMean) {
  constexpr int64_t kRows = 600;
  constexpr int64_t kFeatures = 4096;
  const double mean = dtype() == torch::kHalf ? 1000 : 30;
  const auto x = random({kRows, kFeatures}, 1) * 4 + mean;
  const auto weight = random({kFeatures}, 2) * 0.1 + 1;
  const auto bias = random({kFeatures}, 3);
  // The same sign in every row: the weight's gradient is a long sum.
  const auto cotangent = random({kRows, kFeatures}, 4).abs() + 0.5;

  LayerNorm layer_norm(kFeatures, 1e-5, {});
  RMSNorm rms(kFeatures, 1e-5, {});
  for (const bool centred : {true, false}) {
    SCOPED_TRACE(centred ? "LayerNorm" : "RMSNorm");
    const auto a = low(x);
    auto& w = centred ? layer_norm.weight : rms.weight;
    w.set_data(low(weight).detach());
    if (centred) layer_norm.bias.set_data(low(bias).detach());
    const auto y = centred ? layer_norm.forward(a) : rms.forward(a);
    y.backward(low(cotangent).detach());

    const auto b = exact(a);
    const auto v = exact(w);
    const auto c = centred ? exact(layer_norm.bias) : Tensor();
    const auto z =
        centred ? at::layer_norm(b, {kFeatures}, v, c, 1e-5)
                : b * torch::rsqrt(b.square().mean({-1}, true) + 1e-5) * v;
    z.backward(exact(low(cotangent)));
    expect_near("y", z, y, 2);
    expect_near("gradient of x", b.grad(), a.grad(), 2);
    expect_near("gradient of weight", v.grad(), w.grad(), 2);
    if (centred) {
      expect_near("gradient of bias", c.grad(), layer_norm.bias.grad(), 2);
    }
  }
}

// A sum of 50257 exponentials, which stagnates at 256 in bf16.
TEST_P(LowPrecision, LossOverALargeVocabulary) {
  constexpr int64_t kWords = 50257;
  const auto logits = random({2, 3, kWords}, 1);
  const auto targets = torch::tensor({{5, 50256, 40000}, {-100, 0, 7}});
  const auto b = exact(low(logits));
  const auto expected = torch::nn::functional::cross_entropy(
      b.view({6, kWords}), targets.flatten(),
      torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kNone));
  expected.sum().backward();
  for (const int ranks : {1, 2}) {
    on_ranks({ranks, {}}, [&](const TensorParallel& tp) {
      const auto mine = tp.part_of(kWords);
      const auto a = low(logits.narrow(-1, mine.begin, mine.size()));
      const auto loss = vocab_cross_entropy(a, targets, kWords, tp);
      EXPECT_EQ(loss.scalar_type(), torch::kFloat32);
      EXPECT_LT((loss.flatten() - expected).abs().max().item<double>(), 1e-5);
      loss.sum().backward();
      // Each gradient to its own rounding, the smallest as well as the largest.
      const auto wanted = b.grad().narrow(-1, mine.begin, mine.size());
      const auto error = (a.grad().to(torch::kFloat64) - wanted).abs();
      const double smallest = dtype() == torch::kHalf ? 0x1p-24 : 1e-38;
      EXPECT_TRUE((error <= wanted.abs() * rounding() * 1.01 + smallest)
                      .all()
                      .item<bool>());
    });
  }
}

TEST_P(LowPrecision, AttentionOverManyPositions) {
  constexpr int64_t kSequence = 700;
  const AttentionOptions options{
      .shape = {.hidden = 32, .heads = 4, .kv_heads = 2},
      .fused = false,
      .bias = false,
      .rotary = RotaryOptions{},
      .dropout = 0.1};
  const auto x = random({1, kSequence, 32}, 1) * 0.3;
  const auto cotangent = random({1, kSequence, 32}, 2);
  for (const bool drops : {false, true}) {
    for (const int ranks : {1, 2}) {
      SCOPED_TRACE(drops ? "with dropout" : "without dropout");
      on_ranks({ranks, {}}, [&](const TensorParallel& tp) {
        const auto run = [&](torch::Dtype dtype) {
          ParallelAttention attention(options, tp, "attn");
          parity::give_parts(attention, 3);
          for (auto& parameter : attention.parameters()) {
            parameter.set_data(low(parameter).detach().to(dtype));
          }
          attention.train(drops);
          auto input = low(x).detach().to(dtype).requires_grad_();
          const auto y = attention.forward(
              input, {.batch = 1,
                      .sequence = kSequence,
                      .keys = torch::full({1}, 5, torch::kInt64)});
          y.backward(low(cotangent).detach().to(dtype));
          std::vector<Tensor> all = {y, input.grad()};
          for (const auto& item : attention.named_parameters()) {
            all.push_back(item.value().grad());
          }
          return all;
        };
        const auto expected = run(torch::kFloat64);
        const auto actual = run(dtype());
        for (size_t i = 0; i < expected.size(); ++i) {
          const double error =
              ((actual[i].to(torch::kFloat64) - expected[i]).norm() /
               expected[i].norm())
                  .item<double>();
          EXPECT_LT(error, 3 * rounding()) << i;
        }
      });
    }
  }
}

// One word for all tokens: a sum in the dtype stagnates at 256 (bf16), 2048.
TEST_P(LowPrecision, GradientsOfEmbeddingsOfFrequentTokens) {
  constexpr int64_t kTokens = 3072;
  for (const auto& way :
       {parity::Way{1, {}}, parity::Way{2, {}},
        parity::Way{2, {.sequence_parallel = true}}}) {
    on_ranks(way, [&](const TensorParallel& tp) {
      VocabParallelEmbedding words(6, 4, tp, "words");
      PositionEmbedding positions(2, 4, tp);
      for (auto* weight : {&words.weight, &positions.weight}) {
        weight->set_data(torch::ones_like(*weight, dtype()));
      }
      const auto ids = torch::full({kTokens / 2, 2}, 1, torch::kInt64);
      const auto x = words.forward(ids);
      const auto y = positions.forward(x, ids);
      EXPECT_EQ(y.scalar_type(), dtype());
      EXPECT_TRUE((y == 2).all().item<bool>());
      y.backward(torch::ones_like(y));
      if (tp.part_of(6).begin == 0) {
        EXPECT_EQ(words.weight.grad()[1][3].item<float>(), kTokens);
      } else {
        EXPECT_EQ(words.weight.grad().abs().max().item<float>(), 0);
      }
      SharedGradients(positions, tp).finish();
      EXPECT_EQ(positions.weight.grad()[0][0].item<float>(), kTokens / 2);
      EXPECT_EQ(positions.weight.grad()[1][0].item<float>(), kTokens / 2);
    });
  }
}

TEST_P(LowPrecision, GradientsOfBiasesAndMatricesOfManyRows) {
  constexpr int64_t kRows = 6000;
  const auto x = random({kRows, 8}, 1) + 1;
  for (const int ranks : {1, 2}) {
    on_ranks({ranks, {}}, [&](const TensorParallel& tp) {
      ColumnParallelLinear up({.in = 8, .out = 12}, tp, "up");
      RowParallelLinear down({.in = 12, .out = 4}, tp, "down");
      parity::give_parts(up, 3);
      parity::give_parts(down, 3);
      const auto run = [&](torch::Dtype dtype) {
        for (auto* weight : {&up.weight, &up.bias, &down.weight, &down.bias}) {
          weight->set_data(weight->detach().to(GetParam()).to(dtype));
          weight->mutable_grad().reset();
        }
        const auto input = low(x).detach().to(dtype);
        down.forward(up.forward(input)).sum().backward();
        return std::vector<Tensor>{
            up.weight.grad(), up.bias.grad(), down.weight.grad(),
            down.bias.grad()};
      };
      expect_all_near(run, 4);
    });
  }
}

TEST_P(LowPrecision, ConvolutionsOfManyPixels) {
  for (const int ranks : {1, 2}) {
    on_ranks({ranks, {}}, [&](const TensorParallel& tp) {
      ParallelConv2d conv(
          {.in = 2, .out = 4}, tp, "conv", Channels::replicated,
          Channels::sharded);
      parity::give_parts(conv, 3);
      const auto run = [&](torch::Dtype dtype) {
        for (auto* weight : {&conv.weight, &conv.bias}) {
          weight->set_data(weight->detach().to(GetParam()).to(dtype));
          weight->mutable_grad().reset();
        }
        const auto input = low(random({8, 2, 40, 40}, 1) + 1).detach();
        const auto y = conv.forward(input.to(dtype));
        y.backward(torch::ones_like(y));
        return std::vector<Tensor>{y, conv.weight.grad(), conv.bias.grad()};
      };
      expect_all_near(run, 2);
    });
  }
}

// Angles are products of large positions with frequencies: in the dtype they
// would be off by whole turns. Tables are not rounded either.
TEST_P(LowPrecision, RotationsAtLatePositions) {
  constexpr int64_t kFirst = 30000;
  const auto x = random({2, 50, 3, 64}, 1);
  const auto like = torch::TensorOptions(dtype());
  const auto table = rotary_table({}, 64, kFirst, 50, like);
  const auto a = low(x);
  const auto y = rotate(a, table);
  y.backward(low(x).detach());
  const auto b = exact(a);
  const auto z = rotate(
      b,
      rotary_table({}, 64, kFirst, 50, torch::TensorOptions(torch::kFloat64)));
  z.backward(exact(low(x)));
  expect_near("y", z, y, 1.01);
  expect_near("gradient", b.grad(), a.grad(), 1.01);
}

// 1 / (1 - p) is no number of the dtype: each element would have the same
// error.
TEST_P(LowPrecision, DropoutKeepsTheMean) {
  const auto x = low(random({4, 999}, 1));
  const DropoutSource source{.probability = 0.1, .stream = 7};
  const auto keys = torch::arange(4);
  const auto y = dropout(x, keys, source);
  y.backward(torch::ones_like(y));
  const auto keep = detail::keep_mask(x, keys, source, {});
  const auto expected =
      at::where(keep, exact(x) / 0.9, torch::zeros({}, torch::kFloat64));
  EXPECT_TRUE(y.equal(expected.to(dtype())));
}

// Statistics of 20,000 values a channel, with a mean that is large beside the
// deviation; running statistics, which change by little, stay in float32.
TEST_P(LowPrecision, BatchStatisticsMatchFloat32) {
  const auto x = random({20, 4, 32, 32}, 1) + 6;
  const auto cotangent = (random({20, 4, 32, 32}, 2) + 1) * 0.1;
  for (const int ranks : {1, 2}) {
    on_ranks({ranks, {}}, [&](const TensorParallel& tp) {
      const auto mine = tp.part_of(4);
      const auto part = [&](const Tensor& all) {
        return all.narrow(1, mine.begin, mine.size()).contiguous();
      };
      ParallelBatchNorm2d norm(4, tp, "bn");
      ParallelBatchNorm2d reference(4, tp, "bn");
      parity::give_parts(reference, 5);
      for (auto& parameter : reference.parameters()) {
        parameter.set_data(low(parameter).detach().to(torch::kFloat64));
      }
      norm.weight.set_data(reference.weight.detach().to(dtype()));
      norm.bias.set_data(reference.bias.detach().to(dtype()));
      for (const bool training : {true, true, false}) {
        SCOPED_TRACE(training);
        norm.train(training);
        reference.train(training);
        for (auto* each : {&norm, &reference}) each->zero_grad();
        const auto a = low(part(x));
        const auto b = exact(a);
        const auto y = norm.forward(a);
        const auto z = reference.forward(b);
        y.backward(low(part(cotangent)).detach());
        z.backward(exact(low(part(cotangent))));
        expect_near("y", z, y, 2);
        expect_near("gradient of x", b.grad(), a.grad(), 2);
        expect_near(
            "gradient of weight", reference.weight.grad(), norm.weight.grad(),
            2);
        expect_near(
            "gradient of bias", reference.bias.grad(), norm.bias.grad(), 2);
      }
      EXPECT_EQ(norm.running_mean.scalar_type(), torch::kFloat32);
      for (const auto& item : norm.named_buffers()) {
        const auto expected = reference.named_buffers()[item.key()];
        EXPECT_TRUE(torch::allclose(
            item.value().to(torch::kFloat64), expected.to(torch::kFloat64),
            1e-6, 1e-7))
            << item.key();
      }
    });
  }
}

}  // namespace echelon::low_precision_test
