#include "echelon/parallel/tensor/shared_gradients.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/parallel/tensor/parts.h"

namespace echelon::shared_gradients_test {

using parity::on_ranks;
using torch::Tensor;

// Three parameters: applied to other things on each rank, plain, and one whose
// rows lie on several ranks.
class Layer : public ShardedModule {
 public:
  explicit Layer(const TensorParallel& tp) {
    norm = register_shard("norm", {replicated({3}, tp.rank()), true});
    plain = register_shard("plain", {replicated({3}, tp.rank()), false});
    Shard shard{.shape = {5, 2}, .dim = 0, .pieces = rows_of(tp.rank())};
    keys = register_shard("keys", {shard, true});
    to(torch::kFloat64);
  }

  // Rank 0 holds 4 | 0 1, rank 1 holds 1 2, rank 2 all, rank 3 nothing.
  static std::vector<IndexRange> rows_of(int rank) {
    if (rank == 0) return {{4, 5}, {0, 2}};
    if (rank == 1) return {{1, 3}};
    if (rank == 2) return {{0, 5}};
    return {};
  }

  Tensor norm;
  Tensor plain;
  Tensor keys;
};

void set_gradient(Tensor parameter, const Tensor& value) {
  parameter.mutable_grad() = value;
}

class SharedGradientsTest : public testing::TestWithParam<int> {};

TEST_P(SharedGradientsTest, SumsMarkedParametersByIndex) {
  on_ranks({GetParam()}, [](const TensorParallel& tp) {
    Layer layer(tp);
    SharedGradients shared(layer, tp);
    EXPECT_EQ(shared.size(), tp.size() == 1 ? 0U : 2U);
    const double mine = tp.rank() + 1;
    set_gradient(layer.norm, torch::full({3}, mine, torch::kFloat64));
    set_gradient(layer.plain, torch::full({3}, mine, torch::kFloat64));
    // Row i of the whole has gradient 10 i + rank + 1 on each rank that holds
    // it.
    const auto rows = torch::arange(5, torch::kFloat64).mul(10).unsqueeze(1);
    const Shard shard{
        .shape = {5, 2}, .dim = 0, .pieces = layer.rows_of(tp.rank())};
    set_gradient(
        layer.keys, slice_of((rows + mine).expand({5, 2}), shard).clone());
    const auto memory = layer.norm.grad().data_ptr();

    shared.finish();

    double ranks = 0;
    auto expected = torch::zeros({5, 2}, torch::kFloat64);
    for (int rank = 0; rank < tp.size(); ++rank) {
      ranks += rank + 1;
      for (const auto& piece : Layer::rows_of(rank)) {
        for (int64_t row = piece.begin; row < piece.end; ++row) {
          expected[row] += 10.0 * static_cast<double>(row) + rank + 1;
        }
      }
    }
    EXPECT_TRUE(layer.norm.grad().eq(ranks).all().item<bool>());
    EXPECT_EQ(layer.norm.grad().data_ptr(), memory) << "in place";
    EXPECT_TRUE(layer.plain.grad().eq(mine).all().item<bool>());
    EXPECT_TRUE(layer.keys.grad().equal(slice_of(expected, shard)))
        << layer.keys.grad();
  });
}

TEST_P(SharedGradientsTest, UndefinedCountsAsZeroUnlessOnAllRanks) {
  on_ranks({GetParam()}, [](const TensorParallel& tp) {
    Layer layer(tp);
    SharedGradients shared(layer, tp);
    if (tp.rank() == tp.size() - 1) {
      set_gradient(layer.norm, torch::ones({3}, torch::kFloat64));
    }
    shared.finish();
    ASSERT_TRUE(layer.norm.grad().defined());
    EXPECT_TRUE(layer.norm.grad().eq(1).all().item<bool>());
    EXPECT_FALSE(layer.keys.grad().defined());
  });
}

TEST_P(SharedGradientsTest, FrozenAndTiedParametersAndOtherTypes) {
  on_ranks({GetParam()}, [](const TensorParallel& tp) {
    struct Net : torch::nn::Module {
      explicit Net(const TensorParallel& tp) {
        first = register_module("first", std::make_shared<Layer>(tp));
        half = register_module("half", std::make_shared<Layer>(tp));
        tied = register_module("tied", first);
      }
      std::shared_ptr<Layer> first;
      std::shared_ptr<Layer> half;
      std::shared_ptr<Layer> tied;
    } net(tp);
    net.half->to(torch::kBFloat16);
    net.first->keys.set_requires_grad(false);
    SharedGradients shared(net, tp);
    set_gradient(net.first->norm, torch::ones({3}, torch::kFloat64));
    set_gradient(net.half->norm, torch::ones({3}, torch::kBFloat16));
    shared.finish();
    EXPECT_TRUE(net.first->norm.grad().eq(tp.size()).all().item<bool>());
    EXPECT_TRUE(net.half->norm.grad().eq(tp.size()).all().item<bool>());
    EXPECT_EQ(net.half->norm.grad().scalar_type(), torch::kBFloat16);
    EXPECT_FALSE(net.first->keys.grad().defined());
  });
}

INSTANTIATE_TEST_SUITE_P(
    Ranks, SharedGradientsTest, testing::Values(1, 2, 3, 4));

}  // namespace echelon::shared_gradients_test
