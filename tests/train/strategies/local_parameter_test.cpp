#include "echelon/train/strategies/local_parameter.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace echelon::local_parameter_test {

// The elements that rank (tp, shard) has of a tensor, whose tensor-parallel
// part is split evenly.
LocalParameter part_of_rank(
    const torch::Tensor& whole, const std::vector<Shard>& shards,
    int tensor_rank, int shard_rank, int shard_ranks) {
  LocalParameter part{.name = "weight"};
  if (!shards.empty()) {
    part.shard =
        ParameterShard{.shard = shards[static_cast<size_t>(tensor_rank)]};
  }
  const auto local = part.shard ? slice_of(whole, part.shard->shard) : whole;
  if (shard_ranks > 0) {
    part.range = even_range(local.numel(), shard_rank, shard_ranks);
  }
  part.value = local_values(whole, part).clone();
  return part;
}

// Two matrices beside each other; rank 1 has a row that rank 0 has too.
std::vector<Shard> overlapping(int64_t dim, std::vector<int64_t> shape) {
  Shard first{.shape = shape, .dim = dim, .pieces = {{0, 3}, {5, 7}}};
  first.owned = first.pieces;
  Shard second{.shape = shape, .dim = dim, .pieces = {{2, 5}, {6, 9}}};
  second.owned = {{3, 5}, {7, 9}};
  return {first, second};
}

struct Cut {
  std::vector<int64_t> shape;
  std::vector<Shard> shards;  // by tensor-parallel rank; empty: whole on both
};

std::vector<Cut> cuts() {
  return {
      {{9, 4}, {}},
      {{}, {}},
      {{9, 4}, overlapping(0, {9, 4})},
      {{13, 9}, overlapping(1, {13, 9})},
      {{2, 9, 3}, overlapping(1, {2, 9, 3})},
      {{7, 3}, {even_shard({7, 3}, 0, 0, 2), even_shard({7, 3}, 0, 1, 2)}},
      {{7, 3}, {even_shard({7, 3}, 1, 0, 2), even_shard({7, 3}, 1, 1, 2)}},
      {{5}, {replicated({5}, 0), replicated({5}, 1)}},
      {{}, {replicated({}, 0), replicated({}, 1)}}};
}

TEST(LocalParameter, ShardsOfAllRanksMakeTheFullTensor) {
  for (const auto& cut : cuts()) {
    const auto whole = torch::rand(cut.shape, torch::kFloat64);
    for (const int shard_ranks : {0, 1, 2, 3, 5}) {
      auto copy = torch::full(cut.shape, -1.0, torch::kFloat64);
      for (int tensor = 0; tensor < 2; ++tensor) {
        for (int rank = 0; rank < std::max(shard_ranks, 1); ++rank) {
          const auto part =
              part_of_rank(whole, cut.shards, tensor, rank, shard_ranks);
          copy_into_full(copy, part.value, part);
        }
      }
      EXPECT_TRUE(copy.equal(whole)) << whole.sizes() << " " << shard_ranks;
    }
  }
}

// Tensors that are not in row-major order work too; gradients may be such.
TEST(LocalParameter, AnElementOfTheModelIsCountedOnce) {
  for (const auto& cut : cuts()) {
    const auto whole = torch::rand(cut.shape, torch::kFloat64) + 1;
    for (const int shard_ranks : {0, 1, 2, 3, 5}) {
      double squares = 0;
      int64_t elements = 0;
      for (int tensor = 0; tensor < 2; ++tensor) {
        for (int rank = 0; rank < std::max(shard_ranks, 1); ++rank) {
          auto part =
              part_of_rank(whole, cut.shards, tensor, rank, shard_ranks);
          const CountedElements counted({part}, tensor);
          EXPECT_TRUE(counted.partition({part}, nullptr).counted.empty());
          part.gradient = part.value;
          if (part.value.dim() == 2) {
            part.gradient = part.value.t().contiguous().t();
          }
          int64_t here = 0;
          for (const auto& one : counted.partition({part}, nullptr).counted) {
            squares += one.square().sum().item<double>();
            here += one.numel();
          }
          EXPECT_EQ(here, counted.num_counted(0));
          elements += here;
        }
      }
      EXPECT_EQ(elements, whole.numel()) << whole.sizes() << " " << shard_ranks;
      EXPECT_NEAR(squares, whole.square().sum().item<double>(), 1e-9);
    }
  }
}

TEST(LocalParameter, LeavesOutWhatAnotherRankCounts) {
  const auto whole = torch::rand({3, 2});
  const auto part = part_of_rank(whole, {}, 0, 0, 2);
  EXPECT_EQ(CountedElements({part}, 0).num_counted(0), 3);
  EXPECT_EQ(CountedElements({part}, 1).num_counted(0), 0);
  EXPECT_EQ(CountedElements({part}, 0, {"weight"}).num_counted(0), 0);
  EXPECT_EQ(CountedElements({part}, 0, {"weights"}).num_counted(0), 3);
}

}  // namespace echelon::local_parameter_test
