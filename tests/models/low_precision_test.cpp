// Models with parameters and activations in bf16 and fp16, and under autocast,
// compared with the same models in float32.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <memory>
#include <string>

#include "echelon/layers/low_precision.h"
#include "echelon/layers/network.h"
#include "echelon/models/make_network.h"
#include "echelon/optim/mixed_precision.h"
#include "echelon/parallel/tensor/shared_gradients.h"
#include "echelon/parallel/tensor/vocab.h"
#include "tests/parallel/tensor/parts.h"

namespace echelon::low_precision_test {

using torch::Tensor;

constexpr uint64_t kSeed = 3;
constexpr int64_t kClasses = 7;
constexpr int64_t kVocabulary = 311;
constexpr int64_t kSequence = 24;
constexpr int64_t kBatch = 16;
// Without it some gradients would be too small for fp16.
constexpr double kLossScale = 1024;

struct Case {
  std::string model;
  torch::Dtype dtype = torch::kBFloat16;
  parity::Way way;
  bool autocast = false;  // the parameters stay in float32
};

void PrintTo(const Case& one, std::ostream* out) {
  *out << one.model << "_" << c10::toString(one.dtype)
       << (one.autocast ? "_autocast_" : "_");
  PrintTo(one.way, out);
}

bool is_language(const std::string& model) {
  return model == "gpt" || model == "llama";
}

// Every model, dtype and autocast on one rank; bf16 on two ranks as well.
std::vector<Case> cases() {
  std::vector<Case> all;
  for (const char* model : {"gpt", "llama", "mlp", "simple_cnn", "resnet18"}) {
    for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
      all.push_back({model, dtype, {1, {}}});
      all.push_back({model, dtype, {1, {}}, true});
    }
    all.push_back({model, torch::kBFloat16, {2, {}}});
    if (!is_language(model)) continue;
    const parity::Way sequence_parallel{2, {.sequence_parallel = true}};
    all.push_back({model, torch::kBFloat16, sequence_parallel});
    all.push_back({model, torch::kHalf, sequence_parallel, true});
  }
  return all;
}

std::shared_ptr<Network>
build(const std::string& model, const TensorParallel& parallel) {
  ModelOptions options;
  options.name = model;
  options.hidden = {50, 40};
  if (is_language(model)) {
    options.layers = 3;
    options.hidden_size = 48;
    options.heads = 6;
    options.kv_heads = model == "llama" ? 3 : 0;
    options.intermediate_size = model == "llama" ? 96 : 0;
    options.max_positions = kSequence;
    options.dropout = 0.1;
  }
  const auto layers =
      is_language(model)
          ? model_layers(options, {kSequence}, kVocabulary, parallel)
          : model_layers(options, {3, 33, 33}, kClasses, parallel);
  return build_network(layers, 0, layers.size(), kSeed);
}

// Converts only parameters: activations follow, buffers stay. The reference has
// the same numbers, in float32.
void convert(Network& network, torch::Dtype rounded, torch::Dtype dtype) {
  for (auto& parameter : network.parameters()) {
    parameter.set_data(parameter.detach().to(rounded).to(dtype));
  }
}

Tensors
inputs_of(const std::string& model, torch::Dtype rounded, torch::Dtype dtype) {
  if (!is_language(model)) {
    const auto images = parity::random({kBatch, 3, 33, 33}, 5);
    return {images.to(rounded).to(dtype)};
  }
  const auto tokens = torch::arange(kBatch * kSequence)
                          .square()
                          .remainder(kVocabulary)
                          .view({kBatch, kSequence});
  return {tokens, torch::zeros_like(tokens), torch::arange(kBatch)};
}

// The mean loss, after its backward.
double step(
    Network& network, const Case& one, torch::Dtype dtype,
    const TensorParallel& parallel) {
  const auto inputs = inputs_of(one.model, one.dtype, dtype);
  Tensor loss;
  {
    const Autocast low(torch::kCPU, one.dtype, one.autocast);
    const auto outputs = network.forward(inputs);
    if (is_language(one.model)) {
      const auto targets = (inputs[0] + 1).remainder(kVocabulary);
      const auto& scores = outputs[0];
      EXPECT_EQ(
          is_low_precision(scores.scalar_type()),
          one.autocast || is_low_precision(dtype));
      loss = vocab_cross_entropy(scores, targets, kVocabulary, parallel).mean();
    } else {
      loss = torch::nn::functional::cross_entropy(
          for_sums(outputs[0]), torch::arange(kBatch) % kClasses);
    }
  }
  EXPECT_EQ(loss.scalar_type(), torch::kFloat32);
  (loss * kLossScale).backward();
  SharedGradients(network, parallel).finish();
  for (auto& parameter : network.parameters()) {
    parameter.mutable_grad() = for_sums(parameter.grad()) / kLossScale;
  }
  return loss.item<double>();
}

double relative_error(const Tensor& actual, const Tensor& expected) {
  return ((actual - expected).norm() / expected.norm()).item<double>();
}

// Bounds of |g - g'| / |g'| for all gradients together and for the worst
// parameter, and of the relative error of the loss: 1.5 times the measured
// values. With smooth activations errors are proportional to the rounding.
// ReLU, whose gradient jumps, and statistics of small batches increase them,
// under LibTorch's autocast as well.
struct Band {
  double all;
  double worst;
  double loss;
};

Band band_of(const Case& one) {
  const bool bf16 = one.dtype == torch::kBFloat16;
  if (is_language(one.model)) {
    const double rounding = bf16 ? 0x1p-8 : 0x1p-11;
    return {2.2 * rounding, 4.2 * rounding, 1e-4};
  }
  if (one.model == "resnet18") {
    return bf16 ? Band{0.53, 0.77, 4e-3} : Band{0.19, 0.25, 4e-4};
  }
  if (one.model == "mlp") return {0.14, 0.17, 2e-4};
  return bf16 ? Band{0.03, 0.11, 2e-4} : Band{0.01, 0.05, 2e-4};
}

class LowPrecisionModel : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(
    Models, LowPrecisionModel, testing::ValuesIn(cases()),
    testing::PrintToStringParamName());

TEST_P(LowPrecisionModel, GradientsAreNearThoseOfFloat32) {
  const Case& one = GetParam();
  parity::on_ranks(one.way, [&](const TensorParallel& parallel) {
    const auto reference = build(one.model, parallel);
    const auto network = build(one.model, parallel);
    const auto held = one.autocast ? torch::kFloat32 : one.dtype;
    convert(*reference, one.dtype, torch::kFloat32);
    convert(*network, one.dtype, held);
    Case exact = one;
    exact.autocast = false;
    const double expected = step(*reference, exact, torch::kFloat32, parallel);
    const double actual = step(*network, one, held, parallel);
    double worst = 0;
    std::string where;
    std::vector<Tensor> all;
    std::vector<Tensor> all_expected;
    for (const auto& item : network->named_parameters()) {
      const auto gradient = item.value().grad();
      ASSERT_TRUE(gradient.defined()) << item.key();
      const auto wanted = reference->named_parameters()[item.key()].grad();
      all.push_back(gradient.flatten());
      all_expected.push_back(wanted.flatten());
      const double error = relative_error(gradient, wanted);
      if (error > worst) worst = error, where = item.key();
    }
    const double total =
        relative_error(torch::cat(all), torch::cat(all_expected));
    const Band band = band_of(one);
    EXPECT_LT(total, band.all);
    EXPECT_LT(worst, band.worst) << where;
    EXPECT_LT(std::abs(actual / expected - 1), band.loss);
    for (const auto& item : network->named_buffers()) {
      if (!item.value().is_floating_point()) continue;
      EXPECT_EQ(item.value().scalar_type(), torch::kFloat32) << item.key();
    }
  });
}

// The sum over the pixels of a large image overflows fp16, their mean does not.
TEST(LowPrecision, PixelsOfLargeImagesAreAveragedInFloat32) {
  ModelOptions options;
  options.name = "resnet18";
  const auto layers = model_layers(options, {3, 33, 33}, kClasses);
  const auto fc = layers[layers.size() - 1].build();
  for (auto& parameter : fc.module->parameters()) {
    parameter.set_data(torch::ones_like(parameter, torch::kHalf));
  }
  const auto x = torch::full({1, 512, 40, 40}, 50, torch::kHalf);
  const auto y = fc.forward({x})[0];
  EXPECT_EQ(y.scalar_type(), torch::kHalf);
  EXPECT_TRUE(
      y.eq(512 * 50 + 1).all().item<bool>() ||
      y.eq(512 * 50).all().item<bool>())
      << y;
}

}  // namespace echelon::low_precision_test
