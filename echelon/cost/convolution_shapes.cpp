// Image networks are counted by formulas, for one sample, with the layers that
// models/image_models.cpp gives the trainer. A layer has its FLOPs, its
// parameters, the elements that it keeps for backward and those that its
// memory-bound operators move. The shape of its largest product stands for all
// of its products.
#include "echelon/cost/model_catalogue.h"

#include <algorithm>

#include "echelon/architecture/parameter_list.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon::cost {
namespace {

// An image on its way through a network.
struct Feature {
  int64_t channels = 0;
  int64_t height = 0;
  int64_t width = 0;

  double pixels() const { return as_double(height) * as_double(width); }
  double elements() const { return as_double(channels) * pixels(); }
};

struct Convolution {
  int64_t out = 0;
  int64_t kernel = 3;
  int64_t stride = 1;
  bool bias = false;
  bool first = false;  // no gradient of its input
};

// Halved sizes round up, as padding of kernel / 2 has it.
int64_t strided(int64_t size, int64_t stride) {
  return (size + stride - 1) / stride;
}

// Counts the convolution into `layer` and returns its output.
Feature
convolve(CountedLayer& layer, const Feature& in, const Convolution& conv) {
  const Feature out = {
      conv.out, strided(in.height, conv.stride),
      strided(in.width, conv.stride)};
  const int64_t inner = in.channels * conv.kernel * conv.kernel;
  const double weights = as_double(inner) * as_double(conv.out);
  const double flops = 2 * weights * out.pixels();
  layer.forward_flops += flops;
  layer.backward_flops += (conv.first ? 1 : 2) * flops;
  layer.parameters += weights + (conv.bias ? as_double(conv.out) : 0);
  if (out.pixels() * weights >
      layer.rows * as_double(layer.inner * layer.columns)) {
    layer.inner = inner;
    layer.columns = conv.out;
    layer.rows = out.pixels();
  }
  layer.output_elements = out.elements();
  return out;
}

// Batch normalisation keeps what it is given; the ReLU behind it, in place,
// what it returns. Read twice and written, read and written.
void normalise(CountedLayer& layer, const Feature& image, bool relu) {
  layer.parameters += 2 * as_double(image.channels);
  layer.kept_elements += (relu ? 2 : 1) * image.elements();
  layer.moved_elements += (relu ? 5 : 3) * image.elements();
}

// Adds pooling, which keeps the 64-bit index of each result: two elements of 32
// bits. The result itself is kept by the layer that takes it.
Feature
pool(CountedLayer& layer, const Feature& in, int64_t height, int64_t width) {
  const Feature out = {in.channels, height, width};
  layer.kept_elements += 2 * out.elements();
  layer.moved_elements += in.elements() + 3 * out.elements();
  layer.output_elements = out.elements();
  return out;
}

// A convolution with ReLU and pooling by 2, which forgets an odd last line.
Feature add_pooled(
    ModelShape& model, const std::string& name, const Feature& in,
    int64_t channels) {
  CountedLayer layer{.name = name};
  const bool first = model.layers.empty();
  const Feature out =
      convolve(layer, in, {.out = channels, .bias = true, .first = first});
  layer.kept_elements += in.elements() + out.elements();
  layer.moved_elements += 2 * out.elements();
  const Feature pooled = pool(layer, out, out.height / 2, out.width / 2);
  model.layers.push_back(layer);
  return pooled;
}

// The scores: a matrix product with a bias.
void add_scores(
    ModelShape& model, int64_t features, int64_t classes, double kept) {
  const double weights = as_double(features) * as_double(classes);
  model.layers.push_back(
      {.name = "fc",
       .forward_flops = 2 * weights,
       .backward_flops = 4 * weights,
       .parameters = weights + as_double(classes),
       .kept_elements = kept,
       .moved_elements = 0,
       .output_elements = as_double(classes),
       .inner = features,
       .columns = classes,
       .rows = 1});
}

ModelShape simple_cnn(const ImageShape& image, int64_t classes) {
  ModelShape model{.name = "simple_cnn"};
  Feature feature = {image.channels, image.height, image.width};
  feature = add_pooled(model, "conv1", feature, 16);
  feature = add_pooled(model, "conv2", feature, 32);
  add_scores(
      model, static_cast<int64_t>(feature.elements()), classes,
      feature.elements());
  return model;
}

// 7x7 with normalisation, ReLU and pooling by 2: two layers of the list.
Feature add_stem(ModelShape& model, const ImageShape& image) {
  const Feature in = {image.channels, image.height, image.width};
  CountedLayer conv{.name = "conv1"};
  const Feature out =
      convolve(conv, in, {.out = 64, .kernel = 7, .stride = 2, .first = true});
  conv.kept_elements = in.elements();
  model.layers.push_back(conv);
  CountedLayer norm{.name = "bn1"};
  normalise(norm, out, true);
  const Feature pooled =
      pool(norm, out, strided(out.height, 2), strided(out.width, 2));
  model.layers.push_back(norm);
  return pooled;
}

struct Block {
  int64_t width = 0;
  int64_t out = 0;
  int64_t stride = 1;
  bool bottleneck = false;
};

Feature add_block(
    ModelShape& model, const std::string& name, const Feature& in,
    const Block& block) {
  CountedLayer layer{.name = name};
  Feature feature = in;
  const auto then = [&](const Convolution& conv, bool relu) {
    feature = convolve(layer, feature, conv);
    normalise(layer, feature, relu);
  };
  if (block.bottleneck) {
    then({.out = block.width, .kernel = 1}, true);
    then({.out = block.width, .stride = block.stride}, true);
    then({.out = block.out, .kernel = 1}, true);
  } else {
    then({.out = block.width, .stride = block.stride}, true);
    then({.out = block.out}, true);
  }
  if (in.channels != block.out || block.stride != 1) {
    Feature shortcut = convolve(
        layer, in, {.out = block.out, .kernel = 1, .stride = block.stride});
    normalise(layer, shortcut, false);
  }
  layer.moved_elements += 3 * feature.elements();  // the sum
  model.layers.push_back(layer);
  return feature;
}

ModelShape
resnet(const std::string& name, const ImageShape& image, int64_t classes) {
  const ResnetConfig plan = resnet_config(name);
  ModelShape model{.name = name};
  Feature feature = add_stem(model, image);
  const double pooled = feature.elements();
  for (size_t group = 0; group < plan.blocks.size(); ++group) {
    const int64_t width = int64_t{64} << group;
    for (int64_t i = 0; i < plan.blocks[group]; ++i) {
      const Block block = {
          .width = width,
          .out = plan.bottleneck ? 4 * width : width,
          .stride = group > 0 && i == 0 ? 2 : 1,
          .bottleneck = plan.bottleneck};
      feature =
          add_block(model, format("layer{}.{}", group + 1, i), feature, block);
    }
  }
  model.layers[2].kept_elements += pooled;  // the first block's input
  const int64_t features = feature.channels;
  add_scores(model, features, classes, as_double(features));
  model.layers.back().moved_elements = feature.elements();
  return model;
}

}  // namespace

const std::vector<std::string>& convolution_names() {
  static const std::vector<std::string> names = {"resnet18",  "resnet34",
                                                 "resnet50",  "resnet101",
                                                 "resnet152", "simple_cnn"};
  return names;
}

ModelShape convolution_shape(
    const std::string& name, const ImageShape& image, int64_t classes) {
  const int64_t least = name == "simple_cnn" ? 4 : 1;
  if (image.channels < 1 || image.height < least || image.width < least ||
      classes < 1) {
    throw ConfigError(format(
        "model {}: images of {} x {} x {} and {} classes; it needs {} pixels "
        "or more each way, 1 channel and 1 class or more",
        name, image.channels, image.height, image.width, classes, least));
  }
  if (std::ranges::count(convolution_names(), name) == 0) {
    throw ConfigError("model " + name + ": is no convolutional network");
  }
  return name == "simple_cnn" ? simple_cnn(image, classes)
                              : resnet(name, image, classes);
}

}  // namespace echelon::cost
