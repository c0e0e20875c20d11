#include "echelon/cost/model_shape.h"

#include <gmock/gmock.h>

#include "echelon/cost/strategy.h"
#include "tests/support/error_text.h"

namespace echelon::cost::counted_model_test {

using testing::HasSubstr;

ModelShape model() {
  CountedLayer first{.name = "fc1", .forward_flops = 1e9, .parameters = 12};
  first.rows = 2;
  first.inner = 3;
  first.counted_samples = 8;
  first.stage = 0;
  first.forward = {
      {.name = "mm",
       .product = cluster::ProductKind::product,
       .count = 1,
       .m = 2,
       .n = 3,
       .k = 4},
      {.name = "gelu", .bytes = 24}};
  first.backward = {
      {.name = "mm",
       .product = cluster::ProductKind::convolution_weights,
       .count = 2,
       .m = 2,
       .n = 3,
       .k = 4,
       .one_weight = true,
       .for_weight = true},
      {.name = "add", .bytes = 144, .for_weight = true, .accumulates = true}};
  CountedLayer loss{.name = "loss", .output_elements = 0.125};
  loss.stage = 1;
  return {.name = "ours", .layers = {first, loss}, .seq_len = 128};
}

std::string error_of(const std::string& text) {
  return error_text<DataError>(
      [&] { parse_counted_model(text, "layers.json"); });
}

std::string
with(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

TEST(CountedModel, IsReadBackAsItWasWritten) {
  const ModelShape read = parse_counted_model(counted_model_json(model()), "x");
  EXPECT_EQ(read.name, "ours");
  EXPECT_EQ(read.seq_len, 128);
  EXPECT_EQ(read.layers, model().layers);
}

TEST(CountedModel, BadFilesAreNamedByLayerAndKey) {
  const std::string good = counted_model_json(model());
  EXPECT_EQ(error_of(good), "no error");
  EXPECT_THAT(error_of("{"), HasSubstr("layers.json: is no JSON"));
  EXPECT_THAT(error_of("[]"), HasSubstr("has no layers"));
  EXPECT_THAT(
      error_of("{\"model\": \"x\", \"seq_len\": 0, \"layers\": []}"),
      HasSubstr("one or more"));
  EXPECT_THAT(
      error_of(with(good, "\"rows\": 2.0", "\"rows\": -1")),
      HasSubstr("layers.json: layer 1: rows must be a number, 0 or more"));
  EXPECT_THAT(
      error_of(with(good, "\"stage\": 1", "\"stage\": 0.5")),
      HasSubstr("layer 2: stage must be a whole number"));
  EXPECT_THAT(
      error_of(with(good, "\"bytes\": 24.0", "\"byte\": 24")),
      HasSubstr("has no bytes"));
  EXPECT_THAT(
      error_of(with(good, "convolution weights", "convolution weight")),
      HasSubstr("did you mean \"convolution weights\""));
  EXPECT_THROW(read_counted_model("/nowhere.json"), DataError);
  EXPECT_THROW(read_counted_model("/tmp"), DataError);
}

TEST(CountedModel, StagesAreThoseThatItWasCountedFor) {
  ModelShape shape = model();
  shape.layers.insert(shape.layers.begin() + 1, shape.layers[0]);
  shape.layers[1].forward_flops = 0;
  EXPECT_EQ(layers_of_stages(shape, 2), (std::vector<int64_t>{2, 1}));
  shape.layers[1].stage = 1;
  EXPECT_EQ(layers_of_stages(shape, 2), (std::vector<int64_t>{1, 2}));
  // Other stages than those: by FLOPs.
  EXPECT_EQ(layers_of_stages(shape, 3), (std::vector<int64_t>{1, 1, 1}));
}

}  // namespace echelon::cost::counted_model_test
