#include "echelon/architecture/parameter_list.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>

#include "echelon/architecture/language_model.h"
#include "echelon/error.h"

namespace echelon {
namespace parameter_list_test {

using testing::ElementsAre;
using testing::HasSubstr;

ModelOptions named(const std::string& name) {
  ModelOptions options;
  options.name = name;
  return options;
}

std::string error_of(
    const ModelOptions& options, const std::vector<int64_t>& shape,
    int64_t classes = 10) {
  try {
    list_parameters(options, shape, classes);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no error";
}

int64_t count(const std::string& name, int64_t classes) {
  int64_t total = 0;
  for (const auto& info :
       list_parameters(named(name), {3, 224, 224}, classes)) {
    if (info.kind == ParameterInfo::Kind::parameter) {
      total += info.num_elements();
    }
  }
  return total;
}

TEST(ParameterList, SimpleCnnHasConv1Conv2Fc) {
  const auto list = list_parameters(named("simple_cnn"), {3, 13, 9}, 7);
  ASSERT_EQ(list.size(), 6u);
  EXPECT_EQ(list[0].name, "conv1.weight");
  EXPECT_THAT(list[0].shape, ElementsAre(16, 3, 3, 3));
  EXPECT_EQ(list[1].name, "conv1.bias");
  EXPECT_THAT(list[2].shape, ElementsAre(32, 16, 3, 3));
  EXPECT_EQ(list[4].name, "fc.weight");
  EXPECT_THAT(list[4].shape, ElementsAre(7, 32 * 3 * 2));
  EXPECT_THAT(list[5].shape, ElementsAre(7));
  EXPECT_EQ(
      list[0].initial,
      (InitialValue{InitialValue::Kind::uniform, 1.0 / std::sqrt(27.0)}));
}

TEST(ParameterList, MlpFlattensAnyShape) {
  auto options = named("mlp");
  options.hidden = {5, 4};
  options.dtype = "float64";
  const auto list = list_parameters(options, {2, 3, 2, 1}, 3);
  ASSERT_EQ(list.size(), 6u);
  EXPECT_THAT(list[0].shape, ElementsAre(5, 12));
  EXPECT_EQ(list[4].name, "fc3.weight");
  EXPECT_THAT(list[4].shape, ElementsAre(3, 4));
  EXPECT_EQ(list[4].dtype, "float64");
  options.hidden = {};
  EXPECT_THAT(list_parameters(options, {}, 3)[0].shape, ElementsAre(3, 1));
}

// The published parameter counts of torchvision's models.
TEST(ParameterList, ResnetsHaveThePublishedNumberOfParameters) {
  EXPECT_EQ(count("resnet18", 1000), 11689512);
  EXPECT_EQ(count("resnet34", 1000), 21797672);
  EXPECT_EQ(count("resnet50", 1000), 25557032);
  EXPECT_EQ(count("resnet101", 1000), 44549160);
  EXPECT_EQ(count("resnet152", 1000), 60192808);
}

TEST(ParameterList, NamesAreUniqueAndCountersAreWholeNumbers) {
  for (const auto& name : model_names()) {
    if (is_language_model(named(name))) continue;  // language_model_test
    std::set<std::string> seen;
    for (const auto& info : list_parameters(named(name), {1, 8, 8}, 10)) {
      EXPECT_TRUE(seen.insert(info.name).second) << info.name;
      EXPECT_EQ(
          info.dtype == "int64",
          info.name.find("num_batches_tracked") != std::string::npos);
    }
  }
}

TEST(ParameterList, RefusesModelsThatCannotBeBuilt) {
  EXPECT_THAT(
      error_of(named("simple_cnn"), {3, 8, 3}),
      HasSubstr("images of 8x3 pixels are too small: its two 2x2 poolings "
                "need 4x4 or more"));
  EXPECT_EQ(error_of(named("simple_cnn"), {3, 4, 4}), "no error");
  EXPECT_EQ(error_of(named("resnet18"), {3, 1, 1}), "no error");
  EXPECT_THAT(
      error_of(named("resnet18"), {64}),
      HasSubstr("takes images of channels x height x width, but a sample is "
                "64"));
  EXPECT_THAT(
      error_of(named("resnet19"), {3, 32, 32}),
      HasSubstr("\"resnet19\" is not a model; choose one of simple_cnn, mlp"));
  EXPECT_THAT(
      error_of(named("simple_cnn"), {3, 8, 0}), HasSubstr("3x8x0 has no"));
  EXPECT_THAT(error_of(named("mlp"), {8}, 0), HasSubstr("classes=0"));

  auto options = named("mlp");
  options.hidden = {16, -1};
  EXPECT_THAT(error_of(options, {8}), HasSubstr("width -1"));
  options = named("mlp");
  options.dtype = "int8";
  EXPECT_THAT(error_of(options, {8}), HasSubstr("\"int8\""));
}

TEST(ParameterList, SizesThatOverflowAreRefused) {
  const int64_t large = std::numeric_limits<int64_t>::max() / 2;
  EXPECT_THAT(
      error_of(named("simple_cnn"), {3, large, large}),
      HasSubstr("\"fc.weight"));
  EXPECT_THAT(
      error_of(named("simple_cnn"), {large, 8, 8}),
      HasSubstr("\"conv1.weight"));
  EXPECT_THAT(
      error_of(named("resnet50"), {large, 8, 8}), HasSubstr("\"conv1.weight"));
  EXPECT_THAT(error_of(named("mlp"), {large, 8}), HasSubstr("a sample of"));
  auto options = named("mlp");
  options.hidden = {large};
  EXPECT_THAT(error_of(options, {8}), HasSubstr("\"fc1.weight"));
}

}  // namespace parameter_list_test
}  // namespace echelon
