#include "echelon/models/make_network.h"

#include <gmock/gmock.h>

#include <limits>

#include "echelon/architecture/language_model.h"
#include "echelon/architecture/parameter_list.h"
#include "echelon/error.h"
#include "echelon/layers/sharded_module.h"

namespace echelon::network_test {

using testing::ElementsAre;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

ModelOptions
named(const std::string& name, ModelDtype dtype = ModelDtype::float32) {
  ModelOptions options;
  options.name = name;
  options.dtype = dtype;
  return options;
}

std::vector<std::string> layer_names(const Network& network) {
  std::vector<std::string> names;
  for (const auto& layer : network.layers()) {
    names.push_back(layer.name);
  }
  return names;
}

// A state dict's order: a module's parameters, its buffers, its children.
void collect(
    const torch::nn::Module& module, const std::string& prefix,
    std::vector<std::pair<std::string, torch::Tensor>>& out) {
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    out.emplace_back(prefix + item.key(), item.value());
  }
  for (const auto& item : module.named_buffers(/*recurse=*/false)) {
    out.emplace_back(prefix + item.key(), item.value());
  }
  for (const auto& child : module.named_children()) {
    collect(*child.value(), prefix + child.key() + ".", out);
  }
}

// Language models have a test of their own: language_network_test.
std::vector<std::string> image_models() {
  auto names = model_names();
  std::erase_if(names, [](const std::string& name) {
    return is_language_model(named(name));
  });
  return names;
}

// One of each kind of block: building the large ones takes long.
const char* const kSmallModels[] = {
    "simple_cnn", "mlp", "resnet18", "resnet50"};

TEST(Network, HasTheTensorsOfItsParameterList) {
  for (const auto& name : image_models()) {
    for (const std::vector<int64_t>& shape :
         {std::vector<int64_t>{1, 8, 8}, {3, 13, 9}}) {
      if (name.starts_with("resnet1") && shape[0] == 3) {
        continue;  // the large ones once
      }
      const auto options = named(name, ModelDtype::float64);
      const auto list = list_parameters(options, shape, 11);
      const auto network = make_network(options, shape, 11, 0);
      std::vector<std::pair<std::string, torch::Tensor>> tensors;
      collect(*network, "", tensors);
      ASSERT_EQ(list.size(), tensors.size()) << name;
      const auto parameters = network->named_parameters();
      for (size_t i = 0; i < list.size(); ++i) {
        const auto& [tensor_name, tensor] = tensors[i];
        EXPECT_EQ(list[i].name, tensor_name);
        EXPECT_EQ(tensor.sizes(), at::IntArrayRef(list[i].shape));
        EXPECT_EQ(
            list[i].kind == ParameterInfo::Kind::parameter,
            parameters.contains(tensor_name));
        EXPECT_EQ(
            tensor.scalar_type(),
            list[i].dtype == "int64" ? torch::kInt64 : torch::kFloat64);
      }
    }
  }
}

TEST(Network, MapsABatchToScores) {
  const torch::NoGradGuard no_grad;
  for (const char* name : kSmallModels) {
    const auto network = make_network(named(name), {3, 9, 14}, 5, 0);
    const auto y = network->forward(torch::rand({2, 3, 9, 14}));
    EXPECT_THAT(y.sizes(), ElementsAre(2, 5)) << name;
    EXPECT_TRUE(y.isfinite().all().item<bool>());
  }
}

// A rank may get no samples of the last batch.
TEST(Network, NoSamplesGiveZeroGradients) {
  for (const char* name : kSmallModels) {
    const auto network = make_network(named(name), {3, 9, 14}, 5, 0);
    std::vector<torch::Tensor> before;
    for (const auto& buffer : network->buffers())
      before.push_back(buffer.clone());
    const auto y = network->forward(torch::rand({0, 3, 9, 14}));
    EXPECT_THAT(y.sizes(), ElementsAre(0, 5)) << name;
    y.sum().backward();
    for (const auto& item : network->named_parameters()) {
      ASSERT_TRUE(item.value().grad().defined()) << name << " " << item.key();
      EXPECT_EQ(item.value().grad().abs().sum().item<double>(), 0)
          << name << " " << item.key();
    }
    const auto after = network->buffers();
    for (size_t i = 0; i < after.size(); ++i) {
      if (after[i].is_floating_point()) {
        EXPECT_TRUE(after[i].equal(before[i])) << name;
      }
    }
  }
}

// With one channel both memory orders are the same, except for the strides.
TEST(Network, SmallConvolutionsAreChannelsLast) {
  for (const int64_t channels : {1, 3}) {
    const auto layers = model_layers(named("simple_cnn"), {channels, 8, 12}, 5);
    const BuiltLayer first = layers.layers().front().build();
    for (auto& parameter : first.module->parameters()) {
      torch::NoGradGuard no_grad;
      parameter.uniform_(-1, 1);
    }
    const auto x = torch::rand({2, channels, 8, 12});
    const auto y = first.forward({x})[0];
    EXPECT_TRUE(y.is_contiguous(at::MemoryFormat::ChannelsLast)) << channels;
    const auto parameters = first.module->named_parameters();
    const auto expected = at::max_pool2d(
        at::relu(at::conv2d(x, parameters["weight"], parameters["bias"], 1, 1)),
        2);
    EXPECT_TRUE(y.allclose(expected, 1e-5, 1e-6)) << channels;
  }
}

TEST(Network, RunsItsLayersInOrder) {
  EXPECT_THAT(
      layer_names(*make_network(named("simple_cnn"), {1, 8, 8}, 10, 0)),
      ElementsAre("conv1", "conv2", "fc"));
  EXPECT_THAT(
      layer_names(*make_network(named("mlp"), {1, 8, 8}, 10, 0)),
      ElementsAre("fc1", "fc2", "fc3"));
  const auto network = make_network(named("resnet18"), {3, 32, 32}, 10, 0);
  EXPECT_THAT(
      layer_names(*network),
      ElementsAre(
          "conv1", "bn1", "layer1.0", "layer1.1", "layer2.0", "layer2.1",
          "layer3.0", "layer3.1", "layer4.0", "layer4.1", "fc"));
  network->eval();
  const auto x = torch::rand({2, 3, 32, 32});
  Tensors y = {x};
  for (const auto& layer : network->layers()) {
    y = layer.forward(y);
  }
  EXPECT_TRUE(y[0].equal(network->forward(x)));
}

TEST(Network, InitialValuesDependOnlyOnSeedAndName) {
  const auto a = make_network(named("resnet18"), {3, 32, 32}, 10, 5);
  torch::manual_seed(99);  // torch's own generator has no influence
  const auto b = make_network(named("resnet18"), {3, 32, 32}, 10, 5);
  const auto c = make_network(named("resnet18"), {3, 32, 32}, 10, 6);
  for (const auto& item : a->named_parameters()) {
    const auto& name = item.key();
    EXPECT_TRUE(item.value().equal(b->named_parameters()[name]));
    const bool random = item.value().dim() > 1 || name.starts_with("fc");
    EXPECT_NE(item.value().equal(c->named_parameters()[name]), random) << name;
  }
  // The head does not change earlier layers.
  const auto other = make_network(named("resnet18"), {3, 64, 64}, 7, 5);
  EXPECT_TRUE(a->named_parameters()["layer4.1.conv2.weight"].equal(
      other->named_parameters()["layer4.1.conv2.weight"]));
}

TEST(Network, InitialValuesHaveTheDistributionsOfPyTorch) {
  const auto network = make_network(named("simple_cnn"), {3, 64, 64}, 10, 1);
  const auto parameters = network->named_parameters();
  for (const auto& [name, fan_in] :
       {std::pair<std::string, double>{"conv1", 27},
        {"conv2", 144},
        {"fc", 32 * 16 * 16}}) {
    const double bound = 1 / std::sqrt(fan_in);
    const auto& weight = parameters[name + ".weight"];
    EXPECT_LE(weight.abs().max().item<double>(), bound * 1.0000001);
    EXPECT_GT(weight.abs().max().item<double>(), 0.95 * bound);
    EXPECT_NEAR(
        weight.std().item<double>() / (bound / std::sqrt(3.0)), 1.0, 0.1);
    EXPECT_LE(
        parameters[name + ".bias"].abs().max().item<double>(),
        bound * 1.0000001);
  }
  const auto resnet = make_network(named("resnet50"), {3, 64, 64}, 10, 1);
  const auto tensors = resnet->named_parameters();
  EXPECT_NEAR(
      tensors["layer3.2.conv2.weight"].std().item<double>(),
      std::sqrt(2.0 / (256 * 9)), 1e-4);
  EXPECT_NEAR(
      tensors["layer1.0.conv3.weight"].std().item<double>(),
      std::sqrt(2.0 / 256), 2e-3);
  EXPECT_TRUE((tensors["layer2.0.bn3.weight"] == 1).all().item<bool>());
  EXPECT_TRUE((tensors["layer2.0.bn3.bias"] == 0).all().item<bool>());
  EXPECT_TRUE(
      (resnet->named_buffers()["bn1.running_var"] == 1).all().item<bool>());
}

TEST(Network, NamesTheFirstLayerThatIsNotFinite) {
  const auto network = make_network(named("resnet18"), {3, 32, 32}, 10, 0);
  const auto place_of = [&](const torch::Tensor& x) {
    const auto found = network->first_nonfinite_layer(x);
    return found ? found->layer + ": " + found->what : "none";
  };
  const auto x = torch::rand({2, 3, 32, 32});
  EXPECT_EQ(place_of(x), "none");

  auto bad = x.clone();
  bad[1][2][3][4] = kNan;
  EXPECT_EQ(place_of(bad), "input: input");

  const torch::NoGradGuard no_grad;
  network->named_parameters()["layer3.0.conv2.weight"][0][0][0][0] = kNan;
  EXPECT_EQ(place_of(x), "layer3.0: parameter layer3.0.conv2.weight");

  network->named_parameters()["layer2.1.bn1.weight"].fill_(3e38);
  network->named_parameters()["layer2.1.bn2.weight"].fill_(3e38);
  network->eval();
  EXPECT_EQ(place_of(x), "layer2.1: output");
}

TEST(Network, DiagnosisChangesNothing) {
  const auto network = make_network(named("resnet18"), {3, 32, 32}, 10, 0);
  const auto x = torch::rand({2, 3, 32, 32});
  network->forward(x);
  const auto mean = network->named_buffers()["bn1.running_mean"].clone();
  network->first_nonfinite_layer(x);
  EXPECT_TRUE(mean.equal(network->named_buffers()["bn1.running_mean"]));
  EXPECT_TRUE(at::GradMode::is_enabled());
  network->forward(x);
  EXPECT_FALSE(mean.equal(network->named_buffers()["bn1.running_mean"]));
}

TEST(Network, ACloneHasItsOwnParameters) {
  const auto network =
      make_network(named("resnet18", ModelDtype::float64), {1, 8, 8}, 3, 0);
  network->eval();
  network->named_parameters()["conv1.weight"].set_requires_grad(false);
  const auto copy = std::dynamic_pointer_cast<Network>(network->clone());
  ASSERT_TRUE(copy);
  EXPECT_FALSE(copy->is_training());
  const auto x = torch::rand({2, 1, 8, 8}, torch::kFloat64);
  const auto y = network->forward(x);
  EXPECT_TRUE(y.equal(copy->forward(x)));
  EXPECT_FALSE(copy->named_parameters()["conv1.weight"].requires_grad());
  EXPECT_TRUE(copy->named_parameters()["fc.weight"].requires_grad());

  copy->forward(x).sum().backward();
  EXPECT_FALSE(network->named_parameters()["fc.weight"].grad().defined());
  {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : copy->parameters()) {
      parameter.zero_();
    }
  }
  EXPECT_TRUE(y.equal(network->forward(x)));
}

TEST(Network, RefusesAsTheParameterListDoes) {
  EXPECT_THROW(
      make_network(named("simple_cnn"), {3, 2, 2}, 10, 0), ConfigError);
  EXPECT_THROW(make_network(named("vgg"), {3, 32, 32}, 10, 0), ConfigError);
}

}  // namespace echelon::network_test
