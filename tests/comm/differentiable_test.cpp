// Every adjoint against finite differences of the number that the ranks compute
// together, at 1, 2, 3 and 4 ranks, once and twice differentiated.
#include "echelon/comm/differentiable.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <ATen/CPUGeneratorImpl.h>

#include <functional>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "echelon/comm/world.h"
#include "tests/support/error_text.h"

namespace echelon::differentiable_test {

using testing::HasSubstr;
using torch::Tensor;
using Sizes = std::vector<int64_t>;

/// One operation: the shape of a rank's input, and how F is counted.
struct Case {
  std::string name;
  std::function<Sizes(int rank, int size)> shape;
  std::function<Tensor(const Tensor&, const Group&)> operation;
  bool replicated_input = false;   // one variable, that all ranks hold
  bool replicated_output = false;  // all ranks compute one loss, counted once
};

constexpr int64_t kLargest = 10;

void PrintTo(const Case& test, std::ostream* out) {
  *out << test.name;
}

Tensor random(const at::IntArrayRef shape, uint64_t seed) {
  auto generator = at::detail::createCPUGenerator(seed);
  return torch::empty(shape, torch::kFloat64).normal_(0, 1, generator);
}

// Slices that differ, one of them empty with 3 ranks or more.
Sizes uneven(int size) {
  const Sizes all = {2, 3, 0, 1};
  return {all.begin(), all.begin() + size};
}

// The rows that rank r sends to the others in an uneven all_to_all.
Sizes sends(int rank, int size) {
  Sizes splits;
  for (int to = 0; to < size; ++to) splits.push_back((rank + 2 * to) % 3);
  return splits;
}

Sizes receives(int rank, int size) {
  Sizes splits;
  for (int from = 0; from < size; ++from) {
    splits.push_back((from + 2 * rank) % 3);
  }
  return splits;
}

int64_t total(const Sizes& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
}

std::vector<Case> cases() {
  const auto same = [](int, int) { return Sizes({2, 3}); };
  const auto uneven_columns = [](int r, int n) {
    return Sizes({2, uneven(n)[r]});
  };
  const auto two_each = [](int, int n) { return Sizes({2 * n, 1}); };
  return {
      {"copy_to", same, [](auto& x, auto& g) { return copy_to(x, g); }, true,
       false},
      {"reduce_from", same, [](auto& x, auto& g) { return reduce_from(x, g); },
       false, true},
      {"gather_from", same,
       [](auto& x, auto& g) { return gather_from(x, g, 1); }, false, true},
      {"gather_from_uneven", uneven_columns,
       [](auto& x, auto& g) { return gather_from(x, g, -1, uneven(g.size())); },
       false, true},
      {"scatter_to",
       [](int, int) {
         return Sizes({5, 2});
       },
       [](auto& x, auto& g) { return scatter_to(x, g, 0); }, true, false},
      {"scatter_to_uneven",
       [](int, int n) {
         return Sizes({1, total(uneven(n))});
       },
       [](auto& x, auto& g) { return scatter_to(x, g, 1, uneven(g.size())); },
       true, false},
      {"all_reduce_sum", same,
       [](auto& x, auto& g) { return all_reduce_sum(x, g); }},
      {"all_gather", same, [](auto& x, auto& g) { return all_gather(x, g); }},
      {"all_gather_uneven", uneven_columns,
       [](auto& x, auto& g) { return all_gather(x, g, 1, uneven(g.size())); }},
      {"reduce_scatter", two_each,
       [](auto& x, auto& g) { return reduce_scatter(x, g); }},
      {"reduce_scatter_uneven",
       [](int, int) {
         return Sizes({2, 5});
       },
       [](auto& x, auto& g) { return reduce_scatter(x, g, 1); }},
      {"all_to_all", two_each,
       [](auto& x, auto& g) { return all_to_all(x, g); }},
      {"all_to_all_uneven",
       [](int r, int n) {
         return Sizes({total(sends(r, n)), 2});
       },
       [](auto& x, auto& g) {
         return all_to_all(
             x, g, sends(g.rank(), g.size()), receives(g.rank(), g.size()));
       }},
      {"broadcast_from", same,
       [](auto& x, auto& g) { return broadcast_from(x, g, g.size() - 1); }},
      {"reduce_to", same,
       [](auto& x, auto& g) { return reduce_to(x, g, g.size() / 2); }},
      {"shift", same, [](auto& x, auto& g) { return shift(x, g, 1); }},
      {"shift_back", same, [](auto& x, auto& g) { return shift(x, g, -2); }},
  };
}

// The sum over ranks of a local number, or the number itself when all ranks
// compute the same.
double together(double local, bool replicated, const Group& group) {
  const Tensor value = torch::full({1}, local, torch::kFloat64);
  if (group.size() > 1) group.all_reduce(value).wait();
  return value.item<double>() / (replicated ? group.size() : 1);
}

class Adjoint : public testing::TestWithParam<std::tuple<Case, int>> {
 protected:
  // Central differences of F with respect to every element of every rank's x,
  // which has at most kLargest; F is called by all ranks at once.
  static Tensor differences(
      const std::function<double(const Tensor&)>& f, const Tensor& x,
      const Case& test, const Group& group) {
    Tensor result = torch::zeros_like(x);
    EXPECT_LE(x.numel(), kLargest);
    for (int owner = 0; owner < group.size(); ++owner) {
      if (test.replicated_input && owner > 0) break;
      const bool mine = test.replicated_input || owner == group.rank();
      for (int64_t i = 0; i < kLargest; ++i) {
        const bool moves = mine && i < x.numel();
        double at[2];
        for (const int side : {0, 1}) {
          Tensor moved = x.clone();
          if (moves) moved.view({-1})[i] += side ? 0.5 : -0.5;
          at[side] = f(moved);
        }
        if (moves) result.view({-1})[i] = at[1] - at[0];
      }
    }
    return result;
  }
};

TEST_P(Adjoint, MatchesFiniteDifferences) {
  const auto& [test, num_ranks] = GetParam();
  run_ranks(num_ranks, [&test = test](World& world) {
    const Group& group = world.group();
    const int rank = group.rank();
    const auto shape = test.shape(rank, group.size());
    const Tensor x = random(shape, test.replicated_input ? 7 : 10 + rank);
    x.requires_grad_();
    Tensor y = test.operation(x, group);
    const Tensor w = random(y.sizes(), test.replicated_output ? 5 : 20 + rank);
    (y * w).sum().backward();

    const auto f = [&](const Tensor& at) {
      torch::NoGradGuard no_grad;
      const double local = (test.operation(at, group) * w).sum().item<double>();
      return together(local, test.replicated_output, group);
    };
    const Tensor expected = differences(f, x.detach(), test, group);
    ASSERT_TRUE(x.grad().defined());
    EXPECT_TRUE(torch::allclose(x.grad(), expected, 1e-10, 1e-10))
        << "rank " << rank << "\n"
        << x.grad() << "\n"
        << expected;
  });
}

// G = <dF/dx, v> of a cubic F: its differences are exact, so double backward is
// held to the same tolerance.
TEST_P(Adjoint, CanBeDifferentiatedTwice) {
  const auto& [test, num_ranks] = GetParam();
  run_ranks(num_ranks, [&test = test](World& world) {
    const Group& group = world.group();
    const int rank = group.rank();
    const auto shape = test.shape(rank, group.size());
    const Tensor x = random(shape, test.replicated_input ? 7 : 10 + rank);
    x.requires_grad_();
    const Tensor v = random(shape, test.replicated_input ? 8 : 30 + rank);
    Tensor w;
    const auto gradient = [&](const Tensor& at) {
      const Tensor y = test.operation(at, group);
      if (!w.defined()) {
        w = random(y.sizes(), test.replicated_output ? 5 : 20 + rank);
      }
      return torch::autograd::grad(
          {(y.pow(3) * w).sum()}, {at}, {}, true, /*create_graph=*/true)[0];
    };
    (gradient(x) * v).sum().backward();

    const auto g = [&](const Tensor& at) {
      const Tensor leaf = at.detach().requires_grad_();
      const double local = (gradient(leaf) * v).sum().item<double>();
      return together(local, test.replicated_input, group);
    };
    const Tensor expected = differences(g, x.detach(), test, group);
    EXPECT_TRUE(torch::allclose(x.grad(), expected, 1e-9, 1e-9))
        << "rank " << rank << "\n"
        << x.grad() << "\n"
        << expected;
  });
}

INSTANTIATE_TEST_SUITE_P(
    Differentiable, Adjoint,
    testing::Combine(testing::ValuesIn(cases()), testing::Values(1, 2, 3, 4)),
    [](const auto& info) {
      return std::get<0>(info.param).name + "_" +
             std::to_string(std::get<1>(info.param));
    });

// The results, by rank.
TEST(Differentiable, Values) {
  run_ranks(3, [](World& world) {
    const Group& group = world.group();
    const int rank = group.rank();
    const auto row = [](std::initializer_list<double> values) {
      return torch::tensor(std::vector<double>(values), torch::kFloat64);
    };
    const Tensor x = row({rank + 1.0, 10.0 * (rank + 1)});
    EXPECT_TRUE(copy_to(x, group).equal(x));
    EXPECT_TRUE(reduce_from(x, group).equal(row({6, 60})));
    EXPECT_TRUE(all_reduce_sum(x, group).equal(row({6, 60})));
    EXPECT_TRUE(gather_from(x, group).equal(row({1, 10, 2, 20, 3, 30})));
    EXPECT_TRUE(all_gather(x, group).equal(row({1, 10, 2, 20, 3, 30})));
    const Tensor five = row({1, 2, 3, 4, 5});
    const std::vector<Tensor> parts = {row({1, 2}), row({3, 4}), row({5})};
    EXPECT_TRUE(scatter_to(five, group).equal(parts[rank]));
    EXPECT_TRUE(reduce_scatter(five, group).equal(3 * parts[rank]));
    EXPECT_TRUE(broadcast_from(x, group, 1).equal(row({2, 20})));
    EXPECT_TRUE(
        reduce_to(x, group, 2).equal(rank == 2 ? row({6, 60}) : row({0, 0})));
    EXPECT_TRUE(
        shift(x, group, 1)
            .equal(row({1.0 + (rank + 2) % 3, 10.0 * (1 + (rank + 2) % 3)})));
    const Tensor own = torch::full({3}, rank, torch::kFloat64);
    EXPECT_TRUE(all_to_all(own, group).equal(row({0, 1, 2})));
  });
}

// The result may be changed in place, as the output of a layer is.
TEST(Differentiable, ResultsCanBeChangedInPlace) {
  run_ranks(2, [](World& world) {
    const Group& group = world.group();
    const Tensor x = torch::ones({2}, torch::kFloat64).requires_grad_();
    for (auto* operation : {&copy_to, &reduce_from, &all_reduce_sum}) {
      x.mutable_grad().reset();
      Tensor y = (*operation)(x * 1.0, group, "in place");
      y.mul_(3.0);
      y.sum().backward();
      EXPECT_TRUE(x.grad().defined());
      EXPECT_EQ(x.grad()[0].item<double>(), operation == &reduce_from ? 3 : 6);
    }
  });
}

TEST(Differentiable, GroupOfOneReturnsItsInput) {
  const World world = World::alone();
  const Group& group = world.group();
  const Tensor x = torch::ones({2, 2}, torch::kFloat64);
  EXPECT_TRUE(copy_to(x, group).is_same(x));
  EXPECT_TRUE(all_gather(x, group, 1).is_same(x));
  EXPECT_TRUE(reduce_scatter(x, group, 1).is_same(x));
  EXPECT_TRUE(all_to_all(x, group).is_same(x));
  EXPECT_EQ(world.history().count(), 0u);
}

TEST(Differentiable, WrongShapesAreErrorsBeforeAnythingIsSent) {
  run_ranks(2, [](World& world) {
    const Group& group = world.group();
    const Tensor x = torch::ones({3, 2}, torch::kFloat64);
    const Sizes fours = {4, 4};
    const Sizes ones = {1, 1};
    const std::vector<std::pair<const char*, std::function<void()>>> refused = {
        {"dim=2, but the input is [3, 2]", [&] { all_gather(x, group, 2); }},
        {"sizes [3], but 2 ranks need one size",
         [&] { gather_from(x, group, 0, {3}); }},
        {"a slice of 4, but its input has 3",
         [&] { gather_from(x, group, 0, fours); }},
        {"sum to 2, but the input has 3",
         [&] { reduce_scatter(x, group, 0, ones); }},
        {"3 rows do not divide by 2 ranks", [&] { all_to_all(x, group); }},
        {"rank 2 is not one of", [&] { broadcast_from(x, group, 2); }}};
    for (const auto& [text, call] : refused) {
      EXPECT_THAT(error_text<ConfigError>(call), HasSubstr(text));
    }
  });
}

}  // namespace echelon::differentiable_test
