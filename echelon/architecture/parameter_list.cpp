// This file lists the parameters of image networks and of "mlp"
// (language_model.cpp has the others) by name, shape and initial value, without
// a module, so that the command line can check configurations and weights by
// them. Sizes come from a user's numbers, so every product is checked for
// overflow.
#include "echelon/architecture/parameter_list.h"

#include <algorithm>
#include <cmath>

#include "echelon/architecture/language_model.h"
#include "echelon/architecture/trained_parameters.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

using Shape = std::vector<int64_t>;

std::string to_text(const Shape& shape) {
  return shape.empty() ? "a single number" : join(shape, "x");
}

// More elements than this cannot be addressed in bytes, whatever their type.
constexpr int64_t kMostElements = int64_t{1} << 56;

// The product of sizes that are all at least 1; -1 when it is over
// kMostElements.
int64_t product(const Shape& shape) {
  int64_t result = 1;
  for (int64_t size : shape) {
    if (__builtin_mul_overflow(result, size, &result)) return -1;
  }
  return result <= kMostElements ? result : -1;
}

// Collects the tensors of one layer after the other, with the initial values
// of PyTorch's and torchvision's layers.
class ListBuilder {
 public:
  ListBuilder(std::string place, std::string dtype)
      : place_(std::move(place)), dtype_(std::move(dtype)) {}

  void linear(const std::string& name, int64_t in, int64_t out) {
    weight_and_bias(name, {out, in}, static_cast<double>(in));
  }

  void conv(const std::string& name, int64_t in, int64_t out, int64_t kernel) {
    weight_and_bias(
        name, {out, in, kernel, kernel},
        static_cast<double>(in) * static_cast<double>(kernel * kernel));
  }

  // A convolution of a residual network: no bias, He's normal distribution
  // scaled by the number of outputs.
  void residual_conv(
      const std::string& name, int64_t in, int64_t out, int64_t kernel) {
    const double fan_out = static_cast<double>(out * kernel * kernel);
    add(name + ".weight", {out, in, kernel, kernel},
        InitialValue::normal_of(std::sqrt(2.0 / fan_out)));
  }

  void batch_norm(const std::string& name, int64_t channels) {
    add(name + ".weight", {channels}, InitialValue::constant_of(1));
    add(name + ".bias", {channels}, InitialValue::constant_of(0));
    add(name + ".running_mean", {channels}, InitialValue::constant_of(0), true);
    add(name + ".running_var", {channels}, InitialValue::constant_of(1), true);
    add(name + ".num_batches_tracked", {}, InitialValue::constant_of(0), true);
    list_.back().dtype = "int64";
  }

  std::vector<ParameterInfo> take() { return std::move(list_); }

 private:
  // The default of torch::nn::Linear and Conv2d: kaiming_uniform with
  // a = sqrt(5), which is uniform within 1 / sqrt(fan_in); the bias alike.
  void weight_and_bias(const std::string& name, Shape shape, double fan_in) {
    const auto uniform = InitialValue::uniform_within(1.0 / std::sqrt(fan_in));
    const int64_t out = shape[0];
    add(name + ".weight", std::move(shape), uniform);
    add(name + ".bias", {out}, uniform);
  }

  void
  add(std::string name, Shape shape, InitialValue initial,
      bool buffer = false) {
    if (product(shape) < 0) {
      throw ConfigError(format(
          "{}: \"{}\" would be {}, more elements than can be counted; make the "
          "input or the layer smaller",
          place_, name, to_text(shape)));
    }
    list_.push_back(
        {.name = std::move(name),
         .shape = std::move(shape),
         .kind = buffer ? ParameterInfo::Kind::buffer
                        : ParameterInfo::Kind::parameter,
         .dtype = dtype_,
         .initial = initial});
  }

  std::string place_;
  std::string dtype_;
  std::vector<ParameterInfo> list_;
};

void list_simple_cnn(
    ListBuilder& builder, const Shape& image, int64_t classes) {
  builder.conv("conv1", image[0], 16, 3);
  builder.conv("conv2", 16, 32, 3);
  // Each pooling halves, dropping an odd row or column.
  const int64_t features = product({32, image[1] / 4, image[2] / 4});
  builder.linear("fc", features < 0 ? kMostElements + 1 : features, classes);
}

void list_mlp(
    ListBuilder& builder, int64_t features, const Shape& hidden,
    int64_t classes) {
  int64_t in = features;
  int64_t number = 0;
  for (int64_t width : hidden) {
    builder.linear("fc" + std::to_string(++number), in, width);
    in = width;
  }
  builder.linear("fc" + std::to_string(++number), in, classes);
}

void list_resnet(
    ListBuilder& builder, const ResnetConfig& config, int64_t channels,
    int64_t classes) {
  builder.residual_conv("conv1", channels, 64, 7);
  builder.batch_norm("bn1", 64);
  int64_t in = 64;
  for (size_t group = 0; group < config.blocks.size(); ++group) {
    const int64_t width = 64 << group;
    const int64_t out = config.bottleneck ? 4 * width : width;
    for (int64_t index = 0; index < config.blocks[group]; ++index) {
      const std::string name = format("layer{}.{}.", group + 1, index);
      builder.residual_conv(
          name + "conv1", in, width, config.bottleneck ? 1 : 3);
      builder.batch_norm(name + "bn1", width);
      builder.residual_conv(name + "conv2", width, width, 3);
      builder.batch_norm(name + "bn2", width);
      if (config.bottleneck) {
        builder.residual_conv(name + "conv3", width, out, 1);
        builder.batch_norm(name + "bn3", out);
      }
      if (in != out || (index == 0 && group > 0)) {
        builder.residual_conv(name + "downsample.0", in, out, 1);
        builder.batch_norm(name + "downsample.1", out);
      }
      in = out;
    }
  }
  builder.linear("fc", in, classes);
}

// Throws unless `shape` is channels x height x width of at least `smallest`
// pixels each way.
void check_image(
    const std::string& place, const Shape& shape, int64_t smallest) {
  if (shape.size() != 3) {
    throw ConfigError(format(
        "{} takes images of channels x height x width, but a sample is {}; for "
        "such data use name=\"mlp\"",
        place, to_text(shape)));
  }
  if (shape[1] < smallest || shape[2] < smallest) {
    throw ConfigError(format(
        "{}: images of {}x{} pixels are too small: its two 2x2 poolings need "
        "{}x{} or more; use larger images or name=\"mlp\"",
        place, shape[1], shape[2], smallest, smallest));
  }
}

}  // namespace

int64_t ParameterInfo::num_elements() const {
  return product(shape);
}

int64_t num_parameters(const std::vector<ParameterInfo>& list) {
  int64_t sum = 0;
  for (const auto& info : list) {
    const bool counts =
        info.kind == ParameterInfo::Kind::parameter && info.tied_to.empty();
    if (counts) sum += info.num_elements();
  }
  return sum;
}

ResnetConfig resnet_config(const std::string& name) {
  if (name == "resnet18") return {false, {2, 2, 2, 2}};
  if (name == "resnet34") return {false, {3, 4, 6, 3}};
  if (name == "resnet50") return {true, {3, 4, 6, 3}};
  if (name == "resnet101") return {true, {3, 4, 23, 3}};
  if (name == "resnet152") return {true, {3, 8, 36, 3}};
  throw ConfigError(format(
      "[model] name=\"{}\" is not a model; choose one of {}", name,
      join(model_names(), ", ")));
}

std::vector<ParameterInfo> list_parameters(
    const ModelOptions& options, const Shape& input_shape, int64_t classes) {
  const std::string place = format("[model] name=\"{}\"", options.name);
  const bool language = is_language_model(options);
  if (classes < 1) {
    throw ConfigError(format(
        "[model] {}={}: a {} needs 1 or more",
        language ? "vocab_size" : "classes", classes,
        language ? "language model" : "classifier"));
  }
  if (std::ranges::any_of(input_shape, [](int64_t size) { return size < 1; })) {
    throw ConfigError(format(
        "{}: a sample of {} has no elements; every size must be 1 or more",
        place, to_text(input_shape)));
  }

  if (language) {
    const auto shape = language_model_shape(options, classes);
    if (input_shape.size() != 1) {
      throw ConfigError(format(
          "{} takes sequences of tokens, but a sample is {}; use text data, or "
          "a "
          "model of images",
          place, to_text(input_shape)));
    }
    check_language_model(options, classes, input_shape[0], 1);
    return with_adapters(
        options.lora, list_language_parameters(shape, options.dtype),
        shape.kind->gpt);
  }
  if (options.lora.used()) {
    throw ConfigError(format(
        "[lora] rank={}: {} has no linear layers that can have adapters; use a "
        "language model, or [model] freeze",
        options.lora.rank, options.name));
  }
  ListBuilder builder(place, to_string(options.dtype));
  if (options.name == "simple_cnn") {
    check_image(place, input_shape, 4);
    list_simple_cnn(builder, input_shape, classes);
  } else if (options.name == "mlp") {
    for (int64_t width : options.hidden) {
      if (width < 1) {
        throw ConfigError(format(
            "[model] hidden has a layer of width {}; every width must be 1 or "
            "more",
            width));
      }
    }
    const int64_t features = product(input_shape);
    if (features < 0) {
      throw ConfigError(format(
          "{}: a sample of {} has more elements than can be counted; use "
          "smaller "
          "samples",
          place, to_text(input_shape)));
    }
    list_mlp(builder, features, options.hidden, classes);
  } else {
    const ResnetConfig config = resnet_config(options.name);
    check_image(place, input_shape, 1);
    list_resnet(builder, config, input_shape[0], classes);
  }
  return builder.take();
}

std::vector<std::string> list_layers(const ModelOptions& options) {
  if (options.name == "simple_cnn") return {"conv1", "conv2", "fc"};
  if (is_language_model(options)) {
    return list_language_layers(language_model_shape(options, 1));
  }
  std::vector<std::string> names;
  if (options.name == "mlp") {
    for (size_t i = 0; i <= options.hidden.size(); ++i) {
      names.push_back("fc" + std::to_string(i + 1));
    }
    return names;
  }
  names = {"conv1", "bn1"};
  const ResnetConfig config = resnet_config(options.name);
  for (size_t group = 0; group < config.blocks.size(); ++group) {
    for (int64_t i = 0; i < config.blocks[group]; ++i) {
      names.push_back(format("layer{}.{}", group + 1, i));
    }
  }
  names.push_back("fc");
  return names;
}

}  // namespace echelon
