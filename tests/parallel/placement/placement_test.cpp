#include "echelon/parallel/placement/placement.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include "tests/support/error_text.h"

namespace echelon::placement::placement_test {

using testing::ElementsAre;
using testing::HasSubstr;

const torch::Device kCpu = torch::kCPU;
const torch::Device kGpu = torch::Device("cuda:0");
constexpr int64_t kMiB = 1 << 20;

// Linear layers without bias; widths are those between them.
LayerList linear_layers(const std::vector<int64_t>& widths) {
  LayerList layers;
  for (size_t i = 0; i + 1 < widths.size(); ++i) {
    layers.add("fc" + std::to_string(i), [=] {
      return torch::nn::Linear(
          torch::nn::LinearOptions(widths[i], widths[i + 1]).bias(false));
    });
  }
  return layers;
}

TEST(Placement, SaysWhatEachDeviceHoldsAndNeeds) {
  const auto placement = plan_placement(
      linear_layers({10, 20, 30, 5}), {.devices = {kCpu, kCpu},
                                       .inputs = {{{4, 10}}},
                                       .partition_at = {"fc1"}});
  EXPECT_THAT(placement.boundaries, ElementsAre(0, 1, 3));
  const auto& first = placement.devices[0];
  EXPECT_EQ(first.parameters, 200);
  EXPECT_EQ(first.parameter_bytes, 800);
  EXPECT_EQ(first.gradient_bytes, 800);
  EXPECT_EQ(first.optimizer_bytes, 1600);
  EXPECT_EQ(first.activation_bytes, 4 * 4 * 10);
  EXPECT_EQ(first.output_bytes, 4 * 4 * 20);
  EXPECT_EQ(first.total_bytes(), 800 + 800 + 1600 + 160);
  EXPECT_EQ(first.flops, 2 * 2 * 4 * 10 * 20);  // no gradient of the batch
  const auto& second = placement.devices[1];
  EXPECT_EQ(second.parameters, 20 * 30 + 30 * 5);
  EXPECT_EQ(second.activation_bytes, 4 * 4 * (20 + 30));
  EXPECT_THAT(
      describe(placement),
      ElementsAre(
          "device 0 (cpu): layer fc0; 15 % of the FLOPs; 3.28 KiB: "
          "parameters 800 B, gradients 800 B, optimizer 1.56 KiB, "
          "activations 160 B",
          HasAll(
              "device 1 (cpu): 2 layers, fc1 to fc2; ", "parameters 2.93 KiB"),
          HasSubstr("950 parameters, ")));
}

TEST(Placement, BalancesByTimeOrByMemory) {
  // The first layer is most of the memory, but the convolutions most of the
  // time.
  LayerList layers;
  layers.add("words", [] { return torch::nn::Embedding(100'000, 8); });
  for (int i = 0; i < 4; ++i) {
    layers.add(
        "fc" + std::to_string(i), [] { return torch::nn::Linear(8, 8); });
  }
  PlacementOptions options{
      .devices = {kCpu, kCpu}, .inputs = {{{64}, torch::kInt64}}};
  EXPECT_THAT(plan_placement(layers, options).boundaries, ElementsAre(0, 3, 5));
  options.balance = Balance::memory;
  EXPECT_THAT(plan_placement(layers, options).boundaries, ElementsAre(0, 1, 5));
  // Layers are balanced by time, as far as they fit.
  options.balance = Balance::time;
  options.limits = {13 * kMiB, kNoLimit};
  EXPECT_THAT(plan_placement(layers, options).boundaries, ElementsAre(0, 3, 5));
  options.limits = {100'000 * 8 * 16 + 5000, kNoLimit};
  EXPECT_THAT(plan_placement(layers, options).boundaries, ElementsAre(0, 2, 5));
}

TEST(Placement, RefusesWithNumbersBeforeAnythingIsBuilt) {
  LayerList layers;
  for (int i = 0; i < 4; ++i) {  // 64 GiB in all
    layers.add("block" + std::to_string(i), [] {
      return torch::nn::Linear(
          torch::nn::LinearOptions(1 << 16, 1 << 16).bias(false));
    });
  }
  PlacementOptions options{
      .devices = {kGpu, kGpu},
      .inputs = {{{1, 1 << 16}}},
      .limits = {int64_t{80} << 30, int64_t{80} << 30}};
  EXPECT_THAT(
      error_text<ConfigError>([&] { plan_placement(layers, options); }),
      HasAll(
          "does not fit in 2 slices",
          "slice 1 (layers \"block2\" to \"block3\") needs 128 GiB "
          "of its 80 GiB",
          "use more slices"));
  options.partition_at = {"block1"};
  EXPECT_THAT(
      error_text<ConfigError>([&] { plan_placement(layers, options); }),
      HasAll(
          "device 0 (cuda:0, layer block0) needs 64 GiB of its 80",
          "device 1 (cuda:0, 3 layers, block1 to block3) needs 192 "
          "GiB of its 80 GiB",
          "use more devices"));
  // Plain SGD keeps nothing.
  options.partition_at = {};
  options.optimizer_bytes = 0;
  EXPECT_EQ(
      plan_placement(layers, options).devices[0].parameter_bytes,
      int64_t{32} << 30);
}

TEST(Placement, TiedParametersCountOnce) {
  LayerList layers;
  layers.add("words", [] { return torch::nn::Embedding(1000, 16); });
  layers.add("fc", [] { return torch::nn::Linear(16, 16); });
  layers.add("head", [] {
    return torch::nn::Linear(torch::nn::LinearOptions(16, 1000).bias(false));
  });
  layers.tie("words.weight", "head.weight");
  PlacementOptions options{
      .devices = {kCpu, kCpu},
      .inputs = {{{8}, torch::kInt64}},
      .partition_at = {"head"}};
  const auto together = plan_placement(layers, options);
  EXPECT_EQ(together.devices[0].parameters, 16000 + 16 * 16 + 16);
  EXPECT_EQ(together.devices[1].parameters, 0);
  EXPECT_EQ(together.devices[1].copy_bytes, 0);
  options.devices[1] = kGpu;
  options.limits = {kNoLimit, kNoLimit};
  const auto apart = plan_placement(layers, options);
  EXPECT_EQ(apart.devices[1].parameter_bytes, 0);
  EXPECT_EQ(apart.devices[1].copy_bytes, 4 * 16000);
}

TEST(Placement, SaysWhatIsWrong) {
  const auto layers = linear_layers({10, 20, 30});
  const auto error = [&](PlacementOptions options) {
    options.inputs = {{{4, 10}}};
    return error_text<ConfigError>([&] { plan_placement(layers, options); });
  };
  EXPECT_THAT(error({}), HasSubstr("on 0 devices"));
  EXPECT_THAT(
      error({.devices = {kCpu, kCpu, kCpu}}),
      HasSubstr("2 layers is partitioned into 3 slices"));
  EXPECT_THAT(
      error({.devices = {kCpu, kCpu}, .limits = {1}}),
      HasSubstr("1 memory limits for 2 devices"));
  EXPECT_THAT(
      error({.devices = {kCpu, kCpu}, .partition_at = {"fc7"}}),
      HasAll("no layer is called \"fc7\"", "\"fc"));
  EXPECT_THAT(
      error({.devices = {kCpu, torch::Device("cuda:63")}}),
      HasAll("cuda:63, which is not there", "or cpu"));
}

}  // namespace echelon::placement::placement_test
