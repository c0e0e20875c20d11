#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "echelon/models/meta_mode.h"
#include "tests/support/error_text.h"

namespace echelon {
namespace {

using testing::AllOf;
using testing::HasSubstr;

TEST(BuildOnMeta, MakesNoMemory) {
  const LayerDefinition layer{
      "block", [] {
        torch::nn::Sequential block(
            torch::nn::Linear(1 << 16, 1 << 17),
            torch::nn::Conv2d(torch::nn::Conv2dOptions(1 << 10, 1 << 10, 31)),
            torch::nn::BatchNorm2d(8), torch::nn::Embedding(1 << 20, 1 << 10));
        return BuiltLayer{block.ptr(), nullptr};
      }};
  const auto built = build_on_meta(layer);
  int64_t numel = 0;
  for (const auto& item : built.module->named_parameters()) {
    EXPECT_TRUE(item.value().is_meta()) << item.key();
    numel += item.value().numel();
  }
  EXPECT_GT(numel, int64_t{10'000'000'000});
  for (const auto& item : built.module->named_buffers()) {
    EXPECT_TRUE(item.value().is_meta()) << item.key();
  }
  // It is over when the call is.
  EXPECT_TRUE(torch::ones({2}).is_cpu());
}

TEST(BuildOnMeta, LeavesSharedTensorsWhatTheyAre) {
  const auto shared = torch::nn::Linear(3, 3);
  LayerList layers;
  layers.add("first", [=] { return shared; });
  layers.add("second", [=] { return shared; });
  const auto a = build_on_meta(layers[0]).module->parameters()[0];
  const auto b = build_on_meta(layers[1]).module->parameters()[0];
  EXPECT_TRUE(a.is_cpu());
  EXPECT_TRUE(a.is_alias_of(b));
}

TEST(BuildOnMeta, NamesTheLayerThatNeedsData) {
  const LayerDefinition layer{
      "table", [] {
        auto values = torch::ones({4});
        values.data_ptr<float>()[0] = 2.0F;
        return BuiltLayer{};
      }};
  EXPECT_THAT(
      error_text<ConfigError>([&] { build_on_meta(layer); }),
      AllOf(
          HasSubstr("layer \"table\" cannot be built without memory"),
          HasSubstr("by pointer")));
  EXPECT_TRUE(torch::ones({2}).is_cpu());
}

}  // namespace
}  // namespace echelon
