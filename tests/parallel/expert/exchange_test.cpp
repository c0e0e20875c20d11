// Rows that go to the ranks of their experts and come back.
#include "echelon/parallel/expert/exchange.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include "echelon/comm/world.h"
#include "tests/support/parity.h"

namespace echelon::exchange_test {

using torch::Tensor;

constexpr int64_t kExperts = 5;

// How many rows rank `rank` has for expert `expert`; some have none.
int64_t rows_of(int rank, int64_t expert) {
  return (3 * rank + 2 * expert) % 4;
}

// A row names its rank, its expert and its number.
Tensor rows_of(int rank) {
  std::vector<double> values;
  for (int64_t expert = 0; expert < kExperts; ++expert) {
    for (int64_t i = 0; i < rows_of(rank, expert); ++i) {
      values.insert(
          values.end(), {static_cast<double>(rank), static_cast<double>(expert),
                         static_cast<double>(i)});
    }
  }
  return torch::tensor(values, torch::kFloat64).view({-1, 3});
}

class Exchanges : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(
    Ranks, Exchanges, testing::Values(1, 2, 3, 4, 5),
    testing::PrintToStringParamName());

TEST_P(Exchanges, RowsArriveByExpertAndComeBack) {
  run_ranks(GetParam(), [&](World& world) {
    const auto& group = world.group();
    const int size = group.size();
    const auto x = rows_of(group.rank()).requires_grad_();
    std::vector<int64_t> counts;
    for (int64_t e = 0; e < kExperts; ++e) {
      counts.push_back(rows_of(group.rank(), e));
    }
    Exchange exchange(RowCounts(counts), group, x, "layer");
    exchange.settle();
    const auto arrived = exchange.send(x);
    const auto own = experts_of(kExperts, group);
    ASSERT_EQ(
        exchange.counts().on_host().size(), static_cast<size_t>(own.size()));
    std::vector<Tensor> expected;
    for (int64_t e = own.begin; e < own.end; ++e) {
      int64_t sum = 0;
      for (int rank = 0; rank < size; ++rank) {
        sum += rows_of(rank, e);
        const auto all = rows_of(rank);
        expected.push_back(
            all.index({all.select(1, 1).eq(static_cast<double>(e))}));
      }
      EXPECT_EQ(
          exchange.counts().on_host()[static_cast<size_t>(e - own.begin)], sum);
    }
    EXPECT_TRUE(arrived.equal(torch::cat(expected)));

    // Rank r's experts multiply by r + 2: so do the gradients that come back.
    const double factor = group.rank() + 2;
    const auto y = exchange.give_back(arrived * factor);
    Tensor factors = torch::empty({x.size(0), 1}, torch::kFloat64);
    for (int64_t i = 0; i < x.size(0); ++i) {
      const auto expert = x[i][1].item<int64_t>();
      for (int rank = 0; rank < size; ++rank) {
        const auto theirs = even_range(kExperts, rank, size);
        if (expert >= theirs.begin && expert < theirs.end) {
          factors[i] = rank + 2;
        }
      }
    }
    EXPECT_TRUE(y.equal(x * factors));
    const auto cotangent = parity::random(x.sizes(), 7 + group.rank());
    y.backward(cotangent);
    EXPECT_TRUE(x.grad().equal(cotangent * factors));
  });
}

TEST(Exchange, ScalesGradientsAlone) {
  const auto x = parity::random({3}, 1).requires_grad_();
  const auto y = with_scaled_gradient(x, 0.25);
  EXPECT_TRUE(y.equal(x));
  y.sum().backward();
  EXPECT_TRUE(x.grad().equal(torch::full({3}, 0.25, torch::kFloat64)));
  EXPECT_TRUE(with_scaled_gradient(x, 1).is_same(x));
}

}  // namespace echelon::exchange_test
