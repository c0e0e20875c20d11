#include "echelon/layers/layer_list.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <array>

#include "tests/support/error_text.h"

namespace echelon::layer_list_test {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using torch::Tensor;

Tensor number(double value) {
  return torch::full({1}, value, torch::kFloat64);
}

std::vector<double> values(const Tensors& tensors) {
  std::vector<double> result;
  for (const auto& tensor : tensors) result.push_back(tensor.item<double>());
  return result;
}

// Builds and runs the only layer of the list.
std::vector<double> run(const LayerList& list, const Tensors& inputs) {
  const BuiltLayer layer = list[0].build();
  return values(run_layer(list[0].name, layer.forward, inputs, ""));
}

struct ByReference : torch::nn::Module {
  Tensor forward(const Tensor& x) { return x + 1; }
};
struct ByValue : torch::nn::Module {
  Tensor forward(Tensor x) const noexcept { return x + 2; }
};
struct TwoToTwo : torch::nn::Module {
  std::tuple<Tensor, Tensor> forward(const Tensor& x, Tensor y) const {
    return {x + y, x - y};
  }
};
struct AllToAll : torch::nn::Module {
  Tensors forward(const Tensors& all) {
    return Tensors(all.rbegin(), all.rend());
  }
};
struct WithDefaults : torch::nn::Module {
  Tensor forward(const Tensor& x, const Tensor& y = {}, double factor = 3) {
    return (y.defined() ? x + y : x) * factor;
  }
};
struct Overloaded : torch::nn::Module {
  Tensor forward(const Tensor& x) { return x; }
  Tensor forward(const Tensor& x, const Tensor& y) { return x + y; }
};
struct Nested : torch::nn::Module {
  std::tuple<Tensor, std::pair<Tensor, std::array<Tensor, 2>>>
  forward(const Tensor& x) {
    return {x, {x + 1, {x + 2, x + 3}}};
  }
};
TORCH_MODULE_IMPL(Reference, ByReference);

template <class M>
LayerList one() {
  LayerList list;
  list.add("a", [] { return std::make_shared<M>(); });
  return list;
}

TEST(LayerList, EveryFormOfForwardIsCalled) {
  EXPECT_THAT(run(one<ByReference>(), {number(1)}), ElementsAre(2));
  EXPECT_THAT(run(one<ByValue>(), {number(1)}), ElementsAre(3));
  EXPECT_THAT(run(one<TwoToTwo>(), {number(5), number(2)}), ElementsAre(7, 3));
  EXPECT_THAT(
      run(one<AllToAll>(), {number(5), number(2), number(1)}),
      ElementsAre(1, 2, 5));
  EXPECT_THAT(run(one<WithDefaults>(), {number(2)}), ElementsAre(6));
  EXPECT_THAT(
      run(one<WithDefaults>(), {number(2), number(5)}), ElementsAre(21));
  EXPECT_THAT(run(one<Overloaded>(), {number(2)}), ElementsAre(2));
  EXPECT_THAT(run(one<Overloaded>(), {number(2), number(5)}), ElementsAre(7));
  EXPECT_THAT(run(one<Nested>(), {number(0)}), ElementsAre(0, 1, 2, 3));

  LayerList holder;
  holder.add("a", [] { return Reference(); });
  EXPECT_THAT(run(holder, {number(1)}), ElementsAre(2));
}

// Their forwards are templates, have defaults that are no tensors, and return
// nested tuples.
TEST(LayerList, TorchsOwnModulesAreLayers) {
  LayerList list;
  list.add("linear", [] { return torch::nn::Linear(3, 4); })
      .add(
          "sequential",
          [] {
            return torch::nn::Sequential(
                torch::nn::Linear(4, 5), torch::nn::ReLU());
          })
      .add("lstm", [] {
        return torch::nn::LSTM(torch::nn::LSTMOptions(5, 2).batch_first(true));
      });
  Tensors x = {torch::rand({2, 7, 3})};
  for (const auto& layer : list.layers()) {
    const BuiltLayer built = layer.build();
    EXPECT_GT(built.module->parameters().size(), 0u);
    x = built.forward(x);
  }
  ASSERT_EQ(x.size(), 3u);
  EXPECT_THAT(x[0].sizes(), ElementsAre(2, 7, 2));
  EXPECT_THAT(x[2].sizes(), ElementsAre(1, 2, 2));

  LayerList others;
  others.add("a", [] { return torch::nn::Bilinear(2, 3, 4); });
  others.add(
      "b", [] { return torch::nn::Sequential(torch::nn::Bilinear(2, 3, 4)); });
  others.add("c", [] {
    return torch::nn::MultiheadAttention(
        torch::nn::MultiheadAttentionOptions(4, 2));
  });
  others.add("d", [] {
    return torch::nn::ConvTranspose1d(
        torch::nn::ConvTranspose1dOptions(2, 3, 3));
  });
  const Tensors pair = {torch::rand({5, 2}), torch::rand({5, 3})};
  EXPECT_THAT(others[0].build().forward(pair)[0].sizes(), ElementsAre(5, 4));
  EXPECT_THAT(others[1].build().forward(pair)[0].sizes(), ElementsAre(5, 4));
  const auto q = torch::rand({3, 2, 4});
  EXPECT_EQ(others[2].build().forward({q, q, q}).size(), 2u);
  EXPECT_THAT(
      others[3].build().forward({torch::rand({1, 2, 4})})[0].sizes(),
      ElementsAre(1, 3, 6));
}

TEST(LayerList, FunctionsAreLayersWithoutParameters) {
  LayerList list;
  list.add_function("a", [](Tensor x) { return x * 2; });
  list.add_function("b", [](const Tensor& x, const Tensor& y) {
    return std::make_tuple(x, x * y);
  });
  list.add_function("c", [](const Tensors& all) { return all; });
  list.add_function("d", [](const auto& x) { return x.neg(); });
  list.add_function("e", [](const auto&... x) { return (x + ...); });
  list.add_function("f", torch::relu);
  EXPECT_EQ(list[0].build().module, nullptr);
  const auto call = [&](size_t layer, const Tensors& inputs) {
    return values(list[layer].build().forward(inputs));
  };
  EXPECT_THAT(call(0, {number(3)}), ElementsAre(6));
  EXPECT_THAT(call(1, {number(3), number(4)}), ElementsAre(3, 12));
  EXPECT_THAT(call(2, {number(3), number(4)}), ElementsAre(3, 4));
  EXPECT_THAT(call(3, {number(3)}), ElementsAre(-3));
  EXPECT_THAT(call(4, {number(3), number(4), number(5)}), ElementsAre(12));
  EXPECT_THAT(call(5, {number(-3)}), ElementsAre(0));
}

TEST(LayerList, ALayerMayReplaceItsModulesForward) {
  LayerList list;
  list.add(
      "fc", [] { return torch::nn::Linear(4, 2); },
      [](auto& fc, const Tensor& x) { return fc.forward(x.flatten(1)); });
  list.add(
      "two", [] { return std::make_shared<TwoToTwo>(); },
      [](TwoToTwo& two, const Tensors& all) {
        return two.forward(all[0], all[1]);
      });
  const auto layer = list[0].build();
  EXPECT_TRUE(layer.module->named_parameters().contains("weight"));
  EXPECT_THAT(
      layer.forward({torch::rand({3, 2, 2})})[0].sizes(), ElementsAre(3, 2));
  EXPECT_THAT(
      values(list[1].build().forward({number(1), number(2)})),
      ElementsAre(3, -1));
}

TEST(LayerList, EachBuildIsANewModule) {
  LayerList list;
  list.add("a", [] { return torch::nn::Linear(2, 2); });
  EXPECT_NE(list[0].build().module, list[0].build().module);
}

TEST(LayerList, AWrongNumberOfTensorsIsExplained) {
  EXPECT_EQ(
      error_text<ConfigError>([] { run(one<TwoToTwo>(), {number(1)}); }),
      "layer \"a\" takes 2 tensors and is given 1: the input, float64 [1]; "
      "give it as many, or let it take Tensors");
  const BuiltLayer layer = one<WithDefaults>()[0].build();
  const Tensors three = {number(1), torch::zeros({2, 3}), torch::arange(4)};
  EXPECT_EQ(
      error_text<ConfigError>(
          [&] { run_layer("a", layer.forward, three, "before"); }),
      "layer \"a\" takes 1 or 2 tensors and is given 3: what layer \"before\" "
      "returns, float64 [1], float32 [2, 3] and int64 [4]; let that one return "
      "as many, or this one take Tensors");
  EXPECT_THAT(
      error_text<ConfigError>([&] { one<ByValue>()[0].build().forward({}); }),
      HasSubstr("takes 1 tensor and is given 0"));
}

TEST(LayerList, AnInputThatALayerCannotTakeIsExplained) {
  LayerList list;
  list.add("head", [] { return torch::nn::Linear(4, 2); });
  const BuiltLayer layer = list[0].build();
  EXPECT_THAT(
      error_text<ConfigError>([&] {
        run_layer("head", layer.forward, {torch::rand({2, 3})}, "block");
      }),
      AllOf(
          HasSubstr("layer \"head\" cannot take what layer \"block\" returns, "
                    "float32 [2, 3]: "),
          HasSubstr("mat1 and mat2 shapes"),  // LibTorch's words
          testing::Not(HasSubstr("\n"))));
  LayerList thrower;
  thrower.add_function("data", [](const Tensor& x) -> Tensor {
    throw DataError("sample 3 is broken");
  });
  EXPECT_EQ(
      error_text<DataError>([&] { run(thrower, {number(1)}); }),
      "sample 3 is broken");
}

TEST(LayerList, ALayerReturnsTensorsThatAreDefined) {
  LayerList list;
  list.add_function("a", [](const Tensor&) { return Tensors(); });
  list.add_function(
      "b", [](const Tensor& x) { return std::make_tuple(x, Tensor()); });
  EXPECT_THAT(
      error_text<ConfigError>([&] { list[0].build().forward({number(1)}); }),
      HasSubstr("layer \"a\" returns no tensor"));
  EXPECT_THAT(
      error_text<ConfigError>([&] { list[1].build().forward({number(1)}); }),
      HasSubstr("layer \"b\" returns 2 tensors, of which number 2 is "
                "undefined"));
}

TEST(LayerList, NamesAreUniqueAndWellFormed) {
  const auto add = [](LayerList& list, const std::string& name) {
    list.add_function(name, [](const Tensor& x) { return x; });
  };
  LayerList list;
  for (const char* name : {"conv1", "layer1.0", "layer1.1", "layer10"}) {
    add(list, name);
  }
  EXPECT_EQ(list.size(), 4u);
  EXPECT_THAT(
      list.names(), ElementsAre("conv1", "layer1.0", "layer1.1", "layer10"));
  for (const char* name : {"conv1", "layer1", "layer1.0.x"}) {
    EXPECT_THAT(
        error_text<ConfigError>([&] { add(list, name); }),
        HasSubstr(
            "layer \"" + std::string(name) +
            "\" is added to a list "
            "that has"));
  }
  for (const char* name : {"", ".", "a.", ".a", "a..b"}) {
    EXPECT_THAT(
        error_text<ConfigError>([&] { add(list, name); }),
        HasSubstr("must not be empty"));
  }
  EXPECT_EQ(list.size(), 4u);
  EXPECT_EQ(list.index_of("layer10"), 3u);
  EXPECT_EQ(list.layer_of_parameter("layer1.1.conv1.weight"), 2u);
  EXPECT_EQ(list.layer_of_parameter("layer10.weight"), 3u);
  EXPECT_THAT(
      error_text<ConfigError>([&] { list.index_of("conv2"); }),
      HasAll("\"conv2\"", "did you mean \"conv1\"?"));
  EXPECT_THAT(
      error_text<ConfigError>([&] { list.layer_of_parameter("conv1"); }),
      HasSubstr("no layer has a parameter \"conv1\""));
}

TEST(LayerList, TiesNameParametersOfTwoLayers) {
  LayerList list;
  for (const char* name : {"a", "b", "c"}) {
    list.add(name, [] { return torch::nn::Linear(2, 2); });
  }
  list.tie("a.weight", "b.weight").tie("c.bias", "a.bias");
  EXPECT_THAT(
      list.ties(),
      ElementsAre(Tie{"a.weight", "b.weight"}, Tie{"a.bias", "c.bias"}));
  EXPECT_THAT(
      error_text<ConfigError>([&] { list.tie("a.weight", "d.weight"); }),
      HasSubstr("no layer has a parameter \"d.weight\""));
  EXPECT_THAT(
      error_text<ConfigError>([&] { list.tie("a.weight", "a.bias"); }),
      HasSubstr("both are in layer \"a\""));
}

TEST(LayerList, AddingToACopyLeavesTheOriginal) {
  LayerList list;
  list.add_function("a", [](const Tensor& x) { return x; });
  LayerList copy = list;
  copy.add_function("b", [](const Tensor& x) { return x; });
  EXPECT_EQ(list.size(), 1u);
  EXPECT_EQ(copy.size(), 2u);
}

}  // namespace echelon::layer_list_test
