#include "echelon/architecture/parameter_list.h"

#include <gmock/gmock.h>

#include <cmath>
#include <limits>
#include <set>

#include "echelon/architecture/language_model.h"
#include "tests/support/error_text.h"

namespace echelon::parameter_list_test {

using testing::ElementsAre;
using testing::HasSubstr;

ModelOptions named(const std::string& name) {
  return {.name = name};
}

std::string error_of(
    const ModelOptions& options, const std::vector<int64_t>& shape,
    int64_t classes = 10) {
  return error_text<ConfigError>(
      [&] { list_parameters(options, shape, classes); });
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
  options.dtype = ModelDtype::float64;
  const auto list = list_parameters(options, {2, 3, 2, 1}, 3);
  ASSERT_EQ(list.size(), 6u);
  EXPECT_THAT(list[0].shape, ElementsAre(5, 12));
  EXPECT_EQ(list[4].name, "fc3.weight");
  EXPECT_THAT(list[4].shape, ElementsAre(3, 4));
  EXPECT_EQ(list[4].dtype, "float64");
  options.hidden = {};
  EXPECT_THAT(list_parameters(options, {}, 3)[0].shape, ElementsAre(3, 1));
}

TEST(ParameterList, ResnetsHaveThePublishedNumberOfParameters) {
  for (const auto& [name, count] :
       {std::pair("resnet18", 11689512), std::pair("resnet34", 21797672),
        std::pair("resnet50", 25557032), std::pair("resnet101", 44549160),
        std::pair("resnet152", 60192808)}) {
    const auto list = list_parameters(named(name), {3, 224, 224}, 1000);
    EXPECT_EQ(num_parameters(list), count) << name;
  }
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
  EXPECT_EQ(error_of(named("simple_cnn"), {3, 4, 4}), "no error");
  EXPECT_EQ(error_of(named("resnet18"), {3, 1, 1}), "no error");
  EXPECT_THAT(error_of(named("mlp"), {8}, 0), HasSubstr("classes=0"));
  auto negative = named("mlp"), wide = named("mlp");
  constexpr int64_t kLarge = std::numeric_limits<int64_t>::max() / 2;
  negative.hidden = {16, -1};
  wide.hidden = {kLarge};
  const struct {
    ModelOptions options;
    std::vector<int64_t> shape;
    const char* said;
  } cases[] = {
      {named("simple_cnn"),
       {3, 8, 3},
       "images of 8x3 pixels are too small: its two 2x2 poolings need 4x4 or "
       "more"},
      {named("resnet18"),
       {64},
       "takes images of channels x height x width, but a sample is 64"},
      {named("resnet19"),
       {3, 32, 32},
       "\"resnet19\" is not a model; choose one of simple_cnn, mlp"},
      {named("simple_cnn"), {3, 8, 0}, "3x8x0 has no"},
      {negative, {8}, "width -1"},
      // sizes that overflow
      {named("simple_cnn"), {3, kLarge, kLarge}, "\"fc.weight"},
      {named("simple_cnn"), {kLarge, 8, 8}, "\"conv1.weight"},
      {named("resnet50"), {kLarge, 8, 8}, "\"conv1.weight"},
      {named("mlp"), {kLarge, 8}, "a sample of"},
      {wide, {8}, "\"fc1.weight"}};
  for (const auto& [options, shape, said] : cases) {
    EXPECT_THAT(error_of(options, shape), HasSubstr(said));
  }
}

}  // namespace echelon::parameter_list_test
