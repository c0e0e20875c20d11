// The slices of any partition of a list together equal the whole model, bit for
// bit.
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <map>

#include "echelon/architecture/language_model.h"
#include "echelon/architecture/parameter_list.h"
#include "echelon/comm/world.h"
#include "echelon/layers/network.h"
#include "echelon/models/make_network.h"
#include "tests/support/error_text.h"

namespace echelon::network_slice_test {

using testing::ElementsAre;
using testing::HasSubstr;
using torch::Tensor;

using Values = std::map<std::string, Tensor>;

Values values_of(const Network& network) {
  Values values;
  for (const auto& item : network.named_parameters()) {
    values[item.key()] = item.value().detach();
  }
  for (const auto& item : network.named_buffers()) {
    values[item.key()] = item.value();
  }
  return values;
}

// Two layers, and a tensor that the second one passes on.
struct Split : torch::nn::Module {
  Split() : fc(register_module("fc", torch::nn::Linear(4, 4))) {}
  std::tuple<Tensor, Tensor> forward(const Tensor& x) {
    return {fc->forward(x), x};
  }
  torch::nn::Linear fc;
};
struct Pass : torch::nn::Module {
  Pass() : fc(register_module("fc", torch::nn::Linear(4, 4))) {
    torch::nn::init::orthogonal_(fc->weight);
    scale = register_parameter("scale", torch::randn({4}) + torch::rand({4}));
    order = register_buffer("order", torch::randperm(4));
  }
  std::tuple<Tensor, Tensor> forward(const Tensor& x, const Tensor& skip) {
    return {torch::tanh(fc->forward(x)) * scale, skip};
  }
  torch::nn::Linear fc;
  Tensor scale;
  Tensor order;
};
struct Join : torch::nn::Module {
  Join() : fc(register_module("fc", torch::nn::Linear(4, 2))) {
    dropout = register_module("dropout", torch::nn::Dropout(0.0));
  }
  Tensor forward(const Tensor& x, const Tensor& skip) {
    return dropout->forward(fc->forward(x + skip));
  }
  torch::nn::Linear fc;
  torch::nn::Dropout dropout{nullptr};
};

LayerList with_skip() {
  LayerList list;
  list.add("split", [] { return std::make_shared<Split>(); });
  list.add("body.0", [] { return std::make_shared<Pass>(); });
  list.add_function("body.relu", [](const Tensor& x, const Tensor& skip) {
    return std::make_tuple(torch::relu(x), skip);
  });
  list.add("body.1.deep", [] { return std::make_shared<Pass>(); });
  list.add("join", [] { return std::make_shared<Join>(); });
  return list;
}

// Every slice of every partition has the values of the whole model.
void expect_equal_values(
    const LayerList& list, uint64_t seed, const Values& whole) {
  for (size_t begin = 0; begin < list.size(); ++begin) {
    for (size_t end = begin + 1; end <= list.size(); ++end) {
      const auto slice = build_network(list, begin, end, seed);
      for (const auto& [name, value] : values_of(*slice)) {
        ASSERT_TRUE(whole.contains(name)) << name;
        EXPECT_TRUE(value.equal(whole.at(name))) << name;
      }
    }
  }
}

// The command line counts stages by these names before anything is built.
TEST(NetworkSlice, EveryModelHasItsListedLayers) {
  for (const auto& name : model_names()) {
    ModelOptions options;
    options.name = name;
    if (is_language_model(options)) continue;  // language_network_test
    options.hidden = {8, 7, 6};
    EXPECT_EQ(
        list_layers(options), model_layers(options, {3, 32, 32}, 10).names())
        << name;
  }
}

TEST(NetworkSlice, HasOnlyItsLayersUnderTheirFullNames) {
  const auto list = with_skip();
  const auto slice = build_network(list, 1, 4);
  EXPECT_THAT(
      slice->named_parameters().keys(),
      ElementsAre(
          "body.0.scale", "body.0.fc.weight", "body.0.fc.bias",
          "body.1.deep.scale", "body.1.deep.fc.weight", "body.1.deep.fc.bias"));
  EXPECT_EQ(slice->begin(), 1u);
  EXPECT_EQ(slice->end(), 4u);
  ASSERT_EQ(slice->layers().size(), 3u);
  EXPECT_EQ(slice->layers()[2].name, "body.1.deep");
  EXPECT_EQ(slice->layers()[1].module, nullptr);
}

TEST(NetworkSlice, BuildsNoOtherLayer) {
  int built = 0;
  LayerList list;
  for (const char* name : {"a", "b", "c"}) {
    list.add(name, [&built] {
      ++built;
      return torch::nn::Linear(2, 2);
    });
  }
  build_network(list, 1, 2, 3);
  EXPECT_EQ(built, 1);
}

// Each parameter comes once, before the next layer exists.
TEST(NetworkSlice, ANewLayerIsReportedBeforeTheNextIsBuilt) {
  std::vector<std::string> events;
  const auto one = torch::nn::Linear(2, 2);  // of two layers
  LayerList list;
  for (const char* name : {"a", "b", "c"}) {
    list.add(name, [&events, name] {
      events.push_back(std::string("build ") + name);
      return torch::nn::Linear(2, 2);
    });
  }
  list.add_function("f", [](const Tensor& x) { return x; });
  list.add("d", [one] { return one; });
  list.add("e", [one] { return one; });
  list.tie("a.weight", "b.weight").tie("d.weight", "e.weight");
  const auto show = [&](NewLayer& layer) {
    std::string text = std::to_string(layer.index) + " " + layer.layer.name;
    for (const auto& [name, tensor] : layer.parameters) {
      text += " " + name;
      EXPECT_TRUE(tensor.requires_grad());
    }
    text += " shares " + std::to_string(layer.shared.size());
    layer.layer.forward = [forward = layer.layer.forward](const Tensors& x) {
      return Tensors{forward(x)[0] + 1};
    };
    events.push_back(text);
  };
  const auto network = build_network(list, 0, 6, 3, show);
  EXPECT_THAT(
      events,
      ElementsAre(
          "build a", "0 a a.weight a.bias shares 0",  //
          "build b", "1 b b.bias shares 1",           //
          "build c", "2 c c.weight c.bias shares 0",  //
          "3 f shares 0", "4 d d.weight d.bias shares 0", "5 e shares 2"));
  EXPECT_EQ(network->named_parameters().size(), 7u);
  // A slice without the first one has its own tied tensor, with equal values.
  events.clear();
  const auto last = build_network(list, 1, 3, 3, show);
  EXPECT_THAT(
      events, ElementsAre(
                  "build b", "build a", "1 b b.weight b.bias shares 0",
                  "build c", "2 c c.weight c.bias shares 0"));
  const auto plain = build_network(list, 0, 6, 3);
  const auto x = torch::rand({4, 2});
  auto y = x;
  for (const auto& layer : plain->layers()) {
    y = layer.forward({y})[0] + 1;
  }
  EXPECT_TRUE(network->forward(x).equal(y));
}

// Parameters have memory only while their layer computes, as with FSDP.
TEST(NetworkSlice, ADiagnosisUnshardsParameters) {
  const auto list = with_skip();
  std::map<size_t, std::vector<std::pair<Tensor, Tensor>>> away;
  const auto fill = [&](size_t layer, bool there) {
    for (auto& [parameter, values] : away[layer]) {
      parameter.set_data(there ? values : torch::zeros({0}));
    }
  };
  const auto network = build_network(list, 0, 5, 7, [&](NewLayer& layer) {
    for (const auto& [name, tensor] : layer.parameters) {
      away[layer.index].emplace_back(tensor, tensor.detach().clone());
    }
    fill(layer.index, false);
    auto& forward = layer.layer.forward;
    forward = [&, index = layer.index, forward](const Tensors& x) {
      fill(index, true);
      return forward(x);
    };
  });
  network->set_unshard([&](size_t layer) -> std::shared_ptr<void> {
    fill(layer, true);
    return {nullptr, [&, layer](void*) { fill(layer, false); }};
  });
  const auto x = torch::rand({3, 4});
  EXPECT_FALSE(network->first_nonfinite_layer(x).has_value());
  EXPECT_EQ(network->parameters()[0].numel(), 0);
  away[3][1].second.fill_(NAN);
  const auto found = network->first_nonfinite_layer(x);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->layer, "body.1.deep");
  EXPECT_TRUE(found->what.starts_with("parameter body.1.deep.")) << found->what;
}

TEST(NetworkSlice, ConsecutiveSlicesEqualTheWholeModel) {
  const auto list = with_skip();
  const auto x = torch::rand({3, 4});
  const auto whole = build_network(list, 0, 5, 7)->forward(x);
  EXPECT_THAT(whole.sizes(), ElementsAre(3, 2));
  for (size_t split = 1; split < 5; ++split) {
    const auto first = build_network(list, 0, split, 7);
    const auto second = build_network(list, split, 5, 7);
    const Tensors between = first->forward(Tensors{x});
    EXPECT_EQ(between.size(), 2u);
    const Tensors y = second->forward(between);
    ASSERT_EQ(y.size(), 1u);
    EXPECT_TRUE(y[0].equal(whole));
  }
}

TEST(NetworkSlice, InitialValuesDoNotDependOnThePartition) {
  const auto list = with_skip();
  const auto whole = values_of(*build_network(list, 0, 5, 7));
  ASSERT_EQ(whole.size(), 12u);
  expect_equal_values(list, 7, whole);
  const auto other = values_of(*build_network(list, 0, 5, 8));
  EXPECT_FALSE(whole.at("join.fc.weight").equal(other.at("join.fc.weight")));
  EXPECT_FALSE(
      whole.at("body.0.fc.weight").equal(whole.at("body.1.deep.fc.weight")));
}

TEST(NetworkSlice, InitialValuesAreThoseOfASeededTorch) {
  LayerList list;
  list.add("a", [] { return torch::nn::Linear(3, 3); });
  list.add("b", [] { return std::make_shared<Pass>(); });
  const auto network = build_network(list, 0, 2, 5);
  // Uniform within 1 / sqrt(3), and not all the same.
  const auto weight = network->named_parameters()["a.weight"];
  EXPECT_LE(weight.abs().max().item<double>(), 0.578);
  EXPECT_GT(weight.std().item<double>(), 0.1);
  const auto fc = network->named_parameters()["b.fc.weight"];
  EXPECT_TRUE(torch::allclose(fc.mm(fc.t()), torch::eye(4), 1e-4, 1e-5));
}

TEST(NetworkSlice, TorchsGeneratorIsNeitherReadNorAdvanced) {
  const auto list = with_skip();
  torch::manual_seed(1);
  const auto a = values_of(*build_network(list, 0, 5, 7));
  const auto after = torch::rand({4});
  torch::manual_seed(1);
  EXPECT_TRUE(after.equal(torch::rand({4})));
  const auto b = values_of(*build_network(list, 0, 5, 7));
  for (const auto& [name, value] : a) EXPECT_TRUE(value.equal(b.at(name)));
  // Without a seed torch's own generator is used.
  torch::manual_seed(1);
  const auto c = build_network(list, 0, 1)->parameters()[0];
  torch::manual_seed(1);
  const auto d = torch::nn::Linear(4, 4)->weight;
  EXPECT_TRUE(c.equal(d));
}

TEST(NetworkSlice, RanksAsThreadsDrawTheSameValues) {
  const auto whole = values_of(*build_network(with_skip(), 0, 5, 7));
  run_ranks(4, [&](World& world) {
    const auto list = with_skip();
    for (int round = 0; round < 10; ++round) {
      if (world.rank() == 3) {  // draws while the others build
        for (int i = 0; i < 200; ++i) torch::randn({8});
        continue;
      }
      expect_equal_values(list, 7, whole);
    }
  });
}

TEST(NetworkSlice, EveryPartitionOfOurModelsIsEqual) {
  for (const auto dtype : {ModelDtype::float32, ModelDtype::float64}) {
    ModelOptions options{.name = "resnet18"};
    options.dtype = dtype;
    const auto list = model_layers(options, {3, 16, 16}, 10);
    const auto whole = make_network(options, {3, 16, 16}, 10, 4);
    const auto values = values_of(*make_network(options, {3, 16, 16}, 10, 4));
    EXPECT_EQ(values.size(), 122u);
    size_t seen = 0;
    const auto x =
        torch::rand({2, 3, 16, 16}, whole->parameters()[0].scalar_type());
    const auto y = whole->forward(x);
    Tensors part = {x};
    for (size_t begin = 0; begin < list.size(); begin += 3) {
      const size_t end = std::min(begin + 3, list.size());
      const auto slice = build_network(list, begin, end, 4);
      for (const auto& [name, value] : values_of(*slice)) {
        ++seen;
        EXPECT_TRUE(value.equal(values.at(name))) << name;
        EXPECT_EQ(value.scalar_type(), values.at(name).scalar_type());
      }
      part = slice->forward(part);
    }
    EXPECT_EQ(seen, values.size());
    EXPECT_TRUE(part[0].equal(y));
  }
}

TEST(NetworkSlice, ErrorsNameTheLayers) {
  LayerList list;
  list.add("a", [] { return torch::nn::Linear(2, 3); });
  list.add("b", [] { return torch::nn::Linear(4, 2); });
  list.add("c", [] { return torch::nn::Linear(-4, 2); });
  list.add_function("d", [](const Tensor& x) { return Tensors{x, x}; });
  const auto x = torch::rand({5, 2});
  EXPECT_THAT(
      error_text<ConfigError>([&] { build_network(list, 0, 2)->forward(x); }),
      HasSubstr("layer \"b\" cannot take what layer \"a\" returns, float32 [5, "
                "3]: "));
  // The same holds across a stage boundary.
  EXPECT_THAT(
      error_text<ConfigError>([&] { build_network(list, 1, 2)->forward(x); }),
      HasSubstr("layer \"b\" cannot take what layer \"a\" returns, float32 [5, "
                "2]"));
  EXPECT_THAT(
      error_text<ConfigError>(
          [&] { build_network(list, 0, 1)->forward(x[0][0]); }),
      HasSubstr("layer \"a\" cannot take the input, float32 []"));
  EXPECT_THAT(
      error_text<ConfigError>([&] { build_network(list, 1, 3, 0); }),
      HasSubstr("layer \"c\" cannot be built: "));
  EXPECT_THAT(
      error_text<ConfigError>([&] { build_network(list, 3, 4)->forward(x); }),
      HasSubstr("layer \"d\" is the last and returns float32 [5, 2] and "
                "float32 [5, 2]"));
  for (const auto& [begin, end] :
       {std::pair<size_t, size_t>{0, 0}, {2, 1}, {3, 5}, {4, 5}}) {
    EXPECT_THAT(
        error_text<ConfigError>([&] { build_network(list, begin, end); }),
        HasSubstr("of a list of 4"));
  }
}

TEST(NetworkSlice, AClonedSliceHasItsOwnParameters) {
  const auto slice = build_network(with_skip(), 3, 5, 7);
  slice->layers()[1].module->eval();
  torch::manual_seed(3);
  const auto copy = std::dynamic_pointer_cast<Network>(slice->clone());
  const auto after = torch::rand({3});
  torch::manual_seed(3);
  EXPECT_TRUE(after.equal(torch::rand({3})));
  ASSERT_TRUE(copy);
  EXPECT_EQ(copy->begin(), 3u);
  EXPECT_TRUE(copy->layers()[0].module->is_training());
  EXPECT_FALSE(copy->layers()[1].module->is_training());
  const auto theirs = values_of(*copy);
  for (const auto& [name, value] : values_of(*slice)) {
    EXPECT_TRUE(value.equal(theirs.at(name)));
    EXPECT_FALSE(value.is_alias_of(theirs.at(name)));
  }

  const torch::nn::Linear captured(2, 2);
  LayerList list;
  list.add("a", [captured] { return captured; });
  EXPECT_THAT(
      error_text([&] { build_network(list, 0, 1)->clone(); }),
      HasSubstr("\"a.weight\" cannot be copied"));
}

TEST(NetworkSlice, FindsNonFiniteValuesInASlice) {
  const auto slice = build_network(with_skip(), 1, 5, 7);
  const Tensors inputs = {torch::rand({3, 4}), torch::rand({3, 4})};
  EXPECT_FALSE(slice->first_nonfinite_layer(inputs).has_value());
  auto bad = inputs;
  bad[1] = torch::full({3, 4}, NAN);
  EXPECT_EQ(slice->first_nonfinite_layer(bad)->layer, "input");
  const torch::NoGradGuard no_grad;
  slice->named_parameters()["body.1.deep.scale"].fill_(INFINITY);
  const auto found = slice->first_nonfinite_layer(inputs);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->layer, "body.1.deep");
  EXPECT_EQ(found->what, "parameter body.1.deep.scale");
}

}  // namespace echelon::network_slice_test
