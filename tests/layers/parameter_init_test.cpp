#include "echelon/layers/parameter_init.h"

#include <ATen/Parallel.h>
#include <ATen/core/PhiloxRNGEngine.h>
#include <gmock/gmock.h>

#include <cmath>

#include "echelon/error.h"
#include "echelon/layers/sharded_module.h"
#include "tests/support/error_text.h"

namespace echelon::parameter_init_test {

using Kind = InitialValue::Kind;

torch::Tensor filled(
    Kind kind, int64_t count, double scale, torch::Dtype dtype,
    uint64_t seed = 3, std::string_view name = "layer.weight") {
  auto tensor = torch::empty({count}, dtype);
  fill_initial(tensor, seed, name, 0, {kind, scale});
  return tensor;
}

TEST(ParameterInit, UniformUsesTheWordsOfPhilox) {
  const auto values = filled(Kind::uniform, 200, 2.0, torch::kFloat64);
  at::Philox4_32 engine(parameter_key(3, "layer.weight"), 0, 0);
  for (int64_t i = 0; i < values.numel(); ++i) {
    const double unit = (engine() + 0.5) / 4294967296.0;
    EXPECT_EQ(values[i].item<double>(), 2.0 * (2.0 * unit - 1.0)) << i;
  }
}

TEST(ParameterInit, NormalIsBoxMullerOfPhiloxWords) {
  const auto values = filled(Kind::normal, 4000, 0.5, torch::kFloat64);
  at::Philox4_32 engine(parameter_key(3, "layer.weight"), 0, 0);
  const double turn = 2.0 * std::acos(-1.0);
  for (int64_t i = 0; i < values.numel(); i += 2) {
    const double first = (engine() + 0.5) / 4294967296.0;
    const double second = (engine() + 0.5) / 4294967296.0;
    const double radius = 0.5 * std::sqrt(-2.0 * std::log(first));
    EXPECT_NEAR(
        values[i].item<double>(), radius * std::cos(turn * second), 1e-13);
    EXPECT_NEAR(
        values[i + 1].item<double>(), radius * std::sin(turn * second), 1e-13);
  }
}

// Old seeds must keep giving the same networks.
TEST(ParameterInit, ValuesAreFixedForever) {
  EXPECT_EQ(parameter_key(0, ""), 3244421341483603138u);
  EXPECT_EQ(parameter_key(7, "layer1.0.conv1.weight"), 17617537325656089426u);
  EXPECT_EQ(parameter_key(8, "layer1.0.conv1.weight"), 14644069311732551147u);
  // The exact bits, on every processor.
  const auto checksum = [](const torch::Tensor& x) {
    return x.view(torch::kInt64)
        .mul(torch::arange(1, x.numel() + 1))
        .sum()
        .item<int64_t>();
  };
  EXPECT_EQ(
      checksum(filled(Kind::uniform, 10007, 1.0, torch::kFloat64)),
      -4244732760104632320);
  EXPECT_EQ(
      checksum(filled(Kind::normal, 10007, 1.0, torch::kFloat64)),
      6894659110754849877);
}

TEST(ParameterInit, ASliceEqualsThatOfTheFullTensor) {
  for (Kind kind : {Kind::uniform, Kind::normal}) {
    for (auto dtype : {torch::kFloat32, torch::kFloat64, torch::kBFloat16}) {
      const auto full = filled(kind, 1001, 0.3, dtype);
      for (const auto& [begin, size] : std::vector<std::pair<int64_t, int64_t>>{
               {0, 1},
               {1, 332},
               {333, 335},
               {668, 333},
               {64, 64},
               {1000, 1},
               {500, 0}}) {
        auto shard = torch::empty({size}, dtype);
        fill_initial(shard, 3, "layer.weight", begin, {kind, 0.3});
        EXPECT_TRUE(shard.equal(full.narrow(0, begin, size)))
            << begin << " " << size;
      }
    }
  }
}

// A module with one shard, along any dimension, in pieces that begin anywhere.
class OneShard : public ShardedModule {
 public:
  explicit OneShard(const Shard& shard) { register_shard("weight", {shard}); }
};

TEST(ParameterInit, AShardEqualsThatOfTheFullTensor) {
  const std::vector<Shard> shards = {
      {.shape = {7}, .dim = 0, .pieces = {{3, 7}}},
      {.shape = {40, 50}, .dim = 0, .pieces = {{11, 29}}},
      {.shape = {40, 50}, .dim = 1, .pieces = {{11, 29}}},
      {.shape = {300, 700},
       .dim = 1,
       .pieces = {{0, 99}, {300, 641}, {699, 700}}},
      {.shape = {6, 5, 4, 3}, .dim = 2, .pieces = {{1, 2}, {3, 4}}},
      {.shape = {6, 5}, .dim = 0, .pieces = {{2, 2}}},
      {.shape = {6, 5}, .dim = 1, .pieces = {}}};
  for (const auto& shard : shards) {
    for (const InitialValue& initial :
         {InitialValue{Kind::normal, 0.02}, InitialValue{Kind::uniform, 0.5},
          InitialValue{Kind::constant, 3}}) {
      const auto full = torch::empty(shard.shape);
      fill_initial(full, 5, "block.weight", 0, initial);
      OneShard part(shard);
      initialize(
          part, "block.",
          {{.name = "block.weight", .shape = shard.shape, .initial = initial}},
          5);
      EXPECT_TRUE(part.parameters()[0].equal(slice_of(full, shard)))
          << shard.shape.size() << " " << shard.dim;
    }
  }
  OneShard part(shards[1]);
  EXPECT_THAT(
      error_text<Error>([&] {
        initialize(part, "", {{.name = "weight", .shape = {40, 51}}}, 5);
      }),
      testing::HasSubstr("differ at \"weight\""));
}

TEST(ParameterInit, FarElementsAreReachedDirectly) {
  const int64_t far = (int64_t{1} << 40) + 3;
  auto two = torch::empty({2}, torch::kFloat64);
  fill_initial(two, 3, "w", far, {Kind::uniform, 1.0});
  at::Philox4_32 engine(
      parameter_key(3, "w"), 0, static_cast<uint64_t>(far / 4));
  engine(), engine(), engine();
  EXPECT_EQ(
      two[0].item<double>(), 2.0 * ((engine() + 0.5) / 4294967296.0) - 1.0);
}

TEST(ParameterInit, TheThreadCountDoesNotMatter) {
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const auto one = filled(Kind::normal, 300001, 1.0, torch::kFloat32);
  at::set_num_threads(3);
  const auto three = filled(Kind::normal, 300001, 1.0, torch::kFloat32);
  at::set_num_threads(threads);
  EXPECT_TRUE(one.equal(three));
}

TEST(ParameterInit, Float32IsFloat64Rounded) {
  for (Kind kind : {Kind::uniform, Kind::normal}) {
    EXPECT_TRUE(
        filled(kind, 5000, 0.3, torch::kFloat32)
            .equal(
                filled(kind, 5000, 0.3, torch::kFloat64).to(torch::kFloat32)));
  }
}

TEST(ParameterInit, NameAndSeedDetermineTheStream) {
  const auto a = filled(Kind::uniform, 100, 1.0, torch::kFloat64, 3, "a");
  EXPECT_TRUE(
      a.equal(filled(Kind::uniform, 100, 1.0, torch::kFloat64, 3, "a")));
  EXPECT_FALSE((a == filled(Kind::uniform, 100, 1.0, torch::kFloat64, 3, "b"))
                   .any()
                   .item<bool>());
  EXPECT_FALSE((a == filled(Kind::uniform, 100, 1.0, torch::kFloat64, 4, "a"))
                   .any()
                   .item<bool>());
}

// Four standard errors of each moment's estimate from n samples.
TEST(ParameterInit, UniformHasItsMoments) {
  const double n = 1 << 20;
  const auto x = filled(Kind::uniform, 1 << 20, 1.0, torch::kFloat64);
  EXPECT_NEAR(x.mean().item<double>(), 0.0, 4 * std::sqrt(1 / 3.0 / n));
  EXPECT_NEAR(
      x.square().mean().item<double>(), 1 / 3.0, 4 * std::sqrt(4 / 45.0 / n));
  EXPECT_LT(x.abs().max().item<double>(), 1.0);
  EXPECT_GT(x.abs().max().item<double>(), 0.9999);
  const auto correlation = (x.slice(0, 1) * x.slice(0, 0, -1)).mean();
  EXPECT_NEAR(correlation.item<double>(), 0.0, 4 / 3.0 / std::sqrt(n));
}

TEST(ParameterInit, NormalHasItsMoments) {
  const double n = 1 << 20;
  const auto x = filled(Kind::normal, 1 << 20, 1.0, torch::kFloat64);
  EXPECT_NEAR(x.mean().item<double>(), 0.0, 4 / std::sqrt(n));
  EXPECT_NEAR(x.pow(2).mean().item<double>(), 1.0, 4 * std::sqrt(2 / n));
  EXPECT_NEAR(x.pow(3).mean().item<double>(), 0.0, 4 * std::sqrt(15 / n));
  EXPECT_NEAR(x.pow(4).mean().item<double>(), 3.0, 4 * std::sqrt(96 / n));
  EXPECT_NEAR(
      (x.slice(0, 1) * x.slice(0, 0, -1)).mean().item<double>(), 0.0,
      4 / std::sqrt(n));
  // The share within one and three deviations.
  EXPECT_NEAR(
      x.abs().lt(1).to(torch::kFloat64).mean().item<double>(), 0.682689, 0.002);
  EXPECT_NEAR(
      x.abs().gt(3).to(torch::kFloat64).mean().item<double>(), 0.0026998,
      0.0002);
}

}  // namespace echelon::parameter_init_test
