#include "echelon/parallel/tensor/dropout.h"

#include <ATen/core/PhiloxRNGEngine.h>
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <cmath>

#include "tests/parallel/tensor/parts.h"
#include "tests/support/error_text.h"

namespace echelon::dropout_test {

using testing::HasSubstr;
using torch::Tensor;

Tensor keys_of(std::vector<int64_t> keys) {
  return torch::tensor(keys, torch::kInt64);
}

Tensor mask_of(
    at::IntArrayRef shape, const Tensor& keys, const DropoutSource& source,
    const DropoutPlace& place = {}) {
  return detail::keep_mask(torch::empty(shape), keys, source, place);
}

const DropoutSource kSource{0.3, dropout_stream("transformer.h.0.drop")};

TEST(Dropout, KeepsByTheWordsOfPhilox) {
  const std::vector<int64_t> keys = {5, -7, int64_t{1} << 60};
  const auto mask = mask_of({3, 70}, keys_of(keys), kSource);
  for (int64_t sample = 0; sample < 3; ++sample) {
    at::Philox4_32 words(
        kSource.stream, static_cast<uint64_t>(keys[sample]), 0);
    for (int64_t i = 0; i < 70; ++i) {
      EXPECT_EQ(mask[sample][i].item<bool>(), words() >= 0.3 * 0x1p32)
          << sample << " " << i;
    }
  }
}

TEST(Dropout, DropsTheRequestedShare) {
  const int64_t count = 1 << 20;
  const auto keys = keys_of({1, 2});
  for (const double p : {0.1, 0.5, 0.9}) {
    const auto mask = mask_of({2, count}, keys, {p, 3}).to(torch::kFloat64);
    const double bound = 5 * std::sqrt(p * (1 - p) / count);
    const auto kept = mask.mean(1);
    EXPECT_NEAR(kept[0].item<double>(), 1 - p, bound);
    EXPECT_NEAR(kept[1].item<double>(), 1 - p, bound);
    // Masks of samples, of neighbours and of other streams are independent.
    const auto other = mask_of({2, count}, keys, {p, 4}).to(torch::kFloat64);
    const double both = (1 - p) * (1 - p);
    const double spread = 5 * std::sqrt(both * (1 - both) / count);
    EXPECT_NEAR((mask[0] * mask[1]).mean().item<double>(), both, spread);
    EXPECT_NEAR((mask[0] * other[0]).mean().item<double>(), both, spread);
    EXPECT_NEAR(
        (mask[0].narrow(0, 0, count - 1) * mask[0].narrow(0, 1, count - 1))
            .mean()
            .item<double>(),
        both, spread);
  }
}

TEST(Dropout, ScalesWhatItKeeps) {
  const auto x = parity::random({4, 500}, 1);
  const auto keys = keys_of({1, 2, 3, 4});
  const auto mask = mask_of({4, 500}, keys, kSource);
  const auto y = dropout(x, keys, kSource);
  EXPECT_TRUE(torch::allclose(y, x * mask / 0.7));
  for (const auto dtype : {torch::kFloat32, torch::kBFloat16, torch::kHalf}) {
    const auto low = dropout(x.to(dtype), keys, kSource);
    EXPECT_EQ(low.scalar_type(), dtype);
    EXPECT_TRUE(low.ne(0).equal(mask));
  }
  EXPECT_TRUE(dropout(x, {}, {0.0, 1}).is_same(x));
}

// An infinity that is dropped becomes 0.
TEST(Dropout, DroppedElementsAreZero) {
  const auto x = torch::full({1, 100}, INFINITY);
  const auto y = dropout(x, keys_of({1}), kSource);
  EXPECT_FALSE(y.isnan().any().item<bool>());
  EXPECT_TRUE(y.eq(0).any().item<bool>());
}

class DropoutParity : public testing::TestWithParam<parity::Way> {};
INSTANTIATE_TEST_SUITE_P(
    Ways, DropoutParity, testing::ValuesIn(parity::ways()),
    testing::PrintToStringParamName());

TEST_P(DropoutParity, TokensKeepTheirMaskOnAnyRank) {
  for (const int64_t hidden : {8, 7, 129}) {
    const auto x = parity::random({3, 5, hidden}, 1);
    const auto keys = keys_of({11, 12, 13});
    const auto whole = dropout(x, keys, kSource);
    parity::on_ranks(GetParam(), [&](const TensorParallel& parallel) {
      const auto here = dropout(
          parity::part_of_tokens(x, parallel), keys, kSource,
          place_of_tokens(parallel, 3, 5));
      EXPECT_TRUE(here.equal(parity::part_of_tokens(whole, parallel)));
    });
  }
}

TEST_P(DropoutParity, HeadsKeepTheirMask) {
  const auto x = parity::random({2, 5, 6, 7}, 1);
  const auto keys = keys_of({1, 2});
  const auto whole = dropout(x, keys, kSource);
  parity::on_ranks(GetParam(), [&](const TensorParallel& parallel) {
    const auto heads = parallel.part_of(5);
    const auto here = dropout(
        x.narrow(1, heads.begin, heads.size()), keys, kSource,
        place_of_heads(heads.begin, 6, 7));
    EXPECT_TRUE(here.equal(whole.narrow(1, heads.begin, heads.size())));
  });
}

TEST(Dropout, OperatorsGiveTheSameMask) {
  const auto keys = keys_of({3, -1, int64_t{1} << 50, 8});
  const auto same = [&](at::IntArrayRef shape, const DropoutPlace& place) {
    const auto x = torch::empty(shape);
    return detail::keep_mask(x, keys, kSource, place)
        .equal(detail::keep_mask_by_operators(x, keys, kSource, place));
  };
  EXPECT_TRUE(same({4, 6, 10}, {}));
  EXPECT_TRUE(same({4, 7, 3}, {}));
  EXPECT_TRUE(same({4, 70000}, {}));
  EXPECT_TRUE(same({9, 12}, {.first_row = 4, .rows_per_sample = 5}));
  EXPECT_TRUE(same({9, 11}, {.first_row = 4, .rows_per_sample = 5}));
  EXPECT_TRUE(same({4, 2, 5, 5}, place_of_heads(3, 5, 5)));
  EXPECT_TRUE(same({4, 2, 4, 4}, place_of_heads(3, 4, 4)));
  EXPECT_TRUE(same({4, 8}, {.first_element = int64_t{1} << 36}));
  EXPECT_TRUE(same({0, 8}, {}));
}

TEST(Dropout, GradientsOfAllOrders) {
  const auto x = parity::random({2, 30}, 1).requires_grad_();
  const auto w = parity::random({2, 30}, 2);
  const auto keys = keys_of({1, 2});
  const auto y = dropout(x, keys, kSource);
  const auto factor = mask_of({2, 30}, keys, kSource) / 0.7;
  const auto first = torch::autograd::grad(
      {(y * y * w).sum()}, {x}, {}, std::nullopt, /*create_graph=*/true)[0];
  EXPECT_TRUE(torch::allclose(first, 2 * factor * factor * x * w));
  const auto second = torch::autograd::grad({first.sum()}, {x})[0];
  EXPECT_TRUE(torch::allclose(second, 2 * factor * factor * w));
}

// Adding a residual in the same pass gives what a sum of its own gives.
TEST(Dropout, AddsAResidual) {
  const auto x = parity::random({2, 30}, 1).requires_grad_();
  const auto residual = parity::random({2, 30}, 2).requires_grad_();
  const auto w = parity::random({2, 30}, 3);
  const auto keys = keys_of({1, 2});
  const auto y = dropout(x, keys, kSource, {}, residual);
  EXPECT_TRUE(y.equal(residual + dropout(x, keys, kSource)));
  const auto found = torch::autograd::grad({(y * w).sum()}, {x, residual});
  EXPECT_TRUE(found[0].equal(dropout(w, keys, kSource)));
  EXPECT_TRUE(found[1].equal(w));
  // Rows that are not contiguous, and another dtype.
  const auto turned = parity::random({30, 2}, 4).t();
  EXPECT_TRUE(dropout(x, keys, kSource, {}, turned)
                  .equal(turned + dropout(x, keys, kSource)));
  const auto narrow = x.detach().to(torch::kBFloat16);
  EXPECT_TRUE(dropout(narrow, keys, kSource, {}, residual)
                  .equal(residual + dropout(narrow, keys, kSource)));
  // Low precision is rounded once.
  for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
    const auto low = x.detach().to(dtype), more = residual.detach().to(dtype);
    const auto exact = dropout(low.to(torch::kFloat32), keys, kSource) +
                       more.to(torch::kFloat32);
    EXPECT_TRUE(dropout(low, keys, kSource, {}, more).equal(exact.to(dtype)));
  }
  EXPECT_TRUE(dropout(x, {}, {0.0, 1}, {}, residual).equal(residual + x));
}

TEST(Dropout, AnEmptyBatchIsEmpty) {
  EXPECT_EQ(dropout(torch::empty({0, 4}), keys_of({}), kSource).numel(), 0);
}

TEST(Dropout, WrongArgumentsAreNamed) {
  const auto x = torch::zeros({3, 4});
  const auto error = [&](const Tensor& keys, double probability) {
    return error_text<ConfigError>([&] { dropout(x, keys, {probability, 1}); });
  };
  EXPECT_THAT(error(keys_of({1, 2, 3}), 1.0), HasSubstr("dropout=1.0"));
  EXPECT_THAT(error(keys_of({1, 2, 3}), -0.1), HasSubstr("dropout=-0.1"));
  EXPECT_THAT(error({}, 0.1), HasSubstr("int64 key for each sample"));
  EXPECT_THAT(error(torch::zeros({3}), 0.1), HasSubstr("int64 key"));
  EXPECT_THAT(error(keys_of({1, 2}), 0.1), HasAll("3 samples", "2 keys"));
}

}  // namespace echelon::dropout_test
