#include "echelon/parallel/tensor/rotary.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>

#include "echelon/error.h"
#include "tests/support/error_text.h"
#include "tests/support/parity.h"

namespace echelon::rotary_test {

using testing::HasSubstr;

const torch::TensorOptions kDouble(torch::kFloat64);

TEST(Rotary, ProductsDependOnTheDistance) {
  const auto q = parity::random({8}, 1).view({1, 1, 1, 8}).expand({1, 9, 1, 8});
  const auto k = parity::random({8}, 2).view({1, 1, 1, 8}).expand({1, 9, 1, 8});
  const auto table = rotary_table({.theta = 50}, 8, 0, 9, kDouble);
  const auto a = rotate(q, table).view({9, 8});
  const auto b = rotate(k, table).view({9, 8});
  const auto products = a.mm(b.t());
  for (int64_t distance = -8; distance <= 8; ++distance) {
    const auto diagonal = products.diagonal(distance);
    EXPECT_LT((diagonal - diagonal[0]).abs().max().item<double>(), 1e-5);
  }
  EXPECT_GT((products[0][1] - products[1][0]).abs().item<double>(), 1e-2);
}

TEST(Rotary, ATableIsAViewOfALongerOne) {
  const auto some = rotary_table({.theta = 51}, 6, 3, 4, kDouble);
  const auto all = rotary_table({.theta = 51}, 6, 0, 64, kDouble);
  EXPECT_TRUE(some.cosine.equal(all.cosine.narrow(0, 3, 4)));
  EXPECT_TRUE(some.sine.equal(all.sine.narrow(0, 3, 4)));
}

// Neighbours are turned as halves are, in another order.
TEST(Rotary, PairsOfNeighbours) {
  const auto table = rotary_table({.theta = 52}, 6, 1, 3, kDouble);
  const auto x = parity::random({2, 3, 2, 6}, 5).requires_grad_();
  const auto w = parity::random({2, 3, 2, 6}, 6);
  const auto halves = torch::tensor({0, 2, 4, 1, 3, 5});
  const auto y = rotate(x, table, RotaryPairs::neighbours);
  (y * w).sum().backward();
  const auto other = x.detach().index_select(-1, halves).requires_grad_();
  const auto z = rotate(other, table);
  (z * w.index_select(-1, halves)).sum().backward();
  EXPECT_TRUE(y.index_select(-1, halves).equal(z));
  EXPECT_TRUE(x.grad().index_select(-1, halves).equal(other.grad()));
}

TEST(Rotary, GradientsOfAllOrders) {
  const auto table = rotary_table({}, 4, 2, 3, kDouble);
  const auto x = parity::random({2, 3, 2, 4}, 3).requires_grad_();
  const auto w = parity::random({2, 3, 2, 4}, 4);
  const auto y = rotate(x, table);
  // Turning keeps lengths, and its adjoint is its inverse (in float32).
  EXPECT_TRUE(torch::allclose(y.norm(), x.norm()));
  const auto first = torch::autograd::grad(
      {(y * y * w).sum()}, {x}, {}, std::nullopt, /*create_graph=*/true)[0];
  const auto turned_w = rotate(x, table) * w;
  EXPECT_TRUE(torch::allclose(rotate(first, table), 2 * turned_w, 1e-5, 1e-6));
  const auto second =
      torch::autograd::grad({(first * first).sum() / 2}, {x})[0];
  EXPECT_TRUE(torch::allclose(
      rotate(second, table), 4 * w * w * rotate(x, table), 1e-5, 1e-6));
}

// The same as rotating each and copying the rest, with its gradients.
TEST(Rotary, QueriesAndKeysOfOneTensor) {
  const auto table = rotary_table({}, 4, 2, 3, kDouble);
  const auto x = parity::random({2, 3, 5, 4}, 3).requires_grad_();
  const auto w = parity::random({2, 3, 5, 4}, 4);
  const auto twice = [&](const std::vector<torch::Tensor>& parts) {
    const auto y = torch::cat(parts, 2);
    const auto first = torch::autograd::grad(
        {(y * y * w).sum()}, {x}, {}, std::nullopt, /*create_graph=*/true)[0];
    const auto second = torch::autograd::grad({(first * first).sum()}, {x})[0];
    return std::vector<torch::Tensor>{y, first, second};
  };
  const auto found = rotate_queries_and_keys(x, 2, 1, table);
  EXPECT_EQ(found[0].size(2), 2);
  EXPECT_EQ(found[2].size(2), 2);
  const auto split = x.split_with_sizes({2, 1, 2}, 2);
  const auto actual = twice(found);
  const auto expected =
      twice({rotate(split[0], table), rotate(split[1], table), split[2]});
  for (size_t i = 0; i < actual.size(); ++i) {
    EXPECT_TRUE(torch::allclose(actual[i], expected[i], 1e-12, 1e-12)) << i;
  }
}

// By the definition, frequency by frequency.
TEST(Rotary, ScaledFrequencies) {
  const RotaryOptions plain{.theta = 500000};
  const RotaryOptions options{.theta = 500000, .factor = 8};
  const auto before = rotary_frequencies(plain, 128);
  const auto after = rotary_frequencies(options, 128);
  const auto waves = 6.283185307179586 / before;
  for (int64_t i = 0; i < 64; ++i) {
    const double wave = waves[i].item<double>();
    const double f = before[i].item<double>();
    double expected = f;
    if (wave > 8192.0) {
      expected = f / 8;
    } else if (wave >= 8192.0 / 4) {
      const double smooth = (8192.0 / wave - 1) / 3;
      expected = (1 - smooth) * f / 8 + smooth * f;
    }
    EXPECT_NEAR(after[i].item<double>() / expected, 1.0, 1e-5) << i;
  }
  EXPECT_EQ(after[0].item<float>(), 1.0f);
}

// By the definition of YaRN, pair by pair: Qwen's published numbers.
TEST(Rotary, FrequenciesOfYarn) {
  const RotaryOptions options{
      .theta = 1e6,
      .scaling = RopeScaling::yarn,
      .factor = 4,
      .original_positions = 32768};
  const auto before = rotary_frequencies({.theta = 1e6}, 128);
  const auto after = rotary_frequencies(options, 128);
  // Pairs that turn 32 times and once within 32,768 positions: 23.6 and 39.6.
  for (int64_t i = 0; i < 64; ++i) {
    const double slowed =
        std::clamp((static_cast<double>(i) - 23) / 17, 0., 1.);
    const double expected = 1 - slowed + slowed / 4;
    EXPECT_NEAR((after[i] / before[i]).item<double>(), expected, 1e-6) << i;
  }
  const auto table = rotary_table(options, 128, 3, 1, kDouble);
  const auto angle = 3 * after[5].item<double>();
  const double scale = 1.1386294361119891;  // 0.1 ln 4 + 1
  EXPECT_NEAR(table.cosine[0][5].item<double>(), scale * std::cos(angle), 1e-6);
  EXPECT_NEAR(table.sine[0][5].item<double>(), scale * std::sin(angle), 1e-6);
}

TEST(Rotary, LinearFrequencies) {
  const auto before = rotary_frequencies({}, 8);
  const auto after =
      rotary_frequencies({.scaling = RopeScaling::linear, .factor = 8}, 8);
  EXPECT_TRUE(torch::allclose(after * 8, before));
}

TEST(Rotary, NamesOddHeads) {
  EXPECT_THAT(
      error_text<ConfigError>([] { rotary_frequencies({}, 5); }),
      HasSubstr("has 5"));
}

}  // namespace echelon::rotary_test
